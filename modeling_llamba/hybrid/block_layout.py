"""Layout of the tokens of one pass in blocks of their sequences, and the columns that each block attends to.

The columns of a row are S places, `context` tokens before the first block, and slots of whole blocks: token i of a
sequence lies in slot i % E of its block. Where all rows are alike the tokens are a slice of the slots. Otherwise
(padding, packing, rows that have seen different numbers of tokens) they are gathered into the slots and back. So
everything behind this file computes with blocks alone.

Shapes: B batch, L length, H' heads with a window, K key/value heads, R heads per key/value head, P head dim, N state,
E block, n whole blocks, C columns of the window, S places, T columns, M mixed blocks, J groups of blocks.
"""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from ..kernels.softmax import hiding
from ..model.sequences import sequence_starts
from .eviction import BlockShape, Held, NewTokens, gather_columns, outer_products, salient_before

GROUP = 64
"""Queries that one fused attention serves, at least a block; with 32 and 128 a CPU takes longer."""


class Blocks(NamedTuple):
    """Sizes of a layout, without a tensor.

    first: the first block that is mixed; those before it attend causally. blocks: the number of all blocks.
    context: columns between places and slots. before: how many of them, the last ones, hold tokens, and offset: slots
    before the first new token, where rows are alike. length: new tokens.
    """

    shape: BlockShape
    first: int
    blocks: int
    context: int
    before: int
    offset: int
    length: int

    @classmethod
    def behind_window(cls, shape: BlockShape, length: int) -> "Blocks":
        """The blocks after the first n + 1, for so many new tokens that begin their sequences."""
        first = shape.whole_blocks + 1
        return cls(shape, first, first + _in_groups(length - shape.window, shape.block), 0, 0, 0, length)

    @classmethod
    def continued(cls, shape: BlockShape, length: int, start: int) -> "Blocks":
        """All blocks of so many new tokens, whose first has the number `start` in every row."""
        E, n = shape.block, shape.whole_blocks
        offset = start % E
        return cls(shape, 0, _in_groups(offset + length, E), n * E, min(start // E, n) * E, offset, length)

    @property
    def mixed(self) -> int:
        """Number of blocks that are mixed."""
        return self.blocks - self.first

    @property
    def leaving(self) -> int:
        """Number of blocks that leave the window while the blocks of the layout open, one each, the first excepted."""
        return self.blocks - max(self.first, 1)

    @property
    def columns(self) -> int:
        """Number of columns of the layout: places, context and slots."""
        return self.shape.places + self.context + self.blocks * self.shape.block

    @property
    def first_column(self) -> int:
        """Column of the first slot that is mixed."""
        return self.shape.places + self.context + self.first * self.shape.block

    @property
    def new_tokens(self) -> int:
        """Number of new tokens in the blocks that are mixed, padding included."""
        return self.length - self.first * self.shape.block

    @property
    def last(self) -> int:
        """The block of the last new token, where rows are alike."""
        return (self.offset + self.length - 1) // self.shape.block

    @property
    def window_columns(self) -> slice:
        """The columns of the window after the last new token, where rows are alike."""
        first = self.last - self.shape.whole_blocks  # its first block, unless that holds no token
        start = self.shape.places + self.context
        begin = start + max(first, -(self.before // self.shape.block)) * self.shape.block
        return slice(begin, start + self.offset + self.length)

    def in_columns(self, held: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        """Keys or values of all columns (B, K, T, P), where rows are alike, from those held (B, K, S + C, P) and the
        new (B, K, L, P); 0 where there is none."""
        S = self.shape.places
        right = self.blocks * self.shape.block - self.offset - self.length
        if held is None:
            return F.pad(new, (0, 0, S, right))
        context = held[:, :, S : S + self.before + self.offset]
        context = F.pad(context, (0, 0, self.context - self.before, 0))
        return torch.cat([held[:, :, :S], context, F.pad(new, (0, 0, 0, right))], dim=2)

    def held_after(
        self,
        held: Held | None,
        new: NewTokens,
        salience: torch.Tensor,
        places: torch.Tensor,
        state: torch.Tensor | None,
    ) -> Held:
        """Compute what is held after the last new token, where rows are alike.

        Args:
            salience: (B, T), of all columns. places: (B, S), the columns that hold a place while the block of the last
                token is open, the most salient first, -1 in empty places. state: the state while it is open.
        """
        window = self.window_columns
        room = self.shape.window - (window.stop - window.start)
        past = (None, None) if held is None else held[:2]
        rows = [self.in_columns(*pair) for pair in zip(past, new[:2], strict=True)]
        filled = places >= 0
        places = places.clamp(min=0)
        of_places = salience.gather(1, places).masked_fill(~filled, -torch.inf)
        seen = new.index.new_zeros(len(salience)) if held is None else held.seen
        return Held(
            *(F.pad(torch.cat([gather_columns(t, places), t[:, :, window]], dim=2), (0, 0, 0, room)) for t in rows),
            F.pad(torch.cat([of_places, salience[:, window]], dim=1), (0, room), value=-torch.inf),
            state,
            seen + self.length,
        )


class Layout(NamedTuple):
    """A pass in blocks.

    present (B, T) bool: which columns hold a token. held_columns: columns of what is held.
    source (B, T): where a column is found in [held columns, new tokens], -1 where it is empty. slot (B, L): slot of
    each new token. Both are None where rows are alike.
    sequence (B, blocks): in packed rows, the first column of each block's sequence.
    """

    sizes: Blocks
    present: torch.Tensor
    held_columns: int = 0
    source: torch.Tensor | None = None
    slot: torch.Tensor | None = None
    sequence: torch.Tensor | None = None

    @classmethod
    def behind_window(cls, shape: BlockShape, key: torch.Tensor) -> "Layout":
        """The blocks after the first n + 1, for new tokens with keys (B, K, L, P) that begin their sequences."""
        sizes = Blocks.behind_window(shape, key.shape[2])
        present = torch.ones(key.shape[0], sizes.columns, dtype=torch.bool, device=key.device)
        present[:, : sizes.shape.places] = False
        return cls(sizes, present)

    @classmethod
    def continued(cls, shape: BlockShape, held: Held, key: torch.Tensor, start: int) -> "Layout":
        """All blocks of new tokens, whose first has the number `start` in every row."""
        sizes = Blocks.continued(shape, key.shape[2], start)
        places = shape.places
        filled = held.salience[:, :places] > -torch.inf
        present = torch.arange(sizes.columns - places, device=filled.device) >= sizes.context - sizes.before
        return cls(sizes, torch.cat([filled, present.expand(len(filled), -1)], dim=1))

    @classmethod
    def gathered(cls, shape: BlockShape, held: Held, index: torch.Tensor) -> "Layout":
        """All blocks of new tokens with these numbers (B, L), -1 at padding."""
        E, n, S = shape.block, shape.whole_blocks, shape.places
        blocks = _in_groups(index.shape[1] + E - 1, E)
        block = held.seen // E
        slot = torch.where(index >= 0, index - (block * E)[:, None], -1)
        token = torch.arange(-n * E, E, device=index.device) + (block * E)[:, None]
        column = S + token - ((block - n).clamp(min=0) * E)[:, None]
        tokens = torch.where((token >= 0) & (token < held.seen[:, None]), column, -1)
        places = torch.arange(S, device=index.device)
        places = torch.where(held.salience[:, :S] > -torch.inf, places, -1)
        empty = tokens.new_full((index.shape[0], (blocks - 1) * E), -1)
        return cls._from_source(shape, blocks, torch.cat([places, tokens, empty], dim=1), slot, held.keys.shape[2])

    @classmethod
    def packed(cls, shape: BlockShape, index: torch.Tensor, seq_idx: torch.Tensor) -> "Layout":
        """All blocks of packed sequences seq_idx (B, L), each of which begins a block; index as in `gathered`."""
        E = shape.block
        real = index >= 0
        starts = sequence_starts(seq_idx)
        starts[:, 0] = True
        last = real & (F.pad(starts[:, 1:] | ~real[:, 1:], (0, 1), value=True))
        ends = torch.where(last, index // E + 1, 0).cumsum(1)  # blocks up to here
        earlier = ends - torch.where(last, index // E + 1, 0)
        slot = torch.where(real, earlier * E + index, -1)
        blocks = _in_groups(int(ends[:, -1].max()) * E, E)
        begins = torch.arange(blocks + 1, device=index.device).expand(index.shape[0], -1) * E
        of_block = torch.where(real, slot // E, blocks)
        begins = begins.scatter(1, of_block, torch.where(real, earlier * E, 0))[:, :-1]
        columns = shape.places + (shape.whole_blocks + blocks) * E
        layout = cls._from_source(shape, blocks, slot.new_full((index.shape[0], columns), -1), slot, 0)
        return layout._replace(sequence=begins + shape.places + layout.sizes.context)

    @classmethod
    def _from_source(cls, shape: BlockShape, blocks: int, source: torch.Tensor, slot: torch.Tensor, held: int):
        context = shape.whole_blocks * shape.block
        columns = source.shape[1]
        target = torch.where(slot >= 0, slot + shape.places + context, columns)
        new = torch.arange(held, held + slot.shape[1], device=slot.device).expand_as(slot)
        source = F.pad(source, (0, 1)).scatter(1, target, new)[:, :-1]
        slots = slot.clamp(min=0)
        sizes = Blocks(shape, 0, blocks, context, 0, 0, slot.shape[1])
        return cls(sizes, source >= 0, held, source, slots)

    @property
    def shape(self) -> BlockShape:
        """The shape of the layer."""
        return self.sizes.shape

    @property
    def group(self) -> int:
        """Blocks of a group."""
        return max(GROUP // self.shape.block, 1)

    # Tokens to columns and back

    def columns(self, held: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        """Keys or values of all columns (B, K, T, P), from those held (B, K, S + C, P) and the new (B, K, L, P)."""
        if self.source is None:
            return self.sizes.in_columns(held, new)
        if held is not None:
            new = torch.cat([held, new], dim=2)
        return gather_columns(new, self.source.clamp(min=0))

    def salience(self, held: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        """Salience of all columns (B, T), -inf in those without a token."""
        if held is not None:
            held = held[:, None, :, None]
        return self.columns(held, new[:, None, :, None])[:, 0, :, 0].masked_fill(~self.present, -torch.inf)

    def queries(self, query: torch.Tensor, groups: tuple[int, int]) -> torch.Tensor:
        """Select from queries (B, H', L, P) those of mixed blocks, in groups (B, J, K, M/J, R, E, P)."""
        if self.source is not None:
            first_slot = self.shape.places + self.sizes.context
            query = gather_columns(query, (self.source[:, first_slot:] - self.held_columns).clamp(min=0))
        else:
            right = self.sizes.mixed * self.shape.block - self.sizes.offset - self.sizes.new_tokens
            query = F.pad(query[:, :, self.sizes.length - self.sizes.new_tokens :], (0, 0, self.sizes.offset, right))
        return self.in_groups(query.transpose(1, 2), groups)

    def to_tokens(self, t: torch.Tensor) -> torch.Tensor:
        """Select from slots (B, slots, ...) those of the new tokens, (B, L', ...)."""
        if self.slot is None:
            return t[:, self.sizes.offset : self.sizes.offset + self.sizes.new_tokens]
        slot = self.slot.view(*self.slot.shape, *[1] * (t.ndim - 2))
        return t.gather(1, slot.expand(-1, -1, *t.shape[2:]))

    def in_groups(self, t: torch.Tensor, groups: tuple[int, int]) -> torch.Tensor:
        """Bring values of slots (B, slots, H', ...) into the order of groups, (B, J, K, M/J, R, E, ...)."""
        sizes = (t.shape[0], -1, self.group, self.shape.block, *groups)
        return t.reshape(*sizes, *t.shape[3:]).permute(0, 1, 4, 2, 5, 3, *range(6, 3 + t.ndim))

    def in_order(self, t: torch.Tensor) -> torch.Tensor:
        """Bring values of groups (B, J, K, M/J, R, E, ...) into the order of slots, (B, slots, H', ...)."""
        return t.permute(0, 1, 3, 5, 2, 4, *range(6, t.ndim)).flatten(4, 5).flatten(1, 3)

    def by_group(self, t: torch.Tensor) -> torch.Tensor:
        """Regroup values of mixed blocks (B, M, K, ...) to (B, J, K, M/J, ...)."""
        return t.unflatten(1, (-1, self.group)).transpose(2, 3)

    # Which columns a block attends to

    def select(self, salience: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns that hold a place while each mixed block is open (B, M, S), -1 in empty places; and `until` (B, T),
        the first block to which a column is no longer visible, 0 for a column that is visible to none."""
        S, E = self.shape.places, self.shape.block
        competing = salience[:, : S + self.sizes.leaving * E]
        sequence = self.sequence
        if sequence is not None:
            sequence = sequence[:, -self.sizes.leaving - 1 :]
        holders = salient_before(competing, S, E, self.sizes.leaving, sequence)
        until = self._until_it_leaves()
        lost = torch.arange(self.sizes.leaving + 1, device=until.device) + self.sizes.blocks - self.sizes.leaving
        lost = lost[:, None].expand_as(holders).flatten(1)
        until = F.pad(until, (1, 0)).scatter_reduce(1, holders.flatten(1) + 1, lost, "amax")[:, 1:]
        return holders[:, -self.sizes.mixed :], until

    def block_of_query(self) -> torch.Tensor:
        """Number of the block of each slot that is mixed, (slots,)."""
        slots = torch.arange(self.sizes.mixed * self.shape.block, device=self.present.device)
        return slots // self.shape.block + self.sizes.first

    def column_of_query(self) -> torch.Tensor:
        """Column of each slot that is mixed, (slots,)."""
        first = self.sizes.first_column
        return torch.arange(first, first + self.sizes.mixed * self.shape.block, device=self.present.device)

    def columns_of_groups(self, t: torch.Tensor, holders: torch.Tensor) -> torch.Tensor:
        """Keys or values (B, K, T, P) that a group attends to, (B, J, K, S + n E + E M/J, P): the holders of
        places when its first block opens, then its window."""
        holders = holders[:, :: self.group].clamp(min=0)
        placed = gather_columns(t, holders).transpose(1, 2)
        window = self._windows(t, 2).permute(0, 2, 1, 4, 3)
        return torch.cat([placed, window], dim=3)

    def _windows(self, t: torch.Tensor, axis: int) -> torch.Tensor:
        """Columns of each group's window, in a new last dimension."""
        E, n = self.shape.block, self.shape.whole_blocks
        start = self.shape.places + self.sizes.context + (self.sizes.first - n) * E
        window = t.narrow(axis, start, t.shape[axis] - start)
        return window.unfold(axis, (n + self.group) * E, self.group * E)

    def bias(self, holders: torch.Tensor, until: torch.Tensor, dtype: torch.dtype, shared: int) -> torch.Tensor:
        """Make a bias: 0 where a query of a group attends to a column of `columns_of_groups`, else the least number,
        (B, J, E R M/J, S + n E + E M/J), the same for the R heads that share a key/value head."""
        E = self.shape.block
        rows = self.group * self.shape.block
        block = self.block_of_query().view(-1, rows)[..., None]  # (J, E M/J, 1)
        holders = holders[:, :: self.group]
        of_holders = F.pad(until, (1, 0)).gather(1, holders.flatten(1) + 1).view(holders.shape)
        visible = of_holders[:, :, None] > block
        windows = self._windows(until, 1)[:, :, None]
        number = torch.arange(windows.shape[-1], device=until.device)
        causal = number - self.shape.whole_blocks * E <= torch.arange(rows, device=until.device)[:, None]
        in_window = (windows > block) & causal
        if self.sequence is not None:
            sequence = self.sequence.view(until.shape[0], -1, self.group).repeat_interleave(E, dim=2)[..., None]
            visible = visible & (holders[:, :, None] >= sequence)
            column = self._windows(torch.arange(until.shape[1], device=until.device), 0)
            in_window = in_window & (column[None, :, None] >= sequence)
        hidden = ~torch.cat([visible, in_window], dim=-1)
        bias = hiding(hidden, dtype).unflatten(2, (self.group, 1, E))
        return bias.expand(-1, -1, -1, shared, -1, -1).flatten(2, 4)

    def states(self, held: Held, keys: torch.Tensor, values: torch.Tensor, holders: torch.Tensor) -> torch.Tensor:
        """The sums of the state while each mixed block is open, (B, M, K, P + 1, N + 1)."""
        S = self.shape.places
        E = self.shape.block
        slow = self.shape.slow
        left = slice(S, S + self.sizes.leaving * E)
        blocks = (t[:, :, left].unflatten(2, (self.sizes.leaving, E)).transpose(1, 2) for t in (keys, values))
        present = self.present[:, left].unflatten(1, (self.sizes.leaving, E))
        total = outer_products(*blocks, present, slow).cumsum(1)
        if self.sizes.leaving < self.sizes.mixed:  # nothing leaves while the first block is open
            total = F.pad(total, (0, 0, 0, 0, 0, 0, 1, 0))
        if self.sequence is not None:  # less what other sequences left, which blocks before this one's first did
            first = (self.sequence - S - self.sizes.context) // E  # block at which the sequence begins
            before = torch.minimum(
                first + self.shape.whole_blocks, torch.arange(self.sizes.blocks, device=first.device)
            )
            total = total - total.gather(1, before.view(*before.shape, 1, 1, 1).expand_as(total))
        if held is not None:
            placed = (t[:, :, :S] for t in (keys, values))
            total = total + (held.state + outer_products(*placed, self.present[:, :S], slow))[:, None]
        placed = (gather_columns(t, holders.clamp(min=0)).transpose(1, 2) for t in (keys, values))
        return total - outer_products(*placed, holders >= 0, slow)

    def without_sinks(self, until: torch.Tensor, salience: torch.Tensor) -> torch.Tensor:
        """`until` for queries that attend to sinks apart: as if sinks held no places."""
        return torch.where(salience == torch.inf, self._until_it_leaves(), until)

    def _until_it_leaves(self) -> torch.Tensor:
        """The first block in whose window a column (B, T) is no longer, 0 for places and columns without a token."""
        first_slot = self.shape.places + self.sizes.context
        number = torch.arange(self.present.shape[1], device=self.present.device)
        block = (number - first_slot).div(self.shape.block, rounding_mode="floor")
        in_window = self.present & (number >= self.shape.places)
        return torch.where(in_window, block + self.shape.whole_blocks + 1, 0)


def _in_groups(tokens: int, block: int) -> int:
    """Number of blocks for so many tokens, a multiple of those in a group."""
    group = max(GROUP // block, 1)
    return -(-tokens // (block * group)) * group
