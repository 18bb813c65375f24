"""Closed-form alignment of a whole teacher: fit the mixers of its layers, and keep the fits.

Text streams through the teacher block by block; at each block a mixer is fitted to the attention it replaces, on the
teacher's own activations, so that layers are independent of each other: a fit can be kept, reused for another choice
of layers, and resumed after an interruption.
"""

import contextlib
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedConfig

from modeling_llamba.hybrid.hybrid_attention import HybridAttention

from ..errors import is_out_of_memory
from ..io.folder import write_beside
from ..io.reader import is_finite
from ..io.writer import Progress
from ..memory import return_free_memory
from ..options import FitOptions
from .activations import ActivationStream
from .closed_form import fit_layer
from .hybrid_fit import fit_hybrid_layer, set_map
from .layer_data import LayerData, LayerFit, Pieces, on_host
from .processes import ALONE, FIT, Team
from .teacher_model import TeacherModel

Result = TypeVar("Result")
Sizes = TypeVar("Sizes")
"""Sizes of the batches in memory; `smaller` gives the next sizes that take less, or None after the smallest."""
Fits = dict[int, tuple[nn.Module, LayerFit]]
"""Fitted mixers by layer, on the host, with the report of each fit."""


class FitCache:
    """Fits on disk, under a key that changes with anything they depend on.

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

    def holds(self, layer: int) -> bool:
        """Return True if there is an earlier fit, which may be damaged."""
        path = self._path(f"layer-{layer:03d}.safetensors")
        return path is not None and path.is_file()

    def load_mixer(self, layer: int, mixer: nn.Module) -> LayerFit | None:
        """Fill `mixer` with an earlier fit; None if it is damaged."""
        path = self._path(f"layer-{layer:03d}.safetensors")
        try:
            fit = LayerFit.of_record(json.loads(path.with_suffix(".json").read_text()))
            state = load_file(path)
            if not all(is_finite(tensor) for tensor in state.values()):
                raise ValueError(f"{path} holds values that are not finite.")
            fill(mixer, state)
        except (OSError, ValueError, TypeError, RuntimeError, SafetensorError):  # damaged: it is fitted again
            return None
        return fit

    def save_mixer(self, layer: int, mixer: nn.Module, fit: LayerFit) -> None:
        """Keep a fit; the mixer's tensors are then mapped from the file and need no memory of their own."""
        if self.folder is None:
            return
        report = json.dumps(dataclasses.asdict(fit))
        write_beside(self._path(f"layer-{layer:03d}.json"), lambda path: path.write_text(report))
        state = {name: tensor.contiguous() for name, tensor in mixer.state_dict().items()}
        path = self._path(f"layer-{layer:03d}.safetensors")
        write_beside(path, lambda path: save_file(state, path))
        # mapped from the file, so that the fits of all layers need not fit into memory
        mixer.load_state_dict(load_file(path), assign=True)

    def drop(self) -> None:
        """Remove the fits, which are large."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, name: str) -> Path | None:
        return None if self.folder is None else self.folder / name


def fill(mixer: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Give a mixer the tensors of another fit, its output map included."""
    if "down.weight" in state:
        set_map(mixer, state["down.weight"], state["up.weight"])
    mixer.load_state_dict(state)
    mixer.requires_grad_(False)


def fit_layers(
    teacher: TeacherModel,
    layers: list[int],
    ids: torch.Tensor,
    held_out: int,
    settings: FitOptions,
    cache: FitCache,
    memory: int,
    seed: int = 0,
    progress: Progress = lambda what, done, total: None,
    folder: Path | None = None,
    team: Team = ALONE,
) -> Fits:
    """Fit the mixers of `layers` on token ids (B, L), of which the last `held_out` rows judge.

    Args:
        memory: bytes of activations; more goes to a temporary file in `folder`.
        team: processes that fit together, of which this is the first.
    """
    fitted: Fits = {}
    for layer in layers:
        if cache.holds(layer):
            mixer = teacher.mixer(layer).cpu()
            if (fit := cache.load_mixer(layer, mixer)) is not None:
                fitted[layer] = (mixer, fit)
    missing = sorted(layer for layer in layers if layer not in fitted)
    if not missing:
        return fitted
    task = (missing, ids, held_out, settings, memory, seed)
    team.announce(FIT, teacher.mixer_config, task)
    for layer, mixer, fit in fits_of(teacher, *task, team, progress, folder):
        cache.save_mixer(layer, mixer, fit)
        fitted[layer] = (mixer, fit)
        return_free_memory()
    progress("aligning, layers", max(missing) + 1, max(missing) + 1)
    return fitted


def fits_of(
    teacher: TeacherModel,
    missing: list[int],
    ids: torch.Tensor,
    held_out: int,
    settings: FitOptions,
    memory: int,
    seed: int,
    team: Team,
    progress: Progress = lambda what, done, total: None,
    folder: Path | None = None,
) -> Iterator[tuple[int, nn.Module, LayerFit]]:
    """Yield layer, mixer and report as fits are finished by all processes together; only the first yields any."""
    pieces = Pieces()
    begin = 0
    # the stream has to pass the layers that are fitted already, too
    with contextlib.closing(ActivationStream(teacher, ids, held_out, memory, folder, team)) as stream:
        for turn in team.turns(missing):
            mine = None
            for layer in range(begin, turn[-1] + 1):
                progress("aligning, layers", layer, missing[-1] + 1)
                data = stream.attention_data(layer)
                if layer in turn:
                    data = stream.gathered(data, layer, turn.index(layer))
                    mine = mine if data is None else (layer, data)
            begin = turn[-1] + 1
            found = None
            if mine is not None:
                found, pieces = _fit_mine(teacher, *mine, settings, seed, pieces, team)
            for result in team.at_the_first(found):
                if result is not None:
                    yield _unpacked(teacher, *result)


def fit_for_first(teacher: TeacherModel, mixer_config: PreTrainedConfig, task: tuple, team: Team) -> None:
    """Fit this process's share of the layers that the first process announced."""
    teacher.follow(mixer_config)
    for _ in fits_of(teacher, *task, team):
        raise AssertionError("fits come out in the first process alone")


Found = tuple[int, nn.Module | dict[str, torch.Tensor] | Exception, LayerFit | None]
"""A layer, its fitted mixer and its report; from another process the mixer's tensors, or the exception of its fit."""


def _fit_mine(
    teacher: TeacherModel,
    layer: int,
    data: LayerData,
    settings: FitOptions,
    seed: int,
    pieces: Pieces,
    team: Team,
) -> tuple[Found, Pieces]:
    try:
        (mixer, fit), pieces = within_memory(
            # a seed for each layer: its fit depends on none before it, nor on the process
            lambda pieces: _fit_one(teacher, layer, dataclasses.replace(data, pieces=pieces), settings, seed + layer),
            pieces,
        )
    except Exception as error:
        if team.rank == 0:
            raise
        # pickled on its way to the first, which not every kind survives; a ValueError is a message for users
        kind = ValueError if isinstance(error, ValueError) else RuntimeError
        return (layer, kind(str(error)), None), pieces  # the first process raises it
    return (layer, mixer if team.rank == 0 else mixer.state_dict(), fit), pieces


def _unpacked(
    teacher: TeacherModel, layer: int, found: nn.Module | dict | Exception, fit: LayerFit
) -> tuple[int, nn.Module, LayerFit]:
    if isinstance(found, Exception):
        raise found
    if isinstance(found, nn.Module):
        return layer, found, fit
    mixer = teacher.mixer(layer).cpu()
    fill(mixer, found)
    return layer, mixer, fit


def within_memory(work: Callable[[Sizes], Result], pieces: Sizes) -> tuple[Result, Sizes]:
    """Call `work` with these sizes, or with smaller ones if memory runs out; return its result and the last sizes."""
    while True:
        try:
            return work(pieces), pieces
        except Exception as error:
            if not is_out_of_memory(error) or pieces.smaller() is None:
                raise
        pieces = pieces.smaller()  # outside of `except`, where the error still holds the memory
        return_free_memory()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _fit_one(
    teacher: TeacherModel, layer: int, data: LayerData, settings: FitOptions, seed: int
) -> tuple[nn.Module, LayerFit]:
    mixer = teacher.mixer(layer)
    try:
        if isinstance(mixer, HybridAttention):
            unread = fit_hybrid_layer(mixer.requires_grad_(False), data)
        else:
            mixer, unread = fit_layer(mixer, data, settings, seed)
        state = {name: on_host(tensor) for name, tensor in mixer.state_dict().items()}
        fit = unread.read()  # waits for the device, once for all
        mixer.load_state_dict(state, assign=True)
        return mixer, fit
    except ValueError as error:
        raise ValueError(f"Layer {layer}: {error}") from error
