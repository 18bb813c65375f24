"""Account for every tensor: which ones move, are derived, are initialised or are dropped.

First the teacher's names are translated to those of a hybrid that keeps every layer's attention ("canonical" names):
a pure renaming, apart from fused matrices, which are row slices. Then each replaced layer's canonical attention
tensors become its mixer's (`mapping`). Nothing is read here; a `Rule` says how its tensor is made, block of rows after
block of rows, when it is written.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from ..teachers.base import TeacherFamily
from .reader import BLOCK_BYTES, Checkpoint, TensorInfo


@dataclass(frozen=True)
class Source:
    """A range of rows of one of the teacher's tensors."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]

    @property
    def parts(self) -> tuple["Source", ...]:
        """Sources stacked along rows; a single source is its own stack."""
        return (self,)

    def read(self, checkpoint: Checkpoint) -> torch.Tensor:
        """Read all of the rows at once."""
        return checkpoint.read(self.name, self.start, self.stop).view(self.shape)


@dataclass(frozen=True)
class Stack:
    """Rows of several of the teacher's tensors, one below the other."""

    parts: tuple[Source, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Rule:
    """Rule by which one tensor of the hybrid is made; `blocks` yields its rows in order."""

    target: str
    shape: tuple[int, ...]
    kind: Literal["moved", "derived", "initialised"]
    sources: tuple[str, ...]
    blocks: Callable[[Checkpoint], Iterator[torch.Tensor]]
    dtype: torch.dtype | None = None
    """Type to write it in, where it is not that of the whole checkpoint."""

    def nbytes(self, dtype: torch.dtype) -> int:
        """Size on disk in a checkpoint of this type."""
        return math.prod(self.shape) * (self.dtype or dtype).itemsize


def expert_pieces(
    family: TeacherFamily, shapes: Mapping[str, tuple[int, ...]], num_layers: int
) -> dict[str, list[str]]:
    """Tensor of the hybrid -> the teacher's tensors that it consists of, where a family stacks experts."""
    return {
        target: [template.format(i=i, e=e) for e in range(shapes[target][0]) for template in templates]
        for stack, templates in family.stacked.items()
        for i in range(num_layers)
        if (target := stack.format(i=i)) in shapes
    }


def expand_templates(family: TeacherFamily, num_layers: int) -> dict[str, str | tuple[str, ...] | None]:
    """The family's table with every layer index filled in."""
    table = {}
    for template, target in family.tensors.items():
        for i in range(num_layers) if "{i}" in template else [None]:
            fill = {} if i is None else {"i": i}
            if isinstance(target, tuple):
                table[template.format(**fill)] = tuple(name.format(**fill) for name in target)
            else:
                table[template.format(**fill)] = None if target is None else target.format(**fill)
    return table


def canonical_sources(
    family: TeacherFamily,
    num_layers: int,
    teacher: Mapping[str, TensorInfo],
    attention_shapes: Mapping[str, tuple[int, ...]],
) -> tuple[dict[str, Source | Stack], dict[str, str]]:
    """Find each tensor of a hybrid that keeps all its attention in the teacher, and what is dropped.

    Args:
        attention_shapes: names and shapes of a hybrid that keeps all its attention; a name that is absent
            (a tied head, a bias the configuration does without) is not expected from the teacher.
    """
    table = expand_templates(family, num_layers)
    sources, dropped, faults = {}, {}, []
    pieces = expert_pieces(family, attention_shapes, num_layers)
    place_of = {name: target for target, names in pieces.items() for name in names}
    for name, info in teacher.items():
        if name.startswith(family.other_parts):
            dropped[name] = "not part of the text model"
            continue
        if name in place_of:
            (count, rows, *columns), target = attention_shapes[place_of[name]], place_of[name]
            shapes = {name: (rows * count // len(pieces[target]), *columns)}
            faults += _quantised(name, info) or _place(name, info, [name], shapes, sources)
            continue
        targets = table.get(name, ())
        if targets is None:
            dropped[name] = "not a weight: follows from the configuration"
            continue
        targets = (targets,) if isinstance(targets, str) else targets
        present = [target for target in targets if target in attention_shapes]
        if name == "lm_head.weight" and not present:
            dropped[name] = "tied to the embedding"
        elif not present:
            faults.append(f"unexpected tensor {name} {tuple(info.shape)}")
        else:
            faults += _quantised(name, info) or _place(name, info, present, attention_shapes, sources)
    mis_shaped = {fault.split()[0] for fault in faults}
    for target, names in pieces.items():
        absent = [name for name in names if name not in sources]
        if len(absent) < len(names):
            faults += [f"missing tensor {name}" for name in absent if name not in mis_shaped]
            parts = tuple(sources.pop(name) for name in names if name in sources)
            sources[target] = Stack(parts, tuple(attention_shapes[target]))
    missing = [target for target in attention_shapes if target not in sources]
    renamed = {t: name for name, ts in table.items() if ts for t in ((ts,) if isinstance(ts, str) else ts)}
    faults += [f"missing tensor {renamed[m]}" for m in missing if renamed[m] not in mis_shaped]
    if faults:
        more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
        raise ValueError(
            f"The checkpoint does not match its {family.model_type} configuration: {'; '.join(faults[:5])}{more}."
        )
    return sources, dropped


def _quantised(name: str, info: TensorInfo) -> list[str]:
    """Describe what is wrong with a tensor's type."""
    is_whole = info.dtype.is_floating_point and info.dtype.itemsize >= 2
    return [] if is_whole else [f"{name} has type {info.dtype}, so the weights are quantised"]


def _place(name, info, targets, shapes, sources) -> list[str]:
    """Split one teacher tensor along its rows among its targets; returns what is wrong with it."""
    expected = (sum(shapes[t][0] for t in targets), *shapes[targets[0]][1:])
    if tuple(info.shape) != expected:
        return [f"{name} has shape {tuple(info.shape)} where the configuration says {expected}"]
    start = 0
    for target in targets:
        stop = start + shapes[target][0]
        sources[target] = Source(name, start, stop, tuple(shapes[target]))
        start = stop
    return []


def moved(target: str, source: Source | Stack) -> Rule:
    """The rule of a tensor that keeps its values."""

    ranges = [(part.name, part.start, part.stop) for part in source.parts]
    names = tuple(part.name for part in source.parts)
    return Rule(target, source.shape, "moved", names, lambda checkpoint: checkpoint.blocks(*ranges))


def in_blocks(rows: int, make: Callable[[int, int], torch.Tensor], row_bytes: int) -> Iterator[torch.Tensor]:
    """`make(start, stop)` over all rows, a bounded number of bytes at a time."""
    step = max(1, BLOCK_BYTES // max(row_bytes, 1))
    for start in range(0, rows, step):
        yield make(start, min(start + step, rows))
