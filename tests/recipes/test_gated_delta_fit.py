"""The gated delta rule as a matrix: its recurrence, its best queries, and that the fit improves."""

import pytest
import torch

from recipes.studies.structured_matrices.distances import Effort, approximate
from recipes.studies.structured_matrices.fits import Factors, alternate, distance, truncated_svd
from recipes.studies.structured_matrices.gated_delta_fit import (
    DeltaFactors,
    delta_start,
    fit_gated_delta,
    solve_queries,
)
from recipes.studies.structured_matrices.semiseparable import lower_bound
from tests.recipes.test_matrix_approximation import softmax_matrices


def gated_delta_recurrence(factors):
    """M, a column per token put in, from the recurrence as it is written."""
    count, L, N = factors.q.shape
    k = factors.k / factors.k.norm(dim=-1, keepdim=True)
    matrix = torch.zeros(count, L, L, dtype=torch.float64)
    for m in range(count):
        S = torch.zeros(L, N, dtype=torch.float64)  # a value vector of L: one direction per token
        for t in range(L):
            a, b, v = factors.log_a[m, t].exp(), factors.b[m, t], torch.eye(L, dtype=torch.float64)[t]
            S = a * S @ (torch.eye(N) - b * torch.outer(k[m, t], k[m, t])) + b * torch.outer(v, k[m, t])
            matrix[m, t] = S @ factors.q[m, t]
    return matrix


def test_gated_delta_matrix_is_its_recurrence_and_its_queries_are_found():
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 12, 3, generator=draw, dtype=torch.float64) for _ in range(2))
    a, b = (torch.rand(2, 12, 1, generator=draw, dtype=torch.float64) for _ in range(2))
    factors = DeltaFactors(q, k, a.log(), b)
    matrix = factors.matrix()
    torch.testing.assert_close(matrix, gated_delta_recurrence(factors), rtol=1e-12, atol=1e-12)
    found = solve_queries(matrix, DeltaFactors(torch.zeros_like(q), 2 * k, a.log(), b))
    torch.testing.assert_close(found.matrix(), matrix, rtol=1e-6, atol=1e-8)


def test_gated_delta_fit_improves_on_its_start():
    target = softmax_matrices(3, 48, sharpness=1.0)
    C, B = truncated_svd(target, 4)
    ssd = alternate(target, Factors(C, B, torch.full((3, 48, 1), -0.01, dtype=torch.float64)), 4, fit_decays=True)
    start = distance(target, delta_start(target, ssd).matrix())
    assert (start <= 1.02 * distance(target, ssd.matrix())).all(), "SSD is a limit of it"
    fitted = distance(target, fit_gated_delta(target, ssd, 60).matrix())
    assert (fitted <= start).all() and (fitted < 0.98 * start).any()
    assert (fitted >= lower_bound(target, 4)).all()
    found = approximate(target, 4, Effort(4, extensions=False, delta_steps=60))
    assert "mamba1" not in found and found["gated_delta"] == pytest.approx(fitted.tolist(), rel=0.2)
