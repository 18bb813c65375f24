"""The first day on a GPU, on the stand-in device: what fails is on the page, and the rest is done."""

import json
import sys

import pytest

from recipes.benchmarks import first_day
from tests.helpers.tiny_chat import save_chat_teacher


@pytest.mark.slow
def test_the_first_day(tmp_path, monkeypatch):
    """Speed is left out: its models are no tiny ones. Kernels for a GPU there are none, so that parity fails."""
    teacher, text = save_chat_teacher(tmp_path / "teacher"), tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"w{i} w7 w{i + 1} " * 60}) + "\n" for i in range(8, 28)))
    monkeypatch.setattr(first_day, "steps", _quick(first_day.steps, text))
    only = ["parity of kernels", "a conversion", "comparison", "training"]
    failed = first_day.main(tmp_path / "day", teacher, [sys.executable, "-m", "tests.doubles.device"], only)
    page = (tmp_path / "day/page.md").read_text()
    assert failed == 1, page
    assert page.count("| done |") == 3, page
    assert "| parity of kernels | **failed**, exit code " in page
    assert "\n## parity of kernels\n" in page
    assert (tmp_path / "day/trained/config.json").is_file()
    assert (tmp_path / "day/comparison/compare.md").is_file()


def _quick(steps, text):
    more = {
        "parity of kernels": ["tests/kernels/no_such_test.py"],
        "a conversion": [
            "--text",
            "sampled",
            "--tokens",
            "512",
            "--window",
            "16",
            "--alignment.sequence_length",
            "64",
        ],
        "comparison": ["--text", str(text), "--length", "128", "--first", "32", "--speed", "64"],
        "training": ["--max_length", "64"],
    }
    return lambda output, teacher: {what: [*a, *more.get(what, [])] for what, a in steps(output, teacher).items()}
