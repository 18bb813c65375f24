"""The chunked SSD scan in plain PyTorch, with its own gradient.

Within a chunk the recurrence is a product with a lower triangular matrix, between chunks it is one step of a state
(Dao and Gu 2024, section 6). Chunks come one after the other with the heads batched, so that what is being worked on
stays in the cache; the backward pass keeps one state per chunk and recomputes everything of size Q x Q.

Decays are sums of logarithms in float64, whose differences are taken before the exponential: float32 sums lose up to
1.7e-3 where the decay is strong. They are powers of two because exp takes up to 40 times as long, in the libraries
PyTorch calls on a CPU, where its result underflows, which strong decays do all the time; exp2 does not.

Shapes: B batch, L length, H heads, G groups (heads of x and B), T states, P head dim, N state, Q tokens of a chunk;
R = H / G heads and S = T / G states of a group, BG = B G groups of the whole batch.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

LOG2_E = math.log2(math.e)
BLOCK_DECAYS = 2**13
"""Decays of a sequence computed at once."""
CACHED_SCORES, LEAST_CHUNK = 2**16, 32
"""Scores of a chunk too many for a core's cache; chunks are not made shorter than this."""


def full_precision(like: torch.Tensor) -> contextlib.AbstractContextManager:
    """Autocast would turn the products inside the recurrence to half precision, and its state with them."""
    device = like.device.type
    # entering the context costs as much as some of what is done in it for one token
    recasts = device != "meta" and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if recasts else contextlib.nullcontext()


def chunked_scan(
    x: torch.Tensor,
    log_a: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    state: torch.Tensor | None,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence of ssd.py in chunks.

    Args:
        x: (B, L, G, P). log_a: (B, L, T), whose type, float32 or float64, is computed in. B: (B, L, G, N).
        C: (B, L, H, N). Half precision is widened chunk by chunk.
        state: (B, T, P, N) of log_a's type, where it begins, not modified; None for zero.
        chunk_size: tokens of a chunk; fewer on a CPU where there are many heads.

    Returns:
        y (B, L, H, P) and the final state (B, T, P, N).
    """
    (batch, _, G, P), T, (H, N) = x.shape, log_a.shape[-1], C.shape[2:]
    shape = (batch * G, T // G * P, N)
    if state is None:
        state = log_a.new_zeros(shape)
    else:
        state = state.reshape(shape).clone(memory_format=torch.contiguous_format)
    if x.device.type == "cpu" and not torch.compiler.is_compiling():  # a graph is for any number of sequences
        chunk_size = cached_chunk(chunk_size, batch * H)
    recording = torch.is_grad_enabled() and any(t.requires_grad for t in (x, log_a, B, C, state))
    with full_precision(x):
        if recording:
            y, state = _ChunkedSSD.apply(x, log_a, B, C, state, chunk_size)
        else:
            y, state, _ = _forward(x, log_a, B, C, state, chunk_size, keep=False)
    return y, state.view(batch, T, P, N)


def cached_chunk(chunk_size: int, heads: int) -> int:
    """The chunk size, halved until the scores of all heads fit into a cache beside what they are made of."""
    while heads * chunk_size**2 >= CACHED_SCORES and chunk_size // 2 >= LEAST_CHUNK:
        chunk_size //= 2
    return chunk_size


class Decays(NamedTuple):
    """Decays of one chunk: sums (BG, S, Q, 1) of log2 a to each token, in float64; enter (BG, S, 1, Q, 1) from the
    chunk's start state to a token; leave (BG, Q, S, 1) from a token to the chunk's end; across (BG, S, 1) over it all.
    """

    sums: torch.Tensor
    enter: torch.Tensor
    leave: torch.Tensor
    across: torch.Tensor

    def within(self, space: "Workspace") -> torch.Tensor:
        """(BG, S, 1, Q, Q) from token j to i, 0 for j > i."""
        BG, S, Q, _ = self.sums.shape
        powers = space("within", BG, S, Q, Q)
        torch.sub(self.sums, self.sums.mT, out=powers)
        return powers.exp2_().tril_()[:, :, None]  # above the diagonal the power may have overflowed


def _each_chunk(log_a: torch.Tensor, chunk_size: int, groups: int, backwards: bool = False) -> Iterator[Decays]:
    """Decays of one chunk after the other; small things are computed for many chunks at once."""
    batch, L, states = log_a.shape
    block = max(BLOCK_DECAYS // (states * chunk_size), 1) * chunk_size
    for first in _ordered(range(0, L, block), backwards):
        logs = log_a[:, first : first + block].double() * LOG2_E
        logs = nn.functional.pad(logs, (0, 0, 0, -logs.shape[1] % chunk_size))
        sums = logs.view(batch, -1, chunk_size, groups, states // groups).cumsum(2).permute(1, 0, 3, 4, 2)
        # contiguous, or everything of size Q x Q would take over these strides
        sums = sums.reshape(-1, batch * groups, states // groups, chunk_size).contiguous()
        del logs
        enter, leave = (torch.exp2(t.to(log_a.dtype)) for t in (sums, sums[..., -1:] - sums))
        shaped = sums[..., None], enter[:, :, :, None, :, None], leave.transpose(2, 3)[..., None], enter[..., -1:]
        chunks = [Decays(*views) for views in zip(*(t.unbind() for t in shaped), strict=True)]
        for i in _ordered(range(len(chunks)), backwards):
            Q = min(L - first - i * chunk_size, chunk_size)
            yield chunks[i] if Q == chunk_size else _cut(chunks[i], Q)


def _cut(decays: Decays, Q: int) -> Decays:
    """The decays of a shorter last chunk; beyond its tokens they are 1."""
    return Decays(decays.sums[:, :, :Q], decays.enter[:, :, :, :Q], decays.leave[:, :Q], decays.across)


def _ordered(indices: range, backwards: bool) -> range:
    return indices[::-1] if backwards else indices


class Workspace:
    """Tensors that each chunk overwrites, by name: memory that stays in the cache and is asked for once."""

    def __init__(self, like: torch.Tensor):
        self.like, self.held = like, {}

    def __call__(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor of this name; what is in it is of the chunk before."""
        held = self.held.get(name)
        if held is None or held.shape != shape:
            held = self.held[name] = self.like.new_empty(shape, dtype=dtype)
        return held

    def rows(self, name: str, chunk: torch.Tensor, groups: int) -> torch.Tensor:
        """(B, H, Q, D) -> (BG, R Q, D), contiguous, as products read it fastest."""
        return self(name, *chunk.shape).copy_(chunk).view(groups, -1, chunk.shape[-1])


def _chunks(t: torch.Tensor, chunk_size: int) -> tuple[torch.Tensor, ...]:
    """(B, L, H, D) -> views (B, H, Q, D), the last one shorter."""
    return t.transpose(1, 2).split(chunk_size, dim=2)


def _forward(x, log_a, B, C, state, chunk_size, keep):
    """y, the final state, and with `keep` the state (BG, S P, N) that each chunk began with; may overwrite `state`."""
    batch, L, G, P = x.shape
    H, N, S, BG = C.shape[2], B.shape[-1], log_a.shape[-1] // G, batch * G
    y, kept, space = log_a.new_empty(batch, L, H, P), [], Workspace(log_a)
    chunks = (_chunks(t, chunk_size) for t in (x, B, C, y))
    each = _each_chunk(log_a, chunk_size, G)
    for decays, x_chunk, B_chunk, C_chunk, y_chunk in zip(each, *chunks, strict=L > 0):  # no tokens: one empty chunk
        X, Bc, Cc = space.rows("x", x_chunk, BG), space.rows("B", B_chunk, BG), space.rows("C", C_chunk, BG)
        rows, Q = Cc.shape[1], Bc.shape[1]
        scores = torch.bmm(Cc, Bc.mT, out=space("scores", BG, rows, Q))
        scores.view(BG, S, -1, Q, Q).mul_(decays.within(space))
        Y = torch.bmm(scores, X)
        entering = _entering(Cc, decays).view(BG * S, -1, N)
        Y.view(BG * S, -1, P).baddbmm_(entering, state.view(-1, P, N).mT)
        y_chunk.copy_(Y.view(batch, H, Q, P))
        del Y  # or it would be there beside the next chunk's decays
        if keep:
            kept.append(state)
            state = state.view(BG, S, -1).mul(decays.across).view_as(state)
        else:
            state.view(BG, S, -1).mul_(decays.across)
        state.baddbmm_(_leaving(X, decays).mT, Bc)
    return y, state, kept


def _entering(Cc, decays):
    """(BG, S, R / S, Q, N), C as it meets the state the chunk began with; written over Cc."""
    groups, S, _, Q, _ = decays.enter.shape
    return Cc.view(groups, S, -1, Q, Cc.shape[-1]).mul_(decays.enter)


def _leaving(X, decays):
    """(BG, Q, S P), x as it arrives in each state at the chunk's end; written over X where there is one state."""
    if decays.leave.shape[2] == 1:
        return X.mul_(decays.leave[:, :, 0])
    return (X[:, :, None] * decays.leave).flatten(2)


class _ChunkedSSD(torch.autograd.Function):
    """Keeps the inputs and one state per chunk."""

    @staticmethod
    def forward(ctx, x, log_a, B, C, state, chunk_size):
        y, final, kept = _forward(x, log_a, B, C, state, chunk_size, keep=True)
        ctx.save_for_backward(x, log_a, B, C, *kept)
        ctx.chunk_size = chunk_size
        return y, final

    @staticmethod
    def backward(ctx, dy, dfinal):
        x, log_a, B, C, *kept = ctx.saved_tensors
        batch, _, G, _ = x.shape
        dx, dB, dC, dlog_a = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, B, C, log_a))
        dstate = dfinal.clone(memory_format=torch.contiguous_format)
        space = Workspace(log_a)
        targets = [_chunks(t, ctx.chunk_size) for t in (dx, dB, dC, dlog_a[..., None])]
        chunks = [_chunks(t, ctx.chunk_size) for t in (x, B, C, dy)]
        with full_precision(x):
            for decays in _each_chunk(log_a, ctx.chunk_size, G, backwards=True):
                i = len(kept) - 1
                rows = (space.rows(n, t[i], batch * G) for n, t in zip(("x", "B", "C", "dy"), chunks, strict=True))
                *found, dstate = _chunk_backward(*rows, decays, kept.pop(), dstate, space)
                for target, gradient in zip(targets, found, strict=True):
                    target[i].copy_(gradient.reshape(target[i].shape))
        return dx, dlog_a, dB, dC, dstate, None


def _chunk_backward(X, Bc, Cc, dY, decays, state, dstate, space):
    """Gradients of one chunk; names as in `_forward`, dstate is the gradient of the chunk's end state."""
    (BG, S, Q, _), N, P, rows = decays.sums.shape, Bc.shape[-1], X.shape[-1], Cc.shape[1]
    heads = (BG, S, rows // Q // S, Q)
    within = decays.within(space)
    scores = torch.bmm(Cc, Bc.mT, out=space("scores", BG, rows, Q))
    dscores = torch.bmm(dY, X.mT, out=space("dscores", BG, rows, Q))
    dscores.view(*heads, Q).mul_(within)
    weight = torch.mul(scores, dscores, out=space("weight", BG, rows, Q)).view(*heads, Q)
    weight = weight.sum(2) if heads[2] > 1 else weight[:, :, 0]
    scores.view(*heads, Q).mul_(within)
    dX = torch.bmm(scores.mT, dY, out=space("dx", BG, Q, P))
    dC = torch.bmm(dscores, Bc, out=space("dC", BG, rows, N))
    dB = torch.bmm(dscores.mT, Cc, out=space("dB", BG, Q, N))

    # through the state the chunk began with
    entering = _entering(Cc, decays)
    dentering = torch.bmm(dY.view(BG * S, -1, P), state.view(-1, P, N), out=space("dentering", BG * S, rows // S, N))
    dentering = dentering.view(*heads, N)
    entered = torch.mul(entering, dentering, out=space("products", *heads, N)).sum((2, -1))
    dC.view(*heads, N).addcmul_(dentering, decays.enter)

    # through the state it ended with
    leaving = _leaving(X, decays)
    dleaving = torch.bmm(Bc, dstate.mT, out=space("dleaving", BG, Q, S * P)).view(BG, Q, S, P)
    left = torch.mul(leaving.view(BG, Q, S, P), dleaving, out=space("left", BG, Q, S, P))
    left = left.sum(-1).transpose(1, 2)
    dleaving.mul_(decays.leave)
    dX += dleaving.sum(2) if S > 1 else dleaving.view_as(dX)
    dB.baddbmm_(leaving, dstate)

    weight = space("float64", BG, S, Q, Q, dtype=torch.float64).copy_(weight)
    carried = torch.mul(state, dstate, out=space("carried", *state.shape)).view(BG, S, -1).sum(-1, keepdim=True)
    dlog_a = _log_decay_gradient(weight, entered, left, carried * decays.across)

    dstate.view(BG, S, -1).mul_(decays.across)
    dstate.view(-1, P, N).baddbmm_(dY.view(BG * S, -1, P).mT, entering.view(BG * S, -1, N))
    return dX, dB, dC, dlog_a, dstate


def _log_decay_gradient(weight, entered, left, carried):
    """(BG, S, Q): d/d log_a_k sums every path that crosses k, from before it to k or after.

    weight (BG, S, Q, Q), float64, of paths within the chunk, overwritten; entered and left (BG, S, Q) of those that
    begin before it and end after it; carried (BG, S, 1) of those that do both.
    """
    # without the diagonal, which crosses nothing, rows minus columns telescope, and float64 keeps the difference
    weight.tril_(-1)
    after = (weight.sum(-1) - weight.sum(-2) + entered).flip(-1).cumsum(-1).flip(-1)
    before = left.cumsum(-1, dtype=torch.float64) - left
    return after + before + carried
