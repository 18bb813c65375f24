"""Tables that make each tensor of one format out of rows of another format's tensors.

A target tensor is a sequence of parts, one below the other: rows of a source, some repeated or scaled, or a constant.
A table from targets to their parts accounts for every tensor on both sides, and is carried out block by block.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from ..io.reader import BLOCK_BYTES, Checkpoint, TensorInfo
from ..io.rules import Rule


@dataclass(frozen=True)
class Part:
    """Rows start..stop of a source, every block of `block` rows written `times` times."""

    source: str
    start: int = 0
    stop: int | None = None
    block: int = 1
    times: int = 1
    scale: float = 1.0
    extra_columns: int = 0
    """Number of zero columns added on the right."""

    def rows(self, tensors: Mapping[str, TensorInfo]) -> int:
        """Number of rows of the target that it fills."""
        stop = self.stop
        if self.stop is None:
            stop = tensors[self.source].shape[0]
        return (stop - self.start) * self.times

    def blocks(self, checkpoint: Checkpoint, shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
        """The rows, block by block."""
        if self.times == 1:
            for rows in checkpoint.blocks((self.source, self.start, self.stop)):
                yield self._finished(rows)
            return
        stop = self.stop
        if self.stop is None:
            stop = checkpoint.tensors[self.source].shape[0]
        for first in range(self.start, stop, self.block):
            rows = self._finished(checkpoint.read(self.source, first, first + self.block))
            for _ in range(self.times):
                yield rows

    def _finished(self, rows: torch.Tensor) -> torch.Tensor:
        if self.scale != 1:
            rows = rows.float() * self.scale
        if not self.extra_columns:
            return rows
        return torch.nn.functional.pad(rows, (0, self.extra_columns))

    @property
    def changes(self) -> bool:
        """True if the rows differ from the source's own."""
        return self.times > 1 or self.scale != 1 or bool(self.extra_columns)


@dataclass(frozen=True)
class Fill:
    """`count` rows that hold a constant."""

    count: int
    value: float = 0.0

    def rows(self, tensors: Mapping[str, TensorInfo]) -> int:
        """Number of rows of the target that it fills."""
        return self.count

    def blocks(self, checkpoint: Checkpoint, shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
        """The rows, block by block."""
        step = max(1, BLOCK_BYTES // (4 * math.prod(shape[1:])))
        for first in range(0, self.count, step):
            yield torch.full((min(step, self.count - first), *shape[1:]), self.value)

    changes = True


Parts = tuple[Part | Fill, ...]
Table = dict[str, Parts]


def moved(source: str) -> Parts:
    """The parts of a tensor that only changes its name."""
    return (Part(source),)


def make_rules(
    table: Table,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, TensorInfo],
    dropped: Mapping[str, str],
    what: str,
    keeps_types: bool = False,
) -> list[Rule]:
    """A rule for every target tensor, with every source tensor accounted for.

    Args:
        shapes: shapes of the targets. tensors: the sources. dropped: sources left out, and why.
        what: name of the source's format, for errors.
        keeps_types: whether a tensor is written in the type of its source.
    """
    faults = [f"no place for {name}" for name in sorted(shapes.keys() - table.keys())]
    faults += [f"{name} has no place in the model" for name in sorted(table.keys() - shapes.keys())]
    if faults:
        raise ValueError(f"The configuration asks for more than a {what} has: {'; '.join(faults[:3])}.")
    used = {part.source for parts in table.values() for part in parts if isinstance(part, Part)}
    faults += [f"missing tensor {name}" for name in sorted(used - tensors.keys())]
    faults += [f"unexpected tensor {name}" for name in tensors if name not in used and name not in dropped]
    for name in sorted(used & tensors.keys()):
        if not tensors[name].dtype.is_floating_point or tensors[name].dtype.itemsize < 2:
            faults.append(f"{name} has type {tensors[name].dtype}, so the weights are quantised")
    for target, parts in table.items():
        if used <= tensors.keys():
            faults += _misfits(target, parts, shapes[target], tensors)
    if faults:
        text = "; ".join(faults[:5])
        if len(faults) > 5:
            text += f" (and {len(faults) - 5} more)"
        raise ValueError(f"The checkpoint is not a {what} as its configuration says: {text}.")
    rules = [_rule(target, shapes[target], parts) for target, parts in table.items()]
    if not keeps_types:
        return rules
    types = [[tensors[name].dtype for name in rule.sources] for rule in rules]
    return [
        dataclasses.replace(rule, dtype=functools.reduce(torch.promote_types, found) if found else None)
        for rule, found in zip(rules, types, strict=True)
    ]


def _misfits(target: str, parts: Parts, shape: tuple[int, ...], tensors: Mapping[str, TensorInfo]) -> list[str]:
    faults = []
    if sum(part.rows(tensors) for part in parts) != shape[0]:
        sources = ", ".join(f"{p.source} {tensors[p.source].shape}" for p in parts if isinstance(p, Part))
        faults.append(f"{sources} cannot make {target} {shape}")
    for part in parts:
        if isinstance(part, Part):
            rest = list(tensors[part.source].shape[1:])
            if part.extra_columns:
                rest[-1] += part.extra_columns
            stop = part.stop or 0
            if tuple(rest) != shape[1:] or stop > tensors[part.source].shape[0]:
                faults.append(f"{part.source} has shape {tensors[part.source].shape}, for {target} {shape}")
    return faults


def _rule(target: str, shape: tuple[int, ...], parts: Parts) -> Rule:
    sources = tuple(dict.fromkeys(part.source for part in parts if isinstance(part, Part)))
    kind = "moved"
    if not sources:
        kind = "initialised"
    elif len(parts) > 1 or parts[0].changes:
        kind = "derived"

    def blocks(checkpoint: Checkpoint) -> Iterator[torch.Tensor]:
        for part in parts:
            yield from part.blocks(checkpoint, shape)

    return Rule(target, shape, kind, sources, blocks)
