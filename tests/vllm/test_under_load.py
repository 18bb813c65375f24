"""Hybrids in vLLM under load: equal requests, shared texts, cancelled requests, long ones, and many."""

import gc
import json
import random
from pathlib import Path

import pytest

from tests.vllm.conftest import IS_SECOND, greedy, reference
from tests.vllm.reference import CONVERTED, ROUNDED

pytestmark = pytest.mark.vllm
NAMES = ["hybrid", CONVERTED, ROUNDED, "attention in few bits"]
"""With kept heads and attention; with kept heads alone; with these in few bits; and with attention in few bits."""
REQUESTS = 200 if IS_SECOND else 10_000
"""Triton's interpreter, which the second runner has on a CPU, would take hours for 10,000."""


def tokens_of(outputs) -> list[list[int]]:
    """The tokens of each request's answer."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def pool_of(llm):
    """vLLM's account of free pages."""
    return llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool


def resident(field: str = "VmRSS") -> int:
    """Bytes of memory that this process holds; VmHWM: the most since `forget_peak`."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    (kibibytes,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(kibibytes) * 1024


def forget_peak() -> None:
    """Set VmHWM to what the process holds now (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


@pytest.mark.parametrize("name", NAMES)
def test_equal_prompts_have_equal_answers(name, engine, prompts):
    """Eight at once and eight again, which find their prefix in the cache."""
    llm = engine(name, enforce_eager=True, enable_prefix_caching=True)
    longest = max(prompts, key=len)
    first, again = (greedy(llm, [longest] * 8) for _ in range(2))
    assert all(output.num_cached_tokens > 0 for output in again)
    assert len({tuple(tokens) for tokens in tokens_of(first)}) == 1
    # a state at the end of a block goes on as if it had been read at once, but for the last bits of its sums
    assert sum(a != b for a, b in zip(tokens_of(first)[0], tokens_of(again)[0], strict=True)) <= (
        name not in NAMES[:2]
    )
    assert len({tuple(tokens) for tokens in tokens_of(again)}) == 1


@pytest.mark.parametrize("name", NAMES)
def test_texts_that_share_a_block_and_a_half(name, engine, prompts):
    """Two such requests, then three at once that find them: answers are those of an engine that shares nothing."""
    llm = engine(name, enforce_eager=True, enable_prefix_caching=True)
    block = llm.llm_engine.vllm_config.cache_config.block_size
    text = (max(prompts, key=len) * 4)[: block + block // 2]
    asked = [text + [token] * (block // 2 + 9) for token in (7, 8, 9, 10, 11)]
    outputs = [*greedy(llm, asked[:1]), *greedy(llm, asked[1:2]), *greedy(llm, asked[2:])]
    assert all(output.num_cached_tokens == block for output in outputs[2:])
    shared = tokens_of(outputs)
    llm.reset_prefix_cache()
    alone = []
    for prompt in asked:
        alone += tokens_of(greedy(llm, [prompt]))
        llm.reset_prefix_cache()
    assert shared == alone


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("name", [CONVERTED, ROUNDED])
def test_requests_cancelled_in_mid_prompt(name, prefix_caching, engine, prompts):
    """They leave no page behind, and nothing of theirs in what the others read."""
    from vllm import SamplingParams

    options = dict(max_num_batched_tokens=64, max_num_seqs=4, enable_prefix_caching=prefix_caching)
    llm = engine(name, enforce_eager=True, **options)
    expected = tokens_of(greedy(llm, prompts))
    free = pool_of(llm).get_num_free_blocks()
    core, longest = llm.llm_engine, max(prompts, key=len)
    for step in range(6):
        identifiers = [f"{step}-{i}" for i in range(3)]
        for identifier in identifiers:
            prompt = {"prompt_token_ids": longest}
            core.add_request(identifier, prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        for _ in range(1 + step):
            core.step()
        core.abort_request(identifiers)
        while core.has_unfinished_requests():
            core.step()
        assert pool_of(llm).get_num_free_blocks() == free
    assert tokens_of(greedy(llm, prompts)) == expected


@pytest.mark.parametrize("name", [CONVERTED, ROUNDED])
def test_a_ladder_of_lengths(name, engine, models, tmp_path):
    """2k, 24k and 2k tokens in one engine: the last answer is the first, that of 24k is transformers', and these need
    hardly more memory than 2k, not even while they are read."""
    draw = random.Random(0)
    long = [draw.randrange(7, 60) for _ in range(24_000)]
    options = dict(max_model_len=25_000, max_num_batched_tokens=2048, hf_overrides={"max_position_embeddings": 25_000})
    llm = engine(name, enforce_eager=True, enable_prefix_caching=False, **options)
    free = pool_of(llm).get_num_free_blocks()
    (first,) = tokens_of(greedy(llm, [long[:2000]]))
    before = resident()
    peaks = []
    for prompt in (long[:2000], long):
        forget_peak()
        (output,) = greedy(llm, [prompt])
        peaks.append(resident("VmHWM"))
    (of_long,) = tokens_of([output])
    (last,) = tokens_of(greedy(llm, [long[:2000]]))
    assert last == first
    assert len(of_long) == len(first)
    assert pool_of(llm).get_num_free_blocks() == free
    assert resident() - before < 2**26
    assert peaks[1] - peaks[0] < 2**26
    (again,) = tokens_of(greedy(llm, [long]))
    assert again == of_long
    file = tmp_path / "answer.json"
    file.write_text(json.dumps([{"prompt": long, "tokens": of_long}]))
    reference("tests.vllm.reference", "score", str(models / name), str(file))
    ((own, logprobs),) = ((row["tokens"], row["logprobs"]) for row in json.loads(file.read_text()))
    found = [step[token].logprob for step, token in zip(output.outputs[0].logprobs, own, strict=True)]
    assert found == pytest.approx(logprobs, abs=0.02 if name == ROUNDED else 1e-4)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [CONVERTED, ROUNDED])
def test_thousands_of_requests(name, engine, capsys):
    """Of mixed lengths, with prefixes shared: none is lost, equal ones agree, and memory stays within 8 MiB."""
    draw = random.Random(0)
    llm = engine(name, enforce_eager=True, max_num_seqs=64, max_num_batched_tokens=2048, enable_prefix_caching=True)
    texts = [[draw.randrange(7, 60) for _ in range(draw.choice((1, 9, 40, 150, 300)))] for _ in range(40)]
    usage, seen = [], {}
    for _ in range(10):
        asked = [draw.choice(texts) for _ in range(REQUESTS // 10)]
        outputs = greedy(llm, asked, max_tokens=2, logprobs=None)
        assert len(outputs) == len(asked)
        for prompt, tokens in zip(asked, tokens_of(outputs), strict=True):
            assert len(tokens) == 2
            seen.setdefault(tuple(prompt), set()).add(tuple(tokens))
        usage.append(resident())
    different = sum(len(answers) > 1 for answers in seen.values())
    sizes = ", ".join(str(size >> 20) for size in usage)
    with capsys.disabled():
        print(f"\n{name}: MiB after each tenth {sizes}; {different} of {len(seen)} texts had several answers")  # noqa: T201
    llm.reset_prefix_cache()
    assert pool_of(llm).get_num_free_blocks() == pool_of(llm).num_gpu_blocks - 1
    assert usage[-1] - usage[2] < 2**23
    # where a rounded number lies between two, and reading in parts decides
    assert different <= (2 if name == ROUNDED else 0)
