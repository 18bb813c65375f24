"""What libraries ask of `torch.cuda`, `torch.accelerator` and `torch.Generator`, answered for the stand-in device."""

import contextlib
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.utils._device import _device_constructors

if TYPE_CHECKING:
    from .standin import StandIn

NAME, CAPABILITY, EMPTY = "stand-in", (9, 0), torch.empty


class Stream(contextlib.nullcontext):
    """The one stream, and its events: all work is done when it is asked for."""

    stream_id = cuda_stream = device_index = 0
    device_type, device = 1, torch.device("cuda", 0)

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(self)

    def nothing(self, *args: Any) -> None:
        """Nothing is under way."""

    wait = record = wait_event = record_event = wait_stream = nothing
    query, is_capturing, elapsed_time = (lambda *_: True), (lambda *_: False), (lambda *_: 0.0)

    def synchronize(self) -> None:
        """See `torch.cuda.synchronize`, which counts as a wait."""
        torch.cuda.synchronize()


@contextlib.contextmanager
def replaced(stand_in: "StandIn") -> Iterator[None]:
    """Have PyTorch's Python functions speak of this stand-in for as long as the context lasts."""
    all_books, generators = stand_in.books, stand_in.generators

    def of(parts: list, device: Any = None) -> Any:
        return parts[stand_in.indexed(device).index]

    def set_device(device: Any) -> None:
        stand_in.current = stand_in.indexed(device).index

    @contextlib.contextmanager
    def current_device(device: Any) -> Iterator[None]:
        before = stand_in.current
        set_device(device)
        try:
            yield
        finally:
            stand_in.current = before

    def reset(device: Any = None) -> None:
        of(all_books, device).peak = of(all_books, device).held

    def properties(device: Any = None) -> types.SimpleNamespace:
        major, minor = CAPABILITY
        total = of(all_books, device).limit
        return types.SimpleNamespace(
            name=NAME, major=major, minor=minor, total_memory=total, multi_processor_count=132
        )

    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    def held(device: Any = None) -> int:
        return of(all_books, device).held

    def peak(device: Any = None) -> int:
        return of(all_books, device).peak

    memory = {
        "mem_get_info": lambda device=None: (of(all_books, device).limit - held(device), of(all_books, device).limit),
        "memory_allocated": held, "memory_reserved": held, "max_memory_allocated": peak, "max_memory_reserved": peak,
        "memory_stats": lambda device=None: {"allocated_bytes.all.current": held(device),
                                             "allocated_bytes.all.peak": peak(device)},
        "reset_peak_memory_stats": reset, "reset_max_memory_allocated": reset, "empty_cache": nothing,
    }  # fmt: skip
    random = {
        "manual_seed": lambda seed: of(generators).manual_seed(seed),
        "manual_seed_all": lambda seed: [generator.manual_seed(seed) for generator in generators],
        "get_rng_state": lambda device=None: of(generators, device).get_state(),
        "set_rng_state": lambda state, device=None: of(generators, device).set_state(state),
        "get_rng_state_all": lambda: [generator.get_state() for generator in generators],
        "set_rng_state_all": lambda states: [g.set_state(s) for g, s in zip(generators, states, strict=True)],
        "initial_seed": lambda: of(generators).initial_seed(),
    }
    both = {
        "is_available": lambda: True, "device_count": lambda: len(all_books), "current_stream": Stream,
        "set_stream": nothing, "synchronize": lambda device=None: stand_in.note_wait("synchronize"),
    }  # fmt: skip
    of_cuda = both | random | memory | {
        "is_initialized": lambda: True, "_is_in_bad_fork": lambda: False, "init": nothing, "_lazy_init": nothing,
        "current_device": lambda: stand_in.current, "set_device": set_device, "device": current_device,
        "get_device_name": lambda device=None: NAME, "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_properties": properties, "is_bf16_supported": lambda including_emulation=True: True,
        "get_arch_list": lambda: ["sm_90"], "is_current_stream_capturing": lambda: False, "ipc_collect": nothing,
        "default_stream": Stream, "stream": Stream, "Stream": Stream, "Event": Stream,
    }  # fmt: skip
    index = {"set_device_index": set_device, "current_device_index": of_cuda["current_device"]}
    _device_constructors()  # which are kept, and must be PyTorch's own
    patches = {
        torch.cuda: of_cuda, torch.cuda.random: random, torch.cuda.memory: memory, torch.accelerator: both | index,
        torch: {"Generator": _generators(stand_in), "empty": _empty}, torch.Tensor: _pinning(stand_in),
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for owner, attributes in patches.items():
            stack.enter_context(mock.patch.multiple(owner, **attributes))
        yield


def _pinning(stand_in: "StandIn") -> dict[str, Any]:
    """Methods of a tensor; a storage that is pinned stays so, and stays."""

    def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
        return tensor.device.type == "cpu" and tensor.untyped_storage()._cdata in stand_in.pinned

    def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        if tensor.device.type != "cpu":
            raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
        copied = tensor.clone().detach()
        stand_in.pinned[copied.untyped_storage()._cdata] = copied.untyped_storage()
        return copied

    return {"is_pinned": is_pinned, "pin_memory": pin_memory}


def _empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
    made = EMPTY(*args, **kwargs)
    return made.pin_memory() if pin_memory else made


def _generators(stand_in: "StandIn") -> type:
    """PyTorch's class, of which there can also be generators of the device."""
    original = torch.Generator

    class Kind(type(original)):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

    class Generator(original, metaclass=Kind):
        def __new__(cls, device: Any = "cpu"):
            made = original.__new__(cls)
            made._of = stand_in.indexed(device)
            if made._of.type == "cuda":
                stand_in.made[made._cdata] = made
            return made

        @property
        def device(self) -> torch.device:
            """Where it draws."""
            return self._of

    return Generator
