"""Rotary position embedding, for softmax attention and for B and C of the mixers alike."""

import copy

import torch
from torch import nn

Rotary = tuple[torch.Tensor, ...]
"""A layer's rotary embedding: cos and sin (B, L, rotary dims), and a factor (B, L, 1) on queries, which grows with
their position, in teachers that have one."""


def rotary_embedding(config) -> nn.Module:
    """Module that makes cos and sin: Phi's, which can rotate a part of each head and has every scaling of RoPE."""
    from transformers.models.phi.modeling_phi import PhiRotaryEmbedding  # here, since it takes seconds to import

    return PhiRotaryEmbedding(config)


def local_rotary_embedding(config) -> nn.Module | None:
    """The embedding of the layers whose `layer_rope` is "local"; None where there are none."""
    if config.local_rope_parameters is None:
        return None
    local = copy.copy(config.of_kind("sliding_attention"))
    local.rope_parameters = config.local_rope_parameters
    return rotary_embedding(local)


def query_scale(rope: dict, position_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """The factor (B, L, 1) on queries at these positions (B, L): 1 + beta log(1 + n) after n times the length that the
    model was first trained with. None where the parameters of RoPE, as of all but Ministral 3, name no beta."""
    beta = rope.get("llama_4_scaling_beta")
    if beta is None:
        return None
    lengths = torch.floor(position_ids / rope["original_max_position_embeddings"])
    return (1 + beta * torch.log(1 + lengths))[..., None].to(dtype)


def rotate_queries(query: torch.Tensor, rotary: Rotary, head_dim_axis: int = 1) -> torch.Tensor:
    """Rotate queries, and multiply them by the factor of their position, if there is one."""
    return scale_queries(apply_rotary(query, *rotary[:2], head_dim_axis), rotary, head_dim_axis)


def scale_queries(query: torch.Tensor, rotary: Rotary | None, head_dim_axis: int = 1) -> torch.Tensor:
    """Multiply queries by the factor of their position, if there is one."""
    if rotary is None or len(rotary) == 2:
        return query
    return query * rotary[2].unsqueeze(head_dim_axis)


def rotate_keys(key: torch.Tensor, rotary: Rotary, head_dim_axis: int = 1) -> torch.Tensor:
    """Rotate keys."""
    return apply_rotary(key, *rotary[:2], head_dim_axis)


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
