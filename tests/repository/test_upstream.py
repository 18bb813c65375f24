"""Names of torch and transformers that a checkpoint's code needs: listed on one page, and all installed."""

import importlib
import re
from pathlib import Path

import pytest

from tests.helpers.upstream import upstream_page

PAGE = Path(__file__).parents[2] / "docs" / "upstream.md"
ROWS = re.findall(r"^\| `([\w.]+)` \| (.+?) \|", PAGE.read_text(), re.MULTILINE)


def test_the_page_lists_them():
    assert PAGE.read_text() == upstream_page()
    assert len(ROWS) > 20


@pytest.mark.parametrize("module, names", ROWS, ids=lambda text: text.split("`")[0])
def test_they_are_there(module, names):
    found = importlib.import_module(module)
    for name in re.findall(r"`(\w+)`", names):
        assert hasattr(found, name) or importlib.import_module(f"{module}.{name}")
