"""What replacing each layer costs, and what the choice of layers is worth against uniform placement.

python -m recipes.layer_scores runs/layers [--model MODEL]

Prints and plots KL and recall loss of every layer replaced alone (after a quick closed-form fit), then KL and copying
of whole hybrids at 75, 50, 25 and 12.5 % attention, placed uniformly, by kl, by kl+recall, and by kl+recall in rounds.
Fits and scores are kept in OUT/work, so an interrupted or repeated run starts where it stopped.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import matplotlib
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from convert.alignment import ClosedFormAligner
from convert.alignment.align import LayerScore, select_layers
from convert.config import make_config
from convert.layer_selection import uniform_attention_layers
from convert.teacher import embedded_teacher, find_teacher

matplotlib.use("Agg")
RATIOS = (0.75, 0.5, 0.25, 0.125)
ROUNDS = 3


def plot(scores: dict[int, LayerScore], path: Path) -> None:
    """Bars of KL and of recall loss by layer."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(9, 5), sharex=True)
    layers = sorted(scores)
    axes[0].bar(layers, [scores[i].kl for i in layers], color="tab:blue")
    axes[0].set_ylabel("KL (nats per token)")
    axes[1].bar(layers, [scores[i].recall for i in layers], color="tab:orange")
    axes[1].set_ylabel("recall loss (nats per answer)")
    axes[1].set_xlabel("layer replaced alone")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(output: Path, model: str | None, dataset: str, tokens: int) -> dict:
    """Score, print, plot and save."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    output.mkdir(parents=True, exist_ok=True)
    options = make_config(
        model=model or str(embedded_teacher()), output="unused", attention_ratio=0.5,
        calibration_dataset=dataset, calibration_tokens=tokens, work_dir=str(output / "work"),
    )  # fmt: skip
    found = find_teacher(options.model)
    aligner = ClosedFormAligner(found, options, found.open_weights(), lambda what, done, total: None)
    mixers, examination, cache = aligner.candidates()
    settings, num_layers = aligner.settings.selection, len(mixers)
    placements = {}
    for ratio in RATIOS:
        count = num_layers - len(uniform_attention_layers(num_layers, ratio))
        kept = uniform_attention_layers(num_layers, ratio)
        placements["uniform", ratio] = tuple(i for i in range(num_layers) if i not in kept)
        once, greedy = (dataclasses.replace(settings, rounds=rounds) for rounds in (1, ROUNDS))
        for method, weight, chosen_how in (
            ("kl", 0.0, once),
            ("kl+recall", settings.recall_weight, once),
            (f"kl+recall, {ROUNDS} rounds", settings.recall_weight, greedy),
        ):
            placements[method, ratio], scores = select_layers(mixers, examination, count, weight, chosen_how, cache)
    results = [
        {"placement": method, "attention": ratio, "replaced": layers}
        | _marks(examination.base({layer: mixers[layer] for layer in layers}))
        for (method, ratio), layers in placements.items()
    ]
    report = {
        "scores": {layer: {"kl": score.kl, "recall": score.recall} for layer, score in sorted(scores.items())},
        "teacher": _marks(examination.teacher_marks),
        "placements": results,
    }
    (output / "scores.json").write_text(json.dumps(report, indent=2) + "\n")
    plot(scores, output / "scores.png")
    _print(report)
    return report


def _marks(marks) -> dict:
    return {"kl": marks.kl} | {f"{name}_accuracy": value for name, value in marks.accuracy.items()}


def _print(report: dict) -> None:
    console = Console()
    table = Table("layer", "KL", "recall loss", title="replaced alone")
    for layer, score in report["scores"].items():
        table.add_row(str(layer), f"{score['kl']:.4f}", f"{score['recall']:.3f}")
    console.print(table)
    table = Table("attention", "placement", "KL", "copy", "associative", "needle", "replaced layers")
    for row in [report["teacher"] | {"attention": 1.0, "placement": "teacher", "replaced": ()}, *report["placements"]]:
        accuracies = [f"{row[f'{name}_accuracy']:.3f}" for name in ("copy", "associative", "needle")]
        layers = " ".join(map(str, row["replaced"]))
        table.add_row(f"{row['attention']:.1%}", row["placement"], f"{row['kl']:.3f}", *accuracies, layers)
    console.print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", help="teacher (default: the embedded one)")
    parser.add_argument("--dataset", default="default", help="text, as for --calibration-dataset")
    parser.add_argument("--tokens", type=int, default=16384, help="calibration tokens")
    arguments = parser.parse_args()
    main(arguments.output, arguments.model, arguments.dataset, arguments.tokens)
