"""Which code runs the scan, and that other people's kernels are called rightly."""

import pytest
import torch

import modeling_phimamba.short_conv as short_conv
import modeling_phimamba.ssd as ssd
from modeling_phimamba.short_conv import ShortConv
from tests.modeling.test_ssd import SHAPES, packed, random_inputs, relative_error
from tests.students import make_student
from tests.teachers import random_ids

NAMES = ("x", "log_a", "B", "C", "state")


def stand_in_fla(
    q, k, v, g, scale=None, initial_state=None, output_final_state=False, state_v_first=False, cu_seqlens=None
):
    """The documented contract of fla's simple_gla, a token at a time: S = exp(g) S + k v^T, o = scale S^T q.

    States are (sequences, H, K, V), or (.., V, K) with `state_v_first`; packed sequences lie in one row, and every one
    of them has a state.
    """
    assert q.shape == k.shape and q.shape[:3] == v.shape[:3] == g.shape, "each head has its own q, k, v and g"
    if cu_seqlens is not None:
        assert q.shape[0] == 1 and cu_seqlens[0] == 0 and cu_seqlens[-1] == q.shape[1]
        assert initial_state is None or len(initial_state) == len(cu_seqlens) - 1
        parts = []
        for i, (start, stop) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)):
            state = None if initial_state is None else initial_state[i : i + 1]
            part = (t[:, start:stop] for t in (q, k, v, g))
            parts.append(stand_in_fla(*part, scale, state, output_final_state, state_v_first))
        outputs, states = zip(*parts, strict=True)
        return torch.cat(outputs, 1), torch.cat(states)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dtype, (q, k, v, g) = v.dtype, (t.double() for t in (q, k, v, g))
    state = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1])
    if initial_state is not None:
        state = state + (initial_state.mT if state_v_first else initial_state)
    outputs = []
    for t in range(q.shape[1]):
        state = g[:, t].exp()[..., None, None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append(scale * (q[:, t, :, None] @ state)[:, :, 0])
    state = (state.mT if state_v_first else state).float() if output_final_state else None
    return torch.stack(outputs, 1).to(dtype), state


@pytest.fixture
def fla(monkeypatch):
    monkeypatch.setattr(ssd, "chunk_simple_gla", stand_in_fla)
    monkeypatch.setattr(ssd, "fused_recurrent_simple_gla", stand_in_fla)


@pytest.mark.parametrize("begins", ["at zero", "at a state"])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("shape", ["below-a-chunk", "many-chunks", "shared-states"])
def test_fla_arguments(fla, shape, packing, begins):
    inputs = random_inputs(shape)
    if begins == "at zero":
        inputs[-1] = None
    seq_idx = packed(shape) if packing else None
    y, state = ssd._fla_scan(*inputs, seq_idx)
    y_ref, state_ref = ssd.ssd_recurrence(*inputs, seq_idx=seq_idx)
    assert y.dtype == state.dtype == torch.float32
    assert relative_error(y, y_ref) < 1e-6 and relative_error(state, state_ref) < 1e-6


@pytest.mark.parametrize("packing", [False, True])
def test_gradients_reach_everything_through_the_fla_mapping(fla, packing):
    inputs = random_inputs("shared-states", requires_grad=True)
    seq_idx = packed("shared-states") if packing else None
    outputs, expected = ssd._fla_scan(*inputs, seq_idx), ssd.ssd_recurrence(*inputs, seq_idx=seq_idx)
    grads = torch.autograd.grad(sum(t.sum() for t in outputs), inputs)
    references = torch.autograd.grad(sum(t.sum() for t in expected), inputs)
    for name, got, reference in zip(NAMES, grads, references, strict=True):
        assert relative_error(got, reference.double()) < 1e-6, name


CHOICES = {  # installed, asked, on CUDA, gradients wanted -> runs
    "a CPU": ("mamba_ssm fla", "auto", False, False, "torch"),
    "nothing installed": ("", "auto", True, False, "torch"),
    "both": ("mamba_ssm fla", "auto", True, False, "mamba_ssm"),
    "both, in training": ("mamba_ssm fla", "auto", True, True, "fla"),
    "fla alone": ("fla", "auto", True, True, "fla"),
    "mamba_ssm alone, in training": ("mamba_ssm", "auto", True, True, "torch"),
    "torch by name": ("mamba_ssm fla", "torch", True, False, "torch"),
    "fla by name": ("mamba_ssm fla", "fla", True, False, "fla"),
    "mamba_ssm by name, in training": ("mamba_ssm fla", "mamba_ssm", True, True, "mamba_ssm"),
    "absent by name": ("mamba_ssm", "fla", True, False, "fla-core"),
    "by name on a CPU": ("fla", "fla", False, False, "CUDA tensors"),
    "unknown": ("", "fast", True, False, "HYBRID_SSD_BACKEND"),
}


@pytest.mark.parametrize("case", CHOICES)
def test_choice_of_a_backend(monkeypatch, case):
    installed, asked, on_cuda, recording, expected = CHOICES[case]
    monkeypatch.setattr(ssd, "mamba_chunk_scan_combined", object() if "mamba_ssm" in installed else None)
    monkeypatch.setattr(ssd, "chunk_simple_gla", object() if "fla" in installed else None)
    if expected in ssd.SSD_BACKENDS:
        assert ssd.choose_backend(asked, on_cuda, recording) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            ssd.choose_backend(asked, on_cuda, recording)


def test_the_environment_overrides_the_configuration(monkeypatch):
    model, ids = make_student(), random_ids(1, 20)
    plain = model(ids).logits
    monkeypatch.setattr(ssd, "chunk_simple_gla", None)
    monkeypatch.setenv(ssd.BACKEND_VARIABLE, "fla")
    with pytest.raises(ValueError, match="fla-core"):
        model(ids)
    monkeypatch.setenv(ssd.BACKEND_VARIABLE, "fast")
    with pytest.raises(ValueError, match="Unknown SSD backend 'fast'"):
        model(ids)
    model.config.mixer_backend = "fla"
    monkeypatch.setenv(ssd.BACKEND_VARIABLE, "torch")
    assert torch.equal(model(ids).logits, plain)


@pytest.mark.parametrize("activation", ["identity", "silu"])
def test_causal_conv1d_update_arguments(monkeypatch, activation):
    """The kernel's documented contract: x (B, C) joins conv_state (B, C, >= width), in place; weight (C, width)."""

    def stand_in(x, conv_state, weight, bias=None, activation=None):
        assert x.shape == conv_state.shape[:2] and weight.shape == (x.shape[1], 4) and bias.shape == weight.shape[:1]
        assert activation in (None, "silu")
        conv_state.copy_(torch.cat([conv_state[..., 1:], x[..., None]], -1))
        y = (conv_state[..., -4:] * weight).sum(-1) + bias
        return torch.nn.functional.silu(y) if activation else y

    monkeypatch.setattr(short_conv, "causal_conv1d_update", stand_in)
    conv = ShortConv(6, 4, activation)
    torch.nn.init.normal_(conv.weight), torch.nn.init.normal_(conv.bias)
    x = torch.randn(2, 9, 6)
    past = x[:, 1:5].mT.clone()
    with torch.no_grad():
        steps = [conv(x[:, t : t + 1], None, past, in_place=True) for t in range(5, 9)]
        whole = conv(x)
        remembered = [conv(x[:, t : t + 1], joined=x[:, : t + 1].mT) for t in range(5, 9)]
    torch.testing.assert_close(torch.cat(steps, 1), whole[:, 5:])
    torch.testing.assert_close(torch.cat(remembered, 1), whole[:, 5:])
    assert not conv.steps_in_place(x), "the kernel is for CUDA tensors"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["torch", "mamba_ssm", "fla"])
@pytest.mark.parametrize("shape", ["below-a-chunk", "many-chunks", "shared-states"])
def test_backends_equal_recurrence_on_gpu(backend, dtype, shape, packing):
    """Outputs, states and gradients; kernels multiply in TF32 or bf16, and mamba_ssm divides by -log_a."""
    needed = {"mamba_ssm": ssd.mamba_chunk_scan_combined, "fla": ssd.chunk_simple_gla}
    if backend in needed and needed[backend] is None:
        pytest.skip(f"needs {backend}")
    B, L, H, G, _, _, _, *states = SHAPES[shape]
    sizes = [(B, L, G, 64), (B, L, (states or [H])[0]), (B, L, G, 64), (B, L, H, 64), (B, (states or [H])[0], 64, 64)]
    inputs = [torch.randn(size, device="cuda") for size in sizes]
    inputs[1] = -0.01 - 3 * torch.rand(sizes[1], device="cuda")
    inputs = [t.to(torch.float32 if i in (1, 4) else dtype).requires_grad_() for i, t in enumerate(inputs)]
    seq_idx = packed(shape).cuda() if packing else None
    got = ssd.ssd_scan(*inputs, seq_idx=seq_idx, backend=backend)
    expected = ssd.ssd_recurrence(*inputs, seq_idx=seq_idx)
    limit = 1e-6 if backend == "torch" else 3e-3 if dtype == torch.float32 else 2e-2
    for name, one, reference in zip(("y", "state"), got, expected, strict=True):
        assert relative_error(one, reference) < limit, name
    weights = [torch.randn_like(t) for t in expected]
    grads = torch.autograd.grad(sum((t * w).sum() for t, w in zip(got, weights, strict=True)), inputs)
    references = torch.autograd.grad(sum((t * w).sum() for t, w in zip(expected, weights, strict=True)), inputs)
    # gradients come back in the inputs' type
    limit = max(2 * limit, 4e-3 if dtype == torch.bfloat16 else 0)
    for name, one, reference in zip(NAMES, grads, references, strict=True):
        assert relative_error(one, reference.double()) < limit, name
