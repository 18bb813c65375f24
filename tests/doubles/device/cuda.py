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

CAPABILITY, EMPTY = (9, 0), torch.empty


class Stream:
    """The one there is: all work is done when it is asked for."""

    stream_id = cuda_stream = device_index = 0
    device_type = 1

    def __init__(self, *args: Any, **kwargs: Any):
        self.device = torch.device("cuda", 0)

    def __enter__(self):
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait_stream(self, stream: "Stream") -> None:
        """Nothing is under way."""

    wait_event = record_event = wait_stream

    def query(self) -> bool:
        """Nothing is under way."""
        return True

    def is_capturing(self) -> bool:
        """There are no graphs."""
        return False

    def synchronize(self) -> None:
        """See `torch.cuda.synchronize`, which counts as a wait."""
        torch.cuda.synchronize()


class Event(Stream):
    """A mark in the stream."""

    def record(self, stream: Stream | None = None) -> None:
        """Nothing is under way."""

    wait = record

    def elapsed_time(self, end: "Event") -> float:
        """No time passes on the device."""
        return 0.0


class CurrentDevice:
    """A context in which another device is the current one."""

    stand_in: "StandIn"

    def __init__(self, device: Any):
        self.index = self.stand_in.indexed(device).index

    def __enter__(self):
        self.before, self.stand_in.current = self.stand_in.current, self.index

    def __exit__(self, *error: object) -> None:
        self.stand_in.current = self.before


def replaced(stand_in: "StandIn") -> contextlib.ExitStack:
    """Have PyTorch's Python functions speak of this stand-in until the stack is closed."""

    def books(device: Any = None):
        return stand_in.books[stand_in.indexed(device).index]

    def set_device(device: Any) -> None:
        stand_in.current = stand_in.indexed(device).index

    def reset(device: Any = None) -> None:
        books(device).peak = books(device).held

    def seed_all(seed: int) -> None:
        for generator in stand_in.generators:
            generator.manual_seed(seed)

    def set_states(states: list[torch.Tensor]) -> None:
        for generator, state in zip(stand_in.generators, states, strict=True):
            generator.set_state(state)

    def properties(device: Any = None) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            name="stand-in", major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=books(device).limit,
            multi_processor_count=132, warp_size=32, gcnArchName="sm_90",
        )  # fmt: skip

    def statistics(device: Any = None) -> dict[str, int]:
        held, peak = books(device).held, books(device).peak
        return {f"{what}_bytes.all.{when}": n for what in ("allocated", "reserved") for when, n in
                (("current", held), ("peak", peak))}  # fmt: skip

    def generator_of(device: Any = None) -> torch.Generator:
        return stand_in.generators[stand_in.indexed(device).index]

    held, peak = (lambda device=None: books(device).held), (lambda device=None: books(device).peak)
    nothing, stream = (lambda *args, **kwargs: None), (lambda *args, **kwargs: Stream())
    count, current = (lambda: len(stand_in.books)), (lambda: stand_in.current)
    random = {
        "manual_seed": lambda seed: generator_of().manual_seed(seed),
        "manual_seed_all": seed_all,
        "get_rng_state": lambda device=None: generator_of(device).get_state(),
        "set_rng_state": lambda state, device=None: generator_of(device).set_state(state),
        "get_rng_state_all": lambda: [generator.get_state() for generator in stand_in.generators],
        "set_rng_state_all": set_states,
        "initial_seed": lambda: generator_of().initial_seed(),
    }
    both = {"is_available": lambda: True, "device_count": count, "current_stream": stream, "set_stream": nothing,
            "synchronize": lambda device=None: stand_in.note_wait("synchronize")}  # fmt: skip
    of_cuda = both | random | {
        "is_initialized": lambda: True, "_is_in_bad_fork": lambda: False, "init": nothing, "_lazy_init": nothing,
        "current_device": current, "set_device": set_device, "device": type("device", (CurrentDevice,), {"stand_in": stand_in}),
        "get_device_name": lambda device=None: "stand-in", "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_properties": properties, "is_bf16_supported": lambda including_emulation=True: True,
        "get_arch_list": lambda: ["sm_90"], "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda device=None: (books(device).limit - books(device).held, books(device).limit),
        "memory_allocated": held, "memory_reserved": held, "max_memory_allocated": peak, "max_memory_reserved": peak,
        "memory_stats": statistics, "reset_peak_memory_stats": reset, "reset_max_memory_allocated": reset,
        "empty_cache": nothing, "ipc_collect": nothing, "default_stream": stream, "stream": stream, "Stream": Stream,
        "Event": Event,
    }  # fmt: skip
    of_accelerator = both | {
        "set_device_index": set_device, "set_device_idx": set_device, "current_device_index": current,
        "current_device_idx": current,
    }  # fmt: skip
    _device_constructors()  # which are kept, and must be PyTorch's own
    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(torch.cuda, **of_cuda))
        stack.enter_context(patched(torch.cuda.random, **random))
        stack.enter_context(patched(torch.cuda.memory, **{k: v for k, v in of_cuda.items() if "memory" in k}))
        stack.enter_context(patched(torch.accelerator, **of_accelerator))
        stack.enter_context(patched(torch, Generator=_generators(stand_in), empty=_empty))
        stack.enter_context(patched(torch.Tensor, **_pinning(stand_in)))
        return stack.pop_all()


@contextlib.contextmanager
def patched(owner: Any, **attributes: Any) -> Iterator[None]:
    """Other attributes for as long as the context lasts."""
    with mock.patch.multiple(owner, **attributes):
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
