"""What the C library does with freed memory. A fit or an evaluation makes and frees large matrices all the time."""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_KEPT = 2**30
"""Blocks up to so many bytes, and so much at the end of the heap, are kept for the next that asks."""


def keep_free_memory() -> None:
    """Keep freed memory for the next matrix; otherwise the system takes it back, and clears every page before it gives
    it again. With glibc simple operations on large matrices then take half of the time; elsewhere nothing happens."""
    set_option = _of_c_library("mallopt")
    # a glibc that refuses the first would, with the second, map every block anew
    if set_option and set_option(M_MMAP_THRESHOLD, LARGEST_KEPT):
        set_option(M_TRIM_THRESHOLD, LARGEST_KEPT)


def return_free_memory() -> None:
    """Give the system back what the C library holds of freed memory, which otherwise grows from layer to layer."""
    if trim := _of_c_library("malloc_trim"):
        trim(0)


def _of_c_library(name: str):
    return getattr(ctypes.CDLL(None) if os.name == "posix" else None, name, None)
