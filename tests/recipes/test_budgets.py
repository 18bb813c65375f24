"""Caches of about the same size: of each kind the nearest, none that is far off, what eviction holds at its peak."""

import pytest

from recipes.evaluation.budgets import at_budgets


def row(name, kind, share, kl, needle=0.5):
    """A method as compare.json has it, on two texts."""
    texts = {text: {"after_contexts": {"kl": kl + more}} for text, more in (("web", 0), ("code", 0.02))}
    return {"name": name, "kind": kind, "share": share, "text": texts, "recall": {"needle": needle},
            "sequences": round(100 / share)}  # fmt: skip


@pytest.fixture
def found():
    methods = [
        row("teacher", "teacher", 1.0, 0.0),
        row("int8 cache", "rounded cache", 0.566, 0.001),
        row("int4 cache", "rounded cache", 0.318, 0.004),
        row("int3 cache", "rounded cache", 0.256, 0.03),
        row("half", "hybrid", 0.5, 0.0005),
        row("eighth", "hybrid", 0.125, 0.01, needle=0.875),
        row("window, as eighth", "window", 0.124, 0.09),
        row("eviction, as eighth", "eviction", 0.125, 0.1),
    ]
    speed = [
        {"which": "eighth", "context": 4096, "prefill_tokens_per_second": 1024.0},
        {"which": "half", "context": 512, "prefill_tokens_per_second": 512.0},
    ]
    return {"methods": methods, "settings": {"length": 4096}, "speed": speed}


def test_the_nearest_of_each_kind_stands_at_each_budget(found):
    rows = at_budgets(found)
    assert [cells[:2] for cells in rows] == [
        ["half", "50%"],
        ["int8 cache", "50%"],
        ["int3 cache", "25%"],
        ["eighth", "12.5%"],
        ["window, as eighth", "12.5%"],
        ["eviction, as eighth", "12.5%"],
    ], "nothing is near a sixteenth, int4 is farther from a quarter than int3"


def test_figures_of_a_row(found):
    of_hybrid, of_window, of_eviction = at_budgets(found)[3:]
    assert of_hybrid == ["eighth", "12.5%", "12.5%", "12.5%", "0.0200", "88%", "800", "4.00"]
    assert of_window[3] == "12.4%"
    assert of_eviction[3] == "100.0%", "the whole context is there before any of it is evicted"
    assert at_budgets(found)[0][-1] == "–", "only speed at the length of the rows counts"
