"""CUDA graphs of prompts and tokens, on the stand-in: equal to passes without them, and nothing left to the host."""

import functools

import pytest
import torch
import transformers
from transformers import StaticCache

from modeling_llamba.compatibility import CACHE_NAME, DRAFTS_SINCE, cache_of, numbers_of
from modeling_llamba.model import cuda_graphs, prompt_graphs
from modeling_llamba.model.cache import held_by, seen_by
from modeling_llamba.model.cuda_graphs import VARIABLE
from modeling_llamba.model.prompt_graphs import PROMPTS, PromptGraph, PromptGraphs, chunks_of
from modeling_llamba.model.recorded import REFUSED, Recorded
from modeling_llamba.model.token_graph import CHECKED, CHECKS, TokenGraph
from tests.doubles.device import StandIn
from tests.doubles.device.native import can_stand_in
from tests.helpers.hybrids import make_hybrid
from tests.helpers.teachers import random_ids

if not can_stand_in():  # a file that is named on the command line is collected even so
    pytest.skip("counts what the stand-in can count", allow_module_level=True)
NEW = 12
OPTIONS = dict(
    max_new_tokens=NEW, do_sample=False, eos_token_id=None, output_logits=True, return_dict_in_generate=True
)
MODELS = {
    "hybrids": dict(pattern="beside-only"),
    "phimamba": dict(pattern="beside-only", family="phimamba"),
    "few bits": dict(pattern="beside-only", head_dim=16, window_bits=8, full_attention_bits=[6, 4]),
    "wide windows": dict(pattern="beside-only", hybrid_window=[64, 40], hybrid_block=8),
    "blocks as long as a bucket": dict(pattern="beside-only", hybrid_window=64, hybrid_block=32),
    "far sinks": dict(pattern="beside-only", hybrid_sink_reach=20),
    "of every kind": dict(pattern="every"),
    "attention": dict(pattern="attention"),
    "discrete_mamba2": dict(pattern="hybrid"),
    "mamba2": dict(pattern="hybrid", mixer="mamba2"),
    "mamba1": dict(pattern="hybrid", mixer="mamba1"),
    "shared state": dict(pattern="shared"),
}
RECORDED = 2
"""Runs of a prompt's graph as it is recorded: with another text, and with the prompt."""
LENGTHS = (31, 32, 33, 64)
"""Tokens of a prompt on both sides of each bucket."""


@pytest.fixture
def device(monkeypatch):
    """A stand-in; buckets are small there."""
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setattr(prompt_graphs, "BUCKETS", (32, 64))
    with StandIn() as device:
        yield device


@pytest.fixture
def said_nothing(device, monkeypatch):
    """A stand-in where the user says nothing of graphs."""
    monkeypatch.delenv(VARIABLE)
    return device


def make_model(name):
    return make_hybrid(**MODELS[name] | dict(dtype=torch.float32)).cuda()


def text(length, padding=0):
    """Two rows, of which one begins with padding."""
    ids = random_ids(2, length).cuda()
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    return dict(input_ids=ids, attention_mask=mask)


def without(model, *arguments, **options):
    """`generate` without graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "0")
        return model.generate(*arguments, **options)


def check_equal(found, expected):
    got, wanted = (torch.stack(outputs.logits, dim=1).cpu() for outputs in (found, expected))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def check_held(found, expected):
    """What two calls returned holds as much, and counts the same tokens."""
    caches = [cache_of(outputs) for outputs in (found, expected)]
    assert [t.shape for t in held_by(caches[0])] == [t.shape for t in held_by(caches[1])]
    for a, b in zip(*map(seen_by, caches), strict=True):
        assert torch.equal(a, b)


def replays(device, call):
    """How many graphs ran during a call, and what it returned."""
    with device.counting() as counts:
        result = call()
    return counts.kernels["replay"], result


@pytest.mark.parametrize(
    "length, chunks",
    [
        (127, []),
        (128, [(0, 256)]),
        (256, [(0, 256)]),
        (257, [(0, 512)]),
        (2049, [(0, 4096)]),
        (4096, [(0, 4096)]),
        (4097, [(0, 4096), (4096, 256)]),
        (8192, [(0, 4096), (4096, 4096)]),
        (4 * 4096 + 1, []),
    ],
)
def test_a_bucket_is_at_most_twice_as_long_as_a_prompt(length, chunks):
    assert chunks_of(length) == chunks


@pytest.mark.parametrize("padding", [0, 9])
@pytest.mark.parametrize("name", MODELS)
def test_graphs_give_what_passes_give(device, name, padding):
    """Both sides of each bucket, the second call by the graphs of the first, and a second turn on what was held."""
    model = make_model(name)
    for length in LENGTHS:
        first, second = text(length, padding), text(5)["input_ids"]
        expected = without(model, **first, **OPTIONS)
        count, found = replays(device, functools.partial(model.generate, **first, **OPTIONS))
        assert count == (RECORDED if length in (31, 33) else 1) + NEW - 2
        check_equal(found, expected)
        turns = []
        for generate, before in ((without, expected), (type(model).generate, found)):
            ids = torch.cat([before.sequences, second], dim=1)
            mask = torch.cat([first["attention_mask"], torch.ones_like(ids[:, length:])], dim=1)
            turns.append(generate(model, ids, attention_mask=mask, **{CACHE_NAME: cache_of(before)}, **OPTIONS))
        check_equal(turns[1], turns[0])
        check_held(*turns)
    assert model not in REFUSED
    assert CHECKED[model] == {(2, padding > 0): CHECKS}
    assert all(graph.recorded is not None for graph in PROMPTS[model].graphs.values())


@pytest.mark.parametrize("name", MODELS)
def test_a_long_prompt_is_read_in_chunks(device, name):
    """By a graph each; the second call, with another last chunk of the same size, by those of the first."""
    model = make_model(name)
    for length, graphs in ((135, 3 * RECORDED), (129, 3), (140, 3), (192, 2 + RECORDED)):
        prompt, more = text(length), text(5)["input_ids"]
        expected = without(model, **prompt, **OPTIONS)
        count, found = replays(device, functools.partial(model.generate, **prompt, **OPTIONS))
        assert count == graphs + NEW - 2
        check_equal(found, expected)
        check_held(found, expected)
    turns = [model(more, **{CACHE_NAME: cache_of(outputs)}).logits.cpu() for outputs in (expected, found)]
    torch.testing.assert_close(turns[1], turns[0], rtol=1e-4, atol=1e-4)
    assert model not in REFUSED


@pytest.mark.parametrize("name", ["hybrids", "few bits", "of every kind"])
def test_nothing_is_left_to_the_host(device, name, monkeypatch):
    """A token is one copy, one graph and one copy; a prompt is put in place, and what is held copied out."""
    model, tokens, prompts, where = make_model(name), [], [], []

    def counted(method, into):
        def run(self, *arguments):
            with device.counting() as counts:
                result = method(self, *arguments)
            into.append(counts)
            return result

        return run

    model.generate(**text(50), **OPTIONS)
    monkeypatch.setattr(TokenGraph, "run", counted(TokenGraph.run, tokens))
    monkeypatch.setattr(PromptGraphs, "run", counted(PromptGraphs.run, prompts))
    replay = Recorded.run

    def noted(self):
        result = replay(self)
        logits = result if isinstance(result, torch.Tensor) else result[0]
        where.append((id(self), logits.data_ptr()))
        return result

    monkeypatch.setattr(Recorded, "run", noted)
    found = model.generate(**text(40), **OPTIONS)
    assert [dict(counts.kernels) for counts in tokens[2:]] == [
        {"replay": 1, "aten.copy_.default": 1, "aten.clone.default": 1}
    ] * (NEW - 3)
    (prompt,) = prompts
    taken = {"aten.fill_.Scalar": 1, "aten.copy_.default": 1}
    assert prompt.kernels.pop("replay") == 1
    assert prompt.kernels.pop("aten.clone.default") <= 1 + len(held_by(cache_of(found))) + len(cache_of(found).layers)
    assert dict(prompt.kernels) == taken
    assert not any(counts.syncs for counts in [prompt, *tokens[2:]])
    assert len(where) == NEW - 1
    assert len({*where}) == 2  # one of the prompt, one of the tokens


def test_a_graph_reads_weights_where_they_are(device):
    """Changed in place they are those of the graph; elsewhere they are other graphs'."""
    model, prompt = make_model("hybrids"), text(50)
    model.generate(**prompt, **OPTIONS)
    graphs = PROMPTS[model]
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    check_equal(model.generate(**prompt, **OPTIONS), without(model, **prompt, **OPTIONS))
    assert PROMPTS[model] is graphs
    weight = model.model.layers[0].mlp.down_proj.weight
    weight.data = weight.detach() * 2
    check_equal(model.generate(**prompt, **OPTIONS), without(model, **prompt, **OPTIONS))
    assert PROMPTS[model] is not graphs
    assert model not in REFUSED


def hooked(model):
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)


def compiled(model):
    model.model.layers[0].mlp.compile(disable=True)


def adapted(model):
    mlp = model.model.layers[0].mlp
    mlp.base_layer = mlp.down_proj


CALLS = {
    "beams": (dict(num_beams=2), None),
    "drafts": (dict(prompt_lookup_num_tokens=3), None),
    "hidden states": (dict(output_hidden_states=True), None),
    "a static cache": (dict(cache_implementation="static", disable_compile=True), None),
    "chunks": (dict(prefill_chunk_size=16), None),
    "no cache": (dict(use_cache=False), None),
    "hooks": ({}, hooked),
    "another module": ({}, adapted),
    "a compiled module": ({}, compiled),
    "training": ({}, lambda model: model.train()),
    "eager attention": ({}, lambda model: model.set_attn_implementation("eager")),
}


@pytest.mark.parametrize("name", CALLS)
def test_passes_that_are_not_recorded(device, name):
    options, change = CALLS[name]
    model, prompt = make_model("hybrids"), text(50)
    if name == "drafts":
        if numbers_of(transformers.__version__) < numbers_of(DRAFTS_SINCE):
            pytest.skip(f"a hybrid takes drafts from transformers {DRAFTS_SINCE} on")
        prompt = {key: t[:1] for key, t in prompt.items()}
    if change is not None:
        change(model)
    expected = without(model, **prompt, **OPTIONS | options)
    count, found = replays(device, lambda: model.generate(**prompt, **OPTIONS | options))
    assert count == 0
    assert torch.equal(found.sequences.cpu(), expected.sequences.cpu())


@pytest.mark.parametrize("length, padding", [(10, 0), (80, 9), (4 * 64 + 1, 0)])
def test_prompts_without_graphs(device, length, padding):
    """Tokens after them are a graph all the same; few tokens are none."""
    model, prompt = make_model("hybrids"), text(length, padding)
    expected = without(model, **prompt, **OPTIONS)
    count, found = replays(device, lambda: model.generate(**prompt, **OPTIONS))
    assert count == NEW - 2
    check_equal(found, expected)
    assert replays(device, lambda: model.generate(**prompt, **OPTIONS | dict(max_new_tokens=4)))[0] == 0


@pytest.mark.parametrize("mask", ["inside", "nothing else"])
def test_padding_that_a_graph_does_not_follow(device, mask):
    model, prompt = make_model("hybrids"), text(50)
    prompt["attention_mask"][1, slice(20, 25) if mask == "inside" else slice(None)] = 0
    count, found = replays(device, lambda: model.generate(**prompt, **OPTIONS))
    assert count == 0
    check_equal(found, without(model, **prompt, **OPTIONS))


def test_prompts_of_two_threads(device):
    """One of them is computed without a graph."""
    model, prompt = make_model("hybrids"), text(50)
    expected = model.generate(**prompt, **OPTIONS)
    with PROMPTS[model].lock:
        count, found = replays(device, lambda: model.generate(**prompt, **OPTIONS))
    assert count == NEW - 2
    check_equal(found, expected)


@pytest.mark.parametrize("fault", ["waits", "differs"])
@pytest.mark.parametrize("of", [PromptGraph, TokenGraph])
def test_a_fault_of_a_graph_is_said_and_left_behind(device, monkeypatch, caplog, fault, of):
    """Where a pass looks at the device, or depends on more than a graph can follow, results are those without it."""
    model, prompt = make_model("hybrids"), text(50)
    expected = without(model, **prompt, **OPTIONS)
    compute = of.compute

    def faulty(*arguments):
        result = compute(*arguments)
        logits = result[0] if of is PromptGraph else result
        if fault == "waits":
            logits.abs().max().item()
        elif device.tape is not None:
            logits.mul_(2)
        return result

    monkeypatch.setattr(of, "compute", faulty)
    check_equal(model.generate(**prompt, **OPTIONS), expected)
    assert model in REFUSED
    assert "goes on without CUDA graphs" in caplog.text
    count, found = replays(device, lambda: model.generate(**prompt, **OPTIONS))
    assert count == 0
    check_equal(found, expected)


def test_what_the_first_prompt_of_a_graph_cannot_show(device, monkeypatch, caplog):
    """A count that stays is seen by a second comparison, with another text."""
    model = make_model("hybrids")
    compute = PromptGraph.compute

    def with_count_of_the_first(self, model):
        counts = self.counts
        if device.tape is not None:
            self.counts = counts.clone()
            device.tape.operations.pop()  # so that no replay makes this copy anew
        result = compute(self, model)
        self.counts = counts
        return result

    monkeypatch.setattr(PromptGraph, "compute", with_count_of_the_first)
    prompt = text(50)
    check_equal(model.generate(**prompt, **OPTIONS), without(model, **prompt, **OPTIONS))
    assert model in REFUSED
    assert "gave other results" in caplog.text


def test_graphs_are_taken_without_being_asked_for(said_nothing, monkeypatch):
    """From the version of PyTorch on that goes on after a failed recording."""
    model, prompt = make_model("hybrids"), text(50)
    expected = without(model, **prompt, **OPTIONS)
    for goes_on in (False, True):
        monkeypatch.setattr(cuda_graphs, "goes_on_after_failed_recordings", lambda goes_on=goes_on: goes_on)
        count, found = replays(said_nothing, lambda: model.generate(**prompt, **OPTIONS))
        assert count == (RECORDED + NEW - 2 if goes_on else 0)
        check_equal(found, expected)
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(ValueError, match="1 turns CUDA graphs on, 0 turns them off"):
        model.generate(**prompt, **OPTIONS)


def test_prompts_with_much_work_are_no_graph(device, monkeypatch):
    model, prompt = make_model("hybrids"), text(50)
    monkeypatch.setattr(prompt_graphs, "MOST_WORK", 127 * model.num_parameters())
    count, found = replays(device, lambda: model.generate(**prompt, **OPTIONS))
    assert count == NEW - 2
    check_equal(found, without(model, **prompt, **OPTIONS))


@pytest.mark.parametrize(
    "most, lengths, prompts",
    [
        (1, [32, 64, 32], [RECORDED, 0, 1]),  # none takes the place of another, which would be recorded again
        (2, [135, 135, 32], [0, 0, RECORDED]),  # chunks that need too many take none, so that others have some
    ],
)
def test_a_model_keeps_the_graphs_of_the_first_sizes(device, monkeypatch, most, lengths, prompts):
    monkeypatch.setattr(prompt_graphs, "MOST_GRAPHS", most)
    model, counts = make_model("hybrids"), []
    for length in lengths:
        prompt = text(length)
        count, found = replays(device, lambda prompt=prompt: model.generate(**prompt, **OPTIONS))
        counts.append(count - (NEW - 2))
        check_equal(found, without(model, **prompt, **OPTIONS))
    assert counts == prompts


@pytest.mark.parametrize("times", [1, 2])
def test_memory_that_ends_while_a_graph_is_recorded(device, monkeypatch, caplog, times):
    """It is recorded again when PyTorch has given back what it kept for later; if that does not help, not at all."""
    model, prompt, compute = make_model("hybrids"), text(50), PromptGraph.compute
    expected = without(model, **prompt, **OPTIONS)
    failed = []

    def without_memory(self, model):
        if device.tape is not None and len(failed) < times:
            failed.append(self)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return compute(self, model)

    monkeypatch.setattr(PromptGraph, "compute", without_memory)
    check_equal(model.generate(**prompt, **OPTIONS), expected)
    assert (model in REFUSED) == (times == 2)
    assert ("CUDA out of memory" in caplog.text) == (times == 2)


def test_memory_that_ends_before_a_graph_is_recorded(device, monkeypatch, caplog):
    """The prompt alone may fit, without padding and another one beside it."""
    model, prompt = make_model("hybrids"), text(50)
    expected = without(model, **prompt, **OPTIONS)

    def compute(self, model):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(PromptGraph, "compute", compute)
    check_equal(model.generate(**prompt, **OPTIONS), expected)
    assert "CUDA out of memory" in caplog.text


def test_without_memory_tokens_are_no_graph(device, monkeypatch):
    model, prompt = make_model("hybrids"), text(10)
    expected = without(model, **prompt, **OPTIONS)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 2**30))
    count, found = replays(device, lambda: model.generate(**prompt, **OPTIONS))
    assert count == 0
    check_equal(found, expected)


def test_weights_that_move_end_graphs(device, monkeypatch, caplog):
    monkeypatch.setattr(prompt_graphs, "MOST_MOVES", 1)
    model, prompt = make_model("hybrids"), text(50)
    weight = model.model.layers[0].mlp.down_proj.weight
    for _ in range(3):
        weight.data = weight.detach() + 0.01
        check_equal(model.generate(**prompt, **OPTIONS), without(model, **prompt, **OPTIONS))
    assert model in REFUSED
    assert "its weights move from call to call" in caplog.text


@pytest.mark.parametrize("change", [lambda model: model.train(), lambda model: model.to(torch.float64)])
def test_graphs_go_when_a_model_is_trained_or_converted(device, change):
    model, prompt = make_model("hybrids"), text(50)
    model.generate(**prompt, **OPTIONS)
    assert model in PROMPTS
    change(model)
    assert model not in PROMPTS
    model.eval()
    check_equal(model.generate(**prompt, **OPTIONS), without(model, **prompt, **OPTIONS))


def test_a_second_stream_waits_for_the_first(device, monkeypatch):
    """Two streams may take turns with the graphs of a model, which share memory."""
    model, prompt, waited = make_model("hybrids"), text(50), []
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for stream in streams:
        monkeypatch.setattr(stream, "wait_stream", lambda other, stream=stream: waited.append((stream, other)))
    for stream in (*streams, streams[1], streams[0]):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None, stream=stream: stream)
        model.generate(**prompt, **OPTIONS)
    assert [pair for pair in waited if {*pair} <= {*streams}] == [(streams[1], streams[0]), (streams[0], streams[1])]


def test_room_that_ends_is_made_anew(device, monkeypatch):
    model, prompt = make_model("few bits"), text(50, padding=9)
    options = OPTIONS | dict(max_new_tokens=20)
    expected = without(model, **prompt, **options)
    monkeypatch.setattr(cuda_graphs, "ROOM", -45)  # room for 55, then 65, then 70 tokens
    count, found = replays(device, lambda: model.generate(**prompt, **options))
    assert count == RECORDED + 4 + 9 + 3
    check_equal(found, expected)


def test_more_tokens_than_generate_counts(device):
    """A cache is given, and of the text only what is new, while the mask covers all."""
    model = make_model("hybrids")
    found = {}
    for graphs in "01":
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, graphs)
            torch.manual_seed(1)
            before, after = random_ids(1, 30).cuda(), random_ids(1, 60).cuda()
            cache = cache_of(model(before, use_cache=True))
            mask = torch.ones(1, 90, dtype=torch.long).cuda()
            options = OPTIONS | dict(max_new_tokens=60)
            found[graphs] = model.generate(after, attention_mask=mask, **{CACHE_NAME: cache}, **options)
    check_equal(found["1"], found["0"])


def test_a_turn_that_stays_in_the_open_block(device):
    """What was read from a state before the graphs changed it is read anew."""
    model = make_hybrid(pattern="beside-only", hybrid_window=16, hybrid_block=8, dtype=torch.float32).cuda()
    prompt = text(48)
    more = random_ids(2, 3).cuda()
    turns = []
    for generate in (functools.partial(without, model), model.generate):
        cache = cache_of(generate(**prompt, **OPTIONS))  # 59 tokens
        turns.append(model(more, **{CACHE_NAME: cache}).logits.cpu())
    torch.testing.assert_close(turns[1], turns[0], rtol=1e-4, atol=1e-4)


def test_what_is_returned_goes_on_without_limits(device):
    """The cache of a call grows again, although its tokens had room for this call alone."""
    model, prompt = make_model("few bits"), text(50)
    cache = cache_of(model.generate(**prompt, **OPTIONS))
    assert not isinstance(cache, StaticCache)
    assert cache.get_seq_length() == 50 + NEW - 1
    more = text(70)["input_ids"]
    assert model(more, cache=cache).logits.shape[1] == 70
    assert cache.get_seq_length() == 50 + NEW - 1 + 70
