"""Normalisation layers."""

import torch
from torch import nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, or over groups of it, computed in float32."""

    def __init__(self, size: int, eps: float, group_size: int | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.group_size = group_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        if self.group_size is None and dtype in (torch.float32, torch.float64):
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        h = x.to(torch.promote_types(dtype, torch.float32))
        if self.group_size is not None:
            h = h.unflatten(-1, (-1, self.group_size))
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.group_size is not None:
            h = h.flatten(-2)
        return self.weight * h.to(dtype)


def head_norm(kind: str | None, size: int, eps: float) -> nn.Module | None:
    """The norm some teachers put on queries and keys: "rms" (Qwen3), "layer" (Phi), or None."""
    if kind is None:
        return None
    return RMSNorm(size, eps) if kind == "rms" else nn.LayerNorm(size, eps=eps)
