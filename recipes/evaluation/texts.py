"""Texts to evaluate on, as rows of token ids: what ships, Python's documentation or code, a file, a Hub data set."""

import hashlib
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from convert.fit.text import documents, token_rows

SHIPPED = "shipped"
PYTHON_DOCS = "python-docs"
PYTHON_CODE = "python-code"
HELD_OUT = 288
"""Number of documents at the end of the calibration file that are `shipped`."""
MODULES = ("argparse", "tarfile", "typing", "subprocess", "zipfile")
"""Modules of the standard library whose code is a text."""


class TextSource(NamedTuple):
    """A text, and the column of a data set that holds it."""

    name: str
    """A file's or folder's path, `shipped`, `python-docs`, `python-code`, or NAME:CONFIG:SPLIT of a Hub data set."""
    column: str = "text"

    @property
    def label(self) -> str:
        """The name to show: of a path, only its last part."""
        path = Path(self.name).expanduser()
        if path.exists():
            return path.stem
        return self.name

    def documents(self) -> Iterator[str]:
        """The documents in order.

        `shipped` is the end of the text that ships for calibration, which a conversion with default settings has not
        read; `python-docs` is the documentation inside Python, the longest documents first; `python-code`
        is the code of some of its modules.
        """
        if self.name == SHIPPED:
            return iter(list(documents("default"))[-HELD_OUT:])
        if self.name == PYTHON_DOCS:
            try:
                topics = importlib.import_module("pydoc_data.topics").topics
            except ImportError as error:
                raise ValueError("This Python comes without its documentation; name another --text.") from error
            return iter(sorted(topics.values(), key=len, reverse=True))
        if self.name == PYTHON_CODE:
            return (inspect.getsource(importlib.import_module(name)) for name in MODULES)
        return documents(self.name, self.column)

    def fingerprint(self) -> str | None:
        """Changes when a local file or folder does; None of other texts."""
        path = Path(self.name).expanduser()
        if not path.exists():
            return None
        return hash_files(path)

    def rows(self, tokenizer: Any, length: int, count: int) -> torch.Tensor:
        """(B, length) token ids, B = `count` or as many as the text has."""
        return token_rows(self.documents(), tokenizer, length, count, self.name, at_least=1)


def hash_files(path: Path, pattern: str = "*") -> str:
    """A hash of the contents of a file, or of all files of a folder that match."""
    digest = hashlib.sha256()
    for file in sorted(f for f in path.rglob(pattern) if f.is_file()) if path.is_dir() else [path]:
        digest.update(f"{file.name}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]
