"""Causal self-attention matrices of a teacher, one random head per layer, and what a student has in their place.

Shapes: M matrices, S sequences, B batch, L length, H heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from convert.config import make_config
from torch import nn

from convert.alignment.aligner import load_tokenizer
from convert.alignment.mohawk.orientation import attention_rows, check_comparable
from convert.alignment.mohawk.train import load_hybrid
from convert.alignment.teacher_model import TeacherModel
from convert.alignment.text import documents, token_rows
from convert.teachers.teacher import find_teacher

ROWS_AT_ONCE = 128


@dataclass(frozen=True)
class Place:
    """Where a matrix comes from."""

    dataset: str
    sequence: int
    layer: int
    head: int


def choose_places(datasets: list[str], num_layers: int, num_heads: int, count: int, seed: int) -> list[Place]:
    """One random head per layer and sequence, data sets as even as possible; random layers where not all are left."""
    generator = torch.Generator().manual_seed(seed)
    places = []
    for index, dataset in enumerate(datasets):
        wanted = count // len(datasets) + (index < count % len(datasets))
        for first in range(0, wanted, num_layers):
            layers = torch.randperm(num_layers, generator=generator)[: wanted - first].sort().values
            heads = torch.randint(num_heads, (len(layers),), generator=generator)
            pairs = zip(layers.tolist(), heads.tolist(), strict=True)
            places += [Place(dataset, first // num_layers, layer, head) for layer, head in pairs]
    return places


class Sampler:
    """Runs the text of the places through the teacher, one sequence and block at a time."""

    def __init__(self, teacher: TeacherModel, places: list[Place], length: int, trust_remote_code: bool = False):
        self.teacher, self.places = teacher, places
        tokenizer = load_tokenizer(teacher.teacher, trust_remote_code)
        self.rows = {}
        for dataset in dict.fromkeys(place.dataset for place in places):
            count = 1 + max(place.sequence for place in places if place.dataset == dataset)
            self.rows[dataset] = token_rows(documents(dataset), tokenizer, length, count, dataset)

    @torch.no_grad()
    def _inputs(self) -> Iterator[tuple[int, Place, nn.Module, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]]:
        """Index, place, block, the attention's input (1, L, D) and rotary embedding, sequence after sequence."""
        wanted: dict[tuple[str, int], dict[int, list[int]]] = {}
        for index, place in enumerate(self.places):
            wanted.setdefault((place.dataset, place.sequence), {}).setdefault(place.layer, []).append(index)
        for (dataset, sequence), layers in wanted.items():
            hidden = self.teacher.embed(self.rows[dataset][sequence][None])
            inputs = self.teacher.block_inputs(hidden)
            for layer in range(max(layers) + 1):
                block = self.teacher.block(layer)
                u = block.input_layernorm(hidden)
                for index in layers.get(layer, ()):
                    yield index, self.places[index], block, u, inputs["position_embeddings"]
                hidden = block(hidden, **inputs)

    @torch.no_grad()
    def attention(self) -> torch.Tensor:
        """(M, L, L) attention probabilities in float32."""
        found: dict[int, torch.Tensor] = {}
        for index, place, block, u, rotary in self._inputs():
            tiles = [rows[0, place.head] for _, rows in attention_rows(block.self_attn, u, rotary, ROWS_AT_ONCE)]
            found[index] = torch.cat(tiles)
        return torch.stack([found[index] for index in range(len(self.places))])

    @torch.no_grad()
    def student(self, folder: Path) -> tuple[list[int], torch.Tensor]:
        """What a hybrid's mixers make of the same inputs: indices of the places it replaced, and (M', L, L).

        Raises:
            ValueError: no hybrid, one of another teacher, or one without a matrix per head.
        """
        hybrid = load_hybrid(folder)
        check_student(hybrid, self.teacher, folder)
        found: dict[int, torch.Tensor] = {}
        for index, place, block, u, rotary in self._inputs():
            layer = hybrid.model.layers[place.layer]
            if layer.layer_type == "linear_attention":
                check_comparable(layer.mixer, block.self_attn)
                found[index] = layer.mixer.materialize(u, rotary)[0][0, place.head].float()
        if not found:
            raise ValueError(f"{folder} replaced none of the sampled layers; take more matrices.")
        indices = sorted(found)
        return indices, torch.stack([found[index] for index in indices])


def check_student(hybrid: nn.Module, teacher: TeacherModel, folder: Path) -> None:
    """Refuse a hybrid that does not go with the teacher, or whose layers hold a window beside the mixer.

    Raises:
        ValueError: saying which.
    """
    for field in ("vocab_size", "num_hidden_layers", "hidden_size"):
        ours, theirs = getattr(hybrid.config, field), getattr(teacher.config, field)
        if ours != theirs:
            raise ValueError(f"{folder} has {field} {ours} and the teacher {theirs}: they do not belong together.")
    if "hybrid" in hybrid.config.layer_types:
        raise ValueError(f"{folder} has a window beside its mixers, which then hold a part of the attention only.")
    if "linear_attention" not in hybrid.config.layer_types:
        raise ValueError(f"{folder} kept every layer as attention: there is nothing to compare.")


def open_teacher(model: str) -> TeacherModel:
    """The teacher as its blocks.

    Raises:
        ValueError: it does not exist or is of an unsupported kind.
    """
    found = find_teacher(model)
    options = make_config(model=model, output="unused", attention_ratio=0.0, align="none")
    return TeacherModel(found, options, found.open_weights())


def best_scale(target: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Each matrix (M, L, L) times the scalar that brings it nearest: out_proj takes up any scale of a head."""
    dims = (-2, -1)
    scale = (target * matrix).sum(dims, keepdim=True) / matrix.square().sum(dims, keepdim=True).clamp_min(1e-30)
    return scale * matrix
