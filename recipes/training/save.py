"""Turn a trained model into an ordinary checkpoint: weights, configuration, code, tokenizer, card, training record.

The folder is written beside its place and renamed, as a conversion's is. `training.json` in it holds every stage the
model went through; the card's section on training is made from it.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from matplotlib.figure import Figure
from torch import nn
from transformers import PreTrainedTokenizerBase

from convert.checkpoint.card import NO_FIGURES, renewed
from convert.checkpoint.pictures import CACHE, LAYERS
from convert.io.folder import OutputFolder

RECORD, PLOT = "training.json", "training.png"
SECTION = "## Training"
EVALUATION = "## Evaluation"  # recipes/evaluate.py writes it, and training makes it out of date
TRAINED_NOTE = '**Trained end to end** after the conversion: see "Training" below.'
LABELS = {
    "eval_loss": "loss",
    "eval_ce": "cross entropy, nats per token",
    "eval_kl": "KL(teacher ‖ model), nats per token",
    "eval_agreement": "agreement with the teacher's likeliest token",
    "eval_rewards/accuracies": "reward accuracy",
    "eval_rewards/margins": "reward margin",
}
HYPERPARAMETERS = (
    "learning_rate", "lr_scheduler_type", "num_train_epochs", "max_steps", "warmup_steps", "weight_decay",
    "adam_beta1", "adam_beta2", "max_grad_norm", "per_device_train_batch_size", "gradient_accumulation_steps",
    "max_length", "packing", "beta", "loss_type", "bf16", "seed",
)  # fmt: skip


@dataclass
class StageRecord:
    """One run of a recipe: its settings, its log, and what was measured before and after."""

    stage: str
    teacher: str | None
    data: str
    settings: dict[str, Any]
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)
    tokens: int | None = None


def hyperparameters(arguments: Any) -> dict[str, Any]:
    """The hyperparameters in a trainer's arguments, those in force."""
    found = {name: getattr(arguments, name) for name in HYPERPARAMETERS if hasattr(arguments, name)}
    if found.get("max_steps", 0) > 0:  # which then decides
        found.pop("num_train_epochs")
    return {k: getattr(v, "value", v) for k, v in found.items()}


def check_finite(model: nn.Module, otherwise: str) -> None:
    """Raise ValueError, with `otherwise` for what to do, where a weight is not finite."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise ValueError(f"{name} is not finite {otherwise}")


def write_checkpoint(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    source: Path,
    owner: OutputFolder,
    record: StageRecord,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write the model to its folder, with this stage's record added to those in `source`, the folder it came from."""
    check_finite(model, "after training, nothing was written; lower the learning rate.")
    with owner.staged() as folder:
        _write_files(model, tokenizer, source, folder, owner.output.name, record, max_shard_size=max_shard_size)


def try_to_write(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, source: Path, name: str, record: StageRecord
) -> None:
    """Write what `write_checkpoint` will, without the weights, to a folder that is deleted.

    Raises:
        ValueError: a weight is not finite, or a file in `source` would keep the trained model from being written.
    """
    check_finite(model, f"before any training; convert or download {source} again.")
    with tempfile.TemporaryDirectory() as folder:
        _write_files(model, tokenizer, source, Path(folder), name, record, state_dict={})


def _write_files(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    source: Path,
    folder: Path,
    name: str,
    record: StageRecord,
    **how: Any,
) -> None:
    with _taken_from(source / "tokenizer_config.json"):
        tokenizer.save_pretrained(folder)
    with _taken_from(source / RECORD):
        stages = [*read_record(source), record.__dict__]
        (folder / RECORD).write_text(json.dumps(stages, indent=2, default=str) + "\n")
        loss_curves(stages).savefig(folder / PLOT, dpi=120)
    for kept in ("alignment.json", LAYERS, CACHE):
        if (source / kept).is_file():
            (folder / kept).write_bytes((source / kept).read_bytes())
    with _taken_from(source / "README.md"):
        with_training(card_in(source, name), stages, name).save(folder / "README.md")
    with _taken_from(source / "generation_config.json"):
        model.generation_config.validate(strict=True)  # as saving does, but only where training set a token in it
    model.config.use_cache = True  # which a trainer switches off
    with _taken_from(source / "config.json"):
        model.save_pretrained(folder, **how)


@contextlib.contextmanager
def _taken_from(path: Path) -> Iterator[None]:
    """Have an error name the file of the untrained model that it comes from."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"With {path} the trained model cannot be written ({reason}); mend that file.") from error


def read_record(folder: Path) -> list[dict[str, Any]]:
    """The stages a checkpoint went through."""
    path = folder / RECORD
    if not path.is_file():
        return []
    return json.loads(path.read_text())


def card_in(folder: Path, name: str) -> ModelCard:
    """The card of a model's folder, or a new one for a model that came without."""
    path = folder / "README.md"
    if path.is_file():
        return ModelCard.load(path)
    return new_card(name)


def new_card(name: str) -> ModelCard:
    """A card for a model that came without one."""
    data = ModelCardData(library_name="transformers", pipeline_tag="text-generation", tags=["convert-to-hybrid"])
    return ModelCard.from_template(data, template_str="---\n{{ card_data }}\n---\n\n# {{ title }}\n\n", title=name)


def with_training(card: ModelCard, stages: list[dict[str, Any]], name: str) -> ModelCard:
    """The card with its section on training made anew, and the last stage's figures as evaluation results."""
    text = renewed(card.text, NO_FIGURES, TRAINED_NOTE).split(SECTION)[0].split(EVALUATION)[0].rstrip()
    rows = [
        f"| {i}. {stage['stage']} | {stage['teacher'] or 'none'} | {stage['data']} | {_settings(stage['settings'])} |"
        for i, stage in enumerate(stages, 1)
    ]
    figures = [
        f"| {i}. {stage['stage']} | {LABELS[key]} | {_figure(stage['before'].get(key))} | {_figure(value)} |"
        for i, stage in enumerate(stages, 1)
        for key, value in stage["after"].items()
        if key in LABELS
    ]
    parts = ["| stage | teacher | data | settings |", "|---|---|---|---|", *rows]
    if figures:
        parts += ["", "On the data's held-out split:", "", "| stage | | before | after |", "|---|---|---|---|"]
        parts += figures
    parts += ["", f"![loss against steps]({PLOT})", ""]
    card.text = f"{text}\n\n{SECTION}\n\n" + "\n".join(parts)
    card.data.tags = sorted({*(card.data.tags or []), "trl", *(stage["stage"] for stage in stages)})
    last = stages[-1]
    results = eval_results(
        (last["data"], last["data"], None, "held-out", key.removeprefix("eval_").replace("/", "_"), LABELS[key], value)
        for key, value in last["after"].items()
        if key in LABELS
    )
    # what was measured before this training no longer holds
    card.data.eval_results = card.data.model_name = None
    if results:
        card.data.eval_results = results
        card.data.model_name = name
    card.content = f"---\n{card.data.to_yaml()}\n---\n{card.text}"
    return card


def eval_results(figures: Iterable[tuple]) -> list[EvalResult]:
    """A card's results from (data set, its type, configuration, split, metric, metric's name, value)."""
    keys = ("dataset_name", "dataset_type", "dataset_config", "dataset_split", "metric_type", "metric_name")
    return [
        EvalResult(task_type="text-generation", metric_value=round(value, 6), **dict(zip(keys, about, strict=True)))
        for *about, value in figures
    ]


def _settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in settings.items() if v is not None and v is not False and v != -1)


def _figure(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}"


def loss_curves(stages: list[dict[str, Any]]) -> Figure:
    """Loss against steps, a panel per stage."""
    figure = Figure(figsize=(4.5 * len(stages), 3), layout="constrained")
    for axes, stage in zip(figure.subplots(1, len(stages), squeeze=False)[0], stages, strict=True):
        for key, label in (("loss", "training"), ("eval_loss", "held out")):
            points = [(entry["step"], entry[key]) for entry in stage["log"] if key in entry and "step" in entry]
            if points:
                axes.plot(*zip(*points, strict=True), label=label, marker="." if len(points) < 20 else "")
        axes.set(title=stage["stage"], xlabel="step", ylabel="loss")
        if axes.lines:
            axes.legend()
    return figure
