"""Tables that make each tensor of one format out of rows of another format's tensors (`io/rules.py`).

A table from targets to their parts accounts for every tensor on both sides, and is carried out block by block.
"""

import dataclasses
import functools
from collections.abc import Mapping

import torch

from ..io.reader import TensorInfo, quantisation_fault
from ..io.rules import Part, Parts, Rule, Source, rule_of

Table = dict[str, Parts]


def renamed(source: str) -> Parts:
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
        table: parts of every target.
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
        faults += quantisation_fault(name, tensors[name])
    for target, parts in table.items():
        if used <= tensors.keys():
            faults += _misfits(target, parts, shapes[target], tensors)
    if faults:
        text = "; ".join(faults[:5])
        if len(faults) > 5:
            text += f" (and {len(faults) - 5} more)"
        raise ValueError(f"The checkpoint is not a {what} as its configuration says: {text}.")
    rules = [rule_of(target, Source(parts, tuple(shapes[target]))) for target, parts in table.items()]
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
