"""Caches of about the same size beside each other: of each kind, the one that is nearest to a share of the teacher's.

The shares are those of the literature on compressed caches: a half, a quarter, an eighth, a sixteenth.
"""

import math
from collections.abc import Sequence
from typing import Any

from .picture import mean_of

BUDGETS = (0.5, 0.25, 0.125, 0.0625)
NEAR = 1.3
"""Largest ratio of a cache's share to a budget, or of the budget to it."""
HEAD = ("cache", "budget", "size", "peak", "KL after contexts", "needles", "in 1 GiB", "seconds to the first token")
EVICTED = ("eviction", "eviction and moments")
"""Kinds that read the whole context before they evict, so that all of it is in memory once."""
Row = dict[str, Any]


def at_budgets(found: Row) -> list[list[str]]:
    """Cells of a table: of each budget, the nearest cache of each kind that is near enough, the best KL first.

    Args:
        found: the content of compare.json.
    """
    length = found["settings"]["length"]
    seconds = {
        row["which"]: row["context"] / row["prefill_tokens_per_second"]
        for row in found["speed"]
        if row["context"] == length
    }
    rows = []
    for budget in BUDGETS:
        nearest = nearest_of_kinds(found["methods"][1:], budget)
        for row in sorted(nearest, key=lambda row: mean_of(row, "after_contexts", "kl")):
            peak = 1.0 if row["kind"] in EVICTED else row["share"]
            first = seconds.get(row["name"])
            rows.append([
                row["name"], f"{100 * budget:g}%", f"{row['share']:.1%}", f"{peak:.1%}",
                f"{mean_of(row, 'after_contexts', 'kl'):.4f}", f"{row['recall']['needle']:.0%}",
                f"{row['sequences']:,}", "–" if first is None else f"{first:.2f}",
            ])  # fmt: skip
    return rows


def nearest_of_kinds(methods: Sequence[Row], budget: float) -> list[Row]:
    """The cache of each kind whose share is nearest to a budget, if it is near."""

    def distance(row: Row) -> float:
        return abs(math.log(row["share"] / budget))

    kinds = dict.fromkeys(row["kind"] for row in methods)
    nearest = [min((row for row in methods if row["kind"] == kind), key=distance) for kind in kinds]
    return [row for row in nearest if distance(row) <= math.log(NEAR)]
