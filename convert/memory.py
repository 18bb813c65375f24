"""Freed memory, and how the C library keeps it. A fit or an evaluation makes and frees large matrices all the time."""

import ctypes
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_free_memory(largest: int = 2**30) -> None:
    """Keep freed memory for the next matrix; otherwise the system takes it back, and clears every page before it gives
    it again. With glibc simple operations on large matrices then take half of the time; elsewhere nothing happens.
    It holds for the whole process, and the last call counts.

    Args:
        largest: bytes up to which a block, and the end of the heap, is kept.
    """
    set_option = _of_c_library("mallopt")
    # a glibc that refuses the first would, with the second, map every block anew
    if set_option and set_option(M_MMAP_THRESHOLD, largest):
        set_option(M_TRIM_THRESHOLD, largest)


def return_free_memory() -> None:
    """Give the system back what the C library holds of freed memory, which otherwise grows from step to step."""
    if trim := _of_c_library("malloc_trim"):
        trim(0)


def _of_c_library(name: str) -> Any:
    """A function of the C library; None where it has no such function, as on macOS."""
    return getattr(ctypes.CDLL(None), name, None)
