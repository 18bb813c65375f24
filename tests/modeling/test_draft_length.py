"""The cost model against its equations, and the length that follows from measured rounds."""

import random

import pytest

from modeling_llamba.speculative_decoding import FIRST_LENGTHS, PROBE_EVERY, CostModel, DraftLength


def test_expected_tokens_are_what_a_simulation_yields():
    chance = random.Random(0)
    for acceptance, length in ((0.3, 2), (0.8, 5)):
        total = 0
        for _ in range(20_000):
            total += 1
            for _ in range(length):
                if chance.random() >= acceptance:
                    break
                total += 1
        assert total / 20_000 == pytest.approx(CostModel.tokens(acceptance, length), rel=0.02)
        closed = (1 - acceptance ** (length + 1)) / (1 - acceptance)
        assert CostModel.tokens(acceptance, length) == pytest.approx(closed)
    assert CostModel.tokens(1.0, 4) == 5


def test_leviathans_theorem_is_the_case_of_free_verification():
    cost = CostModel(step=1.0, several=0.0, token=0.0, draft=0.1)
    assert cost.speedup(0.7, 5) == pytest.approx((1 - 0.7**6) / (0.3 * (5 * 0.1 + 1)))


def test_what_pays():
    dear = CostModel(step=1.0, several=0.0, token=0.5, draft=0.6)
    assert dear.best(1.0, 8) == 0 and dear.break_even(3) is None
    late = CostModel(step=1.0, several=1.0, token=0.0, draft=0.0)  # two tokens a pass break even
    assert late.best(0.45, 8) == 0 and late.best(0.8, 8) == 8 and late.break_even(1) is None
    cheap = CostModel(step=1.0, several=0.0, token=0.1, draft=0.0)
    assert cheap.best(0.05, 8) == 0 and cheap.best(1.0, 8) == 8
    assert [cheap.best(a, 8) for a in (0.2, 0.5, 0.8)] == sorted(cheap.best(a, 8) for a in (0.2, 0.5, 0.8))
    edge = cheap.break_even(4)
    assert cheap.speedup(edge - 0.01, 4) < 1 < cheap.speedup(edge + 0.01, 4)


def rounds(acceptance, cost, count=200, seed=0):
    """Lengths chosen on a machine with these costs."""
    chance, lengths, chosen = random.Random(seed), DraftLength(), []
    for _ in range(count):
        length = lengths.next()
        accepted = 0
        while accepted < length and chance.random() < acceptance:
            accepted += 1
        jitter = chance.uniform(0.95, 1.05)
        draft = length * cost.draft
        verify = jitter * (cost.seconds(length) - draft)
        lengths.note(length, accepted, int(accepted < length), draft, verify)
        chosen.append(length)
    return chosen


def test_lengths_follow_what_is_measured():
    cost = CostModel(step=0.05, several=0.02, token=0.003, draft=0.0)
    assert rounds(0.95, cost)[:3] == list(FIRST_LENGTHS)
    assert min(rounds(0.95, cost)[50:]) >= 5
    low = rounds(0.05, CostModel(step=0.05, several=0.0, token=0.02, draft=0.0))[50:]
    assert low.count(0) > 0.9 * len(low) and 0 < sum(n > 0 for n in low) <= len(low) // PROBE_EVERY + 1
    dear = rounds(0.9, CostModel(step=0.05, several=0.0, token=0.0, draft=0.06))[50:]
    assert dear.count(0) > 0.9 * len(dear)


def test_nothing_is_known_before_the_first_rounds():
    lengths = DraftLength(longest=2)
    assert lengths.acceptance() == 0.5 and lengths.next() == 0
    lengths.note(0, 0, 0, 0.0, 0.1)
    assert lengths.next() == 2 and lengths.cost().step == pytest.approx(0.1)
