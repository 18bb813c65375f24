"""What PyTorch's Python asks of its C++ where there is CUDA, answered for the stand-in device."""

import contextlib
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.utils._device import _device_constructors

from .graph import graph_of

if TYPE_CHECKING:
    from .standin import StandIn

EMPTY = torch.empty


class Stream(contextlib.nullcontext):
    """The one stream, and its events: all work is done when it is asked for."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(self)

    def nothing(self, *args: Any) -> None:
        """Nothing is under way."""

    wait = record = wait_event = record_event = wait_stream = nothing
    query, elapsed_time = (lambda *_: True), (lambda *_: 0.0)

    def synchronize(self) -> None:
        """See `torch.cuda.synchronize`, which counts as a wait."""
        torch.cuda.synchronize()


@contextlib.contextmanager
def replaced(stand_in: "StandIn") -> Iterator[None]:
    """Have `torch.cuda` and `torch.accelerator` speak of this stand-in for as long as the context lasts."""
    all_books = stand_in.books

    def properties(index: int) -> types.SimpleNamespace:
        total = all_books[index].limit
        return types.SimpleNamespace(name="stand-in", major=9, minor=0, total_memory=total, multi_processor_count=132)

    def free_and_total(index: int) -> tuple[int, int]:
        return all_books[index].limit - all_books[index].held, all_books[index].limit

    def stats(index: int) -> dict:
        of_all = {"all": {"current": all_books[index].held, "peak": all_books[index].peak}}
        return {"allocated_bytes": of_all, "reserved_bytes": of_all}

    def reset_peak(index: int) -> None:
        all_books[index].peak = all_books[index].held
        all_books[index].at_peak = dict(all_books[index].by_dtype)

    def device_count() -> int:
        return len(all_books)

    def get_device() -> int:
        return stand_in.current

    def exchange_device(index: int) -> int:
        before, stand_in.current = stand_in.current, index if index >= 0 else stand_in.current
        return before

    def wait(*args: Any) -> None:
        stand_in.note_wait("synchronize")

    of_c = {
        "_cuda_clearCublasWorkspaces": lambda: None,
        "_cuda_getDevice": get_device, "_cuda_setDevice": exchange_device, "_cuda_synchronize": wait,
        "_cuda_emptyCache": lambda: None, "_host_emptyCache": lambda: None, "_cuda_memoryStats": stats,
        "_cuda_resetPeakMemoryStats": reset_peak,
        "_accelerator_getDeviceIndex": get_device, "_accelerator_setDeviceIndex": exchange_device,
        "_accelerator_synchronizeDevice": wait,
    }  # fmt: skip
    of_cuda = {
        "is_available": lambda: True, "device_count": device_count,  # which else look at how PyTorch was built
        "_initialized": True, "default_generators": stand_in.generators,
        "_exchange_device": exchange_device, "_maybe_exchange_device": exchange_device,
        "_get_device_properties": properties, "_cudart": types.SimpleNamespace(cudaMemGetInfo=free_and_total),
        "is_current_stream_capturing": lambda: stand_in.tape is not None, "CUDAGraph": graph_of(stand_in),
        "graph_pool_handle": lambda: (0, 1), "Stream": Stream, "Event": Stream, "stream": Stream,
        "current_stream": Stream, "default_stream": Stream, "set_stream": lambda stream: None,
    }  # fmt: skip
    _device_constructors()  # which are kept, and must be PyTorch's own
    patches = {
        torch._C: of_c, torch.cuda: of_cuda, torch.cuda.random: {"device_count": device_count},
        torch: {"Generator": _generators(stand_in), "empty": _empty},
        torch.Tensor: {"is_pinned": _is_pinned, "pin_memory": _pin_memory},
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for owner, attributes in patches.items():
            stack.enter_context(mock.patch.multiple(owner, create=True, **attributes))
        yield


def _is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    return tensor.device.type == "cpu" and hasattr(tensor.untyped_storage(), "pinned")


def _pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    if tensor.device.type != "cpu":
        raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
    copied = tensor.clone().detach()
    copied.untyped_storage().pinned = True
    return copied


def _empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
    made = EMPTY(*args, **kwargs)
    return made.pin_memory() if pin_memory else made


def _generators(stand_in: "StandIn") -> type:
    """PyTorch's class, of which there can also be generators of the device."""

    class Generator(torch.Generator):
        def __new__(cls, device: Any = "cpu"):
            made = super().__new__(cls)
            made._of = stand_in.indexed(device)
            if made._of.type == "cuda":
                stand_in.made[made._cdata] = made
            return made

        @property
        def device(self) -> torch.device:
            """Where it draws."""
            return self._of

    return Generator
