"""How near structured matrices come to a teacher's attention: the study behind MOHAWK's choice of Mamba-2.

python -m recipes.studies.structured_matrices.run HuggingFaceTB/SmolLM2-135M-Instruct --output runs/matrices

Samples causal self-attention matrices (one random head per layer) and approximates each by a Toeplitz matrix (exact
projection), a causal low-rank one (LR), the same with one decay per token (SSD), and a general semiseparable one
(SSM, balanced truncation). Frobenius distances are neither squared nor divided by anything, as in the paper. Writes
approximation.json, approximation.png and table.md into DIR.
"""

import json
import math
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import torch
import typer

from convert.cli import console, one_line_errors, progress_bars, set_verbosity

from .distances import SINKS, WINDOW, Effort, approximate
from .fits import distance, toeplitz
from .semiseparable import balanced_truncation

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
MATRICES_AT_ONCE = 10
FAMILIES = ("low_rank", "ssd", "ssm")
EXTENSIONS = ("ssd_normalised", "mamba1", "mamba1_folded", "window_ssd", "gated_delta")
LABELS = {
    "low_rank": "LR", "ssd": "SSD", "ssm": "SSM", "ssd_normalised": "SSD, rows divided by their sums",
    "mamba1": "a decay per state (Mamba-1)", "mamba1_folded": "the same, written as LR",
    "window_ssd": f"window {WINDOW} + {SINKS} sinks, SSD beyond", "gated_delta": "gated delta rule",
    "lower_bound": "no state of N can beat",
}  # fmt: skip
# Bick et al. 2024: Llama2-7B-Chat, 1,000 matrices of 512 tokens, mean over WikiText-103, OpenWebText, C4 and IMDb
PAPER = {
    "toeplitz": 12.2,
    "low_rank": {"16": 0.605, "32": 0.315, "64": 0.130},
    "ssd": {"16": 0.463, "32": 0.230, "64": 0.095},
    "ssm": {"16": 0.250, "32": 0.119, "64": 0.044},
}


def approximate_all(
    matrices: torch.Tensor, states: list[int], effort: Effort, workers: int, progress=lambda what, done, total: None
) -> dict[str, dict[str, torch.Tensor]]:
    """Family to state size to distances (M,), in `workers` processes."""
    chunks = list(range(0, len(matrices), MATRICES_AT_ONCE))
    jobs = [(first, state) for state in sorted(states, reverse=True) for first in chunks]
    parts: dict[tuple[int, int], dict] = {}
    if workers == 1:
        for done, (first, state) in enumerate(jobs):
            progress("approximating", done, len(jobs))
            parts[first, state] = approximate(matrices[first : first + MATRICES_AT_ONCE], state, effort)
    else:
        # not forked: a fork of a process whose libraries run threads can hang
        with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
            futures = {
                pool.submit(approximate, matrices[first : first + MATRICES_AT_ONCE].clone(), state, effort): (
                    first,
                    state,
                )
                for first, state in jobs
            }
            for done, future in enumerate(as_completed(futures)):
                progress("approximating", done, len(jobs))
                parts[futures[future]] = future.result()
    progress("approximating", len(jobs), len(jobs))
    names = parts[jobs[0]]
    joined = {
        name: {str(n): torch.tensor(sum((parts[first, n][name] for first in chunks), [])) for n in states}
        for name in names
    }
    return joined | {"toeplitz": distance(matrices, toeplitz(matrices))}


def tree(values, reduce):
    """The same nested mapping with every tensor reduced."""
    return {k: tree(v, reduce) for k, v in values.items()} if isinstance(values, dict) else reduce(values)


def state_needed(curve: dict[str, float], wanted: float) -> float | None:
    """The state size at which a curve of distances reaches `wanted`, between the sizes measured, else None."""
    least = 1e-12
    points = sorted((math.log(int(n)), math.log(max(value, least))) for n, value in curve.items())
    aim = math.log(max(wanted, least))
    for (n0, d0), (n1, d1) in zip(points, points[1:], strict=False):
        if d1 <= aim <= d0 and d1 < d0:
            return math.exp(n0 + (d0 - aim) / (d0 - d1) * (n1 - n0))
    return next((math.exp(n) for n, d in points if d == aim), None)


def needed_text(curve: dict[str, float], wanted: float) -> str:
    """The same in words: beyond the sizes measured, on which side."""
    found = state_needed(curve, wanted)
    if found is not None:
        return f"{found:.0f}"
    smallest = min(curve, key=int)
    return f"< {smallest}" if wanted > curve[smallest] else f"> {max(curve, key=int)}"


def shortest_names(datasets: list[str]) -> dict[str, str]:
    """The last part of each name to the name, or all of it where two end alike."""
    last = [Path(name).name for name in datasets]
    return {short if last.count(short) == 1 else name: name for short, name in zip(last, datasets, strict=True)}


def summarise(found: dict, matrices: torch.Tensor, datasets: list[str]) -> dict:
    """Means, spreads, order, ratios, and the state each family needs for the same distance."""
    norms = distance(matrices, torch.zeros_like(matrices))
    families = ("toeplitz", *FAMILIES)
    mean = tree(found, lambda t: t.mean().item())
    sizes = list(mean["ssm"])
    of = {name: torch.tensor([dataset == name for dataset in datasets]) for name in dict.fromkeys(datasets)}
    report = {
        "norm": norms.mean().item(),
        "distance": {name: mean[name] for name in families},
        "spread": tree({name: found[name] for name in families}, lambda t: t.std(correction=0).item()),
        "relative": tree({name: found[name] for name in families}, lambda t: (t / norms).mean().item()),
        "lower_bound": mean["lower_bound"],
        "extensions": {name: mean[name] for name in EXTENSIONS if name in mean},
        "by_dataset": {
            short: tree({f: found[f] for f in families}, lambda t, rows=of[name]: t[rows].mean().item())
            for short, name in shortest_names(list(of)).items()
        },
        "order": {n: sorted(FAMILIES, key=lambda name: mean[name][n]) for n in sizes},
        "ratio_to_ssm": {f: {n: mean[f][n] / max(mean["ssm"][n], 1e-12) for n in sizes} for f in FAMILIES},
        "state_needed_for_ssd": {
            f: {n: needed_text(mean[f], mean["ssd"][n]) for n in sizes} for f in ("low_rank", "ssm")
        },
        "paper": PAPER,
    }  # fmt: skip
    paper = {f: {n: PAPER[f][n] / PAPER["ssm"][n] for n in sizes if n in PAPER["ssm"]} for f in FAMILIES}
    return report | {"paper_ratio_to_ssm": paper}


def as_table(report: dict) -> str:
    """Distances in Markdown, the paper's beside them."""
    sizes = list(report["distance"]["ssm"])
    lines = ["| | " + " | ".join(f"N = {n}" for n in sizes) + " |", "|---" * (len(sizes) + 1) + "|"]
    for family in FAMILIES:
        cells = [
            f"{report['distance'][family][n]:.3f} ± {report['spread'][family][n]:.3f}"
            + (f" ({PAPER[family][n]:.3f})" if n in PAPER[family] else "")
            for n in sizes
        ]
        lines.append(f"| {LABELS[family]} (paper) | " + " | ".join(cells) + " |")
    toeplitz_cell = f"{report['distance']['toeplitz']:.2f} ± {report['spread']['toeplitz']:.2f} ({PAPER['toeplitz']})"
    lines.insert(2, f"| Toeplitz (paper), no state | {toeplitz_cell} |" + " |" * (len(sizes) - 1))
    for name, values in {"lower_bound": report["lower_bound"], **report["extensions"]}.items():
        lines.append(f"| {LABELS[name]} | " + " | ".join(f"{values[n]:.3f}" for n in sizes) + " |")
    for family, of_sizes in report["state_needed_for_ssd"].items():
        lines.append(f"| N that {LABELS[family]} needs for SSD's distance | " + " | ".join(of_sizes.values()) + " |")
    if report.get("students"):
        lines += ["", "| student | matrices | distance | best scale per matrix |", "|---|---|---|---|"]
        lines += [
            f"| {s['name']} | {s['matrices']} | {s['distance']:.3f} ± {s['spread']:.3f} | {s['scaled']:.3f} |"
            for s in report["students"]
        ]
    return "\n".join(lines) + "\n"


def plot(report: dict, matrices: torch.Tensor, path: Path) -> None:
    """Distance over state size, and one matrix with what SSD and SSM make of it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = list(report["distance"]["ssm"])
    figure, axes = pyplot.subplots(1, 4, figsize=(16, 4), layout="constrained")
    curves = {name: report["distance"][name] for name in FAMILIES} | {"lower_bound": report["lower_bound"]}
    curves |= {
        name: report["extensions"][name]
        for name in ("mamba1", "window_ssd", "gated_delta")
        if name in report["extensions"]
    }
    for name, values in curves.items():
        axes[0].plot([int(n) for n in sizes], list(values.values()), marker="o", label=LABELS[name],
                     linestyle=":" if name == "lower_bound" else "-")  # fmt: skip
    axes[0].axhline(report["distance"]["toeplitz"], color="grey", linestyle="--", label="Toeplitz")
    axes[0].set(xscale="log", yscale="log", xlabel="state size N", ylabel="Frobenius distance")
    axes[0].set_xticks([int(n) for n in sizes], sizes, minor=False)
    axes[0].set_xticks([], minor=True)
    axes[0].legend(fontsize=7)
    example = matrices[len(matrices) // 2 : len(matrices) // 2 + 1].double()
    shown = {
        "attention": example,
        "Toeplitz": toeplitz(example),
        f"SSM, N = {sizes[0]}": balanced_truncation(example, int(sizes[0])).matrix(),
    }
    for axis, (title, matrix) in zip(axes[1:], shown.items(), strict=True):
        axis.imshow(matrix[0].clamp_min(0).sqrt().numpy(), vmin=0, vmax=1, cmap="magma")
        axis.set_title(title)
    figure.savefig(path, dpi=80, format="png")
    pyplot.close(figure)


def compare_students(sampler, folders: list[Path], matrices: torch.Tensor) -> list[dict]:
    """Distances of hybrids' matrices to the teacher's, where they replaced its attention."""
    from .attention_matrices import best_scale

    compared = []
    for folder in folders:
        indices, mixed = sampler.student(folder)
        away, scaled = (distance(matrices[indices], m) for m in (mixed, best_scale(matrices[indices], mixed)))
        compared.append(
            {"name": folder.name, "matrices": len(indices), "distance": away.mean().item(),
             "spread": away.std(correction=0).item(), "scaled": scaled.mean().item(), "indices": indices}
        )  # fmt: skip
    return compared


def study(
    model: str, output: Path, datasets: list[str], num_matrices: int, states: list[int], length: int, effort: Effort,
    students: list[Path], workers: int, seed: int, progress=lambda what, done, total: None,
) -> dict:  # fmt: skip
    """Sample, approximate, compare, write; the report.

    Raises:
        ValueError: a teacher, text or student that cannot be used.
    """
    # here, since the processes that fit matrices import this module and need none of it
    from convert.checkpoint.folder import write_beside

    from .attention_matrices import Sampler, choose_places, open_teacher

    started = time.perf_counter()
    teacher = open_teacher(model)
    places = choose_places(datasets, teacher.num_layers, teacher.config.num_attention_heads, num_matrices, seed)
    sampler = Sampler(teacher, places, length)
    matrices = sampler.attention()
    compared = compare_students(sampler, students, matrices)
    sampled = time.perf_counter() - started
    found = approximate_all(matrices, states, effort, workers, progress)
    of_families = {family: found[family] for family in ("toeplitz", *FAMILIES)}
    for student in compared:
        rows = student.pop("indices")
        student["families"] = tree(of_families, lambda t, rows=rows: t[rows].mean().item())
    report = summarise(found, matrices, [place.dataset for place in places]) | {
        "teacher": teacher.teacher.public_name, "num_matrices": num_matrices, "tokens": length,
        "effort": asdict(effort), "workers": workers, "seed": seed, "students": compared,
        "seconds": {"sampling": round(sampled, 1), "all": round(time.perf_counter() - started, 1)},
        "matrices": [
            asdict(place) | {"norm": matrices[i].norm().item()} | tree(found, lambda t, i=i: t[i].item())
            for i, place in enumerate(places)
        ],
    }  # fmt: skip
    output.mkdir(parents=True, exist_ok=True)
    write_beside(output / "approximation.png", lambda path: plot(report, matrices, path))
    write_beside(output / "table.md", lambda path: path.write_text(as_table(report)))
    write_beside(output / "approximation.json", lambda path: path.write_text(json.dumps(report, indent=2) + "\n"))
    return report


def parse_sizes(text: str, length: int) -> list[int]:
    """ "16,32" as state sizes.

    Raises:
        ValueError: not positive numbers, or not below the length, where a state holds everything.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) < length for part in parts):
        raise ValueError(f"state sizes are numbers from 1 to {length - 1} with commas between, not {text!r}.")
    return sorted({int(part) for part in parts})


@app.command()
def matrix_approximation_command(
    teacher: Annotated[str | None, typer.Argument(help="Hub id, folder or GGUF file (default: embedded).")] = None,
    output: Annotated[Path, typer.Option(help="Folder to write.")] = Path("runs/matrices"),
    num_matrices: Annotated[int, typer.Option(help="In all, over the data sets.")] = 100,
    state_sizes: Annotated[str, typer.Option(help="State sizes N.")] = "16,32,64",
    dataset: Annotated[
        list[str] | None, typer.Option(help="Text; repeat it for several (default: the calibration text).")
    ] = None,
    student: Annotated[list[Path] | None, typer.Option(help="Hybrid to compare; repeat it, a stage each.")] = None,
    length: Annotated[int, typer.Option(help="Tokens per matrix.")] = 512,
    sweeps: Annotated[int, typer.Option(help="Exact solves of C and B in turn, for LR and SSD.")] = 8,
    gradient_steps: Annotated[int, typer.Option(help="Gradient steps from random instead (paper: 10000).")] = 0,
    extensions: Annotated[bool, typer.Option(help="Newer families as well.")] = True,
    delta_steps: Annotated[int, typer.Option(help="Gradient steps to fit the gated delta rule (0: not at all).")] = 0,
    workers: Annotated[int | None, typer.Option(help="Processes (default: one per core).")] = None,
    seed: Annotated[int, typer.Option(help="Of heads and layers.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace results in the folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Errors only.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Tracebacks and library messages.")] = False,
) -> None:
    """Approximate a teacher's attention matrices by structured ones."""
    set_verbosity(verbose, quiet)
    with one_line_errors(verbose):
        from convert.teachers.teacher import embedded_teacher

        processes = (os.cpu_count() or 1) if workers is None else workers
        at_least = {"num-matrices": (num_matrices, 1), "length": (length, 4), "sweeps": (sweeps, 1),
                    "gradient-steps": (gradient_steps, 0), "delta-steps": (delta_steps, 0),
                    "workers": (processes, 1)}  # fmt: skip
        for name, (value, least) in at_least.items():
            if value < least:
                raise ValueError(f"--{name} must be at least {least}, not {value}.")
        states = parse_sizes(state_sizes, length)
        if output.is_file():
            raise ValueError(f"{output} is a file; give a folder.")
        if (output / "approximation.json").exists() and not overwrite:
            raise ValueError(f"{output} holds results already; say --overwrite or choose another --output.")
        with progress_bars(quiet) as (_, _, on_progress):
            report = study(
                teacher or str(embedded_teacher()), output, dataset or ["default"], num_matrices, states, length,
                Effort(sweeps, gradient_steps, extensions, delta_steps), student or [], processes, seed,
                on_progress,
            )  # fmt: skip
        if as_json:
            sys.stdout.write(json.dumps(report, indent=2) + "\n")
        elif not quiet:
            print(as_table(report))
        if not quiet:
            console.print(f"[green]done[/] {output} ({report['seconds']['all']:.0f} s)", highlight=False)


if __name__ == "__main__":
    app()
