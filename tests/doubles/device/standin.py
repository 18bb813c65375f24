"""The stand-in device while it is there: its books of memory, its counts, its generators."""

import collections
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch._ops import OpOverload
from torch.nn import functional as F
from torch.optim import optimizer
from torch.utils import _foreach_utils

from . import cuda
from .graph import Tape
from .native import accelerator
from .tensor import ACTIVE, DeviceTensor

ROUNDING = 512
"""Bytes in multiples of which CUDA's allocator gives memory."""
attention = F.scaled_dot_product_attention
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass
class Counts:
    """Operations during which the host waited for the device, and those that launched a kernel, by name."""

    waits: collections.Counter = field(default_factory=collections.Counter)
    kernels: collections.Counter = field(default_factory=collections.Counter)

    @property
    def syncs(self) -> int:
        """How often the host waited."""
        return self.waits.total()

    @property
    def launches(self) -> int:
        """How many kernels were launched."""
        return self.kernels.total()


@dataclass
class Books:
    """Bytes held on a device, the most there ever were, and how many there can be."""

    limit: int
    held: int = 0
    peak: int = 0
    by_dtype: collections.Counter[torch.dtype] = field(default_factory=collections.Counter)
    at_peak: dict[torch.dtype, int] = field(default_factory=dict)

    def take(self, size: int, dtype: torch.dtype) -> None:
        """Hold more; raises torch.OutOfMemoryError in CUDA's words where there is no room."""
        if self.held + size > self.limit:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB. GPU 0 has a total capacity of "
                f"{self.limit / 2**20:.2f} MiB of which {(self.limit - self.held) / 2**20:.2f} MiB is free."
            )
        self.held += size
        self.by_dtype[dtype] += size
        if self.held > self.peak:
            self.peak, self.at_peak = self.held, dict(self.by_dtype)

    def give_back(self, size: int, dtype: torch.dtype) -> None:
        """Hold less."""
        self.held -= size
        self.by_dtype[dtype] -= size


class Block:
    """Memory of one storage, which is in the books for as long as a tensor holds it."""

    def __init__(self, books: Books, size: int, dtype: torch.dtype):
        self.taken = 0  # or what was refused would be given back
        books.take(size, dtype)
        self.taken, self.books, self.dtype = size, books, dtype

    def __del__(self):
        if self.taken:
            self.books.give_back(self.taken, self.dtype)


class StandIn:
    """Devices `cuda:0`, ... for as long as the context lasts.

    Args:
        devices: how many. limit: bytes of each.
    """

    def __init__(self, devices: int = 1, limit: int = 80 * 2**30):
        self.books = [Books(limit) for _ in range(devices)]
        self.current = 0
        self.generators = [torch.Generator().manual_seed(0) for _ in range(devices)]
        # of the device, by what C++, which forgets their class, keeps of them
        self.made = {generator._cdata: generator for generator in self.generators}
        self.counts: list[Counts] = []
        self.tape: Tape | None = None

    def __enter__(self) -> "StandIn":
        assert not ACTIVE, "one stand-in at a time"
        with contextlib.ExitStack() as stack:
            stack.enter_context(accelerator(len(self.books)))
            of_cuda = stack.enter_context(torch.library._scoped_library("_", "IMPL"))
            of_cuda.fallback(self.make, "CUDA")  # without a tensor among the arguments, in any thread
            stack.enter_context(cuda.replaced(self))
            stack.enter_context(mock.patch.object(torch.__future__, "_swap_module_params_on_conversion", True))
            stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", _attend))
            for types in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
                types.append(DeviceTensor)
                stack.callback(types.remove, DeviceTensor)
            ACTIVE.append(self)
            stack.callback(ACTIVE.pop)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def counting(self) -> Iterator[Counts]:
        """Count while the context lasts."""
        self.counts.append(Counts())
        try:
            yield self.counts[-1]
        finally:
            self.counts.pop()

    def peak(self, device: int = 0) -> int:
        """The most bytes that were ever held at once since `torch.cuda.reset_peak_memory_stats`."""
        return self.books[device].peak

    def peak_by_dtype(self, device: int = 0) -> dict[torch.dtype, int]:
        """Bytes of each type of number when the most were held."""
        return self.books[device].at_peak

    def note_wait(self, what: object) -> None:
        """The host waits for the device, which it cannot while a graph is captured."""
        if self.tape is not None:
            self.tape.broken = True
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")
        for counts in self.counts:
            counts.waits[str(what)] += 1

    def note_launch(self, op: object) -> None:
        """A kernel is launched."""
        for counts in self.counts:
            counts.kernels[str(op)] += 1

    def copy_waits(self, name: str, args: tuple, kwargs: dict) -> bool:
        """Return True if a copy between host and device ends before the next operation is asked for."""
        asynchronous = args[2] if name == "copy_" and len(args) > 2 else kwargs.get("non_blocking", False)
        on_host = [t for t in args[:2] if isinstance(t, torch.Tensor) and t.device.type == "cpu"]
        return args[0].numel() > 0 and not (asynchronous and all(t.is_pinned() for t in on_host))

    def note_memory(self, host: torch.Tensor, device: int) -> None:
        """Enter a tensor's storage, which may be that of others, in the books of a device."""
        storage = host.untyped_storage()
        size = -(-storage.nbytes() // ROUNDING) * ROUNDING
        if not hasattr(storage, "block") or storage.block.taken != size:  # or it was resized
            storage.block = Block(self.books[device], size, host.dtype)

    def make(self, op: OpOverload, *args: Any, device: Any = None, pin_memory: Any = None, **options: Any) -> Any:
        """Carry out an operation that makes a tensor from nothing."""
        return DeviceTensor(self.taped(_made, op, args, options), self.indexed(device))

    def taped(self, carry_out: Callable, op: OpOverload, args: tuple, kwargs: dict) -> Any:
        """Carry out an operation in the host's memory, and write it down if a graph is captured."""
        return carry_out(op, args, kwargs) if self.tape is None else self.tape.carry_out(carry_out, op, args, kwargs)

    def indexed(self, device: torch.device | str | int | None) -> torch.device:
        """A device with its number; `cuda` is the current one."""
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        if device.type != "cuda":
            return device
        index = self.current if device.index is None else device.index
        if index >= len(self.books):
            raise RuntimeError("CUDA error: invalid device ordinal")
        return torch.device("cuda", index)

    def generator_of(self, device: torch.device, given: torch.Generator | None) -> torch.Generator:
        """The generator that an operation draws from; one of another device is refused."""
        if device.type == "cpu":
            return given
        if given is None:
            return self.generators[device.index]
        if given._cdata not in self.made:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        return given


def _made(op: OpOverload, args: tuple, kwargs: dict) -> torch.Tensor:
    return op(*args, **kwargs)


def _attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Attention by one kernel in the memory of its output, as CUDA has it; in float64 as written out, as there."""
    fused = isinstance(query, DeviceTensor) and query.dtype != torch.float64 and not dropout_p
    same = query.ndim == 4 and query.shape[-1] == key.shape[-1] == value.shape[-1]
    if not fused or not same or attn_mask is not None and attn_mask.requires_grad:
        return attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if torch.is_autocast_enabled("cuda"):
        query, key, value = (t.to(torch.get_autocast_dtype("cuda")) for t in (query, key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    shape = query.shape
    if enable_gqa and attn_mask is None and not is_causal:  # queries of one key side by side
        query = query.reshape(shape[0], key.shape[1], -1, shape[3])
    elif enable_gqa:
        key, value = (t.repeat_interleave(shape[1] // t.shape[1], dim=1) for t in (key, value))
    return flash(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0].reshape(shape)
