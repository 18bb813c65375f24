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
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from modeling_llamba.hybrid_attention import HybridAttention

from ..errors import is_out_of_memory
from ..io.folder import write_beside
from ..io.reader import is_finite
from ..io.writer import Progress
from ..memory import return_free_memory
from ..options import FitOptions
from .activations import ActivationStream
from .closed_form import LayerData, LayerFit, fit_hybrid_layer, fit_layer, received
from .hybrid_fit import Pieces, set_map
from .teacher_model import TeacherModel

Result = TypeVar("Result")
Fits = dict[int, tuple[nn.Module, LayerFit]]
"""Fitted mixers by layer, on the host, and what each fit reached."""


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
            if "down.weight" in state:
                set_map(mixer, state["down.weight"], state["up.weight"])
            mixer.load_state_dict(state)
        except (OSError, ValueError, TypeError, RuntimeError, SafetensorError):  # damaged: it is fitted again
            return None
        mixer.requires_grad_(False)
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


def fit_mixers(
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
) -> Fits:
    """Fit the mixers of `layers` on token ids (S, L), of which the last `held_out` rows judge.

    Args:
        memory: bytes of activations; more goes to a temporary file in `folder`.
    """
    fitted: Fits = {}
    for layer in layers:
        if cache.holds(layer):
            mixer = teacher.mixer(layer).cpu()
            if (fit := cache.load_mixer(layer, mixer)) is not None:
                fitted[layer] = (mixer, fit)
    missing = [layer for layer in layers if layer not in fitted]
    if not missing:
        return fitted
    pieces = Pieces()
    # the stream has to pass the layers that are fitted already, too
    with contextlib.closing(ActivationStream(teacher, ids, held_out, memory, folder)) as stream:
        for layer in range(max(missing) + 1):
            progress("aligning, layers", layer, max(missing) + 1)
            data = stream.attention_data(layer)
            if layer in missing:
                fitted[layer], pieces = within_memory(
                    lambda pieces, layer=layer, data=data: _fit_one(
                        teacher, layer, dataclasses.replace(data, pieces=pieces), settings, seed + layer
                    ),
                    pieces,
                )
                cache.save_mixer(layer, *fitted[layer])
                return_free_memory()
    progress("aligning, layers", max(missing) + 1, max(missing) + 1)
    return fitted


def within_memory(work: Callable[[Pieces], Result], pieces: Pieces) -> tuple[Result, Pieces]:
    """Work with these pieces, or with smaller ones where memory does not suffice; the result, and the pieces of it."""
    while True:
        try:
            return work(pieces), pieces
        except Exception as error:
            if not is_out_of_memory(error) or pieces.smaller() is None:
                raise
        pieces = pieces.smaller()  # out here the error, which holds what was made, is gone
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
        state = {name: received(tensor) for name, tensor in mixer.state_dict().items()}
        fit = unread.read()  # the device is waited for here, for all of it
        mixer.load_state_dict(state, assign=True)
        return mixer, fit
    except ValueError as error:
        raise ValueError(f"Layer {layer}: {error}") from error
