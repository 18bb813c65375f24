"""Structured matrices near given lower triangular ones: Toeplitz, low rank (LR), and decayed low rank (SSD).

    M[l, s] = C_l . B_s  a_l a_{l-1} ... a_{s+1}        for s <= l

a = 1 is causal linear attention (LR), one decay a per token is Mamba-2 (SSD). Given the decays, the best C for given B
is a least-squares problem per row, and the best B for given C one per column. `alternate` solves them in turn, each
exactly, with a Gauss-Newton step on the decays in between.

Shapes: M matrices, L length, N state.
"""

from dataclasses import dataclass

import torch
from torch import nn

RIDGE = 1e-10
ROWS_AT_ONCE = 32
LEAST_LOG_DECAY = -20.0


@dataclass
class Factors:
    """C and B (M, L, N) and log decays (M, L), at most 0."""

    C: torch.Tensor
    B: torch.Tensor
    log_a: torch.Tensor

    def matrix(self) -> torch.Tensor:
        """(M, L, L)."""
        return (self.C @ self.B.mT) * decay_mask(self.log_a)

    def better_of(self, other: "Factors", target: torch.Tensor) -> "Factors":
        """For each matrix, the nearer of two fits."""
        ours = distance(target, self.matrix()) <= distance(target, other.matrix())
        pairs = ((self.C, other.C), (self.B, other.B), (self.log_a, other.log_a))
        return Factors(*(torch.where(ours.view(-1, *[1] * (a.ndim - 1)), a, b) for a, b in pairs))


def distance(target: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Frobenius norm (M,) of the difference, neither squared nor normalised, as in the paper."""
    return (target.double() - matrix.double()).norm(dim=(-2, -1))


def toeplitz(target: torch.Tensor) -> torch.Tensor:
    """The nearest causal Toeplitz matrices (M, L, L): the mean of each diagonal, by least squares."""
    L = target.shape[-1]
    lag = torch.arange(L)[:, None] - torch.arange(L)
    kernel = torch.stack([target.diagonal(-d, -2, -1).mean(-1) for d in range(L)], dim=-1)
    return torch.where(lag >= 0, kernel[:, lag.clamp_min(0)], 0.0)


def low_rank(target: torch.Tensor, state: int, sweeps: int = 8) -> Factors:
    """Causal linear attention near `target` (M, L, L), from its truncated singular value decomposition."""
    C, B = truncated_svd(target, state)
    return alternate(target, Factors(C, B, target.new_zeros(target.shape[:2])), sweeps, fit_decays=False)


def ssd(target: torch.Tensor, state: int, sweeps: int = 8) -> Factors:
    """Mamba-2 matrices near `target` (M, L, L), from its truncated singular value decomposition and decays of 0.99."""
    C, B = truncated_svd(target, state)
    log_a = target.new_full(target.shape[:2], 0.99).log()
    return alternate(target, Factors(C, B, log_a), sweeps, fit_decays=True)


def decay_mask(log_a: torch.Tensor) -> torch.Tensor:
    """Log decays (M, L) to (M, L, L): a_l ... a_{s+1} for s <= l, else 0."""
    total = log_a.cumsum(-1)
    upper = torch.ones(log_a.shape[1], log_a.shape[1], dtype=torch.bool).triu(1)
    return (total[..., :, None] - total[..., None, :]).masked_fill(upper, float("-inf")).exp()


def solve_rows(target: torch.Tensor, B: torch.Tensor, log_a: torch.Tensor) -> torch.Tensor:
    """The best C (M, L, N) for given B and decays: normal equations per row, in float64.

    Row l sees E_l[s] = B_s a_l ... a_{s+1}; E_l^T E_l follows by recurrence.
    """
    count, L, N = B.shape
    moments = (target * decay_mask(log_a)) @ B
    squared_decays = (2 * log_a).exp()[..., None, None]
    gram, grams, rows = B.new_zeros(count, N, N), [], []
    for t in range(L):
        gram = torch.baddbmm(gram * squared_decays[:, t], B[:, t, :, None], B[:, t, None])
        grams.append(gram)
        if len(grams) == ROWS_AT_ONCE or t + 1 == L:
            rows.append(least_squares(torch.stack(grams, dim=1), moments[:, t + 1 - len(grams) : t + 1]))
            grams = []
    return torch.cat(rows, dim=1)


def least_squares(gram: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """Solutions (..., N) of gram (..., N, N) and moment (..., N); zero where there is nothing to solve."""
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    ridge = RIDGE * diagonal.mean(-1, keepdim=True) + 1e-300
    factor, info = torch.linalg.cholesky_ex(gram + torch.diag_embed(ridge.expand_as(diagonal)))
    solution = torch.cholesky_solve(moment[..., None], factor)[..., 0]
    return torch.where((info == 0)[..., None] & solution.isfinite().all(-1, keepdim=True), solution, 0.0)


def solve_columns(target: torch.Tensor, C: torch.Tensor, log_a: torch.Tensor) -> torch.Tensor:
    """The best B (M, L, N) for given C and decays: the same problem, read from the last token to the first."""
    backwards = torch.cat([torch.zeros_like(log_a[:, :1]), log_a[:, 1:].flip(1)], dim=1)
    return solve_rows(target.flip(-2, -1).mT, C.flip(1), backwards).flip(1)


def improve_decays(target: torch.Tensor, factors: Factors) -> torch.Tensor:
    """Log decays (M, L) after a damped Gauss-Newton step, kept only where the distance falls.

    d M[l, s] / d log a_k = M[l, s] for s < k <= l, so gradient and Hessian are sums over lower left corners.
    """
    product = factors.C @ factors.B.mT
    matrix = product * decay_mask(factors.log_a)
    residual = target - matrix

    def corners(values: torch.Tensor) -> torch.Tensor:  # [i, j]: the sum over rows from i on and columns before j
        return nn.functional.pad(values.flip(1).cumsum(1).flip(1).cumsum(2), (1, -1))

    # in float32: only the direction depends on it, and a step that does not help is not taken
    gradient = corners((residual * matrix).float()).diagonal(dim1=1, dim2=2)
    squares = corners(matrix.square().float())
    hessian = squares.tril() + squares.tril(-1).mT
    damping = 1e-2 * hessian.diagonal(dim1=1, dim2=2) + 1e-12
    factor, info = torch.linalg.cholesky_ex(hessian + torch.diag_embed(damping))
    step = torch.cholesky_solve(gradient[..., None], factor)[..., 0].clamp(-1, 1)
    step = torch.where((info[:, None] == 0) & step.isfinite(), step, 0.0).double()
    best, log_a = residual.square().sum((1, 2)), factors.log_a
    for size in (1.0, 0.3):
        moved = (factors.log_a + size * step).clamp(LEAST_LOG_DECAY, 0)
        error = (target - product * decay_mask(moved)).square().sum((1, 2))
        log_a = torch.where((error < best)[:, None], moved, log_a)
        best = torch.minimum(best, error)
    return log_a


def truncated_svd(target: torch.Tensor, state: int) -> tuple[torch.Tensor, torch.Tensor]:
    """C and B (M, L, N) of the best rank-N approximation of the whole square, mask or not."""
    left = torch.linalg.eigh(target @ target.mT).eigenvectors[..., -state:].flip(-1)
    right = target.mT @ left
    scale = right.norm(dim=1, keepdim=True).sqrt()
    return left * scale, right / scale.clamp_min(1e-150)


def alternate(target: torch.Tensor, start: Factors, sweeps: int, fit_decays: bool) -> Factors:
    """Sweeps of exact solves for C and B in turn, and a step on the decays; the distance falls with every one."""
    C, B, log_a = start.C, start.B, start.log_a
    for _ in range(sweeps):
        C = solve_rows(target, B, log_a)
        B = solve_columns(target, C, log_a)
        if fit_decays:
            log_a = improve_decays(target, Factors(C, B, log_a))
    return Factors(C, B, log_a)
