"""The two classes of hybrid that a conversion or an import writes: their layers and the shapes of their tensors."""

import torch
from transformers import PreTrainedConfig

from modeling_llamba import LlambaConfig, LlambaForCausalLM
from modeling_phimamba import PhiMambaConfig, PhiMambaForCausalLM

STUDENTS = {"llamba": (LlambaConfig, LlambaForCausalLM), "phimamba": (PhiMambaConfig, PhiMambaForCausalLM)}
MIXER_LAYERS = ("linear_attention", "hybrid")
"""Layer types whose attention was replaced."""


def tensor_shapes(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a hybrid's tensors without allocating any; a tied head is left out."""
    return meta_shapes(STUDENTS[config.model_type][1], config)


def meta_shapes(model_class: type, config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that a model class stores, made on the meta device."""
    with torch.device("meta"):
        model = model_class(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return shapes


def layer_letters(layer_types: list[str]) -> str:
    """One letter per layer: A keeps its attention, M is a mixer, H is a mixer beside a window."""
    letters = {"linear_attention": "M", "hybrid": "H"}
    return "".join(letters.get(kind, "A") for kind in layer_types)
