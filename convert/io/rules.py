"""Rules by which tensors are made, in conversion, import and export: moved, derived or initialised.

Nothing is read here; a `Rule` says how its tensor is made, block of rows after block of rows, when it is written. Most
rules have a `Source`: rows of other tensors, one below the other, some repeated or scaled, or constants.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from .reader import BLOCK_BYTES, Checkpoint, TensorInfo

Kind = Literal["moved", "scaled", "derived", "initialised"]


@dataclass(frozen=True)
class Part:
    """Rows `start` to `stop` of a source tensor, every block of `block` rows written `times` times.

    With an order, a block is as many rows as that names.
    """

    source: str
    start: int = 0
    stop: int | None = None
    block: int = 1
    times: int = 1
    scale: float = 1.0
    extra_columns: int = 0
    """Number of zero columns added on the right."""
    order: tuple[int, ...] | None = None
    """Order in which the rows of each head are read; None if they keep the source's."""

    def rows(self, tensors: Mapping[str, TensorInfo]) -> int:
        """Number of rows that the part makes, each as wide as the source's."""
        return (self._stop(tensors) - self.start) * self.times

    def blocks(self, checkpoint: Checkpoint) -> Iterator[torch.Tensor]:
        """Yield the rows in blocks; each may reuse the memory of the block before it."""
        if self.times == 1 and self.order is None:
            for rows in checkpoint.blocks((self.source, self.start, self.stop)):
                yield self._finished(rows)
            return
        step = self.block
        if self.order is not None:
            step = len(self.order)
        stop = self._stop(checkpoint.tensors)
        assert (stop - self.start) % step == 0, f"{self.source}: {stop - self.start} rows in blocks of {step}"
        for first in range(self.start, stop, step):
            rows = checkpoint.read(self.source, first, first + step)
            if self.order is not None:
                rows = rows[list(self.order)]
            rows = self._finished(rows)
            for _ in range(self.times):
                yield rows

    def _stop(self, tensors: Mapping[str, TensorInfo]) -> int:
        if self.stop is None:
            return tensors[self.source].shape[0]
        return self.stop

    def _finished(self, rows: torch.Tensor) -> torch.Tensor:
        if self.scale != 1:
            rows = rows.to(torch.promote_types(rows.dtype, torch.float32)) * self.scale
        if not self.extra_columns:
            return rows
        return torch.nn.functional.pad(rows, (0, self.extra_columns))

    @property
    def changes(self) -> bool:
        """True if rows are repeated, scaled or widened."""
        return self.times > 1 or self.scale != 1 or bool(self.extra_columns)

    @property
    def is_plain(self) -> bool:
        """True if the rows are the source's own, in its order."""
        return not self.changes and self.order is None


@dataclass(frozen=True)
class Fill:
    """Rows that hold a constant, `count` of them."""

    count: int
    value: float = 0.0

    changes = True
    is_plain = False

    def rows(self, tensors: Mapping[str, TensorInfo]) -> int:
        """Number of rows of the target that it fills."""
        return self.count


Parts = tuple[Part | Fill, ...]


@dataclass(frozen=True)
class Source:
    """Parts of one or more source tensors, one below the other, that make a tensor of this shape."""

    parts: Parts
    shape: tuple[int, ...]
    scale: Callable[[Checkpoint], torch.Tensor] | None = None
    """Returns a factor for each row."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the source tensors."""
        return tuple(dict.fromkeys(part.source for part in self.parts if isinstance(part, Part)))

    @property
    def kind(self) -> Kind:
        """Kind of the tensor: whole values that are moved or scaled, values that differ, or constants alone."""
        if not self.names:
            return "initialised"
        if any(part.changes for part in self.parts):
            return "derived"
        return "moved" if self.scale is None else "scaled"

    def in_order(self, order: tuple[int, ...] | None) -> "Source":
        """Return this source with the rows of each head read in another order."""
        assert all(isinstance(part, Part) for part in self.parts), "constants have no order"
        parts = tuple(dataclasses.replace(part, order=order) for part in self.parts)
        return dataclasses.replace(self, parts=parts)

    def blocks(self, checkpoint: Checkpoint) -> Iterator[torch.Tensor]:
        """Yield the rows in blocks; each may reuse the memory of the block before it."""
        blocks = self._unscaled(checkpoint)
        if self.scale is None:
            yield from blocks
            return
        factors = self.scale(checkpoint)
        for rows in blocks:
            of_rows, factors = factors[: len(rows)], factors[len(rows) :]
            yield rows * of_rows.to(rows.dtype).view(-1, *[1] * (rows.ndim - 1))

    def _unscaled(self, checkpoint: Checkpoint) -> Iterator[torch.Tensor]:
        for plain, parts in itertools.groupby(self.parts, lambda part: part.is_plain):
            if plain:  # one buffer serves them all
                yield from checkpoint.blocks(*((part.source, part.start, part.stop) for part in parts))
                continue
            for part in parts:
                if isinstance(part, Part):
                    yield from part.blocks(checkpoint)
                else:
                    yield from self._constant(part)

    def read(self, checkpoint: Checkpoint) -> torch.Tensor:
        """Read all of the rows at once."""
        if self.scale is None and self.parts[0].is_plain and len(self.parts) == 1:
            (part,) = self.parts
            return checkpoint.read(part.source, part.start, part.stop).view(self.shape)
        return torch.cat([block.clone() for block in self.blocks(checkpoint)]).view(self.shape)

    def _constant(self, part: Fill) -> Iterator[torch.Tensor]:
        columns = self.shape[1:]
        return in_blocks(part.count, lambda a, b: torch.full((b - a, *columns), part.value), 4 * math.prod(columns))


@dataclass(frozen=True)
class Rule:
    """Rule by which one tensor of the written checkpoint is made; `blocks` yields its rows in order."""

    target: str
    shape: tuple[int, ...]
    kind: Kind
    sources: tuple[str, ...]
    blocks: Callable[[Checkpoint], Iterator[torch.Tensor]]
    dtype: torch.dtype | None = None
    """Type to write it in, if it is not that of the whole checkpoint."""

    def nbytes(self, dtype: torch.dtype) -> int:
        """Size on disk in a checkpoint of this type."""
        return math.prod(self.shape) * (self.dtype or dtype).itemsize


def rule_of(target: str, source: Source) -> Rule:
    """The rule of a tensor that is made of rows of others."""
    return Rule(target, source.shape, source.kind, source.names, source.blocks)


def in_blocks(rows: int, make: Callable[[int, int], torch.Tensor], row_bytes: int) -> Iterator[torch.Tensor]:
    """`make(start, stop)` over all rows, a bounded number of bytes at a time."""
    step = max(1, BLOCK_BYTES // max(row_bytes, 1))
    for start in range(0, rows, step):
        yield make(start, min(start + step, rows))
