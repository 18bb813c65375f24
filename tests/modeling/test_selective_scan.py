"""Mamba-1's chunked scan against its float64 recurrence."""

import pytest
import torch

from modeling_llamba.hybrid.naive import selective_recurrence
from modeling_llamba.mixers.selective_scan import selective_matrix, selective_scan, selective_step
from tests.helpers.scans import selective_inputs


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 100, 600])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_scan_equals_recurrence_with_gradients(length, packing, scale):
    inputs = selective_inputs(length, requires_grad=True, scale=scale)
    seq_idx = (torch.arange(length) // 9).expand(2, length) if packing else None
    y, state = selective_scan(*inputs, seq_idx=seq_idx)
    y_ref, state_ref = selective_recurrence(*inputs, seq_idx=seq_idx)
    assert (y - y_ref).norm() <= 2e-6 * y_ref.norm()
    assert (state - state_ref).norm() <= 2e-6 * state_ref.norm()
    weight = torch.randn_like(y)
    grads = torch.autograd.grad((y * weight).sum() + state.sum(), inputs)
    expected = torch.autograd.grad((y_ref * weight).sum() + state_ref.sum(), inputs)
    # a product of L rounded decays is off by up to L eps, which A's gradient shows where a decay is near 1
    tolerance = 1e-5 + length * torch.finfo(torch.float32).eps
    for got, ref in zip(grads, expected, strict=True):
        assert (got - ref).norm() <= tolerance * ref.norm() + 1e-7


def test_steps_equal_scan():
    x, dt, A, B, C, state = selective_inputs(20)
    y, final = selective_scan(x, dt, A, B, C, state)
    for t in range(20):
        step_y, state = selective_step(state, x[:, t], dt[:, t], A, B[:, t], C[:, t])
        torch.testing.assert_close(step_y, y[:, t], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, final, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packing", [False, True])
def test_matrix_times_x_equals_recurrence(packing):
    x, dt, A, B, C, _ = selective_inputs(40, dtype=torch.float64)
    seq_idx = (torch.arange(40) // 9).expand(2, 40) if packing else None
    y = torch.einsum("bdls,bsd->bld", selective_matrix(dt, A, B, C, seq_idx), x)
    torch.testing.assert_close(y, selective_recurrence(x, dt, A, B, C, seq_idx=seq_idx)[0])
