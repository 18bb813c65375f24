"""What a PyTorch that was built without CUDA has to be told, in C++, for tensors that say they are on `cuda`.

Three things stand in the way, and each is asked of an object with virtual functions: a guard, which says the current
stream of a device; hooks, which say whether there is an accelerator, without which autograd refuses gradients of one;
and a flag for `torch.tensor`, which makes its tensor on the host first. A table of virtual functions is an array of
addresses in the order of the declarations in PyTorch's own headers, so a copy with a few others put in does the rest.
"""

import contextlib
import ctypes
import mmap
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import torch

CPU, CUDA = 0, 1
"""Numbers of the device types."""
RETURN_SECOND = {"x86_64": "0fb7c631d2c3", "aarch64": "e00301aa010080d2c0035fd6"}
"""A function that returns its second argument, a device, and a zero: the default stream of that device. Python's
ctypes can return no struct."""
ROOT = Path(torch.__file__).parent


def can_stand_in() -> bool:
    """Return True if this machine and this PyTorch can have the stand-in: there is no CUDA, and the code is known."""
    return not torch.cuda.is_available() and torch.version.cuda is None and platform.machine() in RETURN_SECOND


@contextlib.contextmanager
def accelerator(devices: int) -> Iterator[None]:
    """Have PyTorch take CUDA devices for existing, for as long as the context lasts."""
    library = {name: ctypes.CDLL(str(ROOT / "lib" / f"lib{name}.so")) for name in ("c10", "torch_cpu")}
    guards = (ctypes.c_void_p * 20).in_dll(library["c10"], "_ZN3c104impl26device_guard_impl_registryE")
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(bytes.fromhex(RETURN_SECOND[platform.machine()]))
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    count = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(lambda this: devices)
    cuda = ctypes.CFUNCTYPE(ctypes.c_int16, ctypes.c_void_p)(lambda this: CUDA)  # in the second byte its number, 0
    true = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda this: True)

    slots = _slots("c10/core/impl/DeviceGuardImpl")
    is_cuda = dict.fromkeys(("type", "getDevice", "exchangeDevice"), cuda)
    guard, kept = _object(guards[CPU], slots, getStream=address, deviceCount=count, **is_cuda)
    hooks_of = library["torch_cpu"]._ZN2at6detail12getCUDAHooksEv
    hooks_of.restype = ctypes.c_void_p
    hooks = ctypes.c_void_p.from_address(hooks_of())
    slots = _slots("ATen/detail/AcceleratorHooks", "ATen/detail/CUDAHooks", destructor=2)
    is_there = dict.fromkeys(("isBuilt", "isAvailable", "hasPrimaryContext", "hasCUDA"), true)
    theirs, (_, ours) = hooks.value, _object(ctypes.addressof(hooks), slots, deviceCount=count, **is_there)
    lifts = torch._C._only_lift_cpu_tensors()
    with torch.autograd.set_multithreading_enabled(False):  # its threads, one per device, may have been made before
        guards[CUDA], hooks.value = ctypes.addressof(guard), ctypes.addressof(ours)
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            yield
        finally:
            guards[CUDA], hooks.value = None, theirs
            torch._C._set_only_lift_cpu_tensors(lifts)


def _slots(*headers: str, destructor: int = 0) -> dict[str, int]:
    """The place of each virtual function in the table, behind the two of a destructor that is declared first."""
    text = "".join((ROOT / "include" / f"{header}Interface.h").read_text() for header in headers)
    names = re.findall(r"^  virtual (?!~)[^(;]*?(\w+)\(", text, re.MULTILINE)
    return {name: place + destructor for place, name in enumerate(names)}


def _object(original: int, slots: dict[str, int], **functions) -> tuple[ctypes.c_void_p, ctypes.Array]:
    """An object without data like the one at an address, some virtual functions of which are others, and its table."""
    size = max(slots.values()) + 3
    theirs = (ctypes.c_void_p * size).from_address(ctypes.c_void_p.from_address(original).value)
    table = (ctypes.c_void_p * size)(*theirs)
    for name, function in functions.items():
        table[slots[name]] = function if isinstance(function, int) else ctypes.cast(function, ctypes.c_void_p).value
    return ctypes.c_void_p(ctypes.addressof(table)), table
