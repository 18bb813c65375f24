"""Download the test suites of transformers and peft, at the installed versions, into runs/peers: `make test-peers`.

They come from the source distributions on the package index and stay out of the repository. What transformers' common
tests import and its distribution leaves out is replaced by empty classes; PEFT's decoder tests run on our models.
"""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "runs" / "peers"
LEFT_OUT = {"exporters/test_export.py": "ExportTesterMixin", "generation/test_utils.py": "GenerationTesterMixin"}
"""Modules of transformers' tests that its distribution lacks, and the class that is imported from each."""
NEEDED = ("parameterized", "diffusers")
"""Packages that the suites import."""


def fetch() -> None:
    """Put both suites into FOLDER as packages of their own, unless they are there in these versions."""
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "peft")}
    done = FOLDER / "-".join(["done", *versions.values()])
    if done.exists():
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", "--upgrade", "--target", FOLDER / "site", *NEEDED], check=True)
    for name, version in versions.items():
        command = [*pip, "download", "--no-deps", "--no-binary", name, "--dest", FOLDER, f"{name}=={version}"]
        if not (FOLDER / f"{name}-{version}.tar.gz").exists():
            subprocess.run(command, check=True)
        with tarfile.open(FOLDER / f"{name}-{version}.tar.gz") as archive:
            archive.extractall(FOLDER, filter="data")
        tests = FOLDER / f"{name}_suite"
        shutil.rmtree(tests, ignore_errors=True)  # of another version
        (FOLDER / f"{name}-{version}" / "tests").rename(tests)
        (tests / "__init__.py").touch()
    for path, mixin in LEFT_OUT.items():
        module = FOLDER / "transformers_suite" / path
        module.parent.mkdir(exist_ok=True)
        (module.parent / "__init__.py").touch()
        if not module.exists():
            module.write_text(f"class {mixin}:\n    pass\n")
    decoders = FOLDER / "peft_suite" / "test_decoder_models.py"
    ours = "from tests.peers.shapes import saved_shapes\n\n\nPEFT_DECODER_MODELS_TO_TEST = saved_shapes()\n"
    text = re.sub(r"PEFT_DECODER_MODELS_TO_TEST = \[.*?\n\]\n", ours, decoders.read_text(), count=1, flags=re.DOTALL)
    text = re.sub(
        r"\nSMALL_GRID_MODELS = \[.*?\n\]\n",
        "\nSMALL_GRID_MODELS = PEFT_DECODER_MODELS_TO_TEST\n",
        text,
        count=1,
        flags=re.DOTALL,
    )
    decoders.write_text(text)
    done.touch()


if __name__ == "__main__":
    from .shapes import saved_shapes

    fetch()
    shutil.rmtree(FOLDER / "models", ignore_errors=True)  # of other code
    saved_shapes()
