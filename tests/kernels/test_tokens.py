"""Rotated queries and keys, and salience, by the kernel as by PyTorch's operations."""

import pytest
import torch

from modeling_llamba.hybrid.inputs import HybridInputs, Ranked
from modeling_llamba.kernels.torch_backend import TorchBackend
from modeling_llamba.kernels.triton.triton_tokens import can_rotate, rotate
from tests.helpers.hybrid_step import relative_error
from tests.kernels.conftest import DEVICE, INTERPRETED


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim, rotary_dim, length", [(64, 64, 70), (80, 32, 1), (24, 24, 5), (256, 256, 9)])
def test_to_the_last_bit(dtype, dim, rotary_dim, length):
    query = torch.randn(2, length, 6, dim, device=DEVICE).to(dtype).transpose(1, 2)
    key = torch.randn(2, length, 2, dim, device=DEVICE).to(dtype).transpose(1, 2)
    rotary = tuple(torch.randn(1, length, rotary_dim, device=DEVICE).to(dtype) for _ in range(2))
    assert can_rotate(query, key, rotary)
    *found, salience = rotate(query, key, rotary)
    assert salience is None
    for own, theirs in zip(found, TorchBackend().rotate(query, key, rotary), strict=True):
        if INTERPRETED and dtype == torch.bfloat16:  # the interpreter cuts bits off, where a device rounds
            assert relative_error(own, theirs.double()) < 2e-2
        else:
            assert torch.equal(own, theirs)


@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("start", [None, 0, 7])
def test_salience(has_weight, start):
    """Of tokens with padding between them, at the beginning, and behind the sinks."""
    hidden_states = torch.randn(2, 90, 300, device=DEVICE).bfloat16()
    weight = torch.randn(300, device=DEVICE) if has_weight else None
    index = torch.arange(90, device=DEVICE).expand(2, -1) + (start or 0)
    if start is None:
        index = index.clone()
        index[1, ::4] = -1
    ranked = Ranked(hidden_states, weight, HybridInputs(index, start), sinks=4)
    query = torch.randn(2, 2, 90, 16, device=DEVICE)
    rotary = (torch.ones(2, 90, 16, device=DEVICE),) * 2
    torch.testing.assert_close(rotate(query, query, rotary, ranked)[2], ranked.salience())


def test_other_types_and_factors_on_queries_are_left_to_pytorch():
    query, cos = torch.randn(1, 2, 3, 16, device=DEVICE), torch.ones(1, 3, 16, device=DEVICE)
    assert can_rotate(query, query, (cos, cos))
    assert not can_rotate(query.bfloat16(), query, (cos, cos))
    assert not can_rotate(query, query, (cos, cos, cos[..., :1]))
    assert not can_rotate(query.mT.contiguous().mT, query, (cos, cos))
