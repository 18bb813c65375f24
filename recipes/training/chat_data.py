"""Fetch real prompts and preference pairs for the pipeline and for experiments.

python -m recipes.training.chat_data runs/chat

They lie in the source archive of the PyPI package `llamafactory` (Apache-2.0), which is downloaded, not installed:
instructions like those of Stanford Alpaca (whose data set is CC BY-NC 4.0), and chosen and rejected answers. Use it
to try things out; none of it ships with this project.
"""

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = "llamafactory==0.9.5"
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


def main(folder: Path) -> None:
    """Write prompts.jsonl (instruction, input) and pairs.jsonl (prompt, chosen, rejected)."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
        subprocess.run([*command, "--no-binary", "llamafactory", PACKAGE], check=True)
        (archive,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(archive) as source:
            prompts, pairs = (read_member(source, name) for name in ("alpaca_en_demo.json", "dpo_en_demo.json"))
    folder.mkdir(parents=True, exist_ok=True)
    asked = [{"instruction": row["instruction"], "input": row["input"]} for row in prompts]
    write(folder / "prompts.jsonl", asked)
    write(folder / "pairs.jsonl", preference_pairs(pairs))


def read_member(source: tarfile.TarFile, name: str) -> list[dict[str, Any]]:
    """A JSON file of the archive's data folder."""
    (member,) = (m for m in source.getmembers() if m.name.endswith(f"/data/{name}"))
    return json.load(source.extractfile(member))


def preference_pairs(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """In TRL's conversational format."""
    for row in rows:
        prompt = [message(turn) for turn in row["conversations"]]
        yield {"prompt": prompt, "chosen": [message(row["chosen"])], "rejected": [message(row["rejected"])]}


def message(turn: dict[str, str]) -> dict[str, str]:
    """A turn with its role's usual name."""
    return {"role": ROLES[turn["from"]], "content": turn["value"]}


def write(path: Path, rows: Any) -> None:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    main(parser.parse_args().folder)
