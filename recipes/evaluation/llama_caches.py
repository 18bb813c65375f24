"""The caches of llama.cpp, which reads the teacher's own GGUF file (llama-cpp-python).

Keys and values are rounded as they are written and attended to as they are held, in a prompt as well, so that a text
is read once. States come from llama.cpp, logits from the teacher's head, which spares a matrix of the vocabulary.

llama.cpp also rounds the inputs of weights in 8 bits. That is no fault of a cache: so the cache in 16 bits is compared
with the teacher, and the others with that one.
"""

import ctypes
import functools
import importlib.util
from pathlib import Path
from typing import Any

import torch

from .metrics import Reader
from .real_caches import MEASURED

LLAMA_CACHES = {
    "llama.cpp f16": ("F16", "F16"),
    "llama.cpp q8_0": ("Q8_0", "Q8_0"),
    "llama.cpp q5_1": ("Q5_1", "Q5_1"),
    "llama.cpp q8_0 keys, q4_0 values": ("Q8_0", "Q4_0"),
    "llama.cpp q4_0": ("Q4_0", "Q4_0"),
}
"""Types of keys and values, by which llama.cpp's --cache-type-k and --cache-type-v name them in lower case."""
EXACT = "llama.cpp f16"
PACKAGE = "llama_cpp"
BATCH = 512
"""Tokens that are read at once, as by default."""


def is_llama_file(teacher: str) -> bool:
    """True if llama.cpp can read the teacher: a GGUF file."""
    return Path(teacher).suffix.lower() == ".gguf"


def check_llama() -> None:
    """Raise ValueError where llama-cpp-python is missing."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ValueError("--real needs llama-cpp-python for a GGUF file: pip install '.[rivals]'.")


def llama_version() -> str:
    """The version of llama-cpp-python, each of which has one llama.cpp."""
    return importlib.import_module(PACKAGE).__version__


class LlamaCache:
    """A teacher in llama.cpp, with its cache in the types of a name in `LLAMA_CACHES`.

    Args:
        file: its GGUF file.
        length: number of tokens of the longest text.
    """

    def __init__(self, file: str, name: str, length: int):
        self.file, self.types, self.length = file, LLAMA_CACHES[name], length

    @functools.cached_property
    def _opened(self) -> Any:
        library = importlib.import_module(PACKAGE)
        key, value = (getattr(library, f"GGML_TYPE_{name}") for name in self.types)
        return library.Llama(
            self.file, n_ctx=self.length, n_batch=BATCH, n_threads=torch.get_num_threads(),
            n_threads_batch=torch.get_num_threads(), type_k=key, type_v=value, flash_attn=True,
            embedding=True, pooling_type=library.LLAMA_POOLING_TYPE_NONE, verbose=False,
        )  # fmt: skip

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """States (1, L, D) before the head, of the token ids (1, L) of one text."""
        library = importlib.import_module(PACKAGE)
        opened = self._opened
        opened.reset()
        parts = []
        for part in ids[0].split(BATCH):
            opened.eval(part.tolist())
            held = library.llama_get_embeddings(opened.ctx)
            values = (ctypes.c_float * (len(part) * opened.n_embd())).from_address(ctypes.addressof(held.contents))
            parts.append(torch.frombuffer(values, dtype=torch.float32).view(len(part), -1).clone())
        return torch.cat(parts)[None].to(ids.device)

    def reader(self, teacher: Reader, dtype: torch.dtype) -> Reader:
        """A reader of single texts by the head of the teacher, whose weights have this type."""
        return Reader(lambda ids: self.states(ids).to(dtype), teacher.head)

    @functools.cached_property
    def _measured(self) -> list[int]:
        library = importlib.import_module(PACKAGE)
        found = []
        for tokens in MEASURED:
            self.states(torch.ones(1, tokens, dtype=torch.long))
            found.append(library.llama_state_seq_get_size(self._opened.ctx, 0))
        return found

    def nbytes(self, length: int) -> int:
        """Bytes that the cache of one sequence of so many tokens holds."""
        small, large = self._measured
        return round(small + (length - MEASURED[0]) * (large - small) / (MEASURED[1] - MEASURED[0]))
