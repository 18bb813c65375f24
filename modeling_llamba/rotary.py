"""Rotary position embedding, for softmax attention and for B and C of the mixers alike."""

import copy

import torch
from torch import nn


def rotary_embedding(config) -> nn.Module:
    """Makes cos and sin: Phi's, as it knows rotation of a part of each head, besides every scaling of transformers."""
    from transformers.models.phi.modeling_phi import PhiRotaryEmbedding  # here, since it takes seconds to import

    return PhiRotaryEmbedding(config)


def local_rotary_embedding(config) -> nn.Module | None:
    """The embedding of the layers whose `layer_rope` is "local"; None where there are none."""
    if config.local_rope_parameters is None:
        return None
    local = copy.copy(config)
    local.rope_parameters = config.local_rope_parameters
    return rotary_embedding(local)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, head_dim_axis: int) -> torch.Tensor:
    """Rotate the first cos.shape[-1] features of x; `head_dim_axis` is where the head dimension stands in x."""
    cos = cos.unsqueeze(head_dim_axis)
    sin = sin.unsqueeze(head_dim_axis)
    rotary_dim = cos.shape[-1]
    if rotary_dim == x.shape[-1]:
        return x * cos + _rotate_half(x) * sin
    rotated = x[..., :rotary_dim]
    rest = x[..., rotary_dim:]
    return torch.cat((rotated * cos + _rotate_half(rotated) * sin, rest), dim=-1)


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    """(x_1, x_2) -> (-x_2, x_1), halves of the features."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
