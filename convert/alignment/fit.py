"""Closed-form alignment of a whole teacher: choose the layers, fit their mixers.

Text streams through the teacher block by block; at each block a mixer is fitted to the attention it replaces, on the
teacher's own activations, so that layers are independent of each other: a fit can be kept, reused for another choice
of layers, and resumed after an interruption.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ..placement.layer_scores import Examination
from .activations import ActivationStream
from .closed_form import FitSettings, LayerFit, fit_layer
from .mohawk.init import mamba_in_llama_start, mohawk_start
from .settings import SelectionSettings
from .teacher_model import TeacherModel

Fits = dict[int, tuple[nn.Module, LayerFit]]
"""Fitted mixers by layer, and what each fit reached."""
Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and of how much."""


@dataclass(frozen=True)
class LayerScore:
    """What replacing one layer costs: KL in nats per token, and recall loss in nats per answer."""

    kl: float
    recall: float

    def total(self, recall_weight: float) -> float:
        """The two in one figure; recall better than the teacher's is no merit, or it would buy layers that cost KL."""
        return self.kl + recall_weight * max(self.recall, 0.0)


class FitCache:
    """Fits and scores on disk, under a key that changes with anything they depend on.

    Args:
        folder: where; None keeps nothing.
    """

    def __init__(self, folder: Path | None, key: dict):
        digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:20]
        self.folder = None if folder is None else folder / digest
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_beside(
                self.folder / "key.json", lambda path: path.write_text(json.dumps(key, indent=2, default=str))
            )

    def load_mixer(self, layer: int, mixer: nn.Module) -> LayerFit | None:
        """Fill `mixer` with an earlier fit; None if there is none."""
        path = self._path(f"layer-{layer:03d}.safetensors")
        if path is None or not path.is_file():
            return None
        fit = json.loads(self._path(f"layer-{layer:03d}.json").read_text())
        mixer.load_state_dict(load_file(path))
        mixer.requires_grad_(False)
        return LayerFit(**fit)

    def save_mixer(self, layer: int, mixer: nn.Module, fit: LayerFit) -> None:
        """Keep a fit."""
        if self.folder is None:
            return
        report = json.dumps(dataclasses.asdict(fit))
        write_beside(self._path(f"layer-{layer:03d}.json"), lambda path: path.write_text(report))
        state = {name: tensor.contiguous().cpu() for name, tensor in mixer.state_dict().items()}
        write_beside(self._path(f"layer-{layer:03d}.safetensors"), lambda path: save_file(state, path))

    def load_json(self, name: str) -> dict:
        """What was saved under `name`, or nothing."""
        path = self._path(name)
        return json.loads(path.read_text()) if path is not None and path.is_file() else {}

    def save_json(self, name: str, content: dict) -> None:
        """Keep something small."""
        if self.folder is not None:
            write_beside(self._path(name), lambda path: path.write_text(json.dumps(content)))

    def drop_mixers(self) -> None:
        """Remove the fits, which are large; the scores stay."""
        if self.folder is not None:
            for path in self.folder.glob("layer-*"):
                path.unlink(missing_ok=True)

    def _path(self, name: str) -> Path | None:
        return None if self.folder is None else self.folder / name


def write_beside(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside, then rename, so that an interruption leaves no half file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@torch.no_grad()
def start_mixer(teacher: TeacherModel, layer: int, start: str, seed: int) -> nn.Module:
    """The mixer of a layer before any fit."""
    mixer = teacher.mixer(layer)
    if start == "mohawk":
        mohawk_start(mixer, teacher.num_layers, seed + layer)
    elif start == "mamba-in-llama":
        mamba_in_llama_start(mixer, seed + layer)
    return mixer


def fit_mixers(
    teacher: TeacherModel,
    layers: list[int],
    ids: torch.Tensor,
    held_out: int,
    settings: FitSettings,
    cache: FitCache,
    memory: int,
    seed: int = 0,
    progress: Progress = lambda what, done, total: None,
    folder: Path | None = None,
    solved: Fits | None = None,
) -> Fits:
    """Fit the mixers of `layers` on token ids (S, L), of which the last `held_out` rows judge.

    Args:
        solved: mixers that the same settings have solved already, to be refined.
        memory: bytes of activations; more goes to a temporary file in `folder`.

    Raises:
        ValueError: see `fit_layer`.
    """
    fitted: Fits = {}
    solved = solved or {}
    for layer in layers:
        mixer = teacher.mixer(layer)
        if (fit := cache.load_mixer(layer, mixer)) is not None:
            fitted[layer] = (mixer, fit)
        elif layer in solved and not settings.refine_steps:
            fitted[layer] = solved[layer]
    missing = [layer for layer in layers if layer not in fitted]
    if not missing:
        return fitted
    with contextlib.ExitStack() as stack:
        streams = 2 if settings.stream == "student" else 1
        stream, *others = (
            stack.enter_context(ActivationStream(teacher, ids, held_out, memory // streams, folder))
            for _ in range(streams)
        )
        student = others[0] if others else None
        for layer in range(max(missing) + 1):
            progress("aligning", layer, max(missing) + 1)
            data = stream.attention_data(layer)
            if layer in missing:
                if student is not None:
                    data = dataclasses.replace(data, u=student.normalised(layer))
                mixer, before = solved.get(layer) or (teacher.mixer(layer), None)
                try:
                    fitted[layer] = fit_layer(mixer, data, settings, seed + layer, before)
                except ValueError as error:
                    raise ValueError(f"Layer {layer}: {error}") from error
                cache.save_mixer(layer, *fitted[layer])
            if student is not None:
                student.advance(layer, fitted[layer][0] if layer in fitted else None)
    progress("aligning", max(missing) + 1, max(missing) + 1)
    return fitted


def score_layers(
    mixers: dict[int, nn.Module],
    examination: Examination,
    base: tuple[int, ...],
    cache: FitCache,
    progress: Progress = lambda what, done, total: None,
) -> dict[int, LayerScore]:
    """What replacing each further layer costs when `base` is replaced already."""
    known = cache.load_json("scores.json")
    keys = {layer: f"{','.join(map(str, base))}|{layer}" for layer in mixers if layer not in base}
    if any(key not in known for key in keys.values()):
        before = examination.base({layer: mixers[layer] for layer in base})
        for done, (layer, key) in enumerate(keys.items()):
            progress("scoring layers", done, len(keys))
            if key in known:
                continue
            marks = examination.with_layer(layer, mixers[layer])
            recall = examination.recall_cost(marks) - examination.recall_cost(before)
            known[key] = {"kl": marks.kl - before.kl, "recall": recall}
            cache.save_json("scores.json", known)
        progress("scoring layers", len(keys), len(keys))
    return {layer: LayerScore(**known[key]) for layer, key in keys.items()}


def select_layers(
    mixers: dict[int, nn.Module],
    examination: Examination,
    num_replaced: int,
    weight: float,
    settings: SelectionSettings,
    cache: FitCache,
    progress: Progress = lambda what, done, total: None,
) -> tuple[tuple[int, ...], dict[int, LayerScore]]:
    """The layers to replace, cheapest first in each round, and the scores of the first round.

    Args:
        weight: of recall against KL; 0 selects by KL alone.
    """
    chosen: list[int] = []
    first: dict[int, LayerScore] = {}
    for step in range(settings.rounds):
        target = round(num_replaced * (step + 1) / settings.rounds)
        scores = score_layers(mixers, examination, tuple(sorted(chosen)), cache, progress)
        first = first or scores
        ranked = sorted(scores, key=lambda layer: (scores[layer].total(weight), layer))
        chosen += ranked[: target - len(chosen)]
    return tuple(sorted(chosen)), first


__all__ = ["FitCache", "LayerScore", "Progress", "fit_mixers", "select_layers", "start_mixer"]
