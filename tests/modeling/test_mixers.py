"""Every mixer: y = M x, the published layouts, and the recurrence written out token by token."""

import pytest
import torch
from torch.nn import functional as F

from tests.helpers.hybrids import MIXERS, make_hybrid


def mixer_and_input(mixer, length=21, **overrides):
    model = make_hybrid(mixer=mixer, pattern="pure", **overrides)
    u = torch.randn(2, length, model.config.hidden_size, dtype=torch.float64)
    position_embeddings = model.model.rotary_emb(u, torch.arange(length)[None])
    return model.model.layers[0].mixer, u, position_embeddings


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("mixer, shared", [*((mixer, False) for mixer in MIXERS), *((m, True) for m in MIXERS[:2])])
def test_unrolled_matrix_times_x_is_the_mixers_output(mixer, shared, packing):
    module, u, rotary = mixer_and_input(mixer, mixer_shared_state=shared)
    seq_idx = (torch.arange(21) // 8).expand(2, 21) if packing else None
    with torch.no_grad():
        matrix, x = module.materialize(u, rotary, seq_idx=seq_idx)
        gate = module.project(u, rotary, seq_idx=seq_idx)[-1 if mixer == "mamba1" else 4]
        y = matrix @ x
        y = y.squeeze(-1).transpose(1, 2) if mixer == "mamba1" else y.transpose(1, 2)
        torch.testing.assert_close(module.finish(y, gate), module(u, rotary, seq_idx=seq_idx), rtol=1e-6, atol=1e-8)
    heads = module.inner_size if mixer == "mamba1" else module.num_heads
    assert matrix.shape == (2, heads, 21, 21)
    assert matrix.triu(1).abs().max() == 0


def conv_by_hand(weight, bias, x):
    """(B, L, C), each channel with its own taps, last tap = current token."""
    padded = F.pad(x, (0, 0, weight.shape[-1] - 1, 0))
    return sum(padded[:, k : k + x.shape[1]] * weight[:, 0, k] for k in range(weight.shape[-1])) + bias


def test_discrete_mamba2_from_its_equations():
    """The published layout: rows [x, B, C, z, A_log], one head of everything, no rotary, no biases."""
    m, u, _ = mixer_and_input(
        "discrete_mamba2", mixer_num_kv_heads=4, mixer_rotary=False, mixer_decay_bias=False, mixer_out_bias=False
    )
    with torch.no_grad():
        x, B, C, z, A_log = (u @ m.in_proj.weight.T).split([32, 32, 32, 32, 4], dim=-1)
        x, B, C = conv_by_hand(m.conv1d.weight, m.conv1d.bias, torch.cat([x, B, C], -1)).split(32, dim=-1)
        x, B, C = (t.unflatten(-1, (4, 8)) for t in (x, B, C))
        state, ys = torch.zeros(2, 4, 8, 8, dtype=u.dtype), []
        for t in range(u.shape[1]):
            a = torch.sigmoid(-A_log[:, t])
            state = a[..., None, None] * state + x[:, t, :, :, None] * B[:, t, :, None, :]
            ys.append((state * C[:, t, :, None, :]).sum(-1) + m.D[:, None] * x[:, t])
        y = torch.stack(ys, 1).flatten(2) * F.silu(z + m.z_bias)
        torch.testing.assert_close(m(u), y @ m.out_proj.weight.T, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("norm", ["head", "whole", "none"])
def test_mamba2_from_its_equations(norm):
    """The published layout: rows [z, x, B, C, dt], x and B at key/value heads, SiLU, gated norm."""
    m, u, _ = mixer_and_input(
        "mamba2", mixer_rotary=False, mixer_out_bias=False, mixer_gate_bias=False, mixer_norm=norm
    )
    with torch.no_grad():
        z, xBC, dt = (u @ m.in_proj.weight.T).split([32, 16 + 16 + 32, 4], dim=-1)
        x, B, C = F.silu(conv_by_hand(m.conv1d.weight, m.conv1d.bias, xBC)).split([16, 16, 32], dim=-1)
        x, B = (t.unflatten(-1, (2, 8))[:, :, [0, 0, 1, 1]] for t in (x, B))
        C, dt = C.unflatten(-1, (4, 8)), F.softplus(dt + m.dt_bias)
        state, ys = torch.zeros(2, 4, 8, 8, dtype=u.dtype), []
        for t in range(u.shape[1]):
            a = torch.exp(-m.A_log.exp() * dt[:, t])
            state = a[..., None, None] * state + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
            ys.append((state * C[:, t, :, None, :]).sum(-1) + m.D[:, None] * x[:, t])
        y = torch.stack(ys, 1).flatten(2) * F.silu(z)
        if norm != "none":
            groups = y.unflatten(-1, (4, 8)) if norm == "head" else y[..., None, :]
            groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + m.config.rms_norm_eps)
            y = groups.flatten(-2) * m.norm.weight
        torch.testing.assert_close(m(u), y @ m.out_proj.weight.T, rtol=1e-6, atol=1e-8)


def test_mamba1_from_its_equations():
    """Rows [z, x, B, C, dt]; x repeated head by head before the convolution, B and C not convolved."""
    m, u, _ = mixer_and_input("mamba1", mixer_out_bias=False, mixer_gate_bias=False)
    with torch.no_grad():
        z, x, B, C, dt = (u @ m.in_proj.weight.T).split([32, 16, 16, 32, 2], dim=-1)
        x = F.silu(
            conv_by_hand(m.conv1d.weight, m.conv1d.bias, x.unflatten(-1, (2, 8))[:, :, [0, 0, 1, 1]].flatten(2))
        )
        B = B.unflatten(-1, (2, 8))[:, :, [0, 0, 1, 1]].flatten(2).unflatten(-1, (8, 4))
        C = C.unflatten(-1, (8, 4))
        dt = F.softplus(dt @ m.dt_proj.weight.T + m.dt_proj.bias)
        state, ys = torch.zeros(2, 32, 4, dtype=u.dtype), []
        for t in range(u.shape[1]):
            Bt, Ct = (g[:, t].repeat_interleave(4, dim=1) for g in (B, C))
            state = (dt[:, t, :, None] * -m.A_log.exp()).exp() * state + (dt[:, t] * x[:, t])[..., None] * Bt
            ys.append((state * Ct).sum(-1) + m.D * x[:, t])
        y = torch.stack(ys, 1) * F.silu(z)
        torch.testing.assert_close(m(u), y @ m.out_proj.weight.T, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("mixer", ["discrete_mamba2", "mamba2"])
def test_state_size_may_differ_from_the_head_dimension(mixer):
    module, u, _ = mixer_and_input(mixer, mixer_d_state=12, mixer_rotary=False)
    matrix, x = module.materialize(u)
    assert matrix.shape == (2, 4, 21, 21)
    assert x.shape == (2, 4, 21, 8)
    assert module(u).shape == u.shape


@pytest.mark.parametrize("mixer", ["discrete_mamba2", "mamba2"])
def test_rotary_makes_the_matrix_depend_on_distance_only(mixer):
    """Constant input: with rotary B and C, M[l, s] is a function of l - s, as RoPE attention is."""
    module, u, rotary = mixer_and_input(mixer)
    u = u[:, :1].expand_as(u)
    with torch.no_grad():
        module.conv1d.weight.zero_()[..., -1] = 1.0
        matrix, _ = module.materialize(u, rotary)
    torch.testing.assert_close(matrix[..., 1:, 1:], matrix[..., :-1, :-1], rtol=1e-5, atol=1e-6)
    module.config.mixer_rotary = False
    with torch.no_grad():
        without, _ = module.materialize(u, rotary)
    # at distance 0 the rotation cancels, elsewhere it does not
    diagonals = (m.diagonal(dim1=-2, dim2=-1) for m in (without, matrix))
    torch.testing.assert_close(*diagonals, rtol=1e-5, atol=1e-6)
    assert (without - matrix).abs().amax() > 0.1
