"""Make a folder for a machine with a GPU, PyTorch and transformers, but no network: token ids, teachers, wheels.

python -m recipes.benchmarks.carry FOLDER [--tokens 30000000] [--teachers FILE.gguf ...] [--wheels NAME==VERSION ...]

What takes files to that machine may take small ones only, so that none is larger than `--part` MB; contents.json says
how they are put together, with their sizes and hashes. There:

python -m recipes.benchmarks.carry FOLDER --join JOINED
python -m pip install --no-index --no-deps JOINED/*.whl
python -m recipes.benchmarks.first_day runs/first-day --carried FOLDER

Parts may arrive in several turns: a file whose parts are not all there is left for the next --join.

Shapes: L length.
"""

import argparse
import hashlib
import itertools
import json
import lzma
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy

CONTENTS, IDS = "contents.json", "ids.npy"
INSTALLED = "installed"
"""Text: code and documentation of the packages that are installed here."""
SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt")
NEEDED = (
    "docstring-parser", "jsonargparse", "gguf==0.19.0", "einops", "fla-core==0.6.0", "accelerate==1.15.0",
    "peft==0.21.2", "trl==1.16.0", "datasets==5.2.0", "dill", "multiprocess",
)  # fmt: skip
"""Packages that the steps need, and that a machine with transformers, pandas and pytest may lack."""
LARGEST_ID = numpy.iinfo(numpy.uint16).max
TOGETHER = 256
"""Number of texts that the tokenizer reads at once."""
READ = 2**20


def installed_text() -> Iterator[str]:
    """The files of the installed packages, in an order that is the same on every machine and mixes packages."""
    folder = Path(sysconfig.get_paths()["purelib"])
    paths = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.suffix in SUFFIXES]
    for path in sorted(paths, key=lambda path: hashlib.sha256(path.encode()).digest()):
        try:
            text = (folder / path).read_text()
        except UnicodeDecodeError:
            continue  # no text in UTF-8
        if text.strip():
            yield text


def token_ids(texts: Iterable[str], tokenizer: Any, count: int) -> numpy.ndarray:
    """The first `count` token ids (L,) of texts joined by the end-of-sequence token, two bytes each.

    Raises:
        ValueError: too little text, or a vocabulary that needs more than two bytes.
    """
    if len(tokenizer) > LARGEST_ID + 1:
        raise ValueError(f"The vocabulary has {len(tokenizer):,} tokens; two bytes hold {LARGEST_ID + 1:,}.")
    found = numpy.empty(count, dtype=numpy.uint16)
    done = 0
    texts = iter(texts)
    while batch := list(itertools.islice(texts, TOGETHER)):
        for ids in tokenizer(batch, add_special_tokens=False).input_ids:
            ids = [*ids, tokenizer.eos_token_id][: count - done]
            found[done : done + len(ids)] = ids
            done += len(ids)
        if done == count:
            return found
    raise ValueError(f"The text has {done:,} tokens, and {count:,} are asked for; name another --text, or fewer.")


def split(path: Path, folder: Path, part: int) -> dict[str, Any]:
    """Copy a file into `folder` in parts of at most `part` bytes; their names, and the whole file's hash."""
    names = []
    digest = hashlib.sha256()
    with open(path, "rb") as whole:
        for number in itertools.count():
            first = whole.read(min(part, READ))
            if not first:
                break
            names.append(f"{path.name}.{number:03}")
            left = part
            with open(folder / names[-1], "wb") as file:
                while first:
                    file.write(first)
                    digest.update(first)
                    left -= len(first)
                    first = whole.read(min(left, READ))
    return {"parts": names, "bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def join(carried: Path, folder: Path) -> list[Path]:
    """Put the files of a carried folder together in `folder`; those that are there already stay.

    Parts may come one after another: a file whose parts are not all there is named, and left for another time.

    Raises:
        ValueError: a file is not the one that was packed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for name, packed in packed_files(carried).items():
        path = folder / name.removesuffix(".xz")
        if hash_of(path) != packed["sha256"]:
            parts = [part for part in (carried / part for part in packed["parts"]) if part.is_file()]
            size = sum(part.stat().st_size for part in parts)
            if size < packed["bytes"]:
                print(f"{name}: {size / 1e6:.1f} of {packed['bytes'] / 1e6:.1f} MB are here; carry the rest.")
                continue
            _put_together(parts, path, packed["sha256"], compressed=name.endswith(".xz"))
            _hash_file(path).write_text(packed["sha256"])
        found.append(path)
    return found


def hash_of(path: Path) -> str | None:
    """The hash of the packed file that a joined one was made from; None if it is not there."""
    if path.is_file() and _hash_file(path).is_file():
        return _hash_file(path).read_text()
    return None


def _hash_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def packed_files(carried: Path) -> dict[str, dict[str, Any]]:
    """The files of a carried folder, by name: their parts, bytes and hashes."""
    try:
        return json.loads((carried / CONTENTS).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{carried} has no {CONTENTS} of recipes.benchmarks.carry: {error}") from error


def _put_together(parts: list[Path], path: Path, sha256: str, compressed: bool) -> None:
    """Write the file beside its place, and there once it is whole."""
    partial = path.with_name(path.name + ".partial")
    digest = hashlib.sha256()
    with open(partial, "wb") as file:
        for part in parts:
            content = part.read_bytes()
            digest.update(content)
            file.write(content)
    if digest.hexdigest() != sha256:
        raise ValueError(f"{path.name} is not the file that was packed; carry its parts again.")
    if compressed:
        with lzma.open(partial) as packed, open(path.with_name(path.name + ".whole"), "wb") as whole:
            shutil.copyfileobj(packed, whole)
        partial.unlink()
        partial = path.with_name(path.name + ".whole")
    partial.rename(path)


def download(wheels: list[str], folder: Path, python: str) -> None:
    """Fetch wheels for another machine's Python."""
    systems = [f"--platform=manylinux_2_{n}_x86_64" for n in (17, 27, 28, 34)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest",
               str(folder), "--python-version", python, *systems, "--platform=manylinux2014_x86_64"]  # fmt: skip
    subprocess.run([*command, *wheels], check=True)


def make(
    folder: Path,
    teacher: Path,
    text: str,
    tokens: int,
    teachers: list[Path],
    wheels: list[str],
    python: str,
    part: int,
) -> None:
    """Make the folder, and print what it holds.

    Args:
        teacher: whose tokenizer reads the text; it is carried, too. part: largest size of a file, in bytes.
    """
    from convert.checkpoint.load import prompt_tokenizer
    from convert.fit.text import documents

    names = [path.name for path in (teacher, *teachers)]
    if len(set(names)) < len(names):
        raise ValueError("Two teachers have the same name; rename one.")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; name another folder.")
    contents = {}
    with tempfile.TemporaryDirectory() as scratch:
        if wheels:
            download(wheels, Path(scratch), python)
        for path in sorted(Path(scratch).iterdir()):
            contents[path.name] = split(path, folder, part)
    if tokens:
        texts = installed_text() if text == INSTALLED else documents(text)
        packed = folder / f"{IDS}.xz"
        with lzma.open(packed, "wb") as file:
            numpy.save(file, token_ids(texts, prompt_tokenizer(str(teacher)), tokens))
        contents[packed.name] = split(packed, folder, part)
        packed.unlink()
    for path in (teacher, *teachers):
        contents[path.name] = split(path, folder, part)
    (folder / CONTENTS).write_text(json.dumps(contents, indent=2) + "\n")
    for path in sorted(folder.iterdir()):
        print(f"{path.stat().st_size / 1e6:8.1f} MB  {path.name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=30_000_000, help="Number of token ids; 0 for none.")
    parser.add_argument("--text", default=INSTALLED, help="Text of the ids: installed, or one as of a conversion.")
    parser.add_argument("--teachers", type=Path, nargs="*", default=[], help="GGUF files to carry beside SmolLM2.")
    parser.add_argument("--wheels", nargs="*", default=list(NEEDED), help="Packages to carry.")
    parser.add_argument("--python", default="3.12", help="Version of Python there.")
    parser.add_argument("--part", type=int, default=48, help="Largest size of a file, in MB.")
    parser.add_argument("--join", type=Path, help="Put the files of FOLDER together here, and make nothing.")
    asked = parser.parse_args()
    if asked.join is not None:
        print("\n".join(map(str, join(asked.folder, asked.join))))
    else:
        # what joins may have no packages but NumPy yet
        from convert.teachers.teacher import embedded_teacher

        if asked.part < 1:
            parser.error("--part must be 1 or more.")
        make(asked.folder, embedded_teacher(), asked.text, asked.tokens, asked.teachers, asked.wheels, asked.python,
             asked.part * 10**6)  # fmt: skip
