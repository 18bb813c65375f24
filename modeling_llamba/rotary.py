"""Rotary position embedding, for softmax attention and for B and C of the mixers alike."""

import copy

import torch

# Phi's, as it knows rotation of a part of each head, besides every scaling type of transformers
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding as RotaryEmbedding
from transformers.models.phi.modeling_phi import rotate_half

__all__ = ["RotaryEmbedding", "apply_rotary", "local_rotary_embedding"]


def local_rotary_embedding(config) -> RotaryEmbedding | None:
    """The embedding of the layers whose `layer_rope` is "local"; None where there are none."""
    if config.local_rope_parameters is None:
        return None
    local = copy.copy(config)
    local.rope_parameters = config.local_rope_parameters
    return RotaryEmbedding(local)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, head_dim_axis: int) -> torch.Tensor:
    """Rotate the first cos.shape[-1] features of x; `head_dim_axis` is where the head dimension stands in x."""
    cos, sin = cos.unsqueeze(head_dim_axis), sin.unsqueeze(head_dim_axis)
    rotary_dim = cos.shape[-1]
    if rotary_dim == x.shape[-1]:
        return x * cos + rotate_half(x) * sin
    rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    return torch.cat((rotated * cos + rotate_half(rotated) * sin, rest), dim=-1)
