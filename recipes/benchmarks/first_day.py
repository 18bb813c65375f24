"""The first day on a GPU: parity of kernels, a conversion, `compare`, training and speed, in the order of worth.

make first-day-on-a-gpu        or        python -m recipes.benchmarks.first_day [runs/first-day]

Each step is a process of its own, and one that fails or takes too long does not keep the next from running. What
failed, and how, is on one page: OUTPUT/page.md, beside a log of each step.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from convert.teachers.teacher import embedded_teacher

HELD_OUT = Path(__file__).parents[1] / "evaluation" / "held_out.txt"
LIMIT = 360
"""Seconds of a step; the five together take half an hour at most."""
SAID = 12
"""Last lines of a failed step that the page shows."""


def steps(output: Path, teacher: Path) -> dict[str, list[str]]:
    """A module and its arguments, by what it shows."""
    hybrid = output / "hybrid"
    data = output / "data"
    return {
        "parity of kernels": ["pytest", "-q", "-m", "gpu", "tests/kernels", "--numprocesses", "8"],
        "a conversion": ["convert.cli", str(teacher), str(hybrid), "--device", "cuda", "--overwrite"],
        "comparison": [
            "recipes.cli", "compare", str(teacher), str(hybrid), "--quick", "--device", "cuda",
            "--out", str(output / "comparison"),
        ],
        "training": [
            "recipes.sft", "--model_name_or_path", str(hybrid), "--teacher_model_name_or_path", str(teacher),
            "--dataset_name", str(data), "--output_dir", str(output / "trained"), "--overwrite", "true",
            "--max_steps", "8", "--per_device_train_batch_size", "1", "--max_length", "512", "--bf16", "true",
            "--learning_rate", "1e-5", "--logging_steps", "1", "--save_strategy", "no", "--report_to", "none",
            "--eval_strategy", "steps", "--eval_steps", "8",
        ],
        "speed": ["recipes.benchmarks.run", "--only", "gpu", "--output", str(output / "bench")],
    }  # fmt: skip


def main(output: Path, teacher: Path, run: list[str], only: list[str] | None = None) -> int:
    """Take the steps and write the page; returns how many failed.

    Args:
        run: the command that runs a module. only: steps to take; all, if None.
    """
    write_data(output / "data")
    rows = []
    details = []
    failed = 0
    for what, arguments in steps(output, teacher).items():
        if only is not None and what not in only:
            continue
        print(f"{what} ...", flush=True)
        started = time.perf_counter()
        log = output / f"{what.replace(' ', '-')}.log"
        with open(log, "w") as file:
            try:
                done = subprocess.run([*run, *arguments], stdout=file, stderr=subprocess.STDOUT, timeout=LIMIT)
                result = "done" if done.returncode == 0 else f"**failed**, exit code {done.returncode}"
            except subprocess.TimeoutExpired:
                result = f"**failed**, stopped after {LIMIT} s"
        seconds = time.perf_counter() - started
        print(f"{what}: {result}, {seconds:.0f} s", flush=True)
        rows.append(f"| {what} | {result} | {seconds:.0f} | `{log.name}` |")
        if result != "done":
            failed += 1
            last = "\n".join(log.read_text(errors="replace").splitlines()[-SAID:])
            details += ["", f"## {what}", "", f"`{' '.join([*run, *arguments])}`", "", "```", last, "```"]
        head = ["# The first day on a GPU", "", "| step | result | seconds | log |", "|---|---|---|---|"]
        (output / "page.md").write_text("\n".join([*head, *rows, *details]) + "\n")
    print(f"{len(rows) - failed} of {len(rows)} steps done -> {output / 'page.md'}")
    return failed


def write_data(folder: Path) -> None:
    """Write texts to train and to evaluate on: the sentences of the held-out text, two by two."""
    folder.mkdir(parents=True, exist_ok=True)
    sentences = HELD_OUT.read_text().split(". ")
    texts = [". ".join(sentences[i : i + 2]) for i in range(0, len(sentences), 2)]
    for split, part in (("train", texts[:-4]), ("test", texts[-4:])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, nargs="?", default=Path("runs/first-day"), help="Folder for the page.")
    chosen = parser.parse_args().output
    sys.exit(1 if main(chosen, embedded_teacher(), [sys.executable, "-m"]) else 0)
