"""The notebook runs, cell by cell, and stores what running it gives."""

import json
import re
from pathlib import Path

import pytest

from recipes.studies.attention_as_rnn.execute import execute, main

NOTEBOOK = Path(__file__).parents[2] / "docs" / "attention-as-rnn.ipynb"


def shape_of(output):
    """An output without its numbers: rounding and drawing differ from machine to machine."""
    if output["output_type"] == "display_data":
        return "picture"
    return re.sub(r"[\d.]+(e[+-]?\d+)?", "#", "".join(output["text"]))


def test_every_cell_runs_and_its_outputs_are_stored():
    stored = json.loads(NOTEBOOK.read_text())
    fresh = execute(json.loads(NOTEBOOK.read_text()))
    cells = [cell for cell in stored["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 8 and [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    again = [cell for cell in fresh["cells"] if cell["cell_type"] == "code"]
    pictures = 0
    for before, after in zip(cells, again, strict=True):
        # how many distinct rounded sums print depends on the machine
        shapes = [[shape_of(o) for o in cell["outputs"]] for cell in (before, after)]
        assert [re.sub(r"\[.*\]", "", s) for s in shapes[0]] == [re.sub(r"\[.*\]", "", s) for s in shapes[1]]
        for output in before["outputs"]:
            pictures += output["output_type"] == "display_data"
            assert output["output_type"] != "error"
    assert pictures >= 6


def test_execution_stores_text_and_figures(tmp_path):
    sources = ["import matplotlib.pyplot as plt\nx = 2", "print(x + 1)\nplt.plot([1, 2])\nplt.show()", "assert x == 3"]
    cells = [{"cell_type": "code", "source": [s], "outputs": [], "execution_count": None} for s in sources]
    path = tmp_path / "n.ipynb"
    path.write_text(json.dumps({"cells": cells[:2]}))
    main(path)
    outputs = json.loads(path.read_text())["cells"][1]["outputs"]
    assert outputs[0]["data"]["image/png"].startswith("iVBOR") and outputs[1]["text"] == ["3\n"]
    before = path.read_text()
    path.write_text(json.dumps({"cells": cells}))
    with pytest.raises(AssertionError):
        main(path)
    assert path.read_text() != before and "outputs" in path.read_text()
