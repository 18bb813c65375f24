"""The shapes of our models on which peers' suites run."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from tests.helpers.hybrids import FAMILIES, make_hybrid
from tests.helpers.tiny_chat import chat_tokenizer

from .fetch import FOLDER

FEW_BITS = {"window_bits": 8, "full_attention_bits": 8}
SHAPES: dict[str, tuple[str, dict]] = {
    "attention": ("llamba", {"pattern": "attention"}),
    "hybrid": ("llamba", {"pattern": "beside-only"}),
    "hybrid_in_few_bits": ("llamba", {"pattern": "beside-only", **FEW_BITS}),
    "discrete_mamba2": ("llamba", {"pattern": "pure", "mixer": "discrete_mamba2"}),
    "mamba2": ("llamba", {"pattern": "pure", "mixer": "mamba2"}),
    "mamba1": ("llamba", {"pattern": "pure", "mixer": "mamba1"}),
    "experts": ("llamba", {"pattern": "experts"}),
    "phimamba": ("phimamba", {"pattern": "beside-only"}),
}
"""Name -> family, and the arguments of `make_hybrid`."""


def model_of(shape: str, **overrides) -> PreTrainedModel:
    """A tiny model of a shape."""
    family, options = SHAPES[shape]
    return make_hybrid(family, **options, **overrides)


def class_of(shape: str) -> type[PreTrainedModel]:
    """The class of a shape's causal language model."""
    return FAMILIES[SHAPES[shape][0]][1]


def saved_shapes() -> list[str]:
    """Folders of all shapes with a tokenizer, for suites that load what they test."""
    return [_saved(shape) for shape in SHAPES]


def _saved(shape: str) -> str:
    folder: Path = FOLDER / "models" / shape
    if not (folder / "config.json").exists():
        chat_tokenizer().save_pretrained(folder)
        model_of(shape, dtype=torch.float32).save_pretrained(folder)
    return str(folder)
