"""Hybrids in vLLM, against transformers: equal tokens, however requests are cut, mixed, shared and stopped."""

import contextlib
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
import urllib.request

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.vllm.conftest import IS_SECOND, ROOT, SETTINGS, greedy, reference, start_reference
from tests.vllm.reference import CASES, CONVERTED, NEW_TOKENS, ROUNDED, ROUNDED_CASES

pytestmark = pytest.mark.vllm
ON_THE_FIRST = pytest.mark.skipif(IS_SECOND, reason="compilers and other processes would want Triton for CPUs")
REFUSED = {"experts": "Experts are not served", "mamba1": "mamba1 is not served"}
FEW_BITS = [ROUNDED, *ROUNDED_CASES]
SERVED = [CONVERTED, *(name for name in CASES if name not in REFUSED)]
# by vLLM's default flags, which compile what lies between the layers and a hybrid layer's step: a minute each
COMPILED = [CONVERTED, "phi, heads kept apart", "mixers alone", "two kinds of RoPE, caps, far sinks"]
# chunks that cut blocks of 8, the window of 24 and the short convolution; fewer slots than requests
IN_PIECES = dict(enforce_eager=True, max_num_batched_tokens=47, max_num_seqs=3, enable_prefix_caching=False)
# all prompts in one step, in batches of like lengths
AT_ONCE = dict(enforce_eager=True, max_num_batched_tokens=2048, enable_prefix_caching=False)


def differences(outputs, references) -> tuple[int, float]:
    """How many of the tokens differ, and the largest difference of the log-probabilities of those that do not."""
    wrong, worst, compared = 0, 0.0, 0
    for output, expected in zip(outputs, references, strict=True):
        tokens = list(output.token_ids)
        assert len(tokens) == len(expected["tokens"])
        for position, (token, right) in enumerate(zip(tokens, expected["tokens"], strict=True)):
            if token != right:
                wrong += 1
                continue
            found = output.logprobs[position][token].logprob
            worst, compared = max(worst, abs(found - expected["logprobs"][position])), compared + 1
    return wrong, worst if compared else float("inf")


def expected(models, name):
    return json.loads((models / name / "reference.json").read_text())


def assert_equal(outputs, references):
    wrong, worst = differences([output.outputs[0] for output in outputs], references)
    assert wrong == 0, f"{wrong} tokens differ, log-probabilities by {worst}"
    assert worst < 1e-4, f"{wrong} tokens differ, log-probabilities by {worst}"


@pytest.mark.parametrize("name", SERVED)
def test_tokens_and_log_probabilities_are_transformers(name, engine, models, prompts):
    """Ragged prompts of 1 to 600 tokens, ten requests in three slots."""
    assert_equal(greedy(engine(name, **IN_PIECES), prompts), expected(models, name))


def test_the_model_runner_is_the_one_that_was_asked_for(engine):
    """The second needs Triton, which tests of it bring along (model_runner_v2.py)."""
    runner = engine("hybrid", enforce_eager=True).llm_engine.model_executor.driver_worker.worker.model_runner
    assert (".gpu.model_runner" in str([c.__module__ for c in type(runner).__mro__])) == IS_SECOND


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_tokens_in_c_and_by_pytorch(backend, engine, models, prompts, monkeypatch):
    """The former where nothing else is asked for, the latter where C does not run."""
    from modeling_llamba.kernels.backend import BACKEND_VARIABLE
    from modeling_llamba.kernels.c.c_backend import CBackend
    from recipes.serving.cpu_pages import SlotStep

    called = []
    for owner, name in ((SlotStep, "__call__"), (CBackend, "attend_to_pages")):
        call = getattr(owner, name)
        counted = lambda *inputs, name=name, call=call: called.append(name) or call(*inputs)  # noqa: E731
        monkeypatch.setattr(owner, name, staticmethod(counted) if name == "attend_to_pages" else counted)
    if backend != "auto":
        monkeypatch.setenv(BACKEND_VARIABLE, backend)
    assert_equal(greedy(engine(CONVERTED, **IN_PIECES), prompts), expected(models, CONVERTED))
    assert set(called) == ({"__call__", "attend_to_pages"} if backend == "auto" else set())


@pytest.mark.parametrize(
    "name",
    [CONVERTED, *FEW_BITS[:-1], "phi, heads kept apart", "two kinds of RoPE, caps, far sinks", "mamba2"],
)
def test_a_token_of_each_request_asks_the_host_for_nothing(name, engine, models, prompts, monkeypatch):
    """As a CUDA graph of a step requires, with a kernel that reads pages; here PyTorch's operations do."""
    from modeling_llamba.hybrid import eviction
    from modeling_llamba.kernels.backend import BACKEND_VARIABLE
    from modeling_llamba.kernels.torch_backend import TorchBackend
    from recipes.serving import pages, slots

    steps = []

    def watched(run):
        def watch(self, *inputs):
            metadata = self.memory.metadata()
            if metadata is None or metadata.num_prefills:
                return run(self, *inputs)
            steps.append(run.__qualname__)
            with monkeypatch.context() as patch, NothingForTheHost():
                patch.setattr(metadata, "decoding", None)
                read_by_the_host_fails(patch)
                return run(self, *inputs)

        return watch

    monkeypatch.setenv(BACKEND_VARIABLE, "torch")
    monkeypatch.setattr(TorchBackend, "attends_to_pages", True)
    monkeypatch.setattr(TorchBackend, "attend_to_pages", staticmethod(attend_to_pages), raising=False)
    monkeypatch.setattr(eviction, "marked_rows", lambda marked: None)
    monkeypatch.setattr(slots.SlotLayer, "run", watched(slots.SlotLayer.run))
    monkeypatch.setattr(slots.KeptHeads, "attend", watched(slots.KeptHeads.attend))
    llm = engine(name, **IN_PIECES)
    support = pages.steps_in_graphs(llm.llm_engine.vllm_config)
    assert support is pages.AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    outputs = [output.outputs[0] for output in greedy(llm, prompts)]
    wrong, worst = differences(outputs, expected(models, name))
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    kinds = {type(layer).__name__ for layer in layers}
    assert ("SlotLayer.run" in steps) == ({"HybridSlots", "MixerSlots"} & kinds != set())
    assert ("KeptHeads.attend" in steps) == ("HeadPages" in kinds)
    assert wrong <= (0.05 * NEW_TOKENS * len(prompts) if name in FEW_BITS else 0)
    assert worst < (0.02 if name in FEW_BITS else 1e-4)


class NothingForTheHost(TorchDispatchMode):
    """Fails where an operation gives the host a number, or has as many results as it finds."""

    ASKING = re.compile(
        r"aten::(_local_scalar_dense|nonzero|masked_select|_?unique|bincount|repeat_interleave\.(self_)?Tensor)"
    )

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        assert not self.ASKING.match(op.name())
        if op.name().startswith(("aten::index.", "aten::index_put")):
            indices = args[1] if isinstance(args[1], (list, tuple)) else ()
            assert all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in indices)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.sum().item(), lambda t: bool(t.any()), lambda t: t[t > 1], lambda t: t.nonzero(),
        lambda t: t.masked_select(t > 1), lambda t: t.repeat_interleave(t), lambda t: t.unique(),
        lambda t: torch.where(t > 1), lambda t: t.tolist(), lambda t: t.cpu(), lambda t: t.numpy(),
        lambda t: t.index_put_((t > 1,), t[:1]),
    ],
)  # fmt: skip
def test_what_asks_the_host_is_seen(read, monkeypatch):
    read(torch.arange(3))
    read_by_the_host_fails(monkeypatch)
    with pytest.raises(AssertionError), NothingForTheHost():
        read(torch.arange(3))


def read_by_the_host_fails(patch) -> None:
    """Make methods of tensors fail that no operation stands for where tensors are a CPU's."""

    def fails(self, *args, **kwargs):
        raise AssertionError("a tensor is read by the host")

    for name in ("tolist", "cpu", "numpy"):
        patch.setattr(torch.Tensor, name, fails)


def attend_to_pages(query, pages, firsts, kv_heads, table, lengths, block, scaling, softcap, roundings):
    """See `triton_rows.attend_to_pages`: all rows that a request may ever have, those behind its length hidden."""
    from modeling_llamba.kernels.softmax import hiding
    from modeling_llamba.kernels.torch_backend import TorchBackend

    hidden = torch.arange(table.shape[1] * block) >= lengths[:, None]
    held = []
    for rounding, first in zip(roundings, firsts, strict=True):
        width = rounding.width(query.dtype)
        rows = pages[:, first : first + block * kv_heads * width].unflatten(1, (block, kv_heads, width))[table.long()]
        # vLLM's second runner leaves pages of other requests in the table, behind a request's own
        rows = rows.flatten(1, 2).transpose(1, 2).masked_fill(hidden[:, None, :, None], 0)
        held.append(rows if rounding.rounds else rows.view(query.dtype))
    return TorchBackend().attend_to_rows(
        query, *held, roundings, hiding(hidden, query.dtype), scaling, softcap or None
    )


@pytest.mark.parametrize("name", [CONVERTED, "phi, heads kept apart", "two kinds of RoPE, caps, far sinks", "mamba2"])
def test_prompts_of_like_lengths_are_one_batch(name, engine, models, prompts, monkeypatch):
    """Padded where the layer can have it, and two of one length, which every layer takes together."""
    from recipes.serving import slots

    batches = []
    inner = slots.SlotLayer._prompts

    def noted(self, inputs, output, spans, *others):
        batches.append((type(self).__name__, [span.length for span in spans]))
        inner(self, inputs, output, spans, *others)

    monkeypatch.setattr(slots.SlotLayer, "_prompts", noted)
    assert_equal(
        greedy(engine(name, **AT_ONCE), [*prompts, prompts[1]]), [*expected(models, name), expected(models, name)[1]]
    )
    assert ("HybridSlots", [130, 122, 118, 70]) in batches
    assert ("HybridSlots", [37, 37]) in batches
    if name != CONVERTED:  # which has no mixers
        assert ("MixerSlots", [37, 37]) in batches
        assert ("MixerSlots", [122]) in batches


def test_which_prompts_are_together():
    from recipes.serving.pages import Span, together

    spans = [Span(0, 100, 0), Span(100, 190, 0), Span(190, 290, 64), Span(290, 291, 0), Span(291, 391, 64)]
    assert together(spans, ragged=True) == [[0, 1], [3], [2, 4]]
    assert together(spans, ragged=False) == [[0], [1], [3], [2, 4]]
    assert together([], ragged=True) == []


@pytest.mark.parametrize("name", FEW_BITS)
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_few_bits_round_as_in_transformers(name, backend, engine, models, prompts, monkeypatch):
    """But for numbers that lie between two codes, which the last digit of a float32 decides."""
    from modeling_llamba.kernels.backend import BACKEND_VARIABLE

    if backend != "auto":
        monkeypatch.setenv(BACKEND_VARIABLE, backend)
    outputs = [output.outputs[0] for output in greedy(engine(name, **IN_PIECES), prompts)]
    wrong, worst = differences(outputs, expected(models, name))
    assert wrong <= 0.05 * NEW_TOKENS * len(prompts)
    assert worst < 0.02, worst


@pytest.mark.parametrize("name", [CONVERTED, ROUNDED, "mixers alone"])
def test_bfloat16_is_near_float32(name, engine, models, prompts):
    """The log-probability of each token with which transformers goes on in float32, read as a prompt; and those of
    tokens that are decoded, up to a request's first other one."""
    answers = expected(models, name)
    texts = [prompt + own["tokens"] for prompt, own in zip(prompts, answers, strict=True)]
    llm = engine(name, **IN_PIECES, dtype="bfloat16")
    outputs = greedy(llm, texts, max_tokens=1, prompt_logprobs=0)
    apart = []
    for output, own in zip(outputs, answers, strict=True):
        found = output.prompt_logprobs[-NEW_TOKENS:]
        pairs = zip(found, own["tokens"], own["logprobs"], strict=True)
        apart += [abs(of_token[token].logprob - logprob) for of_token, token, logprob in pairs]
    assert len(apart) == NEW_TOKENS * len(prompts)
    # transformers in bfloat16: 0.013, 0.041, 0.015 on average and 0.05, 0.21, 0.09 at most
    assert statistics.mean(apart) < (0.05 if name == ROUNDED else 0.02)
    assert max(apart) < (0.25 if name == ROUNDED else 0.15)
    decoded = []
    for output, own in zip(greedy(llm, prompts, max_tokens=6), answers, strict=True):
        answer = output.outputs[0]
        for found, token, right, logprob in zip(
            answer.logprobs, answer.token_ids, own["tokens"], own["logprobs"], strict=False
        ):
            if token != right:
                break
            decoded.append(abs(found[token].logprob - logprob))
    assert len(decoded) >= 0.6 * 6 * len(prompts)
    assert max(decoded) < 0.15


@ON_THE_FIRST
@pytest.mark.parametrize("name", [ROUNDED, "attention in few bits"])
def test_few_bits_are_compiled_alike(name, engine, models, prompts):
    """Equal to transformers up to a request's first other token, which a number between two codes decides."""
    alike = 0
    for output, own in zip(greedy(engine(name), prompts), expected(models, name), strict=True):
        answer = output.outputs[0]
        steps = zip(answer.logprobs, answer.token_ids, own["tokens"], own["logprobs"], strict=True)
        for found, token, right, logprob in steps:
            if token != right:
                break
            assert abs(found[token].logprob - logprob) < 0.02
            alike += 1
    assert alike >= 0.9 * NEW_TOKENS * len(prompts)


@ON_THE_FIRST
@pytest.mark.parametrize("name", COMPILED)
def test_what_is_compiled_is_the_same(name, engine, models, prompts):
    llm = engine(name)
    assert_equal(greedy(llm, prompts), expected(models, name))
    assert_equal(greedy(llm, prompts[2:3]), expected(models, name)[2:3])  # one request is compiled apart


@pytest.mark.parametrize(
    "name, lost",
    [("hybrid", lost) for lost in ("keys", "salience", "state")]
    + [("mixers alone", lost) for lost in ("conv", "recurrent")],
)
def test_what_is_lost_shows(name, lost, engine, models, prompts, monkeypatch):
    """Every part of a prompt but the first finds one of a slot's tensors empty: what is compared above must see it."""
    from recipes.serving import slots

    fetch = slots.SlotLayer.fetch
    prompt = slots.HybridSlots.prompt if name == "hybrid" else slots.MixerSlots.prompt

    def forget(self, rows):
        content, tensors = fetch(self, rows)
        if lost in tensors:
            tensors[lost].fill_(-torch.inf if lost == "salience" else 0)
        return content, tensors

    def forgetful(self, *arguments):
        with monkeypatch.context() as while_it_reads:
            while_it_reads.setattr(slots.SlotLayer, "fetch", forget)
            prompt(self, *arguments)

    monkeypatch.setattr(slots.HybridSlots if name == "hybrid" else slots.MixerSlots, "prompt", forgetful)
    llm = engine(name, **IN_PIECES)
    long = [i for i, prompt in enumerate(prompts) if len(prompt) > 60]
    references = expected(models, name)
    outputs = greedy(llm, [prompts[i] for i in long])
    for output, i in zip(outputs, long, strict=True):
        wrong, worst = differences([output.outputs[0]], [references[i]])
        assert wrong or worst > 1e-3


def test_cuda_graphs_end_where_slots_are_read():
    """They would replay a layer that was captured without any request's state."""
    from vllm.config import CompilationConfig, CompilationMode
    from vllm.plugins import load_general_plugins

    import recipes.serving.slots  # noqa: F401  registers the operator

    load_general_plugins()
    config = CompilationConfig(mode=CompilationMode.VLLM_COMPILE)
    config.set_splitting_ops_for_v1(all2all_backend="naive")
    assert torch.ops.vllm.hybrid_slots.default.name() in config.splitting_ops


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="vLLM's fp8 on a CPU needs AVX-512")
def test_kept_heads_in_eight_bits_of_vllm(engine, models, prompts):
    """vLLM's own flag halves what kept heads take; windows and states are rounded as the checkpoint says."""
    llm = engine("hybrid", **IN_PIECES, kv_cache_dtype="fp8")
    outputs = [output.outputs[0] for output in greedy(llm, prompts, max_tokens=1)]
    first = [{name: row[name][:1] for name in ("tokens", "logprobs")} for row in expected(models, "hybrid")]
    wrong, worst = differences(outputs, first)
    assert wrong <= 1, f"{wrong} tokens differ, log-probabilities by {worst}"
    assert 1e-3 < worst < 0.3, f"{wrong} tokens differ, log-probabilities by {worst}"


@pytest.fixture
def small_pages(monkeypatch):
    """vLLM's options with which slots are cut into several pages, where kept heads or attention need pages, too."""
    from recipes.serving import pages

    monkeypatch.setattr(pages, "LEAST", 1)
    return dict(enforce_eager=True, block_size=32)


@pytest.mark.parametrize("name", ["hybrid", CONVERTED, *FEW_BITS[:-1], "no kept heads, llama3 RoPE", "mixers alone"])
def test_slots_lie_in_as_many_pages_as_they_need(name, engine, models, prompts, small_pages):
    """A request leaves a part of its last page empty alone; without kept heads and attention it has one page."""
    from recipes.serving.pages import HeadPages, SlotPage, bytes_of
    from recipes.serving.slots import SlotLayer

    llm = engine(name, **IN_PIECES | small_pages)
    config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    (size,) = {group.kv_cache_spec.page_size_bytes for group in config.kv_cache_groups}
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    pages = [layer for layer in layers if isinstance(layer, SlotPage)]
    slots = sum(bytes_of(layer.sizes) for layer in layers if isinstance(layer, SlotLayer))
    assert (len(pages) - 1) * size < slots <= len(pages) * size
    with_rows = name in ("hybrid", CONVERTED, *FEW_BITS)
    assert (len(pages) == 1) != with_rows
    attention = name in ("hybrid", "few bits beside sliding windows")  # of vLLM's own, in one layer
    heads = sum(isinstance(layer, HeadPages) for layer in layers)
    assert heads == with_rows
    assert sum(len(group.layer_names) for group in config.kv_cache_groups) == len(pages) + heads + attention
    outputs = [output.outputs[0] for output in greedy(llm, prompts)]
    wrong, worst = differences(outputs, expected(models, name))
    assert wrong <= (0.05 * NEW_TOKENS * len(prompts) if name in FEW_BITS else 0)
    assert worst < (0.02 if name in FEW_BITS else 1e-4)


def test_blocks_are_as_long_as_pages_must_be():
    """Of 32 KiB at least beside attention of vLLM's own; without, a page is a block of rows."""
    from recipes.serving.pages import LEAST, Sizing

    few = Sizing(slots=10**6, keys=200, values=144, unit=512)
    assert (few.block(16), few.page(64)) == (64, LEAST)
    assert few.block(128) == 128
    many = few._replace(keys=1122, values=612, unit=768)
    assert (many.block(16), many.page(48)) == (48, 3 * 48 * 768)
    alone = few._replace(unit=0)
    assert (alone.block(16), alone.page(96)) == (96, 96 * 344)
    for sizing in (few, many, alone):
        assert sizing.block(sizing.block(16)) == sizing.block(16)  # vLLM has lengthened its own in the meantime


def test_prompts_are_read_in_parts_where_scores_are_in_memory(monkeypatch):
    """A cap, which no fused function has: the same attention, behind earlier tokens and without."""
    from recipes.serving import slots

    lengths = []

    def noted(query, *others, run=slots.causal_attend):
        lengths.append(query.shape[2])
        return run(query, *others)

    monkeypatch.setattr(slots, "causal_attend", noted)
    torch.manual_seed(0)
    query, keys, values = torch.randn(2, 4, 37, 8), torch.randn(2, 2, 90, 8), torch.randn(2, 2, 90, 8)
    whole = slots.attend_causally(query, keys, values, 0.3, 2.0)
    first = slots.attend_causally(query, keys[:, :, :37], values[:, :, :37], 0.3, 2.0)
    monkeypatch.setattr(slots, "SCORES", 2 * 4 * 90 * 5)
    torch.testing.assert_close(slots.attend_causally(query, keys, values, 0.3, 2.0), whole)
    torch.testing.assert_close(slots.attend_causally(query, keys[:, :, :37], values[:, :, :37], 0.3, 2.0), first)
    assert lengths == [37, 37, *[5] * 7, 2, *[12] * 3, 1]


def test_few_numbers_are_taken_out_of_rows_at_once(engine, models, prompts, monkeypatch):
    """Of some requests and heads after others, with the same answers."""
    from recipes.serving import slots

    sizes = []

    def noted(query, keys, *others, run=slots.attend_causally):
        sizes.append(keys.shape)
        return run(query, keys, *others)

    monkeypatch.setattr(slots, "attend_causally", noted)
    llm = engine("phi, heads kept apart", **AT_ONCE)
    sizes.clear()  # what vLLM's measurement of memory has read
    monkeypatch.setattr(slots, "DECODED", 32 * 250)
    assert_equal(greedy(llm, prompts), expected(models, "phi, heads kept apart"))
    assert any(rows * heads > 1 for rows, heads, _, _ in sizes)
    for rows, heads, length, dim in sizes:
        assert rows == heads == 1 or rows * heads * length * dim <= 32 * 250


@pytest.mark.parametrize("name", ["hybrid", "no kept heads, llama3 RoPE", "mixers alone"])
@pytest.mark.parametrize("pages", ["one", "several"])
def test_a_prefix_that_is_shared_is_read_once(name, pages, engine, models, prompts, request):
    """A conversation that goes on, and its last turn changed."""
    options = dict(enforce_eager=True) if pages == "one" else request.getfixturevalue("small_pages")
    llm = engine(name, **options)
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    beginning = prompts[longest][:520]
    greedy(llm, [beginning])
    (other,) = greedy(llm, [beginning + [7] * 60])
    outputs = greedy(llm, [prompts[longest], prompts[longest]])
    assert all(output.num_cached_tokens >= 128 for output in (other, *outputs))
    assert_equal(outputs, [expected(models, name)[longest]] * 2)
    llm.reset_prefix_cache()
    (again,) = greedy(llm, [beginning + [7] * 60])
    assert again.num_cached_tokens == 0
    assert again.outputs[0].token_ids == other.outputs[0].token_ids


@pytest.mark.parametrize("name", [CONVERTED, "hybrid", "few bits beside sliding windows"])
def test_prefixes_end_with_blocks_that_are_lengthened(name, engine, models, prompts, monkeypatch):
    """Pages of slots and of heads have one block, and a text read in pieces goes on from where it was left."""
    from recipes.serving import pages

    monkeypatch.setattr(pages, "MOST_PAGES", 1)
    llm = engine(name, enforce_eager=True, block_size=32, max_num_batched_tokens=160, max_num_seqs=3)
    groups = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
    (block,) = {group.kv_cache_spec.block_size for group in groups}
    assert block > 32
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    for end in (100, 300, 500):
        greedy(llm, [prompts[longest][:end]], max_tokens=1)
    outputs = greedy(llm, [prompts[longest]] * 2)
    assert all(output.num_cached_tokens >= 500 // block * block for output in outputs)
    own = expected(models, name)[longest]
    wrong, worst = differences([output.outputs[0] for output in outputs], [own] * 2)
    assert wrong <= 2 * (name in FEW_BITS)
    assert worst < (0.02 if name in FEW_BITS else 1e-4)


def test_a_third_question_about_a_text_reads_it_no_more(engine, models, prompts):
    """vLLM keeps the state where a second request left the text of a first."""
    llm = engine("hybrid", enforce_eager=True)
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    for question in ([7] * 180, [8] * 180):  # longer than a block, so that the text alone does not end one
        (output,) = greedy(llm, [prompts[longest][:400] + question])
        assert output.num_cached_tokens == 0
    outputs = greedy(llm, [prompts[longest]])
    assert outputs[0].num_cached_tokens >= 256
    assert_equal(outputs, [expected(models, "hybrid")[longest]])


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize(
    ("name", "pages"),
    [("hybrid", 16), ("sliding window, biases, key norms, YaRN", 16), (CONVERTED, 118), (ROUNDED, 138)],
)
def test_a_request_that_was_preempted_goes_on(name, pages, prefix_caching, engine, models, prompts):
    """Pages for fewer requests than begin: each needs one more after its 128th or 256th token, and every 8th or 16th
    opens a block."""
    few = dict(enable_prefix_caching=prefix_caching, max_model_len=512, num_gpu_blocks_override=pages)
    llm = engine(name, enforce_eager=True, **few)
    of_length = {len(prompt): i for i, prompt in enumerate(prompts)}
    some = [of_length[251]] * 6 + [of_length[118], of_length[122]] * 2
    outputs = greedy(llm, [prompts[i] for i in some])
    preempted = [metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"]
    assert sum(preempted) > 0
    references = [expected(models, name)[i] for i in some]
    if name != ROUNDED:
        assert_equal(outputs, references)
        return
    wrong, worst = differences([output.outputs[0] for output in outputs], references)
    assert wrong <= 0.05 * NEW_TOKENS * len(some)  # as in test_few_bits_round_as_in_transformers
    assert worst < 0.02


@pytest.mark.parametrize("name", ["hybrid", ROUNDED])
def test_samples_of_one_prompt_are_apart(name, engine, models, prompts, tmp_path):
    """Each sample's log-probabilities are those that transformers gives to its own tokens."""
    outputs = greedy(engine(name, enforce_eager=True), prompts[:4], n=3, temperature=1.0)
    samples = [(o.prompt_token_ids, sample) for o in outputs for sample in o.outputs]
    assert len({tuple(sample.token_ids) for _, sample in samples}) > 4
    file = tmp_path / "samples.json"
    file.write_text(json.dumps([{"prompt": p, "tokens": list(s.token_ids)} for p, s in samples]))
    reference("tests.vllm.reference", "score", str(models / name), str(file))
    wrong, worst = differences([sample for _, sample in samples], json.loads(file.read_text()))
    assert wrong == 0
    assert worst < (0.02 if name == ROUNDED else 1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(name, engine):
    with pytest.raises(Exception, match=REFUSED[name]):
        engine(name, enforce_eager=True)


def test_offloading_is_refused_when_an_engine_starts(engine):
    """vLLM makes a connector of the flag before it asks the model."""
    with pytest.raises(Exception, match="--kv-offloading-size"):
        engine("hybrid", enforce_eager=True, kv_offloading_size=1)


@pytest.mark.parametrize(
    "part, fields, message",
    [
        ("parallel_config", {"tensor_parallel_size": 2}, "one device"),
        ("model_config", {"max_model_len": 2000}, "--max-model-len 64"),
        (None, {"speculative_config": object()}, "--speculative-config"),
        (None, {"kv_transfer_config": object()}, "--kv-transfer-config"),
        (None, {"lora_config": object()}, "merge_and_unload"),
        (None, {"quant_config": object()}, "--quantization"),
        ("cache_config", {"cache_dtype": "int4_per_token_head"}, "leave out --kv-cache-dtype, or give fp8"),
        ("hf_config", {"attention_gate": True}, "Gates on attention are not served: use transformers"),
        ("hf_config", {"learned_sinks": True}, "Learned sinks are not served: use transformers"),
        ("hf_config", {"sliding_heads": {"head_dim": 8}}, "Windows whose heads are other ones are not served"),
        ("hf_config", {"recurrent": {"model_type": "lfm2"}}, "state of the teacher's own are not served"),
    ],
)
def test_options_and_teachers_that_are_not_served(part, fields, message):
    from types import SimpleNamespace

    from modeling_llamba import LlambaConfig
    from recipes.serving.vllm_model import refuse

    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = LlambaConfig(num_hidden_layers=2, rope_parameters=rope, max_position_embeddings=64)
    served = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=config, max_model_len=64),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        speculative_config=None, kv_transfer_config=None, lora_config=None, quant_config=None, hf_config=config,
    )  # fmt: skip
    refuse(served)
    for name, value in fields.items():
        setattr(served if part is None else getattr(served, part), name, value)
    with pytest.raises(ValueError, match=message):
        refuse(served)


def test_an_export_for_vllm_needs_a_flag(engine, models, prompts):
    """GraniteMoeHybrid: equal without prefix caching; vLLM's default, which has it, fails on a CPU."""
    outputs = greedy(engine("granitemoehybrid", **IN_PIECES), prompts)
    assert_equal(outputs, expected(models, "granitemoehybrid"))


def test_an_export_for_vllm_fails_by_default(engine, prompts):
    """When this fails, the flag is no longer needed, and docs/guide/formats.md says too much."""
    with pytest.raises(Exception, match="out of bounds|IndexError|index"):
        greedy(engine("granitemoehybrid", enforce_eager=True), prompts)


def test_bamba_is_not_for_vllm(engine):
    with pytest.raises(Exception, match="BambaForCausalLM|vLLM has no other way"):
        engine("bamba", enforce_eager=True)


@contextlib.contextmanager
def serving(models, name, log):
    """An OpenAI client of a server of its own, which found the model by the plugin."""
    openai = pytest.importorskip("openai")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(models / name)]
    command += ["--kv-cache-memory-bytes", str(2**27)]
    command += ["--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--served-model-name", name]
    with log.open("w") as file:
        process = subprocess.Popen(command, env=os.environ | SETTINGS, stdout=file, stderr=file, cwd=ROOT)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        try:
            for _ in range(600):
                try:
                    client.models.list()
                    break
                except openai.APIConnectionError:
                    assert process.poll() is None, log.read_text()[-3000:]
                    time.sleep(1)
            yield client
        finally:
            process.terminate()
            process.wait()


@pytest.fixture
def server(models, tmp_path):
    with serving(models, "hybrid", tmp_path / "log") as client:
        yield client


@ON_THE_FIRST
def test_chat_streams_and_stops(server, models, prompts):
    """What is streamed is what is given at once, transformers' greedy words, and ends before a stop string."""
    chat = dict(model="hybrid", messages=[{"role": "user", "content": "w20 w21 w22"}], temperature=0, max_tokens=16)
    chat |= dict(extra_body={"ignore_eos": True})
    whole = server.chat.completions.create(**chat).choices[0].message.content
    parts = [part.choices[0].delta.content or "" for part in server.chat.completions.create(**chat, stream=True)]
    assert len(parts) > 8
    assert "".join(parts) == whole
    first = expected(models, "hybrid")[1]
    text = dict(model="hybrid", prompt=first["prompt"], temperature=0, max_tokens=NEW_TOKENS)
    text |= dict(extra_body={"ignore_eos": True, "return_token_ids": True})
    given = server.completions.create(**text).choices[0]
    assert given.token_ids == first["tokens"]
    words = given.text.split()
    stop = next(word for word in words[3:] if word not in words[:3])
    stopped = server.completions.create(**text, stop=[f" {stop}"]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == given.text[: given.text.index(f" {stop}")]


QUESTIONS = 40


@ON_THE_FIRST
def test_a_teachers_answers_are_made_by_a_server(models, tmp_path):
    """SeqKD: killed half-way, refused without a server, gone on with another; the answers that transformers gives.

    The teacher's own settings have a penalty, which greedy answers must not know.
    """
    shutil.copytree(models / "teacher", tmp_path / "teacher")
    settings = tmp_path / "teacher" / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"repetition_penalty": 1.9}))
    rows = [{"instruction": f"w{10 + i} w{20 + i} w{30 + i}", "input": ""} for i in range(QUESTIONS)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        "--teacher_model_name_or_path",
        str(tmp_path / "teacher"),
        "--dataset_name",
        str(tmp_path / "prompts.jsonl"),
    ]
    command += ["--max_new_tokens", "48", "--truncated", "keep", "--test_share", "0", "--teacher_dtype", "float32"]
    command += ["--output_dir"]
    reference("recipes.seqkd", *command, str(tmp_path / "local"))
    command += [str(tmp_path / "served"), "--concurrency", "2", "--server"]
    answers = tmp_path / "served.work" / "answers.jsonl"
    with serving(tmp_path, "teacher", tmp_path / "log") as client:
        url = str(client.base_url)
        process = start_reference("recipes.seqkd", *command, url)
        for _ in range(6000):
            if answers.is_file() and len(answers.read_text().splitlines()) > QUESTIONS // 4:
                break
            assert process.poll() is None
            time.sleep(0.02)
        process.kill()
        process.wait()
    kept = len(answers.read_text().splitlines())
    assert QUESTIONS // 4 < kept < QUESTIONS
    assert not (tmp_path / "served").exists()
    with pytest.raises(subprocess.CalledProcessError):
        reference("recipes.seqkd", *command, url)
    with serving(tmp_path, "teacher", tmp_path / "log") as client:
        reference("recipes.seqkd", *command, str(client.base_url))
        (requests,) = re.findall(
            r"^vllm:request_success_total.*finished_reason=.length.* ([\d.]+)$", metrics(client), re.M
        )
    assert float(requests) == QUESTIONS - kept
    expected, found = ((tmp_path / name / "train.jsonl").read_text() for name in ("local", "served"))
    assert found == re.sub(r"<(s|pad)> | <(s|pad)>", "", expected)  # a server leaves special tokens out


def metrics(client) -> str:
    """The server's own count of what it did."""
    with urllib.request.urlopen(str(client.base_url).replace("/v1/", "/metrics")) as page:
        return page.read().decode()
