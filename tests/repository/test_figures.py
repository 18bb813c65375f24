"""Figures of the README and the result pages, which are those in docs/results/*.json."""

import re

import pytest

from recipes.evaluation.figures import PAGES, ROOT, SOURCE, TABLE, entries, points_of_shares, render, rendered

TABLES = re.compile(r"^\|.*\n\|[-:|]+\n(?:\|.*\n)+", re.M)
FIGURE = re.compile(r"\d[.,]\d|\d %")


def name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_tables_are_rendered_from_the_figures(path):
    text = path.read_text()
    assert TABLE.search(text)
    assert text == rendered(path), "run `python -m recipes.evaluation.figures`"
    written_by_hand = [cell for table in TABLES.findall(TABLE.sub("", text)) for cell in table.split("|")]
    versions = re.compile(r"Phi-\d\.\d|Mamba-\d|Qwen\d\.\d")
    assert not [cell for cell in written_by_hand if FIGURE.search(versions.sub("", cell))]


@pytest.mark.parametrize("page", sorted(set(PAGES.values()) - {"readme", "compare"}))
def test_figures_say_where_they_come_from(page):
    for key, entry in entries(page):
        assert all(isinstance(entry[field], str) and entry[field] for field in SOURCE), key
        assert isinstance(entry["value"], str) or entry["unit"] or entry["value"] is None, key


def test_each_result_has_its_figures_in_a_file():
    pages = set((ROOT / "docs" / "results").glob("*.md")) | {ROOT / "README.md"}
    assert pages - set(PAGES) == {ROOT / "docs" / "results" / "log.md"}


def test_each_table_stands_on_a_page():
    shown = {(page, found[2]) for path, page in PAGES.items() for found in TABLE.finditer(path.read_text())}
    held = {(page, key.partition("/")[0]) for page in PAGES.values() for key, _ in entries(page)}
    assert shown == held


def test_a_figure_is_shown_as_it_is_written():
    quality = dict(entries("quality"))
    assert str(quality["default/web, window alone, 15 %/256–512"]["value"]) == "0.000"
    assert "| needles found | default, 8 % | 85 % | 86 % | 77 % |" in render("quality", "recall")
    assert "| **hybrid** | 8.0 % | 0.0131 | 0.0227 | 93.5 % | 79 % |" in render("readme", "compare")


def test_points_are_the_rows_of_the_table():
    """Needles are those of all distances over the teacher's, at 6 % over those that the teacher found of the same."""
    points = {(point.kind, point.share): point for point in points_of_shares()}
    assert points["hybrid", 6].found == pytest.approx(100 * (82 + 79 + 85 + 71) / (85 + 92 + 86 + 73))
    assert points["window", 8].found == pytest.approx(100 * (87 + 88) / (88 + 90 + 81 + 70))
    assert points["window", 15].found == pytest.approx(100 * (87 + 90) / (85 + 92 + 86 + 73))
    assert points["window", 10].found == pytest.approx(100 * (88 + 90) / (85 + 92 + 86 + 73))
    assert points["teacher, 8 to 2 bits", 32].kl == pytest.approx((0.0046 + 0.0040 + 0.0072) / 3)
    assert len(points) == len(points_of_shares())
