"""Speed and memory as ratios measured side by side, with targets.

    make bench        or        python -m recipes.benchmarks.run [--only hybrid] [--output runs/bench]
    make bench-gpu    or        python -m recipes.benchmarks.run --only gpu

Each topic runs in a process of its own. Writes TOPIC.json of each, and results.md of all; a run of a
few topics keeps what was measured of the others. Smaller is better everywhere.
"""

import argparse
import importlib
import importlib.metadata
import json
import multiprocessing
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.markdown import Markdown

from ..evaluation.commit import project_commit
from .measure import Report

# each is a module of this package with `measure(output) -> Report`
TOPICS = ("hybrid", "memory", "decode", "conversion")
GPU = "gpu"  # on request only


def run_topic(topic: str, output: Path) -> int | None:
    """Measure one topic in a process of its own; its exit code."""
    process = multiprocessing.get_context("spawn").Process(target=measure_topic, args=(topic, output))
    process.start()
    process.join()
    return process.exitcode


def measure_topic(topic: str, output: Path) -> None:
    """Measure one topic and save it."""
    started = time.perf_counter()
    report = importlib.import_module(f"recipes.benchmarks.{topic}").measure(output)
    save(topic, report, time.perf_counter() - started, output)


def save(topic: str, report: Report, seconds: float, output: Path) -> None:
    """Write a topic's figures with the machine they were measured on."""
    figures = {"machine": machine(), "seconds": round(seconds)} | asdict(report)
    (output / f"{topic}.json").write_text(json.dumps(figures, indent=2) + "\n")


def machine() -> dict[str, str | int | None]:
    """Describe the machine and the versions that the figures come from."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), None)
    return {
        "commit": project_commit(),
        "cpu": model or platform.processor(),
        "cores": multiprocessing.cpu_count(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "date": time.strftime("%Y-%m-%d"),
    }


def as_markdown(reports: dict[str, dict]) -> str:
    """The targets of all topics as one table, then each topic's own tables, and what was skipped."""
    lines = []
    for topic, report in reports.items():
        about = ", ".join(f"{key} {value}" for key, value in report["machine"].items())
        lines += [f"{topic}: {about}, {report['seconds']} s.", ""]
    lines += ["Smaller is better.", "", "| what | value | target | met |", "|---|---|---|---|"]
    for row in (row for report in reports.values() for row in report["targets"]):
        met = "yes" if row["value"] <= row["limit"] else "**no**"
        lines.append(f"| {row['name']} | {row['value']:.3g} | {row['limit']:.3g} | {met} |")
    for table in (table for report in reports.values() for table in report["tables"]):
        cells = [table["columns"], ["---"] * len(table["columns"]), *table["rows"]]
        lines += ["", *("| " + " | ".join(row) + " |" for row in cells)]
    for report in reports.values():
        for what, reason in report["skipped"].items():
            lines += ["", f"{what}: skipped, {reason}."]
    return "\n".join(lines) + "\n"


def main(output: Path, topics: tuple[str, ...] = TOPICS) -> int:
    """Measure the topics, print and save; returns how many failed."""
    if GPU in topics and not torch.cuda.is_available():
        sys.exit("There is no CUDA device here: make bench-gpu needs one, make bench measures on a CPU.")
    output.mkdir(parents=True, exist_ok=True)
    failed = 0
    for topic in topics:
        # or a topic that fails would show the figures of an earlier run
        (output / f"{topic}.json").unlink(missing_ok=True)
        if code := run_topic(topic, output):
            failed += 1
            print(f"{topic} failed with exit code {code}.", file=sys.stderr)
    paths = {topic: output / f"{topic}.json" for topic in (GPU, *TOPICS)}
    reports = {topic: json.loads(path.read_text()) for topic, path in paths.items() if path.is_file()}
    text = as_markdown(reports)
    (output / "results.md").write_text(text)
    Console().print(Markdown(text))
    targets = [target for report in reports.values() for target in report["targets"]]
    met = sum(target["value"] <= target["limit"] for target in targets)
    print(f"{met} of {len(targets)} targets met -> {output}/results.md")
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="folder for the results")
    parser.add_argument("--only", nargs="+", choices=(*TOPICS, GPU), default=TOPICS, help="measure only these topics")
    arguments = parser.parse_args()
    sys.exit(1 if main(arguments.output, tuple(arguments.only)) else 0)
