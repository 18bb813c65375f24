"""One pass of a model as a CUDA graph, and what ends graphs for a model."""

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

logger = logging.get_logger(__name__)
TOLERANCE = 0.05
"""Relative difference between two runs of a pass: products may be summed in another order, which bfloat16 shows."""
REFUSED: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Models that go on without graphs."""
STREAMS: dict[torch.device, torch.cuda.Stream] = {}
"""The stream of each device on which graphs are recorded; of another priority than those that others use."""
RECORDING = threading.Lock()
"""Held while a graph is recorded, of which a process can have one at a time."""


class Recorded:
    """A pass that runs as one graph, with the same addresses each time.

    Args:
        compute: the pass, which reads and writes tensors at addresses that stay. pool: memory that it shares with
            other graphs: results of these that are in use stay, those of graphs that are recorded later may be
            overwritten when this one runs.
    """

    def __init__(self, compute: Callable[[], Any], device: torch.device, pool: object | None = None):
        self.graph = torch.cuda.CUDAGraph()
        if device not in STREAMS:
            STREAMS[device] = torch.cuda.Stream(device, priority=-1)
        stream = STREAMS[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        # not torch.cuda.graph, which waits for the device and gives back all of PyTorch's free memory
        with torch.cuda.device(device), torch.cuda.stream(stream):
            forget_workspaces()
            self.graph.capture_begin(*([] if pool is None else [pool]), capture_error_mode="thread_local")
            try:
                self.result = compute()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # of the same cause
                    self.graph.capture_end()
                raise
            finally:
                forget_workspaces()
            self.graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)

    def run(self) -> Any:
        """Run the pass, and return its result, whose tensors change at the next run."""
        self.graph.replay()
        return self.result


def forget_workspaces() -> None:
    """Have cuBLAS take new memory for its products: in a graph, of this graph's own, which is there as long as it."""
    torch._C._cuda_clearCublasWorkspaces()


def record(model: nn.Module, compute: Callable[[], Any], pool: object | None = None) -> Recorded | None:
    """A recorded pass; None where it cannot be recorded, which ends graphs for the model."""
    free, total = torch.cuda.mem_get_info(model.device)
    if free < total // 8:  # rarely, since all of PyTorch's spare memory is then asked for anew
        torch.cuda.empty_cache()  # of former graphs, too, whose memory nothing else can take
    for may_repeat in (True, False):
        try:
            with RECORDING:
                return Recorded(compute, model.device, pool)
        except RuntimeError as error:
            if not (may_repeat and isinstance(error, torch.OutOfMemoryError)):
                refuse(model, str(error))
                return None
        torch.cuda.empty_cache()  # a recording cannot take what PyTorch keeps for later


def refuse(model: nn.Module, why: str) -> None:
    """Let a model go on without graphs, and say so."""
    REFUSED.add(model)
    logger.warning(f"`generate` goes on without CUDA graphs, which is slower: {why}")


def agree(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Return True if tensors are equal up to the order of sums; rows of bytes may differ in a hundredth of these."""
    same = []
    for a, b in zip(found, expected, strict=True):
        if b.is_floating_point():
            same.append((a.isfinite() == b.isfinite()).all())
            a, b = (torch.nan_to_num(t.float(), posinf=0.0, neginf=0.0) for t in (a, b))
            same.append((a - b).norm() <= TOLERANCE * b.norm() + 1e-6)
        else:
            same.append((a != b).sum() <= (b.numel() // 100 if b.dtype == torch.uint8 else 0))
    return bool(torch.stack(same).all())


def has_room(device: torch.device, size: int) -> bool:
    """Return True if so many bytes are free on a device, those that PyTorch has kept for later included."""
    free, _ = torch.cuda.mem_get_info(device)
    return size <= free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
