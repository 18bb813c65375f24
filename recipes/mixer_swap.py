"""Toeplitz, low-rank and SSD mixers in the same layers of a language model, after the same fit: MOHAWK's second table.

python -m recipes.mixer_swap --output runs/swap --approximation runs/matrices/approximation.json

Every mixer starts from the attention it replaces (values, o_proj; queries and keys, or the mean attention by lag), and
gets the same closed form, the same refinement and the same hidden-state alignment (MOHAWK stage 2). LR is SSD with its
decay fixed at 1. Writes swap.json, swap.png and table.md: held-out error of the attention's output, KL to the teacher,
perplexity, and how well the distances of recipes.matrix_approximation foretell them, layer by layer.
"""

import contextlib
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import nn

from convert.alignment.activations import ActivationStream
from convert.alignment.align import write_beside
from convert.alignment.alignment import load_tokenizer
from convert.alignment.closed_form import FitSettings, LayerData, fit_layer, held_out_error
from convert.alignment.layerwise import LayerwiseStage, hidden_state_loss
from convert.alignment.settings import HiddenStateSettings
from convert.alignment.teacher_model import TeacherModel, replaced
from convert.cli import console, one_line_errors, progress_bars, set_verbosity

from .attention_matrices import open_teacher
from .fidelity import Yardstick, append, text_rows
from .head_scores import rank_correlation
from .toeplitz_mixer import ToeplitzMixer, set_kernel
from .window_ladder import LAYERS

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
KINDS = ("toeplitz", "low_rank", "ssd")
LABELS = {"toeplitz": "Toeplitz", "low_rank": "LR (SSD without decay)", "ssd": "SSD"}
# Bick et al. 2024: Phi-1.5, all layers, stages 2 and 3 with 1B tokens each; L2 distance of the blocks, mean accuracy
PAPER = {"toeplitz": (9.6, 35.0), "low_rank": (7.6, 36.4), "ssd": (5.5, 59.2)}
ACTIVATION_MEMORY = 2_000_000_000
KERNEL_SEQUENCES = 4
HELD_OUT = 4
FIGURES = ("kl", "kl_95", "perplexity", "perplexity_ratio", "top1", "copy")


@dataclasses.dataclass(frozen=True)
class Budget:
    """What every kind of mixer gets."""

    sequences: int = 24
    """To fit on."""
    refine_steps: int = 40
    stage2_steps: int = 16
    learning_rate: float = 1e-3
    validation: int = 6
    """Sequences."""


def start(kind: str, teacher: TeacherModel, layer: int, data: LayerData) -> nn.Module:
    """A mixer before any fit."""
    if kind != "toeplitz":
        return teacher.mixer(layer)
    attention = teacher.block(layer).self_attn
    mixer = ToeplitzMixer(attention, teacher.mixer_plan.config, data.u.shape[1])
    set_kernel(mixer, attention, data, KERNEL_SEQUENCES)
    return mixer


def fit_kinds(
    teacher: TeacherModel, layers: list[int], ids: torch.Tensor, budget: Budget, progress
) -> dict[str, dict[int, nn.Module]]:
    """Fit a mixer of every kind in each layer, on the teacher's own activations; the last rows of `ids` judge."""
    fitted: dict[str, dict[int, nn.Module]] = {kind: {} for kind in KINDS}
    with ActivationStream(teacher, ids, HELD_OUT, ACTIVATION_MEMORY) as stream:
        for layer in range(max(layers) + 1):
            progress("fitting", layer, max(layers) + 1)
            data = stream.attention_data(layer)
            for kind in KINDS if layer in layers else ():
                settings = FitSettings(refine_steps=budget.refine_steps)
                if kind == "low_rank":
                    settings = dataclasses.replace(settings, decays=(1.0,))
                fitted[kind][layer], _ = fit_layer(start(kind, teacher, layer, data), data, settings, layer)
    progress("fitting", max(layers) + 1, max(layers) + 1)
    return fitted


def align(teacher: TeacherModel, mixers: dict[int, nn.Module], ids: torch.Tensor, budget: Budget, progress) -> None:
    """Stage 2 in place; a layer that it made worse on the held-out rows is taken back."""
    before = {layer: {k: v.clone() for k, v in mixer.state_dict().items()} for layer, mixer in mixers.items()}
    settings = HiddenStateSettings(
        tokens=budget.stage2_steps * 2 * ids.shape[1], learning_rate=budget.learning_rate, save_every=0
    )
    for mixer in mixers.values():
        mixer.requires_grad_(True)
    stage = LayerwiseStage(teacher, mixers, hidden_state_loss(teacher, settings), settings)
    report = stage.run(ids[:-HELD_OUT], ids[-HELD_OUT:], progress)
    for layer, mixer in mixers.items():
        mixer.requires_grad_(False)
        if report.after[layer] > report.before[layer]:
            mixer.load_state_dict(before[layer])


def errors_of(
    teacher: TeacherModel, fitted: dict, layers: list[int], ids: torch.Tensor
) -> dict[str, dict[int, float]]:
    """Held-out ||mixer(u) - y||^2 / ||y||^2 of every mixer."""
    errors: dict[str, dict[int, float]] = {kind: {} for kind in fitted}
    with ActivationStream(teacher, ids, HELD_OUT, ACTIVATION_MEMORY) as stream:
        for layer in range(max(layers) + 1):
            data = stream.attention_data(layer)
            for kind in fitted if layer in layers else ():
                errors[kind][layer] = held_out_error(fitted[kind][layer], data)
    return errors


def measure(yardstick: Yardstick, teacher: TeacherModel, mixers: dict[int, nn.Module]) -> dict:
    """Fidelity of the teacher with these mixers in place."""
    with replaced(teacher.whole(), mixers) as student:
        return yardstick.measure(Yardstick.final_hidden(student))


def layer_distances(path: Path | None, layers: list[int]) -> dict[str, dict[int, float]]:
    """Mean distance over norm of each layer's sampled matrices to each kind, at the largest state size.

    Raises:
        ValueError: the file is not that recipe's.
    """
    if path is None:
        return {}
    try:
        matrices = json.loads(path.read_text())["matrices"]
        size = max(matrices[0]["ssd"], key=int)
        found: dict[str, dict[int, float]] = {}
        for kind in KINDS:
            for layer in layers:
                of_layer = [m for m in matrices if m["layer"] == layer]
                values = [(m[kind] if kind == "toeplitz" else m[kind][size]) / m["norm"] for m in of_layer]
                if values:
                    found.setdefault(kind, {})[layer] = sum(values) / len(values)
        return found
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path} holds no results of recipes.matrix_approximation ({error}).") from error


def correlations(distances: dict, errors: dict) -> dict[str, float | None]:
    """Spearman's between distance and error: over layers within a kind, and over all layers and kinds."""
    pairs = {kind: [(distances[kind][i], errors[kind][i]) for i in distances[kind]] for kind in distances}
    pairs["all"] = sum(pairs.values(), [])
    return {
        kind: rank_correlation(*map(list, zip(*points, strict=True))) if len(points) > 2 else None
        for kind, points in pairs.items()
    }


def study(
    model: str, output: Path, layers: list[int], budget: Budget, train: str, validation: str | None,
    approximation: Path | None, length: int, progress=lambda what, done, total: None,
) -> dict:  # fmt: skip
    """Fit, align, measure, write; the report.

    Raises:
        ValueError: layers, text or results that cannot be used.
    """
    started, teacher = time.perf_counter(), open_teacher(model)
    if not layers or not all(0 <= layer < teacher.num_layers for layer in layers):
        raise ValueError(f"layers must lie in 0 to {teacher.num_layers - 1}, not {layers}.")
    distances = layer_distances(approximation, layers)
    tokenizer = load_tokenizer(teacher.teacher, False)
    count = budget.sequences + HELD_OUT
    ids = text_rows(train, tokenizer, length, count)
    same = validation in (None, train)  # then the rows after those that were fitted on
    judged = text_rows(validation or train, tokenizer, length, budget.validation, count if same else 0)
    yardstick = Yardstick(teacher.whole(), tokenizer, judged, judged[:1], new_tokens=1, copied=min(150, length // 3))
    fitted = fit_kinds(teacher, layers, ids, budget, progress)
    output.mkdir(parents=True, exist_ok=True)
    (output / "rows.jsonl").unlink(missing_ok=True)
    rows = {}
    for stage in ("closed form", "stage 2"):
        if stage == "stage 2":
            for kind in KINDS:
                align(teacher, fitted[kind], ids, budget, lambda what, *at, k=kind: progress(f"stage 2, {k}", *at))
        errors = errors_of(teacher, fitted, layers, ids)
        for kind in KINDS:
            figures = measure(yardstick, teacher, fitted[kind])
            kept = {name: figures[name] for name in FIGURES}
            mean_error = sum(errors[kind].values()) / len(layers)
            rows[f"{kind}, {stage}"] = {
                "kind": kind,
                "stage": stage,
                "error": mean_error,
                "layers": errors[kind],
            } | kept
            append(output / "rows.jsonl", rows[f"{kind}, {stage}"])  # what an interrupted run has measured
    final = {kind: rows[f"{kind}, stage 2"]["layers"] for kind in KINDS}
    report = {
        "teacher": teacher.teacher.public_name, "layers": layers, "length": length,
        "budget": dataclasses.asdict(budget),
        "teacher_perplexity": yardstick.teacher["perplexity"], "rows": rows, "matrix_distance": distances,
        "correlation": correlations(distances, final) if distances else {}, "paper": PAPER,
        "seconds": round(time.perf_counter() - started, 1),
    }  # fmt: skip
    write_beside(output / "swap.png", lambda path: plot(report, path))
    write_beside(output / "table.md", lambda path: path.write_text(as_table(report)))
    write_beside(output / "swap.json", lambda path: path.write_text(json.dumps(report, indent=2) + "\n"))
    return report


def as_table(report: dict) -> str:
    """The rows in Markdown."""
    lines = ["| mixer, after | error of the attention's output | KL | perplexity | copy | paper: block L2, accuracy |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for row in report["rows"].values():
        paper = "{} / {}".format(*PAPER[row["kind"]]) if row["stage"] == "stage 2" else ""
        kl = f"{row['kl']:.3f} ± {row['kl_95']:.3f}"
        lines.append(f"| {LABELS[row['kind']]}, {row['stage']} | {row['error']:.3f} | {kl} "
                     f"| {row['perplexity']:.1f} | {row['copy']:.2f} | {paper} |")  # fmt: skip
    lines.append(f"| teacher | 0 | 0 | {report['teacher_perplexity']:.1f} | | |")
    return "\n".join(lines) + "\n"


def plot(report: dict, path: Path) -> None:
    """KL by kind, and matrix distance against error layer by layer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    for offset, stage in enumerate(("closed form", "stage 2")):
        values = [report["rows"][f"{kind}, {stage}"]["kl"] for kind in KINDS]
        axes[0].bar([i + 0.4 * offset for i in range(len(KINDS))], values, width=0.4, label=stage)
    axes[0].set_xticks([0.2, 1.2, 2.2], [LABELS[kind] for kind in KINDS])
    axes[0].set_ylabel("KL to the teacher (nats per token)")
    axes[0].legend()
    for kind, of_layers in report["matrix_distance"].items():
        errors = report["rows"][f"{kind}, stage 2"]["layers"]
        axes[1].scatter(list(of_layers.values()), [errors[i] for i in of_layers], label=LABELS[kind])
    axes[1].set(xlabel="distance of the layer's matrices / their norm", ylabel="error of the attention's output")
    axes[1].set_xscale("log")
    if report["matrix_distance"]:
        axes[1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110, format="png")
    pyplot.close(figure)


def parse_layers(text: str) -> list[int]:
    """ "0,4,5" as layers.

    Raises:
        ValueError: not numbers.
    """
    with contextlib.suppress(ValueError):
        return sorted({int(part) for part in text.split(",")})
    raise ValueError(f"layers are numbers with commas between, not {text!r}.")


@app.command()
def mixer_swap_command(
    teacher: Annotated[str | None, typer.Argument(help="Hub id, folder or GGUF file (default: embedded).")] = None,
    output: Annotated[Path, typer.Option(help="Folder to write.")] = Path("runs/swap"),
    layers: Annotated[str, typer.Option(help="Layers to replace.")] = ",".join(map(str, LAYERS)),
    sequences: Annotated[int, typer.Option(help="Sequences to fit on.")] = Budget.sequences,
    refine_steps: Annotated[int, typer.Option(help="Gradient steps of each fit.")] = Budget.refine_steps,
    stage2_steps: Annotated[int, typer.Option(help="Steps of hidden-state alignment, two sequences each.")] = (
        Budget.stage2_steps
    ),
    length: Annotated[int, typer.Option(help="Tokens per sequence.")] = 512,
    train: Annotated[str, typer.Option(help="Text to fit on.")] = "default",
    validation: Annotated[str | None, typer.Option(help="Text to measure on (default: rows not fitted on).")] = None,
    approximation: Annotated[Path | None, typer.Option(help="approximation.json of matrix_approximation.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace results in the folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Errors only.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Tracebacks and library messages.")] = False,
) -> None:
    """Swap mixers of several kinds into the same layers."""
    set_verbosity(verbose, quiet)
    with one_line_errors(verbose):
        from convert.teacher import embedded_teacher

        at_least = {"sequences": (sequences, 1), "refine-steps": (refine_steps, 0),
                    "stage2-steps": (stage2_steps, 1), "length": (length, 16)}  # fmt: skip
        for name, (value, least) in at_least.items():
            if value < least:
                raise ValueError(f"--{name} must be at least {least}, not {value}.")
        if output.is_file():
            raise ValueError(f"{output} is a file; give a folder.")
        if (output / "swap.json").exists() and not overwrite:
            raise ValueError(f"{output} holds results already; say --overwrite or choose another --output.")
        budget = Budget(sequences, refine_steps, stage2_steps)
        with progress_bars(quiet) as (_, _, on_progress):
            report = study(
                teacher or str(embedded_teacher()), output, parse_layers(layers), budget, train, validation,
                approximation, length, on_progress,
            )  # fmt: skip
        if as_json:
            sys.stdout.write(json.dumps(report, indent=2) + "\n")
        elif not quiet:
            print(as_table(report))
            print("rank correlation of matrix distance and error:", report["correlation"])
        if not quiet:
            console.print(f"[green]done[/] {output} ({report['seconds']:.0f} s)", highlight=False)


if __name__ == "__main__":
    app()
