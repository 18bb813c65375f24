"""Recurrences with a state of N as semiseparable matrices, and the best ones near a given matrix.

    h_t = A_t h_{t-1} + B_t x_t        y_t = C_t h_t        M[l, s] = C_l A_l ... A_{s+1} B_s    for s <= l

With A_t any N x N matrix, these M are exactly the lower triangular matrices whose Hankel blocks M[k:, :k+1] (what the
inputs up to k do to the outputs from k on) all have rank at most N (Dewilde and van der Veen 1998, "Time-varying
systems and computations", ch. 3; Dao and Gu 2024, "Transformers are SSMs", section 3).

Shapes: B batch (matrices), L length, N state.
"""

from dataclasses import dataclass

import torch


def distance(target: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Frobenius norm (B,) of the difference."""
    return (target.double() - matrix.double()).norm(dim=(-2, -1))


@dataclass
class StateSpace:
    """A time-varying recurrence: transition (B, L, N, N), its matrices B (B, L, N) and C (B, L, N)."""

    transition: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    dropped: torch.Tensor
    """(B, L) norms of what each step's truncation dropped; their squares add up to the squared distance."""

    def matrix(self) -> torch.Tensor:
        """The unrolled matrix (B, L, L)."""
        count, L, N = self.B.shape
        rows = []
        reached = self.B.new_zeros(count, N, L)
        for t in range(L):
            reached = self.transition[:, t] @ reached
            reached[..., t] = self.B[:, t]
            rows.append(self.C[:, t, None] @ reached)
        return torch.cat(rows, dim=1)


def balanced_truncation(target: torch.Tensor, state: int) -> StateSpace:
    """A recurrence with a state of N near a lower triangular `target` (B, L, L): balanced truncation in time order.

    The exact recurrence holds every input. At each step its state is brought into balanced coordinates, those of
    the singular value decomposition of the Hankel block (inputs so far x outputs to come), and all but the first
    `state` are dropped: the best rank-N approximation of that block (Eckart and Young). Blocks of later steps are
    built from what was kept, so what is dropped at different steps is orthogonal, and

        ||target - result||_F^2 = sum_k dropped_k^2 <= sum_k sum_{i > N} sigma_i(target[k:, :k+1])^2.

    Truncating every step's exact block instead (Sandberg and Rantzer 2004, "Balanced truncation of linear time-varying
    systems") needs a full decomposition per token. A matrix that is N-semiseparable comes back exactly.
    """
    target = target.double()
    count, L, _ = target.shape
    transition, B, C = (target.new_zeros(count, L, *shape) for shape in ((state, state), (state,), (state,)))
    dropped = target.new_zeros(count, L)
    future = target.new_zeros(count, L, 0)  # what the state does to the outputs from t on
    for t in range(L):
        block = torch.cat([future[:, -(L - t) :], target[:, t:, t, None]], dim=-1)
        left, sigma, right = torch.linalg.svd(block, full_matrices=False)
        before = future.shape[-1]
        kept = min(state, sigma.shape[-1])
        dropped[:, t] = sigma[:, kept:].norm(dim=-1)
        transition[:, t, :kept, :before] = right[:, :kept, :before]
        B[:, t, :kept] = right[:, :kept, before]
        future = left[..., :kept] * sigma[:, None, :kept]
        C[:, t, :kept] = future[:, 0]
        future = future[:, 1:]
    return StateSpace(transition, B, C, dropped)


def lower_bound(target: torch.Tensor, state: int) -> torch.Tensor:
    """A distance (B,) that no recurrence with a state of `state` can beat, whatever its transitions.

    An off-diagonal block of the result has rank at most N, so it misses the target's block by the singular values
    beyond N. Blocks that do not overlap add up: the lower left quarter, the same of both diagonal quarters, and on.
    """

    def squared(first: int, last: int) -> torch.Tensor:
        if last - first <= 2 * state:
            return target.new_zeros(len(target), dtype=torch.float64)
        middle = (first + last) // 2
        sigma = torch.linalg.svdvals(target[:, middle:last, first:middle].double())
        return sigma[:, state:].square().sum(-1) + squared(first, middle) + squared(middle, last)

    return squared(0, target.shape[-1]).sqrt()
