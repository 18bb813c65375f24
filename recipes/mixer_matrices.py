"""What each stage makes of the teacher's attention: matrices to look at, and how far each head is from its original.

python -m recipes.mixer_matrices mapped closed-form stage-2 --teacher MODEL --text text.jsonl --output runs/matrices

STUDENT... are hybrids of one teacher in the order of their stages; NAME=FOLDER shows one under another name. On the
teacher's own layer inputs, each mixer's unrolled matrix M is compared with the attention matrix A of the head that it
replaced: ||M - A|| / ||A|| (Frobenius); the same after the best scalar per head, as out_proj takes up any scale; and
that without the first token's column, where heads put what attention they do not need, on a value near zero. Distances
are means over the sequences. The matrices kept to be looked at are those of the first sequence, at the best scale
without that column, a pixel the share of its rows' attention that goes to its columns. Writes matrices.npz and
matrices.json into DIR, which `recipes.report` reads; both are safe to load.
"""

import json
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from convert.cli import console, one_line_errors, progress_bars, set_verbosity

from .commit import project_commit

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Sampling:
    """What is looked at: text, tokens per matrix, sequences that distances are means over, pixels of a picture."""

    text: str = "default"
    length: int = 256
    sequences: int = 2
    pixels: int = 64


def pool(matrices: torch.Tensor, pixels: int) -> torch.Tensor:
    """(..., L, L) to (..., P, P): sums over columns, means over rows, so that a row that sums to 1 still does."""
    block = matrices.shape[-1] // pixels
    return matrices.unflatten(-1, (pixels, block)).sum(-1).unflatten(-2, (pixels, block)).mean(-2)


def replaced_layers(folder: Path) -> list[int]:
    """Layers whose attention a mixer alone replaced.

    Raises:
        ValueError: the folder holds no configuration, or none of a hybrid with such layers.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json, so it is no hybrid.")
    try:
        kinds = json.loads(path.read_text()).get("layer_types") or []
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not valid JSON.") from error
    layers = [i for i, kind in enumerate(kinds) if kind == "linear_attention"]
    if not layers:
        raise ValueError(f"{folder} has no layer with a mixer in place of attention: there is nothing to compare.")
    return layers


def parse_students(students: list[str]) -> dict[str, Path]:
    """Names and folders of FOLDER or NAME=FOLDER.

    Raises:
        ValueError: two of one name.
    """
    named = {}
    for given in students:
        name, _, folder = given.rpartition("=") if not Path(given).exists() else ("", "", given)
        name = name or Path(folder).resolve().name
        if name in named:
            raise ValueError(f"two students are called {name}; tell them apart with NAME=FOLDER.")
        named[name] = Path(folder)
    return named


def compare(
    model: str, students: dict[str, Path], sampling: Sampling, progress=lambda what, done, total: None
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Distances of every replaced head at every stage, and the pictures.

    Raises:
        ValueError: a teacher, student or text that cannot be used.
    """
    from .attention_matrices import Place, Sampler, open_teacher

    layers_of = {name: replaced_layers(folder) for name, folder in students.items()}
    started, teacher = time.perf_counter(), open_teacher(model)
    layers, heads = sorted(set().union(*layers_of.values())), teacher.config.num_attention_heads
    if layers[-1] >= teacher.num_layers:
        raise ValueError(f"a student has a layer {layers[-1]}, the teacher {teacher.num_layers} layers only.")
    places = [
        Place(sampling.text, sequence, layer, head)
        for sequence in range(sampling.sequences)
        for layer in layers
        for head in range(heads)
    ]
    sampler = Sampler(teacher, places, sampling.length)
    progress("matrices", 0, len(students) + 1)
    attention = sampler.attention()
    first = len(layers) * heads
    pictures = {"teacher": _pictures(attention[:first], heads, sampling.pixels)}
    stages = []
    for number, (name, folder) in enumerate(students.items()):
        progress("matrices", number + 1, len(students) + 1)
        stage, pictures[f"stage_{number}"] = _stage(sampler, folder, attention, places, heads, sampling)
        stages.append({"name": name, "folder": str(folder)} | stage)
    progress("matrices", len(students) + 1, len(students) + 1)
    report = {
        "teacher": teacher.teacher.public_name, "text": Path(sampling.text).name, "length": sampling.length,
        "sequences": sampling.sequences, "pixels": sampling.pixels, "layers": layers, "heads": heads,
        "stages": stages, "seconds": round(time.perf_counter() - started, 1), "commit": project_commit(),
    }  # fmt: skip
    return report, pictures


def _stage(sampler, folder: Path, attention: torch.Tensor, places: list, heads: int, sampling: Sampling):
    """Distances of a student by layer and head, and its pictures."""
    from .attention_matrices import best_scale
    from .matrix_fits import distance

    indices, mixed = sampler.student(folder)
    target = attention[indices]
    if not torch.isfinite(mixed).all():
        raise ValueError(f"{folder} has mixers whose matrices are not finite.")
    beyond = [torch.cat((torch.zeros_like(m[..., :1]), m[..., 1:]), -1) for m in (target, mixed)]
    pairs = {
        "relative": (target, mixed),
        "scaled": (target, best_scale(target, mixed)),
        "beyond_first": (beyond[0], best_scale(*beyond)),
    }
    layers = sorted({places[i].layer for i in indices})
    by_head = (sampling.sequences, len(layers), heads)
    found = {}
    for name, (wanted, matrices) in pairs.items():
        norms = distance(wanted, torch.zeros_like(wanted)).clamp_min(1e-12)
        means = (distance(wanted, matrices) / norms).view(by_head).mean(0)
        found[name] = {layer: [round(x, 6) for x in row] for layer, row in zip(layers, means.tolist(), strict=True)}
    first = slice(len(layers) * heads)
    scale = (beyond[0] * beyond[1]).sum((-2, -1)) / beyond[1].square().sum((-2, -1)).clamp_min(1e-30)
    return {"layers": layers} | found, _pictures((scale[:, None, None] * mixed)[first], heads, sampling.pixels)


def _pictures(matrices: torch.Tensor, heads: int, pixels: int) -> np.ndarray:
    return pool(matrices, pixels).unflatten(0, (-1, heads)).clamp(-6e4, 6e4).numpy().astype(np.float16)


def write(output: Path, report: dict[str, Any], pictures: dict[str, np.ndarray]) -> None:
    """Both files, the one that makes the folder a result last."""
    from convert.alignment.align import write_beside

    def save(path: Path) -> None:
        with open(path, "wb") as file:
            np.savez_compressed(file, **pictures)

    output.mkdir(parents=True, exist_ok=True)
    write_beside(output / "matrices.npz", save)
    write_beside(output / "matrices.json", lambda path: path.write_text(json.dumps(report, indent=2) + "\n"))


def as_table(report: dict[str, Any]) -> str:
    """Mean over heads by layer and stage, at the best scale per head and without the first column, in Markdown."""
    stages = report["stages"]
    lines = ["| layer | " + " | ".join(s["name"] for s in stages) + " |", "|---" * (len(stages) + 1) + "|"]
    for layer in report["layers"]:
        rows = [stage["beyond_first"].get(layer) for stage in stages]
        lines.append(f"| {layer} | " + " | ".join(f"{np.mean(row):.3f}" if row else "–" for row in rows) + " |")
    means = [np.mean([x for row in stage["beyond_first"].values() for x in row]) for stage in stages]
    return "\n".join([*lines, "| all | " + " | ".join(f"{mean:.3f}" for mean in means) + " |"])


@app.command()
def mixer_matrices_command(
    students: Annotated[
        list[str], typer.Argument(metavar="STUDENT...", help="Hybrids, a stage each; or NAME=FOLDER.")
    ],
    teacher: Annotated[str | None, typer.Option(help="Hub id, folder or GGUF file (default: embedded).")] = None,
    text: Annotated[str, typer.Option(help="Text, as for --calibration-dataset.")] = Sampling.text,
    output: Annotated[Path, typer.Option(help="Folder to write.")] = Path("runs/matrices"),
    length: Annotated[int, typer.Option(help="Tokens per matrix.")] = Sampling.length,
    sequences: Annotated[int, typer.Option(help="Sequences that distances are means over.")] = Sampling.sequences,
    pixels: Annotated[int, typer.Option(help="Width of a picture; divides the length.")] = Sampling.pixels,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace results in the folder.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Errors only.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Tracebacks and library messages.")] = False,
) -> None:
    """Compare hybrids' unrolled mixers with the attention they replaced."""
    set_verbosity(verbose, quiet)
    with one_line_errors(verbose):
        from transformers.utils import logging

        from convert.teacher import embedded_teacher

        logging.disable_progress_bar()  # ours shows the students
        for name, value, least in (("length", length, 4), ("sequences", sequences, 1), ("pixels", pixels, 2)):
            if value < least:
                raise ValueError(f"--{name} must be at least {least}, not {value}.")
        if length % pixels:
            raise ValueError(f"--pixels {pixels} must divide --length {length}.")
        if output.is_file():
            raise ValueError(f"{output} is a file; give a folder.")
        if (output / "matrices.json").exists() and not overwrite:
            raise ValueError(f"{output} holds results already; say --overwrite or choose another --output.")
        named = parse_students(students)
        with progress_bars(quiet) as (_, _, on_progress):
            sampling = Sampling(text, length, sequences, pixels)
            report, pictures = compare(teacher or str(embedded_teacher()), named, sampling, on_progress)
        command = shlex.join(["python", "-m", "recipes.mixer_matrices", *sys.argv[1:]])
        write(output, report | {"command": command}, pictures)
        if not quiet:
            print(as_table(report))
            console.print(f"[green]done[/] {output} ({report['seconds']:.0f} s)", highlight=False)


if __name__ == "__main__":
    app()
