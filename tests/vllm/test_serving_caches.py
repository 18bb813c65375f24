"""Caches of few bits in vLLM as recipes.benchmarks.serving_caches measures them."""

import pytest
import torch

from tests.vllm.conftest import greedy
from tests.vllm.reference import ROUNDED

pytestmark = pytest.mark.vllm


def test_four_bits_are_those_of_vllms_kernel():
    """What its kernel writes into pages, read back, for keys with a bias, values, and one vector of equal numbers."""
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        pytest.skip("vLLM's kernel needs Triton: make test-vllm-v2")
    from vllm.v1.attention.ops.int4_per_token_head import reshape_and_cache_int4, single_rht

    from recipes.benchmarks.serving_caches import to_int4

    torch.manual_seed(0)
    length, heads, dim, block = 24, 2, 64, 16
    keys = 3 * torch.randn(length, heads, dim) + 40 * torch.randn(heads, dim)
    values = torch.randn(length, heads, dim)
    keys[0] = 5.0
    pages = [torch.zeros(2, block, heads, dim // 2, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.zeros(2, block, heads) for _ in range(2)]
    places = torch.arange(length)
    reshape_and_cache_int4(keys, values, *pages, places, k_scale_cache=scales[0], v_scale_cache=scales[1])
    for vectors, page, scale in zip((keys, values), pages, scales, strict=True):
        numbers = torch.stack([page & 15, page >> 4], dim=-1).flatten(-2).float()
        bits = scale.view(torch.int32)  # the last four of a scale are the zero point
        held = (numbers - (bits & 15)[..., None]) * (bits & -16).view(torch.float32)[..., None]
        expected = single_rht(held.flatten(0, 1)[:length], inverse=True) / dim
        torch.testing.assert_close(to_int4(vectors), expected, rtol=0, atol=1e-5 * vectors.abs().max().item())


def test_a_prompt_is_read_by_vllm(engine, prompts):
    """Its last state's likeliest token is the one with which vLLM goes on; rounding ends with its reader."""
    from recipes.benchmarks.serving_caches import reader, to_fp8, to_int4

    llm = engine("hybrid", enforce_eager=True, enable_prefix_caching=False, max_num_batched_tokens=256)
    said = [output.outputs[0].token_ids[0] for output in greedy(llm, prompts, max_tokens=1)]
    own = reader(llm)
    states = [own.states(torch.tensor([prompt])) for prompt in prompts]
    assert [own.head(t[0, -1:]).argmax().item() for t in states] == said
    longest = max(prompts, key=len)
    exact = states[prompts.index(longest)]
    fp8, int4 = (reader(llm, rounded).states(torch.tensor([longest])) for rounded in (to_fp8, to_int4))
    assert 0 < (fp8 - exact).abs().mean() < (int4 - exact).abs().mean()
    assert torch.equal(own.states(torch.tensor([longest])), exact)


def test_kept_heads_are_not_rounded_again(engine, prompts):
    """The caches of vLLM are those of its own layers, which a model of kept heads alone has not."""
    from recipes.benchmarks.serving_caches import reader, to_int4

    llm = engine(ROUNDED, enforce_eager=True, enable_prefix_caching=False)
    ids = torch.tensor([max(prompts, key=len)])
    assert torch.equal(reader(llm, to_int4).states(ids), reader(llm).states(ids))
