"""Gated delta rule matrices near given lower triangular ones.

    S_t = a_t S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T,  o_t = S_t q_t,  |k_t| = 1, 0 < a_t, b_t < 1

(Yang et al. 2025, Gated Delta Networks, eq. 10.) With u_t = b_t (v_t - a_t S_{t-1} k_t), what the state takes up of
token t, this is linear attention over u, and u solves a triangular system, so that as a matrix over the tokens

    M = (Q K^T * G) (I + diag(b) (K K^T * G)_{s < l})^{-1} diag(b),   G[l, s] = prod_{s < k <= l} a_k.

As b shrinks (and q grows) the correction fades and SSD is left, so SSD matrices are limits of these.

Shapes: M matrices, L length, N state.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

from .fits import Factors, decay_masks, distance, least_squares

FIRST_STRENGTHS = (0.5, 0.05, 0.005)
LEAST_STRENGTH = 1e-6


@dataclass
class DeltaFactors:
    """q and k (M, L, N), log decays and strengths b (M, L, 1); k of any length stands for k / |k|."""

    q: torch.Tensor
    k: torch.Tensor
    log_a: torch.Tensor
    b: torch.Tensor

    def matrix(self) -> torch.Tensor:
        """(M, L, L)."""
        k, decayed = nn.functional.normalize(self.k, dim=-1), decay_masks(self.log_a)[:, 0]
        system = self.b * (k @ k.mT) * decayed
        # only what lies below the diagonal is read
        taken_up = torch.linalg.solve_triangular(
            system, (self.q @ k.mT) * decayed, upper=False, left=False, unitriangular=True
        )
        return taken_up * self.b.mT


def solve_queries(target: torch.Tensor, factors: DeltaFactors) -> DeltaFactors:
    """The same with the best q: a least-squares problem per row, whose matrix is the state itself."""
    count, L, N = factors.k.shape
    k, a, b = nn.functional.normalize(factors.k, dim=-1), factors.log_a.exp(), factors.b
    state, queries = target.new_zeros(count, N, L), []
    gram = target.new_zeros(count, N, N)
    for t in range(L):
        kept = torch.eye(N, dtype=target.dtype) - b[:, t, :, None] * k[:, t, :, None] * k[:, t, None]
        kept = kept * a[:, t, :, None]
        state[..., :t] = kept @ state[..., :t]
        state[..., t] = b[:, t] * k[:, t]
        gram = kept @ gram @ kept.mT + state[..., t, None] * state[..., None, :, t]
        queries.append(least_squares(gram, (state[..., : t + 1] @ target[:, t, : t + 1, None])[..., 0]))
    return DeltaFactors(torch.stack(queries, dim=1), factors.k, factors.log_a, factors.b)


def delta_start(target: torch.Tensor, ssd: Factors) -> DeltaFactors:
    """SSD's keys and decays, their lengths as strengths, and the q that suit them best.

    Matrix by matrix the best of several sizes of the strengths: the smaller, the nearer to SSD itself.
    """
    length = ssd.B.norm(dim=-1, keepdim=True)
    share = length / length.amax(1, keepdim=True).clamp_min(1e-150)
    best = None
    for strength in FIRST_STRENGTHS:
        b = (strength * share).clamp_min(LEAST_STRENGTH)
        found = solve_queries(target, DeltaFactors(ssd.C, ssd.B, ssd.log_a, b))
        best = found if best is None else nearer(target, found, best)
    return best


def nearer(target: torch.Tensor, new: DeltaFactors, old: DeltaFactors) -> DeltaFactors:
    """Matrix by matrix the nearer of two fits."""
    better = (distance(target, new.matrix()) < distance(target, old.matrix()))[:, None, None]
    pairs = zip((new.q, new.k, new.log_a, new.b), (old.q, old.k, old.log_a, old.b), strict=True)
    return DeltaFactors(*(torch.where(better, a, b) for a, b in pairs))


def fit_gated_delta(target: torch.Tensor, ssd: Factors, steps: int, learning_rate: float = 0.01) -> DeltaFactors:
    """Adam on all factors from `delta_start`, a cosine to zero, then the best q; never worse than the start.

    Args:
        target: (M, L, L) in float64.
    """
    start = delta_start(target, ssd)
    scale = start.q.square().mean((1, 2), keepdim=True).sqrt().clamp_min(1e-150)
    free = [
        (start.q / scale).float(), nn.functional.normalize(start.k, dim=-1).float() * math.sqrt(start.k.shape[-1]),
        (-start.log_a).clamp_min(1e-4).float().expm1().log(), torch.logit(start.b, LEAST_STRENGTH / 10).float(),
    ]  # fmt: skip
    free = [nn.Parameter(part.contiguous()) for part in free]

    def factors(dtype: torch.dtype) -> DeltaFactors:
        q, k, a, b = (part.to(dtype) for part in free)
        return DeltaFactors(q * scale.to(dtype), k, -nn.functional.softplus(a), b.sigmoid())

    optimizer, single = torch.optim.Adam(free, lr=learning_rate, betas=(0.9, 0.99)), target.float()
    weight = 1 / single.square().sum((1, 2), keepdim=True).clamp_min(1e-30)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.zero_grad()
        ((factors(torch.float32).matrix() - single).square() * weight).sum().backward()
        optimizer.step()
    with torch.no_grad():
        return nearer(target, solve_queries(target, factors(torch.float64)), start)
