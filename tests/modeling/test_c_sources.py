"""The C files of the project, each compiled alone."""

import subprocess
from pathlib import Path

import pytest

from modeling_llamba.kernels.c.c_library import FLAGS, FOLDER, SOURCES, compilers
from recipes.serving.cpu_pages import PAGES

FILES = [*(FOLDER / name for name in SOURCES), PAGES]


def test_every_file_is_compiled():
    assert set(FOLDER.glob("*.c")) == {*FILES} - {PAGES}


@pytest.mark.parametrize("instructions", ["x86-64", "x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_compiles_without_a_warning(path: Path, instructions, tmp_path):
    warnings = ("-Wall", "-Wextra", "-Werror", f"-march={instructions}", "-fopenmp")
    # optimised little, which takes a fifth of the time
    command = [compilers()[0], *FLAGS, "-O1", *warnings, "-I", FOLDER, "-c", path, "-o", tmp_path / "x.o"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
