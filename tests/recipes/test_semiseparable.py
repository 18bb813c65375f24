"""Semiseparable matrices near given ones, as the notebook shows them: what is exact, and what bounds what."""

import math

import pytest
import torch

from recipes.studies.semiseparable import balanced_truncation, distance, lower_bound

LENGTH = 48


def softmax_matrices(count=3, length=LENGTH, sharpness=3.0):
    scores = sharpness * torch.randn(count, length, length, dtype=torch.float64)
    upper = torch.ones(length, length, dtype=torch.bool).triu(1)
    return scores.masked_fill(upper, float("-inf")).softmax(-1)


def semiseparable(state, count=2, length=LENGTH):
    """General recurrences, unrolled entry by entry."""
    A = torch.randn(count, length, state, state, dtype=torch.float64) / math.sqrt(state)
    B, C = (torch.randn(count, length, state, dtype=torch.float64) for _ in range(2))
    matrix = torch.zeros(count, length, length, dtype=torch.float64)
    for s in range(length):
        column = B[:, s]
        for t in range(s, length):
            column = column if t == s else (A[:, t] @ column[..., None])[..., 0]
            matrix[:, t, s] = (C[:, t] * column).sum(-1)
    return matrix


@pytest.mark.parametrize("state", [1, 3, 8])
def test_semiseparable_matrices_come_back_exactly(state):
    target = semiseparable(state)
    found = balanced_truncation(target, state)
    torch.testing.assert_close(found.matrix(), target, rtol=0, atol=1e-10 * target.abs().max().item())
    assert lower_bound(target, state).max() < 1e-10 * target.abs().max()
    if state > 1:
        fewer = distance(target, balanced_truncation(target, state // 2).matrix())
        assert fewer.min() > 1e-3
        assert (fewer >= lower_bound(target, state // 2)).all()


def test_ranks_of_the_truncation_and_its_error():
    target = softmax_matrices()
    tails = []
    for k in range(LENGTH):
        sigma = torch.linalg.svdvals(target[:, k:, : k + 1])
        tails.append(sigma[:, 5:].square().sum(-1))
    found = balanced_truncation(target, 5)
    matrix = found.matrix()
    for k in range(LENGTH):
        assert torch.linalg.matrix_rank(matrix[:, k:, : k + 1], atol=1e-9).max() <= 5
    error = distance(target, matrix)
    torch.testing.assert_close(error, found.dropped.square().sum(1).sqrt())
    assert (error <= torch.stack(tails).sum(0).sqrt()).all(), "the bound by the Hankel blocks' singular values"
    assert (error >= torch.stack(tails).max(0).values.sqrt()).all(), "one block alone is a lower bound"


def test_lower_bound_holds_and_is_reached():
    target = softmax_matrices()
    for state in (1, 4, 10):
        bound = lower_bound(target, state)
        single = torch.linalg.svdvals(target[:, LENGTH // 2 :, : LENGTH // 2])[:, state:].norm(dim=-1)
        assert (bound >= single - 1e-12).all()
        assert (bound > 0).all()
        assert (bound <= distance(target, balanced_truncation(target, state).matrix())).all()
    # one block and nothing else: its best rank-6 approximation is a recurrence, so the bound is the smallest distance
    target, half = torch.zeros(2, LENGTH, LENGTH, dtype=torch.float64), LENGTH // 2
    target[:, half:, :half] = torch.randn(2, half, half)
    left, sigma, right = torch.linalg.svd(target[:, half:, :half])
    best = torch.zeros_like(target)
    best[:, half:, :half] = (left[..., :6] * sigma[:, None, :6]) @ right[:, :6]
    torch.testing.assert_close(balanced_truncation(best, 6).matrix(), best, rtol=0, atol=1e-10)
    torch.testing.assert_close(lower_bound(target, 6), distance(target, best))
    assert (distance(target, balanced_truncation(target, 6).matrix()) < 1.1 * lower_bound(target, 6)).all()
