"""Functions of PyTorch that suit one kind of device and not another."""

import torch
from torch.nn import functional as F
from transformers.utils import is_torchdynamo_compiling


def marked_rows(marked: torch.Tensor) -> torch.Tensor | None:
    """Numbers of the rows that are marked (B,); None where the host would wait for a device, or a graph break."""
    if is_torchdynamo_compiling() or marked.device.type != "cpu":
        return None
    return marked.nonzero()[:, 0]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x (..., D), divided by the root of its mean square in float32, times weight (D,)."""
    # CUDA's kernel, one in place of eight, computes in float32 whatever it is given
    if x.dtype in (torch.float32, torch.float64) or (x.is_cuda and x.dtype == weight.dtype):
        return F.rms_norm(x, weight.shape, weight, eps).to(x.dtype)
    # Llama rounds before it multiplies
    return weight * normalised(x, eps).to(x.dtype)


def normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x (..., D) divided by the root of its mean square, in float32 or float64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
