"""State space duality (SSD): the scan behind the Mamba-2 style mixers.

Per head, with S_t of shape (P, N):

    S_t = a_t S_{t-1} + x_t B_t^T        y_t = S_t C_t        a_t = exp(log_a_t), log_a_t <= 0

(Dao and Gu 2024, "Transformers are SSMs", section 3; no step size multiplies B x here: a mixer that has one
folds it into x.) No path but mamba_ssm's divides x by the step size, which overflows as a -> 1.

Shapes: B batch, L length, H heads, G groups, U states, P head dim, N state.
`ssd_recurrence` (naive.py) is the ground truth that every other path is compared with.
"""

import math

import torch

from ..kernels.backend import backend_for, requested_backend
from ..model.precision import full_precision
from ..model.sequences import sequence_starts

# exp(-1e4) is exactly 0, and float64 sums of a few such terms still resolve the ordinary decays beside them.
RESET_LOG_DECAY = -1e4
LOG2_E = math.log2(math.e)


def reset_at_boundaries(log_a: torch.Tensor, seq_idx: torch.Tensor | None) -> torch.Tensor:
    """Set the decay to zero where a new packed sequence starts, so that no state crosses the boundary.

    Args:
        log_a: (B, L, ...) log decays.
        seq_idx: (B, L) integer id of the sequence each token belongs to, or None when nothing is packed.
    """
    if seq_idx is None:
        return log_a
    starts = sequence_starts(seq_idx)
    return log_a.masked_fill(starts.view(*starts.shape, *[1] * (log_a.ndim - 2)), RESET_LOG_DECAY)


def repeat_groups(t: torch.Tensor, num_heads: int) -> torch.Tensor:
    """(B, L, G, .) -> (B, L, H, .), each group repeated for its H // G consecutive heads."""
    num_groups = t.shape[2]
    if num_groups == num_heads:
        return t
    return t.repeat_interleave(num_heads // num_groups, dim=2)


def ssd_matrix(
    log_a: torch.Tensor, B: torch.Tensor, C: torch.Tensor, seq_idx: torch.Tensor | None = None
) -> torch.Tensor:
    """The unrolled matrix mixer: M[l, s] = (C_l . B_s) exp(sum_{s<k<=l} log_a_k) for s <= l, else 0.

    Args:
        log_a: (B, L, U). B: (B, L, G, N). C: (B, L, H, N); or of the last tokens only, whose rows are then returned.
        seq_idx: (B, L) or None.

    Returns:
        M (B, H, L, L) with y = M x per head, in the dtype of C.
    """
    H = C.shape[2]
    L = log_a.shape[1]
    rows = C.shape[1]
    total = reset_at_boundaries(log_a.double(), seq_idx).cumsum(1).transpose(1, 2)  # (B, U, L)
    upper = torch.ones(rows, L, dtype=torch.bool, device=log_a.device).triu(1 + L - rows)
    decay = (total[..., L - rows :, None] - total[..., None, :]).masked_fill(upper, float("-inf")).exp()
    with full_precision(C):
        scores = C.transpose(1, 2) @ repeat_groups(B, H).transpose(1, 2).transpose(-1, -2)
    return scores * decay.to(scores.dtype).repeat_interleave(H // decay.shape[1], dim=1)


def ssd_step(
    state: torch.Tensor, x: torch.Tensor, log_a: torch.Tensor, B: torch.Tensor, C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of the recurrence.

    Args:
        state: (B, U, P, N), float32 or wider; updated in place unless autograd is recording.
        x: (B, G, P). log_a: (B, U). B: (B, G, N). C: (B, H, N).

    Returns:
        y (B, H, P) in the state's dtype and the new state (the same tensor when updated in place).
    """
    batch, U, P, N = state.shape
    x, log_a, B, C = (t if t.dtype == state.dtype else t.to(state.dtype) for t in (x, log_a, B, C))
    G = x.shape[1]
    shared = U // x.shape[1]
    decay = log_a.exp().view(batch, G, shared, 1, 1)
    x = x.view(batch, G, 1, P, 1)
    B = B.view(batch, G, 1, 1, N)
    by_group = state.view(batch, G, shared, P, N)
    if is_recorded(state, x, log_a, B, C):
        state = (decay * by_group + x * B).view(batch, U, P, N)
    else:
        by_group.mul_(decay).addcmul_(x, B)
    with full_precision(state):
        y = torch.bmm(C.reshape(batch * U, -1, N), state.view(-1, P, N).mT)
    return y.view(batch, -1, P), state


def ssd_advance(state: torch.Tensor, x: torch.Tensor, log_a: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """Take a state (B, U, P, N) over some tokens, in place.

    Args:
        x: (B, L, G, P). log_a: (B, L, U). B: (B, L, G, N). Tokens that are all zero leave the state as it is.
    """
    U = state.shape[1]
    total = log_a.double().cumsum(1)
    leave = (total[:, -1:] - total).exp().to(state.dtype)
    x, B = (repeat_groups(t.to(state.dtype), U) for t in (x, B))
    with full_precision(state):
        added = (x * leave[..., None]).permute(0, 2, 3, 1) @ B.transpose(1, 2)  # (B, U, P, L) @ (B, U, L, N)
    return state.mul_(total[:, -1].exp().to(state.dtype)[..., None, None]).add_(added)


def ssd_scan(
    x: torch.Tensor,
    log_a: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    chunk_size: int = 64,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the recurrence in chunks, in float32 (float64 for float64 input).

    Args:
        backend: of the configuration.

    Raises:
        ValueError: a backend that is asked for by name cannot be used here, or not for this.
    """
    inputs = x, log_a, B, C, initial_state, seq_idx
    found = backend_for(x, backend).ssd_scan(*inputs, chunk_size, requested_backend(backend))
    if found is not None:
        return found
    dtype = torch.promote_types(x.dtype, torch.float32)
    log_a = reset_at_boundaries(log_a.to(dtype), seq_idx)
    if initial_state is not None:
        initial_state = initial_state.to(dtype)
    with full_precision(x):
        return chunked_scan(x, log_a, B, C, initial_state, chunk_size)


def chunked_scan(
    x: torch.Tensor, log_a: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor | None, chunk_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence in chunks, one after the other: a product with a lower triangular matrix within a chunk, and one
    step of the state between chunks (Dao and Gu 2024, section 6).

    Decays are sums of logarithms in float64, whose differences are taken before the exponential: float32 sums lose up
    to 1.7e-3 where the decay is strong.

    Args:
        x, B, C: as for `ssd_scan`. log_a: (B, L, U), whose type is computed in. state: (B, U, P, N), or None for zero.

    Returns:
        y (B, L, H, P) and the final state.
    """
    (batch, _, G, P) = x.shape
    U = log_a.shape[-1]
    dtype = log_a.dtype
    if state is None:
        state = log_a.new_zeros(batch, U, P, B.shape[-1])
    outputs = []
    chunks = zip(*(t.split(chunk_size, dim=1) for t in (x, log_a, B, C)), strict=True)
    for x_chunk, log_a_chunk, B_chunk, C_chunk in chunks:
        size = x_chunk.shape[1]
        total = log_a_chunk.double().cumsum(1).transpose(1, 2)  # (B, U, size)
        X, keys = (t.to(dtype).transpose(1, 2).repeat_interleave(U // G, dim=1) for t in (x_chunk, B_chunk))
        queries = C_chunk.to(dtype).transpose(1, 2).reshape(batch, U, -1, B.shape[-1])  # (B, U, H / U size, N)
        later = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
        within = (total[..., None] - total[..., None, :]).masked_fill(later, RESET_LOG_DECAY)
        # exp2, as exp takes up to 40 times as long on a CPU where its result underflows
        within, enter, leave = ((t * LOG2_E).exp2().to(dtype) for t in (within, total, total[..., -1:] - total))
        scores = (queries @ keys.mT).unflatten(2, (-1, size)) * within[:, :, None]
        carried = (queries @ state.mT).unflatten(2, (-1, size)) * enter[:, :, None, :, None]
        y = scores.flatten(2, 3) @ X + carried.flatten(2, 3)
        state = enter[..., -1:, None] * state + (X * leave[..., None]).mT @ keys
        outputs.append(y.unflatten(2, (-1, size)).flatten(1, 2).transpose(1, 2))
    return torch.cat(outputs, dim=1), state


def is_recorded(*tensors: torch.Tensor | None) -> bool:
    """Return True if autograd records one of them."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
