"""MOHAWK stage 1: turn the mixer's unrolled matrix towards the teacher's attention matrix.

    loss = mean over sequences and heads of ||Attention(u) - Mixer(u)||_F                 (Bick et al. 2024, eq. 5)

u is the teacher's own layer input, so layers are independent. The matrices are compared a tile of rows at a time: the
norm is summed over the tiles in a first pass, and the second pass computes every tile again and sends its gradient
back to the streams B, C, decay, step and D, from where one backward pass reaches the projections. Memory is
O(B H tile L), not O(B H L^2), and the result is the same.

Shapes: B batch, L length, D model width, H heads, G groups, N state, Q queries.
"""

from functools import partial

import torch
from torch import nn

from modeling_llamba.mixers.ssd import repeat_groups
from modeling_llamba.model.rotary import Rotary

from ...fit.teacher_model import attention_rows


def matrix_orientation_loss(
    mixer: nn.Module,
    attention: nn.Module,
    u: torch.Tensor,
    rotary: Rotary,
    tile: int = 128,
) -> float:
    """Stage-1 loss of one layer; its gradients are added to the mixer's parameters where autograd is on.

    Args:
        u: (B, L, D), the input of both. tile: rows compared at a time.
    """
    check_has_matrix_per_head(mixer.config.mixer)
    heads = attention.q_proj.out_features // attention.head_dim
    if mixer.num_heads != heads:
        raise ValueError(f"Stage 1 compares head by head: the mixer has {mixer.num_heads}, the attention {heads}.")
    # the loss is a difference of matrices that come close, which half precision would drown
    with torch.autocast(u.device.type, enabled=False):
        u = u.to(torch.promote_types(u.dtype, torch.float32))
        tiles = partial(attention_rows, attention, u, rotary, tile)
        streams = mixer.project(u, rotary)
        parts = [streams.log_a, streams.B, streams.C, mixer.D]
        if streams.step is not None:
            parts.append(streams.step)
        # gradients of all tiles gather here, and pass the projections once
        leaves = [part.detach().requires_grad_(torch.is_grad_enabled()) for part in parts]
        with torch.no_grad():
            squares = sum((mixer_rows(leaves, rows) - target).square().sum((-2, -1)) for rows, target in tiles())
        norms = squares.double().sqrt()
        if torch.is_grad_enabled():
            _send_back(parts, leaves, tiles, norms)
    return norms.mean().item()


def _send_back(parts, leaves, tiles, norms) -> None:
    """d ||E||_F = <E, dE> / ||E||_F, tile by tile; a norm of zero has gradient zero."""
    # half, since d ||E||^2 is 2 <E, dE>
    weights = torch.where(norms > 0, 0.5 / norms, 0.0) / norms.numel()
    for rows, target in tiles():
        squares = (mixer_rows(leaves, rows) - target).square().sum((-2, -1))
        (squares * weights.to(squares.dtype)).sum().backward()
    reached = [(part, leaf.grad) for part, leaf in zip(parts, leaves, strict=True) if part.requires_grad]
    torch.autograd.backward([part for part, _ in reached], [grad for _, grad in reached])


def check_has_matrix_per_head(mixer: str) -> None:
    """Refuse a kind of mixer that has none."""
    if mixer == "mamba1":
        raise ValueError(
            "mamba1 mixes every channel with a matrix of its own, so there is none per head to orient; leave stage 1 "
            "out (matrix_orientation: {tokens: 0})."
        )


def mixer_rows(streams: list[torch.Tensor], rows: slice) -> torch.Tensor:
    """Rows (B, H, Q, L) of the unrolled matrix, skip connection included.

    Args:
        streams: log_a (B, L, H), B (B, L, G, N), C (B, L, H, N), D (H,), and the step (B, L, H) where there is one;
            decay and step may have fewer heads, which consecutive heads then share.
    """
    log_a, B, C, D, *step = streams
    H, L = C.shape[2], log_a.shape[1]
    log_a = log_a.repeat_interleave(H // log_a.shape[-1], dim=-1)
    # decays are differences of these sums, which grow with the text
    total = log_a.double().cumsum(1).transpose(1, 2)
    position = torch.arange(L, device=log_a.device)
    future = position[rows, None] < position
    decay = (total[..., rows, None] - total[..., None, :]).masked_fill(future, float("-inf")).exp()
    matrix = C[:, rows].transpose(1, 2) @ repeat_groups(B, H).transpose(1, 2).transpose(-1, -2) * decay.to(C.dtype)
    if step:
        of_heads = step[0].repeat_interleave(H // step[0].shape[-1], dim=-1)
        matrix = matrix * of_heads.transpose(1, 2)[..., None, :].to(matrix.dtype)
    return matrix + D[:, None, None] * (position[rows, None] == position).to(matrix.dtype)
