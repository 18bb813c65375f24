"""Pages: one table a result, and links that lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "docs" / "results").glob("*.md"))
PAGES = [*RESULTS, *(path for folder in ("docs/guide", "docs", ".") for path in sorted((ROOT / folder).glob("*.md")))]


def name(path):
    return str(path.relative_to(ROOT))


def anchors(path):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", RESULTS, ids=name)
def test_a_result_has_one_table(path):
    """A page makes one claim; the log of what did not work has no figures of its own."""
    tables = 1
    if path.stem == "log":
        tables = 0
    assert len(re.findall(r"^\|[-:|]+\|$", path.read_text(), re.M)) == tables


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_lead_to_a_heading(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        if not link.startswith("http"):
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
