"""Whole tiny models on the kernels, against the same models on PyTorch's own operations."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import StaticCache

import modeling_llamba.kernels.triton.scans as scans
from modeling_llamba import LlambaConfig, LlambaForCausalLM
from modeling_llamba.compatibility import cache_of
from modeling_llamba.kernels.backend import BACKEND_VARIABLE
from modeling_llamba.model import prompt_graphs
from modeling_llamba.model.cuda_graphs import VARIABLE
from modeling_llamba.model.recorded import REFUSED
from modeling_phimamba import PhiMambaConfig, PhiMambaForCausalLM
from tests.helpers.hybrid_step import PARTIAL, ROPE, randomised, relative_error
from tests.kernels.conftest import DEVICE, INTERPRETED

PROMPT, STEPS = (70 if INTERPRETED else 300), 6
FAMILIES = {"llamba": (LlambaConfig, LlambaForCausalLM), "phimamba": (PhiMambaConfig, PhiMambaForCausalLM)}
KERNELS = {"fla": "chunk_simple_gla", "mamba_ssm": "mamba_chunk_scan_combined"}
KERNELS = {backend: name for backend, name in KERNELS.items() if INTERPRETED or getattr(scans, name) is not None}
AUTO = {*([*KERNELS][:1])}
MODELS = {  # kinds of layers, and what else differs
    "pure": (["linear_attention"] * 2, {}),
    "step sizes": (["linear_attention", "full_attention"], dict(mixer="mamba2")),
    "hybrids": (["hybrid"] * 2, dict(hybrid_full_heads=[[2, 3], []], hybrid_window=[8, 4])),
    "in few bits": (
        ["hybrid"] * 2,
        dict(hybrid_full_heads=[[2, 3], []], head_dim=16, window_bits=8, full_attention_bits=[6, 4]),
    ),
    "windows of 6 and 4 bits": (["hybrid"] * 2, dict(head_dim=16, window_bits=[6, 4])),
    "of every kind": (["hybrid", "linear_attention", "full_attention"], dict(mixer_shared_state=True)),
    "far sinks": (
        ["hybrid"] * 2,
        dict(hybrid_full_heads=[[], [0, 1]], hybrid_sink_reach=20, rope_parameters=ROPE | PARTIAL),
    ),
}
CLOSE = dict(rtol=1e-4, atol=1e-5 if INTERPRETED else 5e-2)  # as tensor cores round what the prompt's kernel is given


def make_model(name, family="llamba"):
    """A model in float32, with weights large enough that a leak shows."""
    kinds, options = MODELS[name]
    wide = {} if INTERPRETED else dict(head_dim=16, mixer_d_state=16)  # as flex_attention wants on a device
    sizes = dict(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=len(kinds), num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, layer_types=kinds, mixer_num_kv_heads=2,
        mixer_chunk_size=16, hybrid_window=6, hybrid_block=2, hybrid_sinks=2, hybrid_salient=3, hybrid_rank=4,
        hybrid_state_planes=2, rope_parameters=ROPE,
    )  # fmt: skip
    config, model = FAMILIES[family]
    return randomised(model(config(**sizes | wide | options))).eval().to(DEVICE)


def random_ids(batch, length):
    return torch.randint(3, 97, (batch, length)).to(DEVICE)


@torch.no_grad()
def logits(model, ids):
    """Of the prompt at once, padded on the left in one row, and of steps of one token."""
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    out = model(ids[:, :PROMPT], attention_mask=mask[:, :PROMPT], use_cache=True)
    found = [out.logits[0], out.logits[1, 5:]]
    for end in range(PROMPT + 1, PROMPT + STEPS + 1):
        out = model(ids[:, end - 1 : end], attention_mask=mask[:, :end], cache=out.cache)
        found.append(out.logits[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", MODELS)
def test_prefill_and_decoding(monkeypatch, launches, name, family):
    model, ids, found = make_model(name, family), random_ids(2, PROMPT + STEPS), {}
    kinds = model.config.layer_types
    backends = ("torch", *KERNELS, "auto") if "linear_attention" in kinds else ("torch", "auto")
    for backend in backends:
        before = dict(launches)
        monkeypatch.setenv(BACKEND_VARIABLE, backend)
        found[backend] = logits(model, ids)
        used = {kernel for kernel in KERNELS if launches[kernel] > before[kernel]}
        expected = (AUTO if backend == "auto" else {backend} & {*KERNELS}) if "linear_attention" in kinds else set()
        assert used == expected
        assert launches["layer"] - before["layer"] == STEPS * kinds.count("hybrid") * (backend != "torch")
        full = kinds.count("full_attention") + sum(map(bool, model.config.hybrid_full_heads or ()))
        assert launches["kept heads"] - before["kept heads"] == STEPS * full * (backend != "torch")
    limit = 1e-5 if INTERPRETED else 5e-3
    assert all(relative_error(found[backend], found["torch"]) < limit for backend in found)


@pytest.mark.parametrize(
    "gap", [slice(PROMPT - 6, PROMPT), slice(PROMPT - 9, PROMPT - 4), slice(PROMPT + 1, PROMPT + 2)]
)
@torch.no_grad()
def test_padding_between_tokens_is_never_seen(monkeypatch, gap):
    """Behind a prompt, inside it, and as a single token."""
    model, ids = make_model("of every kind"), random_ids(2, PROMPT + STEPS)
    other, mask, found = ids.clone(), torch.ones_like(ids), {}
    mask[1, gap], other[1, gap] = 0, (ids[1, gap] + 7) % model.config.vocab_size
    for backend, tokens in (("torch", ids), ("auto", ids), ("auto", other)):
        monkeypatch.setenv(BACKEND_VARIABLE, backend)
        out = model(tokens[:, :PROMPT], attention_mask=mask[:, :PROMPT], use_cache=True)
        steps = []
        for end in range(PROMPT + 1, PROMPT + STEPS + 1):
            token, past = tokens[:, end - 1 : end], out.cache
            out = model(token, attention_mask=mask[:, :end], cache=past)
            steps.append(out.logits[:, 0] * mask[:, end - 1, None])
        found[backend, tokens is other] = torch.cat(steps)
    expected = found["torch", False]
    assert all(relative_error(got, expected) < (1e-5 if INTERPRETED else 5e-3) for got in found.values())


@pytest.mark.parametrize("family, name", [("llamba", "hybrids"), ("phimamba", "hybrids"), ("llamba", "in few bits")])
@torch.no_grad()
def test_static_steps_compile_into_one_graph(monkeypatch, family, name):
    """Blocks are opened in the graph, too."""
    torch.compiler.reset()
    model, ids, prompt = make_model(name, family), random_ids(1, 18), 12
    with monkeypatch.context() as plainly:
        plainly.setenv(BACKEND_VARIABLE, "torch")
        expected = model(ids).logits
    cache = StaticCache(config=model.config, max_cache_len=32)
    model(ids[:, :prompt], cache=cache)
    counter = CompileCounterWithBackend("aot_eager" if INTERPRETED else "inductor")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for t in range(prompt, ids.shape[1]):
        position = torch.full((1, 1), t, device=DEVICE)
        step = compiled(ids[:, t : t + 1], cache=cache, position_ids=position, use_cache=True)
        torch.testing.assert_close(step.logits[:, 0], expected[:, t], **CLOSE)
    assert counter.frame_count == 1
    launched = [
        str(node.target).split(".")[1]
        for node in counter.graphs[0].graph.nodes
        if "kernels_triton" in str(node.target)
    ]
    assert launched.count("mix_one") == launched.count("write_one") == 2
    assert launched.count("attend_to_rows") == 1
    # rows of both layers' windows, and of the kept head's keys and values
    assert launched.count("encode_rows") == (4 if name == "in few bits" else 0)


@torch.no_grad()
def test_generate_with_a_static_cache(launches):
    model, ids = make_model("hybrids", "phimamba"), random_ids(2, 15)
    options = dict(max_new_tokens=4, eos_token_id=None, do_sample=False, disable_compile=True)
    options |= dict(return_dict_in_generate=True)
    static = model.generate(ids, cache_implementation="static", **options)
    assert cache_of(static).is_compileable
    assert launches["layer"] == 2 * 3
    assert torch.equal(static.sequences, model.generate(ids, **options).sequences)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    padded = model.generate(ids, attention_mask=mask, cache_implementation="static", **options)
    assert torch.equal(padded.sequences, model.generate(ids, attention_mask=mask, **options).sequences)


@pytest.mark.skipif(INTERPRETED, reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_generate_by_cuda_graphs(monkeypatch, name):
    """Its first prompt and tokens, and those of graphs that are there."""
    model, ids = make_model(name), random_ids(2, PROMPT)
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    options = dict(max_new_tokens=12, eos_token_id=None, do_sample=False, output_logits=True)
    options |= dict(return_dict_in_generate=True)
    for padding in (None, mask):
        monkeypatch.setenv(VARIABLE, "0")
        expected = model.generate(ids, attention_mask=padding, **options).logits
        monkeypatch.setenv(VARIABLE, "1")
        for _ in range(2):
            found = model.generate(ids, attention_mask=padding, **options).logits
            assert relative_error(torch.stack(found), torch.stack(expected)) < 5e-3
    assert model not in REFUSED


@pytest.mark.skipif(INTERPRETED, reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_long_prompts_by_cuda_graphs(monkeypatch, name):
    """Chunks of two lengths in turns: no graph writes over what the one before it holds."""
    monkeypatch.setattr(prompt_graphs, "BUCKETS", (64, 128))
    model = make_model(name)
    options = dict(max_new_tokens=12, eos_token_id=None, do_sample=False, output_logits=True)
    options |= dict(return_dict_in_generate=True)
    for length in (300, 380, 300, 380):
        ids, found = random_ids(2, length), {}
        for graphs in "01":
            monkeypatch.setenv(VARIABLE, graphs)
            found[graphs] = torch.stack(model.generate(ids, **options).logits)
        assert relative_error(found["1"], found["0"]) < 5e-3
    assert model not in REFUSED
    if model in prompt_graphs.PROMPTS:  # where nothing grows, transformers compiles tokens by itself
        assert len(prompt_graphs.PROMPTS[model].graphs) == 4


LAYOUTS = {  # of a row of 20 and 50 tokens
    "seq_idx": dict(seq_idx=torch.tensor([[0] * 20 + [1] * 50])),
    "cu_seqlens": dict(cu_seqlens=torch.tensor([0, 20, 70])),
    "position_ids": dict(position_ids=torch.cat([torch.arange(20), torch.arange(50)])[None]),
    "padding at the end": dict(attention_mask=torch.tensor([[1] * 60 + [0] * 10])),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["step sizes", "of every kind"])
def test_training(monkeypatch, launches, name, layout):
    """The gradient of every parameter, in each way to pack sequences; a model takes fla's kernel by itself."""
    model, ids, grads = make_model(name), random_ids(1, 70), {}
    packing = {name: value.to(DEVICE) for name, value in LAYOUTS[layout].items()}
    labels = ids.masked_fill(packing.get("attention_mask", torch.ones_like(ids)) == 0, -100)
    for backend in ("torch", "auto"):
        monkeypatch.setenv(BACKEND_VARIABLE, backend)
        loss = model(ids, labels=labels, use_cache=False, **packing).loss
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        found = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
        grads[backend] = dict(zip(trained, found, strict=True))
    trains = {"fla"} if scans.chunk_simple_gla is not None and scans.fla_gradient_problem() is None else set()
    assert {kernel for kernel, count in launches.items() if count} == AUTO & trains
    for parameter, gradient in grads["torch"].items():
        got = grads["auto"][parameter]
        assert (got is None) == (gradient is None), parameter
        if gradient is not None:
            norm = gradient.double().norm()
            error = (got.double() - gradient.double()).norm() / norm.clamp_min(1e-30)
            assert error < (1e-4 if INTERPRETED else 5e-2) or not gradient.any(), parameter
