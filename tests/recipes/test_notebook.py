"""The notebook runs in a Jupyter kernel and gives the outputs that are stored in it."""

import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "recipes/studies/attention_as_rnn/attention-as-rnn.ipynb"


def shapes_of(cell):
    """A cell's pictures and what it printed, without numbers: they differ from machine to machine.

    Printed text is joined first: how many pieces it arrives in depends on the kernel's timing.
    """
    pictures = ["picture" for output in cell.outputs if output.output_type == "display_data"]
    printed = "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
    # how many distinct rounded sums are printed depends on the machine, too
    return [*pictures, re.sub(r"\[.*\]", "", re.sub(r"[\d.]+(e[+-]?\d+)?", "#", printed))]


def test_every_cell_runs_and_its_outputs_are_stored(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    stored, fresh = nbformat.read(NOTEBOOK, as_version=4), nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(fresh, timeout=300, kernel_name="python3").execute()  # raises what a cell raises
    before, after = ([cell for cell in of.cells if cell.cell_type == "code"] for of in (stored, fresh))
    assert len(before) >= 8
    assert [cell.execution_count for cell in before] == list(range(1, len(before) + 1))
    shapes = [[shapes_of(cell) for cell in cells] for cells in (before, after)]
    assert shapes[0] == shapes[1]
    assert sum(shape == "picture" for outputs in shapes[0] for shape in outputs) >= 6
