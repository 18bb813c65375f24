"""The first day on a GPU: parity of kernels, speed, conversions, `compare`, training, vLLM, in the order of worth.

make first-day-on-a-gpu        or        python -m recipes.benchmarks.first_day [runs/first-day] [--carried FOLDER]

Each step is a process of its own, and one that fails or takes too long does not keep the next from running. The same
command again takes the steps that are not done, or whose command or carried files have changed: conversions,
comparisons and distillation go on where they were. What failed, and how, is on one page: OUTPUT/page.md, beside a
log of each step. A machine without a network needs a folder of `recipes.benchmarks.carry`; without one, the steps that
need its token ids or teachers are left out.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from convert.io.folder import write_beside
from convert.teachers.teacher import EMBEDDED_TEACHER, embedded_teacher

from .carry import IDS, hash_of, join

HELD_OUT = Path(__file__).parents[1] / "evaluation" / "held_out.txt"
LIMIT = 360
"""Seconds of a step, unless --limit says otherwise."""
SAID = 12
"""Last lines of a failed step that the page shows."""
GRACE = 10
"""Seconds that a step has to end itself."""
ATTENTION = {"mamba-2": "none", "a-quarter-of-attention": "0.25"}
"""Hybrids that are distilled, and the layers of them that keep attention."""
DISTILLED = (0, 3_000_000, 30_000_000)
"""Numbers of tokens of distillation after which KL and recall are measured."""
STAGES = {
    "sequence_length": 2048,
    "hidden_state_alignment": {"tokens": 3_000_000, "sequences": 16, "bf16": True, "save_every": 20},
    "distillation": {"sequences": 16, "bf16": True, "save_every": 50},
}
"""Settings of MOHAWK's stages 2 and 3."""


def steps(output: Path, teacher: Path, carried: Sequence[Path] = ()) -> dict[str, list[str]]:
    """A module and its arguments, by what it shows.

    Args:
        carried: files that were brought along: token ids and GGUF files of larger teachers.
    """
    found = {
        "parity of kernels": ["pytest", "-q", "-m", "gpu", "tests/kernels", "--numprocesses", "8"],
        "speed": ["recipes.benchmarks.run", "--only", "gpu", "--output", str(output / "bench")],
        **conversion(teacher, output / "hybrid", ""),
    }
    for other in carried:
        if other.suffix == ".gguf" and other.name != teacher.name:
            found |= conversion(other, output / other.stem, f" of {other.stem}")
    found["training"] = [
        "recipes.sft", "--model_name_or_path", str(output / "hybrid"), "--teacher_model_name_or_path", str(teacher),
        "--dataset_name", str(output / "data"), "--output_dir", str(output / "trained"), "--overwrite", "true",
        "--max_steps", "8", "--per_device_train_batch_size", "1", "--max_length", "512", "--bf16", "true",
        "--learning_rate", "1e-5", "--logging_steps", "1", "--save_strategy", "no", "--report_to", "none",
        "--eval_strategy", "steps", "--eval_steps", "8",
    ]  # fmt: skip
    for ids in carried:
        if ids.name == IDS:
            found |= distillation(teacher, ids, output)
    if importlib.util.find_spec("vllm") is not None:
        serving = ["recipes.benchmarks.serving", str(output / "serving")]
        found |= {"models for vllm": [*serving, "--make"], "vllm": serving}
    return found


def conversion(teacher: Path, hybrid: Path, whose: str) -> dict[str, list[str]]:
    """A default conversion, and its comparison."""
    out = hybrid.with_name(f"{hybrid.name}-comparison")
    return {
        f"a conversion{whose}": ["convert.cli", str(teacher), str(hybrid), "--device", "cuda", "--overwrite"],
        f"comparison{whose}": [
            "recipes.cli", "compare", str(teacher), str(hybrid), "--quick", "--device", "cuda", "--out", str(out),
        ],
    }  # fmt: skip


def distillation(teacher: Path, ids: Path, output: Path) -> dict[str, list[str]]:
    """Mamba-2 layers from the teacher, with and without attention: the closed form, MOHAWK's stage 2, then stage 3 of
    more and more tokens, each measured."""
    found = {}
    device = ["--device", "cuda", "--overwrite"]
    for name, attention in ATTENTION.items():
        made = {tokens: output / f"{name}-{tokens}" for tokens in DISTILLED}
        aligned = output / f"{name}-aligned"
        mohawk = ["convert.cli", "mohawk"]
        text = ["--teacher", str(teacher), "--text", str(ids), "--config", str(output / "stages.json"), *device]
        found[f"{name}, closed form"] = [
            "convert.cli", str(teacher), str(made[0]), "--attention-layers", attention, *device,
        ]  # fmt: skip
        found[f"{name}, stage 2"] = [*mohawk, str(made[0]), str(aligned), "--stages", "2", *text]
        for tokens, hybrid in made.items():
            if tokens:
                found[f"{name}, stage 3, {tokens:,} tokens"] = [
                    *mohawk, str(aligned), str(hybrid), "--stages", "3", "--stage-tokens", str(tokens), *text,
                ]  # fmt: skip
            found[f"{name}, {tokens:,} tokens, measured"] = [
                "recipes.evaluate", str(hybrid), "--teacher", str(teacher), "--parts", "text", "recall",
                "--device", "cuda", "--text", "python-docs", "--lengths", "512",
                "--output", str(output / f"{hybrid.name}-figures"),
            ]  # fmt: skip
    return found


def main(
    output: Path,
    teacher: Path | None,
    run: list[str],
    only: list[str] | None = None,
    carried: Path | None = None,
    limit: float = LIMIT,
) -> int:
    """Take the steps that are not done yet and write the page; returns how many failed.

    Args:
        teacher: the one to convert; if None, SmolLM2, carried or installed.
        run: the command that runs a module. only: steps to take if they are not done; all, if None.
        carried: a folder of `carry`. limit: seconds of a step.

    Raises:
        ValueError: a step is named that there is not, or the carried folder is none.
    """
    write_data(output / "data")
    (output / "stages.json").write_text(json.dumps({"alignment": STAGES}))  # JSON is YAML, too
    brought = [] if carried is None else join(carried, output / "carried")
    hashes = {path: hash_of(path) for path in brought}
    teacher = teacher or next((path for path in brought if path.name == EMBEDDED_TEACHER), None) or embedded_teacher()
    record = output / "steps.json"
    known = json.loads(record.read_text()) if record.is_file() else {}
    planned = steps(output, teacher, brought)
    unknown = [what for what in only or () if what not in planned]
    if unknown:
        raise ValueError(f"--only names {', '.join(unknown)}; the steps are {'; '.join(planned)}.")
    failed = 0
    for what, arguments in planned.items():
        command = [*run, *arguments]
        if only is not None and what not in only:
            continue
        used = {path.name: hashes[path] for path in brought if str(path) in command}
        made_of = {"command": " ".join(command), "carried": used}
        before = known.get(what, {})
        if before.get("result") == "done" and made_of.items() <= before.items():
            continue
        print(f"{what} ...", flush=True)
        known[what] = take(what, command, output, limit) | made_of
        failed += known[what]["result"] != "done"
        print(f"{what}: {known[what]['result']}, {known[what]['seconds']} s", flush=True)
        write_beside(record, lambda partial: partial.write_text(json.dumps(known, indent=2) + "\n"))
        write_beside(output / "page.md", lambda partial: partial.write_text(page(known)))
    done = sum(step["result"] == "done" for step in known.values())
    print(f"{done} of {len(known)} steps done -> {output / 'page.md'}")
    return failed


def take(what: str, command: list[str], output: Path, limit: float) -> dict[str, Any]:
    """Take one step: its result, its seconds, its log, and the last lines of one that failed."""
    started = time.perf_counter()
    log = output / f"{what.replace(' ', '-').replace(',', '')}.log"
    with open(log, "w") as file:
        # a session of its own, so that what the step has started ends with it
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(limit)
            result = "done" if code == 0 else f"**failed**, exit code {code}"
        except subprocess.TimeoutExpired:
            result = f"**failed**, stopped after {limit:g} s"
            stop(process)
    last = []
    if result != "done":
        last = log.read_text(errors="replace").splitlines()[-SAID:]
    seconds = round(time.perf_counter() - started)
    return {"result": result, "seconds": seconds, "log": log.name, "last": last}


def stop(process: subprocess.Popen) -> None:
    """End a process and what it has started: first by SIGTERM, on which a conversion keeps what it has."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)


def page(known: dict[str, dict[str, Any]]) -> str:
    """A table of the steps, then how those failed that did."""
    lines = ["# The first day on a GPU", "", "| step | result | seconds | log |", "|---|---|---|---|"]
    for what, step in known.items():
        lines.append(f"| {what} | {step['result']} | {step['seconds']} | `{step['log']}` |")
    for what, step in known.items():
        if step["last"]:
            lines += ["", f"## {what}", "", f"`{step['command']}`", "", "```", *step["last"], "```"]
    return "\n".join(lines) + "\n"


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
    parser.add_argument("--carried", type=Path, help="Folder of recipes.benchmarks.carry.")
    parser.add_argument("--only", nargs="*", help="Steps to take, by their names on the page.")
    parser.add_argument("--limit", type=float, default=LIMIT, help="Seconds of a step.")
    asked = parser.parse_args()
    run = [sys.executable, "-m"]
    sys.exit(1 if main(asked.output, None, run, asked.only, asked.carried, asked.limit) else 0)
