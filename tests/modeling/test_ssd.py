"""The fast scan against the float64 recurrence: outputs, states, gradients."""

import pytest
import torch

import modeling_llamba.mixers.ssd as ssd
from modeling_llamba.hybrid.naive import ssd_recurrence
from tests.helpers.scans import SHAPES, relative_error, ssd_inputs

DECAYS = {"long": (-1e-3, 0.0), "mixed": (-3.0, 0.0), "extreme": (-18.0, 0.0)}


def packed(shape, every=7):
    B, L = SHAPES[shape][:2]
    return (torch.arange(L) // every).expand(B, L)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("shape", SHAPES)
def test_scan_equals_recurrence_with_gradients(shape, decay, packing):
    inputs = ssd_inputs(shape, DECAYS[decay], requires_grad=True)
    seq_idx = packed(shape) if packing else None
    y, state = ssd.ssd_scan(*inputs, seq_idx=seq_idx, chunk_size=SHAPES[shape][6])
    y_ref, state_ref = ssd_recurrence(*inputs, seq_idx=seq_idx)
    assert relative_error(y, y_ref) < 1e-6
    assert relative_error(state, state_ref) < 1e-6
    weights = torch.randn_like(y), torch.randn_like(state)
    grads = torch.autograd.grad((y * weights[0]).sum() + (state * weights[1]).sum(), inputs)
    expected = torch.autograd.grad((y_ref * weights[0]).sum() + (state_ref * weights[1]).sum(), inputs)
    for name, got, ref in zip(("x", "log_a", "B", "C", "state"), grads, expected, strict=True):
        assert relative_error(got, ref.double()) < 2e-6, name


def test_scan_is_exact_in_float64():
    inputs = ssd_inputs("many-chunks", dtype=torch.float64)
    y, state = ssd.ssd_scan(*inputs)
    y_ref, state_ref = ssd_recurrence(*inputs)
    torch.testing.assert_close(y, y_ref, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, state_ref, rtol=1e-12, atol=1e-12)


def test_gradients_pass_gradcheck():
    inputs = [t[:, :9].clone() if t.shape[1] == 15 else t for t in ssd_inputs("below-a-chunk", dtype=torch.float64)]
    inputs = [t.detach().requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(lambda *args: ssd.ssd_scan(*args, chunk_size=4), inputs)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("shape", ["many-chunks", "shared-states"])
def test_matrix_times_x_equals_recurrence(shape, packing):
    x, log_a, B, C, _ = ssd_inputs(shape, dtype=torch.float64)
    seq_idx = packed(shape) if packing else None
    matrix = ssd.ssd_matrix(log_a, B, C, seq_idx)
    y = (matrix @ ssd.repeat_groups(x, C.shape[2]).transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(y, ssd_recurrence(x, log_a, B, C, seq_idx=seq_idx)[0])


def test_steps_equal_scan_and_update_in_place():
    x, log_a, B, C, state = ssd_inputs("below-a-chunk")
    y, final = ssd.ssd_scan(x, log_a, B, C, state)
    running = state.clone()
    for t in range(x.shape[1]):
        step_y, new = ssd.ssd_step(running, x[:, t], log_a[:, t], B[:, t], C[:, t])
        assert new is running
        torch.testing.assert_close(step_y, y[:, t], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(running, final, rtol=1e-5, atol=1e-5)


def test_step_leaves_state_alone_under_autograd():
    x, log_a, B, C, state = ssd_inputs("one-token", requires_grad=True)
    before = state.detach().clone()
    y, new = ssd.ssd_step(state, x[:, 0], log_a[:, 0], B[:, 0], C[:, 0])
    assert new is not state
    assert torch.equal(state, before)
    y.sum().backward()
    assert state.grad is not None


def test_half_precision_input_keeps_a_float32_state():
    """Widened chunk by chunk: the numbers are those from wide inputs."""
    inputs = ssd_inputs("many-chunks", dtype=torch.bfloat16, requires_grad=True)
    wide = [t.detach().float().requires_grad_() for t in inputs]
    y, state = ssd.ssd_scan(*inputs)
    assert state.dtype == y.dtype == torch.float32
    assert relative_error(y, ssd_recurrence(*inputs)[0]) < 1e-6
    weights = torch.randn_like(y), torch.randn_like(state)
    grads = torch.autograd.grad((y * weights[0]).sum() + (state * weights[1]).sum(), inputs)
    y, state = ssd.ssd_scan(*wide)
    expected = torch.autograd.grad((y * weights[0]).sum() + (state * weights[1]).sum(), wide)
    for got, ref in zip(grads, expected, strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, ref.bfloat16(), rtol=0, atol=0)


def test_decay_of_exactly_one_is_a_plain_sum():
    x, log_a, B, C, _ = ssd_inputs("many-chunks")
    y, _ = ssd.ssd_scan(x, torch.zeros_like(log_a), B, C)
    scores = (C.transpose(1, 2) @ ssd.repeat_groups(B, log_a.shape[-1]).transpose(1, 2).mT).tril()
    torch.testing.assert_close(y, (scores @ ssd.repeat_groups(x, log_a.shape[-1]).transpose(1, 2)).transpose(1, 2),
                               rtol=1e-4, atol=1e-4)  # fmt: skip


def test_unknown_and_unusable_backends_are_refused():
    x, log_a, B, C, _ = ssd_inputs("one-token")
    with pytest.raises(ValueError, match="Unknown backend 'fast'"):
        ssd.ssd_scan(x, log_a, B, C, backend="fast")
    with pytest.raises(ValueError, match="The mamba_ssm backend needs CUDA tensors"):
        ssd.ssd_scan(x, log_a, B, C, backend="mamba_ssm")
