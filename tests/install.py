"""Follow the README in a new environment without constraints: `make test-install`.

Runs the install line, the commands and the Python that stand in README.md, in their order, on a tiny teacher and on
the embedded one, in place of the model that the README downloads.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from convert.teachers.teacher import embedded_teacher
from tests.helpers.tiny_chat import save_chat_teacher

ROOT = Path(__file__).parents[1]
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def blocks(language: str) -> list[str]:
    """The README's blocks of code in a language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def follow(teacher: Path, folder: Path, environment: dict[str, str], python: Path) -> None:
    """Run the README's commands on a teacher, and its Python, in a folder."""
    _, commands = blocks("bash")
    (code,) = blocks("python")
    for line in commands.splitlines():
        command = line.partition("#")[0].strip().replace(MODEL, str(teacher))
        command = command.replace("--teacher recorded", f"--teacher {teacher}")  # a local one is not recorded
        if command.startswith("convert-to-hybrid"):
            run(["bash", "-c", command], folder, environment, "w9 w8 w7\n")
    run([str(python), "-c", code], folder, environment)


def run(command: list[str], folder: Path, environment: dict[str, str], said: str = "") -> None:
    """Run a command; a failure ends the program with its output."""
    started = time.monotonic()
    done = subprocess.run(command, cwd=folder, env=environment, input=said, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command} failed:\n{done.stdout}\n{done.stderr}")
    print(f"{time.monotonic() - started:6.0f} s  {command[-1].splitlines()[0][:100]}", flush=True)  # noqa: T201


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        venv.create(root / "pipx", with_pip=True)
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        path = f"{root / 'bin'}:{root / 'pipx' / 'bin'}:{os.environ['PATH']}"
        environment = kept | {"PIPX_HOME": str(root / "home"), "PIPX_BIN_DIR": str(root / "bin"), "PATH": path}
        run([str(root / "pipx" / "bin" / "python"), "-m", "pip", "install", "--quiet", "pipx"], root, environment)
        install = next(line for line in blocks("bash")[1].splitlines() if line.startswith("pipx install"))
        run(["bash", "-c", install.partition("#")[0]], ROOT, environment)
        python = root / "home" / "venvs" / "convert-to-hybrid" / "bin" / "python"
        run([str(python), "-c", "import transformers, torch; print(transformers.__version__)"], root, environment)
        for teacher in (save_chat_teacher(root / "tiny"), embedded_teacher()):
            folder = root / f"with-{teacher.name}"
            folder.mkdir()
            follow(teacher, folder, environment, python)
