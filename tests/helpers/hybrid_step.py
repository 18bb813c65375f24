"""Hybrid layers whose every part matters, and the distance of what they give."""

import torch
from torch import nn

from modeling_llamba.hybrid_attention import HybridAttention

ROPE = {"rope_type": "default", "rope_theta": 1e4}
PARTIAL = {"partial_rotary_factor": 0.4}


@torch.no_grad()
def randomised(module: nn.Module) -> nn.Module:
    """The module with weights large enough that a leak shows."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.weight.normal_(0, part.in_features**-0.5)
        if isinstance(part, HybridAttention):
            for projection in (part.q_proj, part.k_proj):
                projection.weight.mul_(1.5)
            if part.salience is not None:
                part.salience.normal_()
            if part.mass is not None:
                part.mass.add_(0.2 * torch.randn_like(part.mass))
    return module


def relative_error(got, expected):
    """The worst of any token."""
    got, expected = (t.double().cpu() for t in (got, expected))
    return ((got - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-6)).max().item()
