"""Structured matrices near given lower triangular ones: Toeplitz, low rank, and decayed low rank (SSD and relatives).

    M[l, s] = sum_n C[l, n] B[s, n] prod_{s < k <= l} a[k, n]        for s <= l

a = 1 is causal linear attention (low rank, LR), one decay per token is Mamba-2 (SSD), one per token and state Mamba-1.
Given the decays, the best C for given B is a least-squares problem per row, and the best B for given C one per column;
`alternate` solves them in turn, exactly, with a Gauss-Newton step on the decays in between. `descend` fits by
gradient instead, as Bick et al. 2024 (MOHAWK) did.

With free C, B and nonzero decays the families are one: prod a = p_l / p_s for p the running product, and C p, B / p
are the factors of a low-rank matrix (`fold_decays`); a general recurrence with invertible transitions folds the same
way. So the smallest distance is the same for LR, SSD and the general semiseparable matrix of a state size. What
differs is how near fits in finite precision get, which is what the distances here say.

Shapes: M matrices, L length, N state, K decays per token (1 or N).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

RIDGE = 1e-10
ROWS_AT_ONCE = 32
LEAST_LOG_DECAY = -20.0


@dataclass
class Factors:
    """C and B (M, L, N) and log decays (M, L, K), at most 0."""

    C: torch.Tensor
    B: torch.Tensor
    log_a: torch.Tensor

    def matrix(self) -> torch.Tensor:
        """(M, L, L)."""
        if self.log_a.shape[-1] == 1:
            return (self.C @ self.B.mT) * decay_masks(self.log_a)[:, 0]
        rows, reached, a = [], torch.zeros_like(self.B), self.log_a.exp()
        for t in range(self.B.shape[1]):
            reached = reached * a[:, t, None]
            reached[:, t] = self.B[:, t]
            rows.append((reached @ self.C[:, t, :, None])[..., 0])
        return torch.stack(rows, dim=1)

    def better_of(self, other: "Factors", target: torch.Tensor) -> "Factors":
        """Matrix by matrix the nearer of two fits of one kind."""
        ours = distance(target, self.matrix()) <= distance(target, other.matrix())
        pick = ours[:, None, None]
        pairs = ((self.C, other.C), (self.B, other.B), (self.log_a, other.log_a))
        return Factors(*(torch.where(pick, a, b) for a, b in pairs))


def distance(target: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Frobenius distance (M,), neither squared nor divided by anything."""
    return (target.double() - matrix.double()).norm(dim=(-2, -1))


def toeplitz(target: torch.Tensor) -> torch.Tensor:
    """The nearest causal Toeplitz matrices (M, L, L): the mean of each diagonal, by least squares."""
    L = target.shape[-1]
    lag = torch.arange(L)[:, None] - torch.arange(L)
    kernel = torch.stack([target.diagonal(-d, -2, -1).mean(-1) for d in range(L)], dim=-1)
    return torch.where(lag >= 0, kernel[:, lag.clamp_min(0)], 0.0)


def decay_masks(log_a: torch.Tensor) -> torch.Tensor:
    """(M, L, K) to (M, K, L, L): prod_{s < k <= l} a_k for s <= l, else 0."""
    total = log_a.mT.cumsum(-1)
    upper = torch.ones(log_a.shape[1], log_a.shape[1], dtype=torch.bool).triu(1)
    return (total[..., :, None] - total[..., None, :]).masked_fill(upper, float("-inf")).exp()


def fold_decays(factors: Factors) -> Factors:
    """The same matrices as low rank, without decays.

    In exact arithmetic always; in float64 as long as the running product stays above 1e-300, which a float32 layer,
    whose factors are bounded, has no way to follow.
    """
    scale = factors.log_a.cumsum(1).exp()
    return Factors(factors.C * scale, factors.B / scale, torch.zeros_like(factors.log_a))


def solve_rows(target: torch.Tensor, B: torch.Tensor, log_a: torch.Tensor) -> torch.Tensor:
    """The best C (M, L, N) for given B and decays: normal equations per row, in float64.

    Row l sees B_s decayed to l, E_l[s] = B_s prod_{s < k <= l} a_k; E_l^T E_l follows by recurrence.
    """
    count, L, N = B.shape
    a = log_a.exp()
    shared = log_a.shape[-1] == 1
    moments = [] if not shared else [(target * decay_masks(log_a)[:, 0]) @ B]
    seen = None if shared else B.new_zeros(count, L, N)
    gram, grams, rows = B.new_zeros(count, N, N), [], []
    for t in range(L):
        gram = torch.baddbmm(gram * (a[:, t, :, None] * a[:, t, None]), B[:, t, :, None], B[:, t, None])
        grams.append(gram)
        if seen is not None:
            seen[:, :t] *= a[:, t, None]
            seen[:, t] = B[:, t]
            moments.append(target[:, t, None, : t + 1] @ seen[:, : t + 1])
        if len(grams) == ROWS_AT_ONCE or t + 1 == L:
            moment = moments[0][:, t + 1 - len(grams) : t + 1] if shared else torch.cat(moments, dim=1)
            rows.append(least_squares(torch.stack(grams, dim=1), moment))
            grams, moments = [], moments if shared else []
    return torch.cat(rows, dim=1)


def least_squares(gram: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """Solutions (..., N) of gram (..., N, N) and moment (..., N); zero where there is nothing to solve."""
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    ridge = RIDGE * diagonal.mean(-1, keepdim=True) + 1e-300
    factor, info = torch.linalg.cholesky_ex(gram + torch.diag_embed(ridge.expand_as(diagonal)))
    solution = torch.cholesky_solve(moment[..., None], factor)[..., 0]
    return torch.where((info == 0)[..., None] & solution.isfinite().all(-1, keepdim=True), solution, 0.0)


def solve_columns(target: torch.Tensor, C: torch.Tensor, log_a: torch.Tensor) -> torch.Tensor:
    """The best B for given C and decays: the same problem, read from the last token to the first."""
    backwards = torch.cat([torch.zeros_like(log_a[:, :1]), log_a[:, 1:].flip(1)], dim=1)
    return solve_rows(target.flip(-2, -1).mT, C.flip(1), backwards).flip(1)


def improve_decays(target: torch.Tensor, factors: Factors) -> torch.Tensor:
    """Log decays (M, L, 1) after a damped Gauss-Newton step, kept only where the distance falls.

    d M[l, s] / d log a_k = M[l, s] for s < k <= l, so gradient and Hessian are sums over lower left corners.
    """
    mask = decay_masks(factors.log_a)[:, 0]
    product = factors.C @ factors.B.mT
    matrix = product * mask
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
        moved = (factors.log_a[..., 0] + size * step).clamp(LEAST_LOG_DECAY, 0)[..., None]
        error = (target - product * decay_masks(moved)[:, 0]).square().sum((1, 2))
        log_a = torch.where((error < best)[:, None, None], moved, log_a)
        best = torch.minimum(best, error)
    return log_a


def truncated_svd(target: torch.Tensor, state: int) -> tuple[torch.Tensor, torch.Tensor]:
    """C and B (M, L, N) of the best rank-N approximation of the whole square: where `alternate` starts."""
    target = target.double()
    left = torch.linalg.eigh(target @ target.mT).eigenvectors[..., -state:].flip(-1)
    right = target.mT @ left
    scale = right.norm(dim=1, keepdim=True).sqrt()
    return left * scale, right / scale.clamp_min(1e-150)


def decay_start(target: torch.Tensor, state: int) -> Factors:
    """Half of the states remember everything and start from the SVD; the rest forget fast and start as waves."""
    count, L, _ = target.shape
    C, B = truncated_svd(target, state - state // 2)
    parts, log_a = [], [torch.zeros(C.shape[-1])]
    for share, decay in ((state // 4, 0.5), (state // 2 - state // 4, 0.9)):
        waves = torch.arange(share) // 2 + 0.5
        angles = torch.arange(L)[:, None] * waves * (2 * math.pi / max(share, 1)) + math.pi / 2 * (
            torch.arange(share) % 2
        )
        parts.append(angles.double().cos().expand(count, L, share))
        log_a.append(torch.full((share,), math.log(decay)))
    log_decays = torch.cat(log_a).double().expand(count, L, state)
    return Factors(torch.cat([C, *parts], dim=-1), torch.cat([B, *parts], dim=-1), log_decays)


def alternate(target: torch.Tensor, start: Factors, sweeps: int, fit_decays: bool) -> Factors:
    """So many sweeps of exact solves for C and B in turn; with `fit_decays` a step on the decays in each.

    The distance falls with every solve.
    """
    target, C, B, log_a = target.double(), start.C, start.B, start.log_a
    for _ in range(sweeps):
        C = solve_rows(target, B, log_a)
        B = solve_columns(target, C, log_a)
        if fit_decays:
            log_a = improve_decays(target, Factors(C, B, log_a))
    return Factors(C, B, log_a)


def descend(
    target: torch.Tensor,
    state: int,
    decayed: bool,
    steps: int,
    learning_rate: float = 0.03,
    seed: int = 0,
    progress: Callable[[int], None] = lambda step: None,
) -> Factors:
    """Gradient descent from random factors: Adam on the squared distance in float32, a cosine to zero.

    Bick et al. 2024 took 10,000 steps; their optimizer, rate and start are not published.
    """
    target, generator = target.float(), torch.Generator().manual_seed(seed)
    shape = (*target.shape[:2], state)
    C, B = (torch.randn(shape, generator=generator) * 0.3 for _ in range(2))
    C = C * state**-0.5
    log_a = torch.full((*shape[:2], 1), -0.05 if decayed else 0.0)
    trained = [nn.Parameter(part) for part in ((C, B, log_a) if decayed else (C, B))]
    optimizer = torch.optim.Adam(trained, lr=learning_rate, betas=(0.9, 0.99))
    lower = torch.ones(shape[1], shape[1]).tril()
    for step in range(steps):
        progress(step)
        with torch.no_grad():
            C, B = trained[0], trained[1]
            mask = decay_masks(trained[2])[:, 0] if decayed else lower
            matrix = (C @ B.mT) * mask
            residual = matrix - target
            trained[0].grad, trained[1].grad = (residual * mask) @ B, (residual * mask).mT @ C
            if decayed:
                corners = (residual * matrix).flip(1).cumsum(1).flip(1).cumsum(2)
                gradient = nn.functional.pad(corners.diagonal(-1, 1, 2), (1, 0))
                trained[2].grad = gradient[..., None]
        optimizer.param_groups[0]["lr"] = learning_rate * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.step()
        if decayed:
            trained[2].data.clamp_(LEAST_LOG_DECAY, 0)
    return Factors(trained[0].data, trained[1].data, trained[2].data if decayed else log_a)


def beyond_window(target: torch.Tensor, window: int, sinks: int) -> torch.Tensor:
    """What a window of the last tokens and the first few leave to a recurrence, as a problem without a window.

    A token reaches the state when it leaves the window, so columns move right by the window; sinks never do.
    """
    rest = target.clone()
    rest[..., :sinks] = 0
    return nn.functional.pad(rest, (window, 0))[..., : target.shape[-1]].tril()
