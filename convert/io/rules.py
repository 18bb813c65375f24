"""Rules by which tensors are made: moved, derived or initialised.

Nothing is read here; a `Rule` says how its tensor is made, block of rows after block of rows, when it is written.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from .reader import BLOCK_BYTES, Checkpoint


@dataclass(frozen=True)
class Source:
    """A range of rows of one of the teacher's tensors."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]
    order: tuple[int, ...] | None = None
    """Order in which the rows of each head are read; None if they keep the teacher's."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the teacher's tensors."""
        return (self.name,)

    def blocks(self, checkpoint: Checkpoint) -> Iterator[torch.Tensor]:
        """Yield the rows in blocks; each reuses the memory of the block before it."""
        if self.order is None:
            yield from checkpoint.blocks((self.name, self.start, self.stop))
            return
        for first in range(self.start, self.stop, len(self.order)):
            yield checkpoint.read(self.name, first, first + len(self.order))[list(self.order)]

    def read(self, checkpoint: Checkpoint) -> torch.Tensor:
        """Read all of the rows at once."""
        if self.order is None:
            return checkpoint.read(self.name, self.start, self.stop).view(self.shape)
        return torch.cat(list(self.blocks(checkpoint)))


@dataclass(frozen=True)
class Stack:
    """Rows of several of the teacher's tensors, one below the other."""

    parts: tuple[Source, ...]
    shape: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the teacher's tensors, one for each part."""
        return tuple(part.name for part in self.parts)

    def blocks(self, checkpoint: Checkpoint) -> Iterator[torch.Tensor]:
        """Yield the rows in blocks; each reuses the memory of the block before it."""
        return checkpoint.blocks(*((part.name, part.start, part.stop) for part in self.parts))


@dataclass(frozen=True)
class Rule:
    """Rule by which one tensor of the hybrid is made; `blocks` yields its rows in order."""

    target: str
    shape: tuple[int, ...]
    kind: Literal["moved", "derived", "initialised"]
    sources: tuple[str, ...]
    blocks: Callable[[Checkpoint], Iterator[torch.Tensor]]
    dtype: torch.dtype | None = None
    """Type to write it in, if it is not that of the whole checkpoint."""

    def nbytes(self, dtype: torch.dtype) -> int:
        """Size on disk in a checkpoint of this type."""
        return math.prod(self.shape) * (self.dtype or dtype).itemsize


def moved(target: str, source: Source | Stack) -> Rule:
    """The rule of a tensor that keeps its values."""
    return Rule(target, source.shape, "moved", source.names, source.blocks)


def in_blocks(rows: int, make: Callable[[int, int], torch.Tensor], row_bytes: int) -> Iterator[torch.Tensor]:
    """`make(start, stop)` over all rows, a bounded number of bytes at a time."""
    step = max(1, BLOCK_BYTES // max(row_bytes, 1))
    for start in range(0, rows, step):
        yield make(start, min(start + step, rows))
