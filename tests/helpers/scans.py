"""Random inputs of the scans, and the distance of what they give."""

import torch

SHAPES = {  # B, L, H, G, P, N, chunk, and T where the heads of a group share a state
    "one-token": (2, 1, 2, 2, 4, 4, 16),
    "below-a-chunk": (1, 15, 4, 2, 8, 4, 16),
    "a-chunk": (1, 16, 4, 4, 8, 8, 16),
    "above-a-chunk": (2, 17, 4, 1, 4, 8, 16),
    "many-chunks": (2, 200, 6, 2, 8, 5, 64),
    "shared-states": (2, 75, 6, 2, 8, 5, 16, 2),
    "one-state": (1, 20, 4, 1, 4, 8, 16, 1),
    "halved-chunks": (2, 75, 18, 6, 8, 4, 64),  # on a CPU
}


def ssd_inputs(shape, decay=(-3.0, 0.0), dtype=torch.float32, requires_grad=False):
    B, L, H, G, P, N, _, *shared = SHAPES[shape]
    T = shared[0] if shared else H
    low, high = decay
    tensors = [
        torch.randn(B, L, G, P),
        torch.empty(B, L, T).uniform_(low, high),
        torch.randn(B, L, G, N),
        torch.randn(B, L, H, N),
        torch.randn(B, T, P, N),
    ]
    return [t.to(dtype).requires_grad_(requires_grad) for t in tensors]


def selective_inputs(L=100, B=2, D=12, G=3, N=4, dtype=torch.float32, requires_grad=False, scale=1.0):
    tensors = [
        torch.randn(B, L, D),
        torch.rand(B, L, D) * scale,
        -torch.rand(D, N) * 3,
        torch.randn(B, L, G, N),
        torch.randn(B, L, G, N),
        torch.randn(B, D, N),
    ]
    return [t.to(dtype).requires_grad_(requires_grad) for t in tensors]


def relative_error(got, expected):
    return ((got.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()
