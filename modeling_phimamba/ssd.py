"""State space duality (SSD): the scan behind the Mamba-2 style mixers.

Identical in modeling_phimamba and modeling_llamba; edit the former, run `make fix-copies`.

Per head, with S_t of shape (P, N):

    S_t = a_t S_{t-1} + x_t B_t^T        y_t = S_t C_t        a_t = exp(log_a_t), log_a_t <= 0

(Dao and Gu 2024, "Transformers are SSMs", section 3; no step size multiplies B x here: a mixer that has one
folds it into x.) No path divides x by the step size, which overflows as a -> 1.

Shapes: B batch, L length, H heads, G groups (heads of x and B; head h reads group h // (H // G)), T states (heads of
the decay: H, or G where the heads of a group share theirs and with it the state), P head dim, N state, Q chunk.
`ssd_recurrence` is the ground truth every other path is compared with.
"""

import torch

try:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
except ImportError:
    mamba_chunk_scan_combined = None

# exp(-1e4) is exactly 0, and float64 sums of a few such terms still resolve the ordinary decays beside them.
RESET_LOG_DECAY = -1e4
# Decays closer to 1 than this are clamped on the mamba_ssm path only, which has to divide x by -log_a.
KERNEL_MIN_STEP = 1e-6

SSD_BACKENDS = ("auto", "torch", "mamba_ssm")


def full_precision(like: torch.Tensor) -> torch.autocast:
    """Autocast would turn the products inside the recurrence to half precision, and its state with them."""
    return torch.autocast(like.device.type, enabled=False)


def reset_at_boundaries(log_a: torch.Tensor, seq_idx: torch.Tensor | None) -> torch.Tensor:
    """Set the decay to zero where a new packed sequence starts, so that no state crosses the boundary.

    Args:
        log_a: (B, L, ...) log decays.
        seq_idx: (B, L) integer id of the sequence each token belongs to, or None when nothing is packed.
    """
    if seq_idx is None:
        return log_a
    starts = torch.zeros_like(seq_idx, dtype=torch.bool)
    starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return log_a.masked_fill(starts.view(*starts.shape, *[1] * (log_a.ndim - 2)), RESET_LOG_DECAY)


def repeat_groups(t: torch.Tensor, num_heads: int) -> torch.Tensor:
    """(B, L, G, D) -> (B, L, H, D), each group repeated for its H // G consecutive heads."""
    num_groups = t.shape[2]
    return t if num_groups == num_heads else t.repeat_interleave(num_heads // num_groups, dim=2)


def ssd_recurrence(
    x: torch.Tensor,
    log_a: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence, one token after the other in float64: slow, and the judge of every other path.

    Args:
        x: (B, L, G, P). log_a: (B, L, T). B: (B, L, G, N). C: (B, L, H, N).
        initial_state: (B, T, P, N) or None for zero. seq_idx: (B, L) or None.

    Returns:
        y (B, L, H, P) and the final state (B, T, P, N), both float64.
    """
    T, H = log_a.shape[-1], C.shape[2]
    x, B = repeat_groups(x.double(), T), repeat_groups(B.double(), T)
    log_a, C = reset_at_boundaries(log_a.double(), seq_idx), C.double()
    if initial_state is None:
        state = x.new_zeros(x.shape[0], T, x.shape[-1], B.shape[-1])
    else:
        state = initial_state.double()
    y = []
    for t in range(x.shape[1]):
        state = log_a[:, t].exp()[..., None, None] * state + x[:, t, :, :, None] * B[:, t, :, None, :]
        y.append((state.repeat_interleave(H // T, dim=1) * C[:, t, :, None, :]).sum(-1))
    return torch.stack(y, dim=1), state


def ssd_matrix(
    log_a: torch.Tensor, B: torch.Tensor, C: torch.Tensor, seq_idx: torch.Tensor | None = None
) -> torch.Tensor:
    """The unrolled matrix mixer: M[l, s] = (C_l . B_s) exp(sum_{s<k<=l} log_a_k) for s <= l, else 0.

    Args and shapes as in `ssd_recurrence`; C may be that of the last tokens only, whose rows are then returned.

    Returns:
        M (B, H, L, L) with y = M x per head, in the dtype of C.
    """
    H, L, rows = C.shape[2], log_a.shape[1], C.shape[1]
    total = reset_at_boundaries(log_a.double(), seq_idx).cumsum(1).transpose(1, 2)  # (B, T, L)
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
        state: (B, T, P, N), float32 or wider; updated in place unless autograd is recording.
        x: (B, G, P). log_a: (B, T). B: (B, G, N). C: (B, H, N).

    Returns:
        y (B, H, P) in the state's dtype and the new state (the same tensor when updated in place).
    """
    T = state.shape[1]
    x, log_a, B, C = (t.to(state.dtype) for t in (x, log_a, B, C))
    x, B = (repeat_groups(t[:, None], T)[:, 0] for t in (x, B))
    decay = log_a.exp()[..., None, None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in (state, x, log_a, B, C)):
        state = decay * state + x[..., :, None] * B[..., None, :]
    else:
        state.mul_(decay).addcmul_(x[..., :, None], B[..., None, :])
    with full_precision(state):
        if T == C.shape[1]:
            return (state @ C[..., None]).squeeze(-1), state
        return (C.unflatten(1, (T, -1)) @ state.mT).flatten(1, 2), state


def ssd_read(
    state: torch.Tensor, x: torch.Tensor, log_a: torch.Tensor, B: torch.Tensor, C: torch.Tensor
) -> torch.Tensor:
    """What the last tokens of a short chunk read, from a state (B, T, P, N) that stays as it is.

    Args:
        x: (B, R, G, P). log_a: (B, R, T). B: (B, R, G, N). C: (B, L, H, N) of the last L <= R tokens.

    Returns:
        y (B, L, H, P) in the state's dtype.
    """
    L, H = C.shape[1:3]
    x, log_a, B, C = (t.to(state.dtype) for t in (x, log_a, B, C))
    enter = log_a.double().cumsum(1)[:, -L:].exp().to(state.dtype).repeat_interleave(H // log_a.shape[-1], dim=-1)
    with full_precision(state):
        y = ssd_matrix(log_a, B, C) @ repeat_groups(x, H).transpose(1, 2)  # (B, H, L, P)
        from_state = (C * enter[..., None]).transpose(1, 2) @ state.repeat_interleave(H // state.shape[1], dim=1).mT
    return (y + from_state).transpose(1, 2)


def ssd_advance(state: torch.Tensor, x: torch.Tensor, log_a: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """Take a state (B, T, P, N) over a short chunk, in place; shapes as in `ssd_read`. Zeros leave it as it is."""
    T = state.shape[1]
    total = log_a.double().cumsum(1)
    leave = (total[:, -1:] - total).exp().to(state.dtype)
    x, B = (repeat_groups(t.to(state.dtype), T) for t in (x, B))
    with full_precision(state):
        added = (x * leave[..., None]).permute(0, 2, 3, 1) @ B.transpose(1, 2)  # (B, T, P, R) @ (B, T, R, N)
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
    """The same map as `ssd_recurrence`, in chunks, in float32 (float64 for float64 input).

    `backend`: "torch", "mamba_ssm" (CUDA kernels), or "auto": mamba_ssm when it is importable and the tensors are
    on CUDA and no gradient is wanted, else torch. The kernel divides x by -log_a, and near a = 1 the gradient of that
    is a small difference of large numbers; asking for "mamba_ssm" by name accepts it.

    Raises:
        ValueError: the backend is unknown, or asked for by name and not usable here.
    """
    if backend not in SSD_BACKENDS:
        raise ValueError(f"Unknown SSD backend {backend!r}; choose one of {', '.join(SSD_BACKENDS)}.")
    kernel_usable = mamba_chunk_scan_combined is not None and x.is_cuda
    if backend == "mamba_ssm" and not kernel_usable:
        raise ValueError("The mamba_ssm backend needs the package mamba-ssm and CUDA tensors; use backend 'torch'.")
    recording = torch.is_grad_enabled() and any(t.requires_grad for t in (x, log_a, B, C))
    if kernel_usable and (backend == "mamba_ssm" or (backend == "auto" and not recording)):
        return _mamba_ssm_scan(x, log_a, B, C, initial_state, seq_idx, chunk_size)
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, B, C = (t.to(dtype) for t in (x, B, C))
    log_a = reset_at_boundaries(log_a.to(dtype), seq_idx)
    batch, _, G, P = x.shape
    T, N = log_a.shape[-1], B.shape[-1]
    if initial_state is None:
        initial_state = x.new_zeros(batch, T, P, N)
    # (B, T, P, N) -> (B G, T / G N, P): every product below is then one batched matmul over groups
    state = initial_state.to(dtype).transpose(-1, -2).reshape(batch * G, -1, P)
    recording = recording or (torch.is_grad_enabled() and state.requires_grad)
    with full_precision(x):
        if recording and not torch.compiler.is_compiling():
            y, state = _ChunkedSSD.apply(x, log_a, B, C, state, chunk_size)
        else:
            y, state, _ = _chunk_forward(x, log_a, B, C, state, chunk_size, save_states=False)
    return y, state.view(batch, T, N, P).transpose(-1, -2)


def _chunk(t: torch.Tensor, start: int, stop: int, groups: int) -> torch.Tensor:
    """(B, L, H, D) -> (B G, R Q, D) for the tokens start..stop."""
    batch, _, heads, dim = t.shape
    return t[:, start:stop].transpose(1, 2).reshape(batch * groups, heads // groups * (stop - start), dim)


def _decays(log_a: torch.Tensor, start: int, stop: int, groups: int) -> tuple[torch.Tensor, ...]:
    """Decays of one chunk, from float64 sums: float32 sums lose up to 1.7e-3 where the decay is strong.

    Returns:
        within (BG, S, Q, Q) from token j to i, enter (BG, S, Q) from the chunk's start state to i,
        leave (BG, S, Q) from j to the chunk's end, across (BG, S) over the whole chunk; S = T / G states per group.
    """
    batch, _, heads = log_a.shape
    total = log_a[:, start:stop].double().cumsum(1).transpose(1, 2).reshape(batch * groups, heads // groups, -1)
    Q = stop - start
    upper = torch.ones(Q, Q, dtype=torch.bool, device=log_a.device).triu(1)
    within = (total[..., :, None] - total[..., None, :]).to(log_a.dtype).masked_fill(upper, float("-inf")).exp()
    last = total[..., -1:]
    enter, leave = total.to(log_a.dtype).exp(), (last - total).to(log_a.dtype).exp()
    return within, enter, leave, last[..., 0].to(log_a.dtype).exp()


def _chunk_forward(x, log_a, B, C, state, chunk_size, save_states):
    """Chunks one after the other, heads batched. state: (B G, S N, P), S states and R heads per group."""
    batch, L, G, P = x.shape
    H, N = C.shape[2], B.shape[-1]
    R, S = H // G, log_a.shape[-1] // G
    y, saved = [], []
    for start in range(0, L, chunk_size):
        stop = min(start + chunk_size, L)
        Q = stop - start
        if save_states:
            saved.append(state)
        X, Bc, Cc = _chunk(x, start, stop, G), _chunk(B, start, stop, G), _chunk(C, start, stop, G)
        within, enter, leave, across = _decays(log_a, start, stop, G)
        scores = ((Cc @ Bc.transpose(1, 2)).view(-1, R, Q, Q) * within).view(-1, R * Q, Q)
        inter = (Cc.reshape(-1, R, Q, N) * enter[..., None]).reshape(-1, R // S * Q, N) @ state.reshape(-1, N, P)
        chunk_y = scores @ X + inter.reshape(-1, R * Q, P)
        y.append(chunk_y.reshape(batch, H, Q, P).transpose(1, 2))
        update = (Bc[:, None] * leave[..., None]).transpose(-1, -2).reshape(-1, S * N, Q) @ X
        state = (state.reshape(-1, S, N * P) * across[..., None]).reshape(-1, S * N, P) + update
    return torch.cat(y, dim=1), state, saved


class _ChunkedSSD(torch.autograd.Function):
    """Keeps the inputs and one state per chunk; recomputes everything of size Q x Q in the backward."""

    @staticmethod
    def forward(ctx, x, log_a, B, C, state, chunk_size):
        y, final, saved = _chunk_forward(x, log_a, B, C, state, chunk_size, save_states=True)
        ctx.save_for_backward(x, log_a, B, C, *saved)
        ctx.chunk_size = chunk_size
        return y, final

    @staticmethod
    def backward(ctx, dy, dstate):
        x, log_a, B, C, *saved = ctx.saved_tensors
        batch, L, G, _ = x.shape
        T = log_a.shape[-1]
        dx, dB, dC, dlog_a = (torch.empty_like(t) for t in (x, B, C, log_a))

        def store(target, chunk_grad, start, stop):
            heads = target.shape[2]
            target[:, start:stop] = chunk_grad.reshape(batch, heads, stop - start, -1).transpose(1, 2)

        for index in reversed(range(len(saved))):
            start = index * ctx.chunk_size
            stop = min(start + ctx.chunk_size, L)
            with full_precision(x):
                grads = _chunk_backward(
                    *(_chunk(t, start, stop, G) for t in (x, B, C, dy)),
                    _decays(log_a, start, stop, G),
                    saved[index],
                    dstate,
                )
            dX, dBc, dCc, dlog, dstate = grads
            store(dx, dX, start, stop)
            store(dB, dBc, start, stop)
            store(dC, dCc, start, stop)
            dlog_a[:, start:stop] = dlog.reshape(batch, T, stop - start).transpose(1, 2).to(dlog_a.dtype)
        return dx, dlog_a, dB, dC, dstate, None


def _chunk_backward(X, Bc, Cc, dY, decays, state, dstate):
    """Gradients of one chunk; names as in `_chunk_forward`, dstate is the gradient of the chunk's end state."""
    within, enter, leave, across = decays
    BG, S, Q, _ = within.shape
    N, P, R = Bc.shape[-1], X.shape[-1], Cc.shape[1] // Q
    shared = R // S  # heads that share a state
    products = Cc @ Bc.transpose(1, 2)
    scores = (products.view(BG, R, Q, Q) * within).view(BG, R * Q, Q)
    dscores = ((dY @ X.transpose(1, 2)).view(BG, R, Q, Q) * within).view(BG, R * Q, Q)
    B_leave = (Bc[:, None] * leave[..., None]).transpose(-1, -2).reshape(BG, S * N, Q)
    dX = scores.transpose(1, 2) @ dY + B_leave.transpose(1, 2) @ dstate

    per_head = dY.reshape(BG * S, shared * Q, P) @ state.reshape(BG * S, N, P).transpose(1, 2)
    dC_enter = per_head.reshape(BG, R, Q, N) * enter[..., None]
    dC = (dscores @ Bc).reshape(BG, R, Q, N) + dC_enter
    dB_leave = (X @ dstate.transpose(1, 2)).reshape(BG, Q, S, N).transpose(1, 2) * leave[..., None]
    dB = dscores.transpose(1, 2) @ Cc + dB_leave.sum(1)

    # d/d log_a_k sums every path that crosses k; without the diagonal, which crosses nothing, rows minus columns
    # telescope to exactly that, and float64 keeps the difference.
    weight = (dscores * products).reshape(BG, S, shared, Q, Q).tril(-1).double()
    into_end = (Bc[:, None] * dB_leave).sum(-1).double()
    entered = (Cc.reshape(BG, R, Q, N) * dC_enter).sum(-1).double().view(BG, S, shared, Q)
    dtotal = (weight.sum(-1) - weight.sum(-2) + entered).sum(2) - into_end
    carried = (state * dstate).reshape(BG, S, -1).sum(-1) * across
    dtotal[..., -1] += into_end.sum(-1) + carried.double()
    dlog_a = dtotal.flip(-1).cumsum(-1).flip(-1)

    entering = (Cc.reshape(BG, R, Q, N) * enter[..., None]).reshape(BG * S, shared * Q, N)
    through = entering.transpose(1, 2) @ dY.reshape(BG * S, shared * Q, P)
    dstate = (dstate.reshape(BG, S, N * P) * across[..., None]).reshape(BG, S * N, P) + through.reshape(BG, S * N, P)
    return dX, dB, dC, dlog_a, dstate


def _mamba_ssm_scan(x, log_a, B, C, initial_state, seq_idx, chunk_size):
    """mamba_ssm's kernel computes S = exp(dt A) S + dt x B: with A = -1 and dt = -log_a, x has to be divided by dt."""
    H, shared = C.shape[2], C.shape[2] // log_a.shape[-1]
    log_a = log_a.repeat_interleave(shared, dim=-1)
    if initial_state is not None:
        initial_state = initial_state.repeat_interleave(shared, dim=1)
    step = (-log_a.float()).clamp_min(KERNEL_MIN_STEP)
    y, state = mamba_chunk_scan_combined(
        repeat_groups(x, H).float() / step[..., None],
        step,
        -torch.ones(H, device=x.device, dtype=torch.float32),
        repeat_groups(B, H).float(),
        C.float(),
        chunk_size=max(chunk_size, 64),
        initial_states=None if initial_state is None else initial_state.float(),
        seq_idx=None if seq_idx is None else seq_idx.int(),
        return_final_states=True,
    )
    return y, state[:, ::shared]
