"""Every benchmark, one after the other, and one table of what was to be reached.

    make bench        or        python -m recipes.benchmarks.run [--only scan] [--output runs/bench]

Each topic runs in a process of its own (`python -m recipes.benchmarks.scan` and so on run one alone) and leaves a JSON
file; here they are put together: results.json with `targets`, results.md, and scaling.png, the cost of a layer against
the length. What is compared is measured in the same process, interleaved; smaller is better everywhere.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

from ..commit import project_commit
from .conversion import COMPARE, synthetic_llama

TOPICS = ("scan", "decode", "conversion", "alignment", "loss")

__all__ = ["COMPARE", "TOPICS", "main", "synthetic_llama"]


def run_topic(topic: str, output: Path) -> str | None:
    """Run one benchmark; returns what went wrong, if anything."""
    (output / f"{topic}.json").unlink(missing_ok=True)
    done = subprocess.run([sys.executable, "-m", f"recipes.bench_{topic}", "--output", str(output)])
    if done.returncode != 0:
        return f"exit code {done.returncode}"
    path = output / f"{topic}.json"
    path.write_text(json.dumps({"machine": machine()} | json.loads(path.read_text()), indent=2) + "\n")
    return None


def collect(output: Path, failed: dict[str, str]) -> dict:
    """One report of the topics' files; those that were not run again are as they were measured last."""
    paths = {topic: output / f"{topic}.json" for topic in TOPICS if topic not in failed}
    reports = {topic: json.loads(path.read_text()) for topic, path in paths.items() if path.is_file()}
    targets = [target for report in reports.values() for target in report.pop("targets", [])]
    return {"targets": targets, "failed": failed} | reports


def machine() -> dict[str, str | int | None]:
    """Where the figures come from."""
    model = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), None)
    return {
        "commit": project_commit(),
        "cpu": model or platform.processor(),
        "cores": torch.multiprocessing.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.is_file() else []


def as_markdown(report: dict) -> str:
    """The targets as a table, and what was skipped or failed."""
    machines: dict[str, list[str]] = {}
    for topic in TOPICS:
        if topic in report:
            about = ", ".join(f"{key} {value}" for key, value in report[topic].get("machine", {}).items())
            machines.setdefault(about, []).append(topic)
    lines = [f"{', '.join(topics)}: {about}." for about, topics in machines.items()]
    lines += ["", "Smaller is better.", "", "| what | value | target | met |", "|---|---|---|---|"]
    for row in report["targets"]:
        met = "yes" if row["met"] else "**no**"
        lines.append(f"| {row['name']} | {row['value']:.3g} | {row['target']:.3g} | {met} |")
    for topic, tables in TABLES.items():
        if topic in report:
            lines += ["", *tables(report[topic])]
    skipped = {name: why for t in TOPICS for name, why in report.get(t, {}).get("skipped", {}).items()}
    lines += ["", *(f"{name}: skipped, {why}." for name, why in skipped.items())]
    lines += [f"{topic}: failed, {why}." for topic, why in report["failed"].items()]
    return "\n".join(lines).rstrip() + "\n"


def scan_tables(scan: dict) -> list[str]:
    """Ours in milliseconds, the peers as multiples of it."""
    shares = {(row["heads"], row["length"]): row["share"] for row in scan["peak_share"]}
    lines = []
    for kind in ("prefill", "training"):
        peers = list(dict.fromkeys(n for row in scan[kind] for n in row["ms"] if n != "ours"))
        title = "forward" if kind == "prefill" else "forward and backward"
        lines += ["", f"| {title}: heads, tokens | ms (least, most) | of matmul peak | {' | '.join(peers)} |"]
        lines.append("|---" * (3 + len(peers)) + "|")
        for row in scan[kind]:
            ours, shape = row["ms"]["ours"], (row["heads"], row["length"])
            share = f"{shares[shape]:.0%}" if kind == "prefill" else ""
            times = [f"{row['ms'][p]['median'] / ours['median']:.2f} x" if p in row["ms"] else "" for p in peers]
            spread = f"{ours['median']:.1f} ({ours['least']:.1f}, {ours['most']:.1f})"
            lines.append(f"| {shape[0]}, {shape[1]} | {spread} | {share} | {' | '.join(times)} |")
    grown = ", ".join(f"{what} {figures['exponent']:.2f}" for what, figures in scan["growth"].items())
    return [*lines[1:], "", f"Exponents of growth: {grown}."]


def decode_table(decode: dict) -> list[str]:
    """Milliseconds per step of generate(), tokens per second, cache bytes."""
    lines = ["| context, batch | model | ms per step (least, most) | tokens/s | cache MB |", "|---|---|---|---|---|"]
    for row in decode["generate"]:
        for name, times in row["ms_per_step"].items():
            spread = f"{times['median']:.0f} ({times['least']:.0f}, {times['most']:.0f})"
            size = f"{row['cache_bytes'][name] / 1e6:.1f}" if name in row["cache_bytes"] else ""
            speed = f"{1e3 * row['batch'] / times['median']:.1f}" if size else ""
            label = name if size else "its matrix-vector products alone"
            lines.append(f"| {row['context']}, {row['batch']} | {label} | {spread} | {speed} | {size} |")
    lines += ["", "| a prompt of | model | tokens/s read | said, by the clock | cache MB |", "|---|---|---|---|---|"]
    for row in decode["whole"]:
        read, said = (row[f"{what}_tokens_per_second"] for what in ("prefill", "decode"))
        size = f"{row['cache_bytes'] / 1e6:.1f}"
        lines.append(f"| {row['context']} tokens | {row['which']} | {read:.0f} | {said:.1f} | {size} |")
    return lines


def alignment_table(alignment: dict) -> list[str]:
    """What the default alignment takes, and stage 1 in tiles against whole matrices."""
    lines = ["| default alignment at 50 %, extrapolated from one block | minutes | peak memory, GB |", "|---|---|---|"]
    for row in alignment["one_layer"]:
        peak = (row["peak_bytes"] + row["activation_bytes"]) / 1e9
        lines.append(f"| {row['teacher']} | {row['total_minutes']:.0f} | {peak:.1f} |")
    tiles = ", ".join(f"{row['ratio']:.2f} at {row['length']} tokens" for row in alignment["stage_1"])
    return [*lines, "", f"Stage 1, time of tiles over that of whole matrices: {tiles}."]


def loss_line(loss: dict) -> list[str]:
    """The distillation loss in chunks against logits written out."""
    sizes = " against ".join(f"{loss['figures'][name]['bytes'] / 1e6:.0f} MB" for name in ("chunked", "written out"))
    shape = f"{loss['tokens']} tokens of {loss['vocabulary']} logits"
    return [f"Distillation loss in chunks, {shape}: {sizes} written out, {loss['ratios']['seconds']:.2f} of its time."]


TABLES = {"scan": scan_tables, "decode": decode_table, "alignment": alignment_table, "loss": loss_line}


def plot_scaling(scan: dict, path: Path) -> None:
    """Milliseconds of one layer of 9 heads against the length, both logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in scan["prefill"] if row["heads"] == 9]
    grown = scan["growth"]["length"]
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    lengths = [int(n) for n in grown["ms"]]
    label = f"this project (exponent {grown['exponent']:.2f})"
    axes.plot(lengths, list(grown["ms"].values()), "o-", color="black", label=label)
    for name in dict.fromkeys(n for row in rows for n in row["ms"] if n != "ours"):
        points = [(row["length"], row["ms"][name]["median"]) for row in rows if name in row["ms"]]
        axes.plot(*zip(*points, strict=True), "o--", label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms of CPU time, one thread",
             title="One layer, forward, 9 heads, P = N = 64")  # fmt: skip
    axes.set_xticks(lengths, labels=[str(n) for n in lengths])
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(output: Path, topics: tuple[str, ...] = TOPICS) -> int:
    """Run the topics, print and save; the number of topics that failed."""
    output.mkdir(parents=True, exist_ok=True)
    console, failed, started = Console(), {}, time.perf_counter()
    for topic in topics:
        console.rule(topic)
        problem = run_topic(topic, output)
        if problem:
            failed[topic] = problem
    report = collect(output, failed)
    (output / "results.json").write_text(json.dumps(report, indent=2) + "\n")
    (output / "results.md").write_text(as_markdown(report))
    if "scan" in report:
        plot_scaling(report["scan"], output / "scaling.png")
    table = Table("what", "value", "target", "met", title="targets; smaller is better")
    for row in report["targets"]:
        table.add_row(row["name"], f"{row['value']:.3g}", f"{row['target']:.3g}", "yes" if row["met"] else "no")
    console.print(table)
    met = sum(row["met"] for row in report["targets"])
    minutes = (time.perf_counter() - started) / 60
    console.print(f"{met} of {len(report['targets'])} met, {minutes:.1f} min -> {output}/results.md", highlight=False)
    for topic, why in failed.items():
        console.print(f"{topic} failed: {why}", style="red")
    return len(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/bench"))
    parser.add_argument("--only", nargs="+", choices=TOPICS, default=TOPICS, help="measure only these again")
    arguments = parser.parse_args()
    sys.exit(1 if main(arguments.output, tuple(arguments.only)) else 0)
