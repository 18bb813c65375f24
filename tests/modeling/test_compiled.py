"""torch.compile and torch.export: whole graphs, not a new one for every length, and the same numbers."""

import functools
import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import flex_attention
from transformers import CompileConfig, StaticCache

import modeling_llamba.kernels.backend as door
import modeling_llamba.kernels.flex as flex
from modeling_llamba.mixers.selective_scan import selective_scan
from tests.helpers.backends import use_backend
from tests.helpers.hybrids import MIXERS, make_hybrid, trained_parameters
from tests.helpers.scans import selective_inputs
from tests.helpers.teachers import random_ids


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    """And Mamba-1's scan in short chunks, each step of which takes time to compile."""
    torch.compiler.reset()
    monkeypatch.setattr(selective_scan, "__defaults__", (None, None, 8))


def compare(function, parameters, inputs, graphs, backend):
    """Outputs and gradients of a compiled function, input after input; the number of graphs there are after each."""
    counter, found = CompileCounterWithBackend(backend), []
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for given in inputs:
        results = []
        for call in (function, compiled):
            output = call(*given)
            results.append((output, *torch.autograd.grad((output * output.detach().cos()).sum(), parameters)))
        for expected, got in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-9)
        found.append(counter.frame_count)
    assert found == graphs


def of_any_length(t, lengths):
    torch._dynamo.mark_dynamic(t, 1, min=min(lengths), max=max(lengths))
    return t


ONE_LAYER = dict(num_hidden_layers=1, layer_types=["hybrid"], hybrid_window=6, hybrid_full_heads=None)
IN_FEW_BITS = dict(head_dim=16, hybrid_full_heads=[[0, 1]], full_attention_bits=[6, 4], window_bits=8)
LAYERS = {
    "hybrid": (ONE_LAYER, (20, 33, 50)),
    "hybrid in few bits": (ONE_LAYER | IN_FEW_BITS, (20, 33, 50)),
    **{mixer: (dict(layer_types=["linear_attention"], mixer=mixer), (18, 22, 30)) for mixer in MIXERS[:2]},
    "mamba1": (dict(layer_types=["linear_attention"], mixer="mamba1"), (5, 6, 7)),
}


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LAYERS)
def test_one_graph_of_a_layer_for_three_lengths(name, backend):
    """Of as many groups of blocks, or chunks of a scan."""
    options, lengths = LAYERS[name]
    model = make_hybrid(pattern="beside-only", **ONE_LAYER | options)
    layer, inputs = model.model.layers[0].mixer, []
    for length in lengths:
        hidden = torch.randn(2, length, model.config.hidden_size, dtype=torch.float64)
        rotary = model.model.rotary_emb(hidden, torch.arange(length)[None])
        inputs.append((of_any_length(hidden, lengths), [of_any_length(t, lengths) for t in rotary]))
    compare(layer, trained_parameters(layer), inputs, [1, 1, 1], backend)


def test_one_graph_of_the_selective_scan_for_three_lengths():
    lengths = (5, 6, 7)
    A, inputs = -torch.rand(12, 4, dtype=torch.float64).requires_grad_(), []
    for length in lengths:
        x, dt, _, B, C, _ = selective_inputs(length, dtype=torch.float64)
        x, dt, B, C = (of_any_length(t, lengths) for t in (x, dt, B, C))
        inputs.append((x, dt, A, B, C))
    compare(lambda *given: selective_scan(*given, chunk_size=4)[0], [A], inputs, [1, 1, 1], "eager")


@pytest.mark.slow
def test_one_graph_of_a_model_for_three_lengths():
    """Of every kind of layer."""
    model, lengths = make_hybrid(pattern="every"), (20, 25, 30)
    inputs = [(of_any_length(random_ids(2, length), lengths),) for length in lengths]
    compare(lambda ids: model(ids, use_cache=False).logits, trained_parameters(model), inputs, [1, 1, 1], "eager")


@pytest.mark.slow
def test_packed_rows_are_compiled_in_parts():
    """Their number of blocks follows from what they hold, where the graph ends; the numbers are the same."""
    model = make_hybrid(pattern="beside-only", **ONE_LAYER)
    compiled = torch.compile(model, backend="aot_eager")
    for lengths in ((20, 30), (9, 31), (45, 5)):
        ids, position_ids = random_ids(2, sum(lengths)), torch.cat([torch.arange(length) for length in lengths])
        results = []
        for call in (model, compiled):
            logits = call(ids, position_ids=position_ids.expand(2, -1), use_cache=False).logits
            results.append((logits, *torch.autograd.grad(logits.logsumexp(-1).sum(), trained_parameters(model))))
        torch.testing.assert_close(results[1], results[0], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_and_its_gradients(name):
    """In one graph with that of the backward pass."""
    model = make_hybrid(pattern="beside-only", **ONE_LAYER | LAYERS[name][0])
    layer, hidden = model.model.layers[0].mixer, torch.randn(2, 20, model.config.hidden_size, dtype=torch.float64)
    rotary = model.model.rotary_emb(hidden, torch.arange(20)[None])
    compare(layer, trained_parameters(layer), [(hidden, rotary)], [1], "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("mixer, pattern", [*((mixer, "hybrid") for mixer in MIXERS), ("none", "beside-only")])
def test_inductor(mixer, pattern):
    model, ids = make_hybrid(mixer=mixer, pattern=pattern, dtype=torch.float32), random_ids(2, 20)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True)(ids, use_cache=False).logits
        torch.testing.assert_close(compiled, model(ids, use_cache=False).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "options",
    [dict(family="phimamba", pattern="shared"), ONE_LAYER | IN_FEW_BITS | dict(pattern="beside-only")],
    ids=["phimamba", "in few bits"],
)
@pytest.mark.parametrize("cached, graphs", [(None, 2), (StaticCache, 1)])
@torch.no_grad()
def test_decoding_steps(options, cached, graphs):
    """One graph with a static cache, else a second for any number of tokens that went before."""
    model, ids = make_hybrid(**options), random_ids(1, 26)
    cache = None if cached is None else cached(config=model.config, max_cache_len=32)
    cache = model(ids[:, :20], cache=cache, use_cache=True).cache
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for t in range(20, 26):
        step = compiled(ids[:, t : t + 1], cache=cache, position_ids=torch.tensor([[t]]), use_cache=True)
        torch.testing.assert_close(step.logits[:, 0], model(ids[:, : t + 1]).logits[:, -1], rtol=1e-4, atol=1e-5)
    assert counter.frame_count == graphs


# flex_attention, which is compiled on CUDA; what is compiled here is traced as there, and run by PyTorch


def use_flex(monkeypatch):
    use_backend(monkeypatch, flex.FlexBackend())
    monkeypatch.setattr(flex.FlexBackend, "can_flex", lambda *inputs: True)


@pytest.mark.parametrize("pattern", ["beside-only", pytest.param("every", marks=pytest.mark.slow)])
def test_chunks_of_a_prompt_compile_in_generate(pattern):
    """As on CUDA by itself: whole graphs for the first chunk, for others, for a shorter last one, for tokens."""
    sizes = dict(num_hidden_layers=1, layer_types=["hybrid"], hybrid_window=6, hybrid_full_heads=[[2, 3]])
    model = make_hybrid(pattern=pattern, dtype=torch.float32, **(sizes if pattern == "beside-only" else {})).eval()
    ids, graphs = random_ids(1, 80), []
    options = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)

    def backend(graph, inputs):
        graphs.append(
            {t.shape[1] for t in inputs if isinstance(t, torch.Tensor) and t.dtype == torch.int64 and t.ndim == 2}
        )
        return graph

    compiling = CompileConfig(fullgraph=True, backend=backend, mode=None)
    compiling._compile_all_devices = True
    chunks = dict(cache_implementation="static", prefill_chunk_size=32, compile_config=compiling)
    found = model.generate(ids, **chunks, **options)
    assert torch.equal(found, model.generate(ids, **options))
    assert graphs == [{32}, {32}, {16}, {1}]


@torch.no_grad()
def test_flex_attention_is_not_compiled_for_every_length(monkeypatch):
    model = make_hybrid(pattern="beside-only", dtype=torch.float32, **ONE_LAYER)
    counter = CompileCounterWithBackend("aot_eager")
    compiled, frames = torch.compile(flex_attention, backend=counter), []
    monkeypatch.setattr(flex, "compiled_flex_attention", lambda: compiled)
    for batch, length in ((1, 300), (1, 512), (2, 333), (3, 450), (2, 700), (1, 1000)):
        ids = random_ids(batch, length)
        expected = model(ids).logits
        with monkeypatch.context() as on_cuda:
            use_flex(on_cuda)
            out = model(ids[:, :140], use_cache=True)
            found = torch.cat([out.logits, model(ids[:, 140:], cache=out.cache).logits], dim=1)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        frames.append(counter.frame_count)
    assert 0 < frames[-3] == frames[-1], frames


def test_flex_attention_stays_compiled_in_a_process_of_many_kinds(monkeypatch):
    """Of more kinds than PyTorch compiles by itself: types, layers, with a cap and without."""
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    use_flex(monkeypatch)
    flex.compiled_flex_attention.cache_clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=2):
        for dtype, cap in itertools.product((torch.float32, torch.bfloat16), (None, 9.0)):
            model = make_hybrid(pattern="beside-only", dtype=dtype, attn_logit_softcapping=cap, **ONE_LAYER)
            with torch.inference_mode():
                assert model(random_ids(1, 300)).logits.isfinite().all()
        assert counter.frame_count > torch._dynamo.config.recompile_limit
    flex.compiled_flex_attention.cache_clear()


# torch.export


@pytest.mark.parametrize(
    "family, mixer, pattern",
    [
        ("llamba", "mamba1", "hybrid"),
        ("phimamba", "mamba2", "hybrid"),
        ("phimamba", "none", "beside-only"),
    ],
)
@torch.no_grad()
def test_export(family, mixer, pattern):
    model, ids, other = make_hybrid(family, mixer, pattern), random_ids(2, 20), random_ids(2, 20, seed=5)
    program = torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, strict=False)
    torch.testing.assert_close(program.module()(input_ids=other, use_cache=False).logits, model(other).logits)


@torch.no_grad()
def test_export_for_any_number_of_sequences():
    model, ids = make_hybrid(pattern="shared", dtype=torch.float32), random_ids(2, 20)
    shapes = {"input_ids": {0: torch.export.Dim("batch", min=2, max=64)}, "use_cache": None}
    program = torch.export.export(
        model, (), {"input_ids": ids, "use_cache": False}, dynamic_shapes=shapes, strict=False
    )
    other = random_ids(40, 20, seed=5)
    torch.testing.assert_close(program.module()(input_ids=other, use_cache=False).logits, model(other).logits)


@torch.no_grad()
def test_a_backend_is_found_while_a_model_is_compiled(monkeypatch):
    """In a process in which nothing has run before."""
    model, ids = make_hybrid(pattern="beside-only", dtype=torch.float32, **ONE_LAYER), random_ids(1, 20)
    expected = model(ids, use_cache=False).logits
    monkeypatch.setattr(door, "FOUND", {})
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)
    assert set(door.FOUND) == {"torch", "cpu"}
