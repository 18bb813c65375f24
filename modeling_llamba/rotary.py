"""Rotary position embedding, for softmax attention and for B and C of the mixers alike."""

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update


class RotaryEmbedding(nn.Module):
    """cos and sin of the teacher's RoPE, every scaling type of transformers included.

    The attribute names are the ones transformers' weight initialisation and RoPE updates look for.
    """

    def __init__(self, config):
        super().__init__()
        self.max_seq_len_cached = config.max_position_embeddings
        self.original_max_seq_len = config.max_position_embeddings
        self.config = config
        self.rope_type = config.rope_parameters["rope_type"]
        rope_init = ROPE_INIT_FUNCTIONS.get(self.rope_type, self.compute_default_rope_parameters)
        inv_freq, self.attention_scaling = rope_init(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config, *args, **kwargs) -> tuple[torch.Tensor, float]:
        """Inverse frequencies of plain RoPE over the first `partial_rotary_factor` of each head."""
        dim = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        exponent = torch.arange(0, dim, 2, dtype=torch.float) / dim
        return 1.0 / (config.rope_parameters["rope_theta"] ** exponent), 1.0

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids (B, L) -> cos, sin (B, L, rotary dims) in x's dtype."""
        angles = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.attention_scaling).to(x.dtype), (angles.sin() * self.attention_scaling).to(x.dtype)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """(a, b) -> (-b, a), a and b the halves of the last dimension."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, head_dim_axis: int) -> torch.Tensor:
    """Rotate the first cos.shape[-1] features of x; `head_dim_axis` is where the head dimension stands in x."""
    cos, sin = cos.unsqueeze(head_dim_axis), sin.unsqueeze(head_dim_axis)
    rotary_dim = cos.shape[-1]
    if rotary_dim == x.shape[-1]:
        return x * cos + rotate_half(x) * sin
    rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    return torch.cat((rotated * cos + rotate_half(rotated) * sin, rest), dim=-1)
