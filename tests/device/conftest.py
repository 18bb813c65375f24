"""The device that the rehearsals run on: a GPU, or a stand-in for one; nothing is collected where neither can be."""

import gc

import pytest
import torch

from tests.doubles.device import StandIn
from tests.doubles.device.native import can_stand_in

IS_THERE = torch.cuda.is_available()
collect_ignore_glob = [] if can_stand_in() or IS_THERE else ["test_*.py"]


class Present:
    """A GPU that is there, and its memory since then."""

    def __enter__(self) -> "Present":
        self.before = 0
        self.before = self.held()
        torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def peak(self) -> int:
        """Most bytes that were held at a time."""
        return torch.cuda.max_memory_allocated() - self.before

    def held(self) -> int:
        """Bytes that are held still, but for what cuBLAS keeps for itself."""
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        return torch.cuda.memory_allocated() - self.before


class Rehearsed(StandIn):
    """A stand-in."""

    def held(self) -> int:
        """Bytes that are held still."""
        return self.books[0].held


def some_device(devices: int = 1) -> Present | Rehearsed:
    """GPUs where there are as many, else a stand-in for them."""
    if not IS_THERE:
        return Rehearsed(devices=devices)
    if torch.cuda.device_count() < devices:
        pytest.skip(f"there is no stand-in for {devices} GPUs where one is")
    return Present()
