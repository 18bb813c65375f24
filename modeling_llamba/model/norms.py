"""Normalisation layers."""

import torch
from torch import nn

from ..kernels.by_device import normalised, rms_norm


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, or over groups of it, computed in float32.

    With `unit_offset` it multiplies by 1 + weight, in float32, as Gemma's does.
    """

    def __init__(self, size: int, eps: float, group_size: int | None = None, unit_offset: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if unit_offset else torch.ones(size))
        self.eps = eps
        self.group_size, self.unit_offset = group_size, unit_offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype, weight = x.dtype, self.weight
        if self.unit_offset:  # Gemma multiplies before it rounds
            weight = 1 + weight.to(torch.promote_types(dtype, torch.float32))
            x = x.to(weight.dtype)
        if self.group_size is None:
            y = rms_norm(x, weight, self.eps)
        else:
            y = weight * normalised(x.unflatten(-1, (-1, self.group_size)), self.eps).flatten(-2).to(x.dtype)
        return y.to(dtype) if self.unit_offset else y


class AllHeadsNorm(RMSNorm):
    """One norm over all heads of (..., heads, size) together."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(-2)).view(x.shape)


def head_norm(kind: str | None, size: int, heads: int, eps: float, unit_offset: bool = False) -> nn.Module | None:
    """The norm some teachers put on queries or keys (..., heads, size): "rms" (Qwen3) and "layer" (Phi) on each head,
    "all_heads" (OLMo) on all together, or None."""
    if kind is None:
        return None
    if kind == "layer":
        return nn.LayerNorm(size, eps=eps)
    if kind == "all_heads":
        return AllHeadsNorm(heads * size, eps, unit_offset=unit_offset)
    return RMSNorm(size, eps, unit_offset=unit_offset)


def make_norm(config) -> RMSNorm:
    """A norm over the residual stream."""
    return RMSNorm(config.hidden_size, config.rms_norm_eps, unit_offset=config.norm_unit_offset)
