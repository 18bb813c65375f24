"""State of a hybrid layer after the tokens so far, and the fate of those that leave its window.

The tokens of a sequence are numbered t = 0, 1, ... and come in blocks of E. The window is the open block and the n
blocks before it, C = (n + 1) E columns. When block b opens, block b - n - 1 leaves. Each token that leaves competes
for a place in the salient cache, which has S of them. Sinks, the first tokens, have infinite salience and so hold
their places for good; the other places are held by the most salient tokens that ever left. All others are
evicted: the state takes them up as sums over tokens j,

    state = sum_j [v_j; 1] [1; k'_j]^T          with k' the slow part of a key (`SlowDims`).

Nothing happens between the openings of blocks, so all queries of a block read one state and one salient cache.

Shapes: B batch, K key/value heads, P head dim, N state, E block, n whole blocks, C columns of the window, S places, T
columns, W bytes of a row.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F

from ..kernels.by_device import marked_rows
from ..model.precision import full_precision
from .rounding import Rounding


class SlowDims(NamedTuple):
    """The dimensions of a key that the state keeps: the planes that the rotary embedding turns slowest, and those
    that are not rotated. Plane f of a head with `planes` of them is the pair of dimensions f and f + planes."""

    planes: int
    slow_planes: int

    def take(self, t: torch.Tensor) -> torch.Tensor:
        """Select from vectors (..., P) the dimensions that a state keeps, (..., N)."""
        if self.slow_planes == self.planes:
            return t
        first = self.planes - self.slow_planes
        second = 2 * self.planes - self.slow_planes
        return torch.cat([t[..., first : self.planes], t[..., second:]], dim=-1)

    def put(self, t: torch.Tensor) -> torch.Tensor:
        """Extend what a state keeps of vectors (..., N) to (..., P), by zeros in the other dimensions."""
        if self.slow_planes == self.planes:
            return t
        fast = t.new_zeros(*t.shape[:-1], self.planes - self.slow_planes)
        return torch.cat([fast, t[..., : self.slow_planes], fast, t[..., self.slow_planes :]], dim=-1)


class BlockShape(NamedTuple):
    """Sizes of a layer's window and salient cache, what of a key its state keeps (None: there is no state), and the
    rounding of the keys and values that are held."""

    block: int
    whole_blocks: int
    sinks: int
    places: int
    slow: SlowDims | None
    key_rounding: Rounding
    value_rounding: Rounding

    @classmethod
    def of(cls, config, layer: int) -> "BlockShape":
        """The shape that a hybrid's configuration gives to a layer."""
        slow = None
        if config.mixer != "none":
            slow = SlowDims(config.rotary_planes, config.state_planes(layer))
        block = config.hybrid_block
        sinks = config.hybrid_sinks
        places = sinks + config.hybrid_salient
        roundings = Rounding.of_pair(config.window_bits, config.head_dim, config.backend)
        return cls(block, config.window_of(layer) // block - 1, sinks, places, slow, *roundings)

    @property
    def window(self) -> int:
        """Columns of the window, the open block included."""
        return (self.whole_blocks + 1) * self.block

    def column(self, number: int) -> int:
        """Column of the token with this number, whose block is open."""
        return self.places + number - max(number // self.block - self.whole_blocks, 0) * self.block

    def columns(self, number: torch.Tensor) -> torch.Tensor:
        """Columns (B,) of tokens with these numbers, whose blocks are open."""
        return self.places + number - (number // self.block - self.whole_blocks).clamp(min=0) * self.block


class Held(NamedTuple):
    """State of a layer for each row.

    keys, values (B, K, S + C, P), or rows of bytes (B, K, S + C, W) where they are rounded (rounding.py): the salient
    cache, then the window. Places are sorted by salience, the highest first, so that sinks come first and empty places
    last; the window is filled from the left and ends with the open block. salience (B, S + C) in float32 or wider:
    -inf in an empty place, +inf for a sink. state (B, K, P + 1, N + 1) in that type, or None. seen (B,): number of
    tokens so far.
    """

    keys: torch.Tensor
    values: torch.Tensor
    salience: torch.Tensor
    state: torch.Tensor | None
    seen: torch.Tensor

    @classmethod
    def empty(cls, shape: BlockShape, tokens: "NewTokens") -> "Held":
        """Make the state of a layer before the first of these tokens."""
        batch, heads, _, width = tokens.keys.shape
        keys = tokens.keys.new_zeros(batch, heads, shape.places + shape.window, width)
        values = tokens.values.new_zeros(*keys.shape[:3], tokens.values.shape[3])
        salience = tokens.salience.new_full((batch, keys.shape[2]), -torch.inf)
        state = None
        if shape.slow is not None:
            dim = shape.key_rounding.dim
            slow = dim - 2 * (shape.slow.planes - shape.slow.slow_planes)
            state = tokens.salience.new_zeros(batch, heads, dim + 1, slow + 1)
        return cls(keys, values, salience, state, tokens.index.new_zeros(batch))

    @classmethod
    def within_window(cls, shape: BlockShape, tokens: "NewTokens") -> "Held":
        """Make the state after tokens that begin a sequence, hold no padding, and are all in the window."""
        length = tokens.keys.shape[2]
        empty = cls.empty(shape, tokens)
        columns = slice(shape.places, shape.places + length)
        empty.keys[:, :, columns] = tokens.keys
        empty.values[:, :, columns] = tokens.values
        empty.salience[:, columns] = tokens.salience
        return empty._replace(seen=empty.seen + length)

    def rows(self, which: torch.Tensor) -> "Held":
        """Copies of some rows, in that order."""
        return self.changed(lambda t: t.index_select(0, which.to(t.device)))

    def copied(self) -> "Held":
        """A copy of the state that shares no memory with it."""
        return self.changed(torch.Tensor.clone)

    def changed(self, change: Callable[..., torch.Tensor], *others: "Held") -> "Held":
        """Apply a function to each tensor there is, with those of `others` in the same place."""
        return Held(*(None if each[0] is None else change(*each) for each in zip(self, *others, strict=True)))


class NewTokens(NamedTuple):
    """Tokens in the order of their sequence, between which padding may stand.

    keys, values (B, K, T, P) or their rows of bytes (B, K, T, W). salience (B, T) in float32 or wider. index (B, T):
    number in the sequence, -1 at padding.
    """

    keys: torch.Tensor
    values: torch.Tensor
    salience: torch.Tensor
    index: torch.Tensor


class State(NamedTuple):
    """A state as queries read it; every tensor is (..., K, .) over key/value heads.

    log_count (..., K). empty (..., K) bool. value_mean (..., K, P). key_mean (..., K, N). covariance (..., K, P, N).
    """

    log_count: torch.Tensor
    empty: torch.Tensor
    value_mean: torch.Tensor
    key_mean: torch.Tensor
    covariance: torch.Tensor

    @classmethod
    def of(cls, sums: torch.Tensor) -> "State":
        """The means and covariance in sums (..., K, P + 1, N + 1)."""
        count = sums[..., -1, 0]
        mean = sums / count.clamp(min=1)[..., None, None]
        value_mean = mean[..., :-1, 0]
        key_mean = mean[..., -1, 1:]
        covariance = mean[..., :-1, 1:] - value_mean[..., None] * key_mean[..., None, :]
        # below 1/2 is none: a count is a sum of ones in floating point
        return cls(count.clamp(min=1).log(), count < 0.5, value_mean, key_mean, covariance)


def decoded(
    shape: BlockShape, keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype, rotated: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (..., P) of rows that are held; see `Rounding.decode`."""
    return shape.key_rounding.decode(keys, dtype, rotated), shape.value_rounding.decode(values, dtype, rotated)


def open_block(held: Held, shape: BlockShape) -> Held:
    """Open a new block in rows whose window is full: its first block leaves, and the others move up."""
    S, E = shape.places, shape.block
    candidates = S + E
    salience = held.salience[:, :candidates]
    # stable: of tokens as salient as one another the earlier stays, as in naive.py
    order = salience.sort(dim=1, descending=True, stable=True).indices[:, :S]
    keys, values = (gather_columns(t, order) for t in held[:2])
    state = held.state
    if state is not None:
        # places may be empty, but a block that leaves is full
        there = F.pad(salience[:, :S] > -torch.inf, (0, E), value=True)
        lost = there.scatter(1, order, False)
        rows = (t[:, :, :candidates] for t in held[:2])
        left = decoded(shape, *rows, state.dtype)
        state = state + outer_products(*left, lost, shape.slow)
    room = (0, 0, 0, E)
    return Held(
        torch.cat([keys, F.pad(held.keys[:, :, candidates:], room)], dim=2),
        torch.cat([values, F.pad(held.values[:, :, candidates:], room)], dim=2),
        torch.cat([salience.gather(1, order), F.pad(held.salience[:, candidates:], (0, E), value=-torch.inf)], dim=1),
        state,
        held.seen,
    )


def open_blocks(held: Held, shape: BlockShape, next_index: torch.Tensor) -> Held:
    """Open a block in the rows whose next token (B,) begins one while their window is full."""
    opens = (next_index % shape.block == 0) & (next_index >= shape.window)
    which = marked_rows(opens)
    if which is not None:
        if len(which) == 0:
            return held
        opened = open_block(held.rows(which), shape)
        return held.changed(lambda old, new: old.index_copy(0, which, new), opened)

    def chosen(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return torch.where(opens.view(-1, *[1] * (old.ndim - 1)), new, old)

    return held.changed(chosen, open_block(held, shape))


def advance(held: Held, new: NewTokens, shape: BlockShape) -> Held:
    """Compute the state after these tokens.

    The block of the last token is open afterwards, even if it is full: what follows it opens the next.
    """
    S, E, n = shape.places, shape.block, shape.whole_blocks
    seen = held.seen + (new.index >= 0).sum(1)
    first = (((held.seen - 1) // E - n).clamp(min=0) * E)[:, None]  # token in the first column of the window
    begin = (((seen - 1) // E - n).clamp(min=0) * E)[:, None]  # the same afterwards
    window = torch.arange(shape.window, device=seen.device) + first
    index = torch.where(window < held.seen[:, None], window, -1)
    places = index.new_full((index.shape[0], S), -1)
    index = torch.cat([places, index, new.index], dim=1)
    keys, values = (torch.cat(pair, dim=2) for pair in zip(held[:2], new[:2], strict=True))
    salience = torch.cat([held.salience, new.salience], dim=1)

    left = (index >= 0) & (index < begin)
    left[:, :S] = held.salience[:, :S] > -torch.inf
    competing = salience.masked_fill(~left, -torch.inf)
    order = competing.sort(dim=1, descending=True, stable=True).indices[:, :S]
    state = held.state
    if state is not None:
        vectors = decoded(shape, keys, values, state.dtype)
        state = state + outer_products(*vectors, left.scatter(1, order, False), shape.slow)

    stays = index >= begin
    stays[:, :S] = False
    column = torch.where(stays, index - begin, shape.window)
    source = torch.arange(index.shape[1], device=index.device).expand_as(index)
    of_window = index.new_zeros(index.shape[0], shape.window + 1).scatter(1, column, source)[:, :-1]
    filled = torch.arange(shape.window, device=seen.device) < seen[:, None] - begin
    columns = torch.cat([order, of_window], dim=1)
    of_window_salience = salience.gather(1, of_window).masked_fill(~filled, -torch.inf)
    return Held(
        gather_columns(keys, columns),
        gather_columns(values, columns),
        torch.cat([competing.gather(1, order), of_window_salience], dim=1),
        state,
        seen,
    )


def outer_products(keys: torch.Tensor, values: torch.Tensor, which: torch.Tensor, slow: SlowDims) -> torch.Tensor:
    """sum_j [v_j; 1] [1; k'_j]^T (..., K, P + 1, N + 1) over the tokens (..., K, T, P) that `which` (..., T) marks."""
    wide = torch.promote_types(keys.dtype, torch.float32)
    weight = which.to(wide)[..., None, :, None]
    x = F.pad(values.to(wide), (0, 1), value=1.0) * weight
    y = F.pad(slow.take(keys.to(wide)), (1, 0), value=1.0)
    with full_precision(x):  # counts beyond 256 have no place in bfloat16
        return x.mT @ y


def gather_columns(t: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Gather keys or values (B, K, T, P) at columns (B, ...), as (B, K, ..., P)."""
    flat = columns.flatten(1)[:, None, :, None].expand(-1, t.shape[1], -1, t.shape[-1])
    return t.gather(2, flat).unflatten(2, columns.shape[1:])


def salient_before(
    salience: torch.Tensor, places: int, block: int, blocks: int, first_column: torch.Tensor | None = None
) -> torch.Tensor:
    """The columns that hold a place (B, 1 + blocks, S), -1 where none does: at first, and after each block has left.

    A token that loses its place never gets one again. So the tokens that hold a place are the most salient of all that
    left, and after two stretches of text they are the most salient of those that hold one after either: about
    log2(blocks) rounds for all blocks at once.

    Args:
        salience: (B, S + blocks * E) of the holders at first and of the tokens that leave, block by block; -inf where
            there is no token.
        first_column: (B, 1 + blocks), in packed rows: the first column of the sequence that each block belongs to.
    """
    batch = salience.shape[0]
    columns = torch.arange(salience.shape[1], device=salience.device)
    width = max(places, block)
    initial = F.pad(columns[:places], (width - places, 0), value=-1).expand(batch, 1, -1)
    leaving = F.pad(columns[places:].view(blocks, block), (width - block, 0), value=-1).expand(batch, -1, -1)
    best = torch.cat([initial, leaving], dim=1)

    def most_salient(candidates: torch.Tensor) -> torch.Tensor:
        there = candidates >= 0
        if first_column is not None:
            there = there & (candidates >= first_column[..., None])
        score = salience.gather(1, candidates.clamp(min=0).flatten(1)).view(candidates.shape)
        score = score.masked_fill(~there, -torch.inf)
        score, order = score.sort(dim=-1, descending=True, stable=True)
        return candidates.gather(-1, order[..., :places]).masked_fill(score[..., :places] == -torch.inf, -1)

    best = most_salient(best)
    reach = 1
    while reach <= blocks:
        earlier = F.pad(best[:, :-reach], (0, 0, reach, 0), value=-1)
        best = most_salient(torch.cat([earlier, best], dim=-1))
        reach = 2 * reach
    return best
