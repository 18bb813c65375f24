"""Picture of how near hybrids and other caches are to the teacher, by the bytes that they take."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from convert.checkpoint.pictures import LEAST_KL, LINE_COLORS, figure_under_legend

Row = dict[str, Any]


class Point(NamedTuple):
    """A method in the picture; None for what was not measured."""

    kind: str
    share: float
    """Bytes of the cache, in % of a bfloat16 cache."""
    kl: float | None
    found: float | None
    """Needles that are found, in % of those that the teacher finds."""


def picture(points: Sequence[Point]) -> Any:
    """KL and recall against the share of a bfloat16 cache."""
    kinds = list(dict.fromkeys(point.kind for point in points))
    columns = 3
    figure, left, right = figure_under_legend(len(kinds), columns, 2.5, (0.12, 0.37), (0.6, 0.37))
    points = [point if point.kl is None else point._replace(kl=max(point.kl, LEAST_KL)) for point in points]
    for axes, field in ((left, "kl"), (right, "found")):
        for color, kind in zip(itertools.cycle(LINE_COLORS), kinds):
            of_kind = [(point.share, getattr(point, field)) for point in points if point.kind == kind]
            values = sorted(place for place in of_kind if place[1] is not None)
            if values:
                axes.plot(*zip(*values, strict=True), "o-", color=color, label=kind, markersize=4)
        axes.set_xlabel("% of a bfloat16 cache", labelpad=1)
        axes.grid(color="#e2e8f0", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
    left.set_yscale("log")
    right.set_xlim(left.get_xlim())
    left.set_ylabel("KL to the teacher")
    right.set_ylim(bottom=0)
    right.set_ylabel("needles found, % of the teacher's")
    figure.legend(*left.get_legend_handles_labels(), loc="upper center", ncols=columns, frameon=False, fontsize=8)
    return figure


def points(methods: Sequence[Row]) -> list[Point]:
    """All methods but the teacher, with their KL on the tokens after contexts, which all of them have."""
    teacher, *others = methods
    found = []
    for row in others:
        needles = None
        if teacher["recall"]["needle"]:
            needles = 100 * row["recall"]["needle"] / teacher["recall"]["needle"]
        found.append(Point(row["kind"], 100 * row["share"], mean_of(row, "after_contexts", "kl"), needles))
    return found


def mean_of(row: Row, where: str, figure: str) -> float | None:
    """Mean of a figure over the texts, each of which counts the same."""
    values = [of_text[where] and of_text[where][figure] for of_text in row["text"].values()]
    return None if None in values else sum(values) / len(values)
