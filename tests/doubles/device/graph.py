"""A CUDA graph on the stand-in: what is asked of the device is written down, and done again in the same memory."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from .standin import StandIn


@dataclass
class Tape:
    """What is asked of a device while a graph is captured, in the host's memory.

    operations: what carries each out, its arguments by place and by name, and what came of it. overwritten: tensors
    that one wrote over, and what was in them. broken: True after something that no graph can hold.
    """

    operations: list[tuple[Callable, tuple, dict, Any]] = field(default_factory=list)
    overwritten: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    broken: bool = False

    def carry_out(self, function: Callable, op: OpOverload, args: tuple, kwargs: dict) -> Any:
        """Carry out an operation, and write it down."""
        for argument, value in zip(op._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
                self.overwritten.append((value, value.clone()))
        out = function(op, args, kwargs)
        self.operations.append((functools.partial(function, op), args, kwargs, out))
        return out


def graph_of(stand_in: "StandIn") -> type:
    """PyTorch's class, for graphs of this stand-in."""

    class Graph:
        """See `torch.cuda.CUDAGraph`."""

        def capture_begin(self, *pool: object, **options: object) -> None:
            """Write down what follows."""
            self.tape = stand_in.tape = Tape()

        def capture_end(self) -> None:
            """Write down no more. Nothing has run on CUDA until now, so what was written over here is put back."""
            stand_in.tape = None
            for written, before in reversed(self.tape.overwritten):
                written.copy_(before)
            self.tape.overwritten.clear()
            if self.tape.broken:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

        def replay(self) -> None:
            """Do all of it."""
            stand_in.note_launch("replay")
            for carry_out, args, kwargs, out in self.tape.operations:
                again = carry_out(args, kwargs)
                for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    # what was made to be written over has no size at first
                    if isinstance(old, torch.Tensor) and new.numel() and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

    return Graph
