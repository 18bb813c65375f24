"""Selective scan (S6): the diagonal recurrence of Mamba-1.

Per channel d, with state h_t of shape (I, N):

    h_t[d] = exp(dt_t[d] A[d]) h_{t-1}[d] + dt_t[d] x_t[d] B_t[g(d)]        y_t[d] = h_t[d] . C_t[g(d)]

(Gu and Dao 2023, "Mamba", section 3.) Channels come in G consecutive groups that share B and C.

Shapes: B batch, L length, G groups, N state, I inner width.
"""

import torch
from torch.utils.checkpoint import checkpoint

from ..model.sequences import sequence_starts
from .ssd import is_recorded

# Tokens whose states are held at once when training; each such segment is recomputed in the backward.
SEGMENT = 512


def selective_matrix(
    dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, seq_idx: torch.Tensor | None = None
) -> torch.Tensor:
    """Unrolled matrix per channel: M[l, s] = sum_n C_l[n] exp(A[n] sum_{s<k<=l} dt_k) dt_s B_s[n] for s <= l.

    Returns:
        M (B, I, L, L), with y[..., d] = M[d] x[..., d].
    """
    L, channels = dt.shape[1], dt.shape[2]
    per_group = channels // B.shape[2]
    total = dt.double().cumsum(1).transpose(1, 2)  # (B, I, L)
    elapsed = total[..., :, None] - total[..., None, :]
    hidden = torch.ones(L, L, dtype=torch.bool, device=dt.device).triu(1)
    if seq_idx is not None:
        hidden = hidden | (seq_idx[:, None, :, None] != seq_idx[:, None, None, :])
    matrix = torch.zeros_like(elapsed)
    for n in range(A.shape[-1]):
        Bn, Cn = (t[..., n].double().transpose(1, 2).repeat_interleave(per_group, dim=1) for t in (B, C))
        matrix = matrix + Cn[..., :, None] * (elapsed * A[:, n, None, None].double()).exp() * Bn[..., None, :]
    return (matrix * dt.double().transpose(1, 2)[..., None, :]).masked_fill(hidden, 0.0).to(dt.dtype)


def selective_step(
    state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token. state: (B, I, N); x, dt: (B, I); B, C: (B, G, N). Returns y (B, I) and the new state."""
    x, dt, A, B, C = (t.to(state.dtype) for t in (x, dt, A, B, C))
    per_group = x.shape[-1] // B.shape[1]
    B, C = (t.repeat_interleave(per_group, dim=1) for t in (B, C))
    state = (dt[..., None] * A).exp() * state + (dt * x)[..., None] * B
    return (state * C).sum(-1), state


def selective_advance(
    state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor, A: torch.Tensor
) -> torch.Tensor:
    """The state (B, I, N) after some tokens: x, dt (B, L, I), B (B, L, G, N); dt = 0 leaves it as it is."""
    for t in range(x.shape[1]):
        _, state = selective_step(state, x[:, t], dt[:, t], A, B[:, t], B[:, t])
    return state


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    chunk_size: int = 32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence from `initial_state`, in about 2 c + L / c vectorised steps for chunks of c tokens, instead of L.

    Args:
        x, dt: (B, L, I), dt >= 0. A: (I, N), negative. B, C: (B, L, G, N).
        initial_state: (B, I, N) or None. seq_idx: (B, L) or None.

    Returns:
        y (B, L, I) and the final state (B, I, N).

    All chunks advance side by side from a zero state; the true start states then follow chunk by chunk, and their
    share is added. Only decays <= 1 are ever multiplied, so strong decay cannot overflow.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, dt, A, B, C = (t.to(dtype) for t in (x, dt, A, B, C))
    state = x.new_zeros(x.shape[0], *A.shape) if initial_state is None else initial_state.to(dtype)
    keep = torch.ones_like(dt[..., :1]) if seq_idx is None else (~sequence_starts(seq_idx)).to(dtype)[..., None]
    recording = is_recorded(x, dt, A, B, C, state)
    outputs = []
    # a compiled graph is for a number of segments; range(0, L, SEGMENT) would make it one for this length
    for start in [n * SEGMENT for n in range(-(-x.shape[1] // SEGMENT))]:
        part = (*(t[:, start : start + SEGMENT] for t in (x, dt, B, C, keep)), A, state, chunk_size)
        if recording and not torch.compiler.is_compiling():
            y, state = checkpoint(_segment, *part, use_reentrant=False)
        else:
            y, state = _segment(*part)
        outputs.append(y)
    return torch.cat(outputs, dim=1), state


def _segment(x, dt, B, C, keep, A, state, chunk_size):
    batch, L, channels = x.shape
    G, N = B.shape[2:]
    # a compiled graph unrolls a whole chunk, or it would be one for this length
    size = chunk_size if torch.compiler.is_compiling() else min(chunk_size, L)
    count = -(-L // size)

    def chunks(t, fill=0.0):
        padded = torch.nn.functional.pad(t.flatten(2), (0, 0, 0, count * size - L), value=fill)
        return padded.view(batch, count, size, *t.shape[2:])

    # Padding has dt = 0 and keep = 1: it leaves the state alone.
    x = chunks(x)
    dt = chunks(dt)
    B = chunks(B)
    C = chunks(C)
    keep = chunks(keep, 1.0)
    A = A.view(G, channels // G, N)
    local = x.new_zeros(batch, count, G, channels // G, N)
    carried = torch.ones_like(local)
    local_y = []
    decays = []
    for q in range(size):
        step = dt[:, :, q].view(batch, count, G, channels // G, 1)
        decay = (step * A).exp() * keep[:, :, q, :, None, None]
        local = decay * local + step * x[:, :, q].view_as(step) * B[:, :, q, :, None, :]
        carried = carried * decay
        local_y.append((local * C[:, :, q, :, None, :]).sum(-1))
        decays.append(carried)
    starts = []
    state = state.view(batch, G, channels // G, N)
    for t in range(count):
        starts.append(state)
        state = carried[:, t] * state + local[:, t]
    start = torch.stack(starts, dim=1)
    y = [
        ly + (d * start * C[:, :, q, :, None, :]).sum(-1)
        for q, (ly, d) in enumerate(zip(local_y, decays, strict=True))
    ]
    return torch.stack(y, dim=2).reshape(batch, count * size, channels)[:, :L], state.reshape(batch, channels, N)
