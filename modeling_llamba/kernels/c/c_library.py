"""The library of the functions in C, which the C compiler of the machine makes when the first is called, in seconds.

It is kept beside the code that transformers downloads. Without a compiler PyTorch's operations do the same.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers.utils import logging
from transformers.utils.hub import HF_MODULES_CACHE

logger = logging.get_logger(__name__)
FOLDER = Path(__file__).parent
SOURCES = ("rows.c", "attention.c", "step.c", "prompt.c")
FLAGS = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    # vectors of float sums, which need another order of addition; infinities and NaN stay what they are
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
)
ARCHITECTURES = {"AVX512": ("-march=x86-64-v4",), "AVX2": ("-march=x86-64-v3",)}
"""Options for the instructions that PyTorch itself uses on this machine, by its name for them."""
LIBRARY_FOLDER = Path(HF_MODULES_CACHE) / "hybrid_kernels"
"""Folder in which compiled libraries are kept, below transformers' own for remote code."""
COMPILE_VARIABLE = "HYBRID_COMPILE_C"
"""Environment variable that keeps a hybrid from compiling, with 0, false, no or off."""
PROBLEMS: list[str] = []
"""The reasons for which libraries could not be made in this process."""
TYPES = {torch.float32: 32, torch.bfloat16: 16}
"""Types of a model that is computed here, and their bits."""
SPAN = 512
"""Columns of a part at least, where several threads attend to one head."""


class Layer(ctypes.Structure):
    """Sizes of a hybrid layer, as the functions in C read them."""

    _fields_ = [(name, ctypes.c_int) for name in "K R P N T E sinks S planes slow_planes".split()] + [
        (name, ctypes.c_float) for name in ("scale", "softcap")
    ]


def compilers() -> list[str]:
    """The machine's C compilers, first that of the environment variable CC if it is set."""
    found = map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))
    return [*dict.fromkeys(path for path in found if path is not None)]


def forbidden() -> bool:
    """Return True if the environment variable HYBRID_COMPILE_C says that nothing may be compiled."""
    return os.environ.get(COMPILE_VARIABLE, "").lower() in ("0", "false", "no", "off")


@functools.cache
def library(*others: Path) -> ctypes.CDLL | None:
    """The compiled functions; None where they cannot be compiled, which is said once, or must not be.

    Args:
        others: files of functions that belong to another module and call these.
    """
    if forbidden():
        return None
    sources = [*(FOLDER / name for name in SOURCES), *others]
    text = "".join(path.read_text() for path in [*sorted(FOLDER.glob("*.h")), *sources])
    flags = FLAGS + ARCHITECTURES.get(torch.backends.cpu.get_cpu_capability(), ())
    # OpenMP's functions are PyTorch's own, which are in the process already if they are those of this compiler
    variants = [(found, (*flags, *openmp)) for found in compilers() for openmp in (("-fopenmp",), ())]
    for _, options in variants:
        kept = LIBRARY_FOLDER / _name_of(text, options)
        if kept.is_file():
            with contextlib.suppress(OSError):  # of another C library: then it is made once more
                return ctypes.CDLL(str(kept))
    causes: dict[Path | None, str] = {}
    # a temporary folder serves where that of the libraries is full, or must not be written to or run from
    for folder in (LIBRARY_FOLDER, None):
        for found, options in variants:
            try:
                if folder is not None:
                    folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    linked = _compiled(sources, found, options, Path(scratch))
                    loaded = ctypes.CDLL(str(linked))
                    if folder is not None:
                        os.replace(linked, folder / _name_of(text, options))  # another process may do the same
                return loaded
            except (OSError, subprocess.CalledProcessError) as error:
                causes[folder] = _cause(found, error)
    PROBLEMS.append("; ".join(dict.fromkeys(causes.values())) or "there is no C compiler; install gcc")
    logger.warning(
        f"A hybrid is slower on a CPU without its functions in C ({PROBLEMS[-1]}). Set {COMPILE_VARIABLE}=0 to do "
        "without."
    )
    return None


def _name_of(text: str, options: tuple[str, ...]) -> str:
    """File name of a library that was made of this source with these options for such a machine."""
    made_of = "\n".join([text, *options, sys.platform, platform.machine()])
    return f"{hashlib.sha256(made_of.encode()).hexdigest()}.so"


def _compiled(sources: list[Path], found: str, options: tuple[str, ...], scratch: Path) -> Path:
    """Compile files with a compiler into a library in the folder `scratch`.

    Raises:
        OSError, subprocess.CalledProcessError: they cannot be compiled.
    """
    linked = scratch / "kernels.so"
    objects = [scratch / f"{path.stem}.o" for path in sources]
    for source, compiled in zip(sources, objects, strict=True):
        _run(found, *options, "-I", FOLDER, "-c", source, "-o", compiled)
    _run(found, "-shared", *objects, "-o", linked, "-lm")
    return linked


def _run(*command: str | Path) -> None:
    subprocess.run([*map(str, command)], check=True, capture_output=True)


def _cause(found: str, error: OSError | subprocess.CalledProcessError) -> str:
    """The reason for which compiling or loading failed, in one line."""
    if isinstance(error, subprocess.CalledProcessError):
        return f"{found}: {error.stderr.decode(errors='replace').strip().partition(chr(10))[0]}"
    if "failed to map segment" in str(error) or "Operation not permitted" in str(error):
        folder = Path(str(error).partition(":")[0]).parent.parent
        return f"nothing in {folder} may be run, by its mount option noexec; set HF_HOME to another folder"
    return f"{found}: {error}"


def pointer(t: torch.Tensor | None, offset: int = 0) -> ctypes.c_void_p:
    """Address of a tensor's first byte, or of another `offset` bytes behind it; NULL for None."""
    return ctypes.c_void_p(None if t is None else t.data_ptr() + offset)


@functools.cache
def ints(*numbers: int) -> ctypes.Array:
    """Few numbers as an array in C, made once."""
    return (ctypes.c_int * len(numbers))(*numbers)


def int64s(*numbers: int) -> ctypes.Array:
    """Numbers as an array in C."""
    return (ctypes.c_int64 * len(numbers))(*numbers)
