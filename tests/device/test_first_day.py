"""The first day on a GPU, on the stand-in device: what fails is on the page, and the rest is done, once."""

import json
import lzma
import sys

import numpy
import pytest

from recipes.benchmarks import carry, first_day
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
    converted = (tmp_path / "day/hybrid/config.json").stat().st_mtime_ns
    failed = first_day.main(tmp_path / "day", teacher, [sys.executable, "-m", "tests.doubles.device"], only)
    assert failed == 1
    assert (tmp_path / "day/page.md").read_text().count("| done |") == 3
    assert (tmp_path / "day/hybrid/config.json").stat().st_mtime_ns == converted, "what is done is not done again"
    assert (tmp_path / "day/trained/config.json").is_file()
    assert (tmp_path / "day/hybrid-comparison/compare.md").is_file()


@pytest.mark.slow
def test_distillation_of_carried_ids(tmp_path, monkeypatch):
    """From the closed form to stage 3 of two lengths, each measured; a larger teacher that came along is converted."""
    teacher = save_chat_teacher(tmp_path / "teacher")
    carried = tmp_path / "carried"
    carried.mkdir()
    with lzma.open(tmp_path / "ids.npy.xz", "wb") as file:
        numpy.save(file, numpy.random.default_rng(0).integers(8, 60, 9000, dtype=numpy.uint16))
    (tmp_path / "larger.gguf").write_bytes(b"GGUF")
    contents = {path.name: carry.split(path, carried, 4000) for path in tmp_path.glob("*.*")}
    (carried / carry.CONTENTS).write_text(json.dumps(contents))
    stages = {"sequence_length": 64, "hidden_state_alignment": {"tokens": 512, "bf16": True},
              "distillation": {"bf16": True}}  # fmt: skip
    monkeypatch.setattr(first_day, "STAGES", stages)
    monkeypatch.setattr(first_day, "DISTILLED", (0, 512, 2048))
    monkeypatch.setattr(first_day, "ATTENTION", {"half": "0.5"})
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"w{i} w7 w{i + 1} " * 60}) + "\n" for i in range(8, 28)))
    monkeypatch.setattr(first_day, "steps", _quick(first_day.steps, text))
    names = list(first_day.steps(tmp_path / "day", teacher, carry.join(carried, tmp_path / "j")))
    assert "a conversion of larger" in names
    only = [what for what in names if what.startswith("half")]
    assert len(only) == 7
    run = [sys.executable, "-m", "tests.doubles.device"]
    failed = first_day.main(tmp_path / "day", teacher, run, only, carried)
    assert failed == 0, (tmp_path / "day/page.md").read_text()
    after = json.loads((tmp_path / "day/half-2048/alignment.json").read_text())["stages"]
    assert [list(stage) for stage in after] == [["hidden_state_alignment"], ["distillation"]]
    assert (tmp_path / "day/half-2048-figures/evaluation.json").is_file()


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
    short = ["--text", str(text), "--lengths", "64", "--sequences", "2"]

    def quick(output, teacher, carried=()):
        found = {what: [*a, *more.get(what, [])] for what, a in steps(output, teacher, carried).items()}
        for what, arguments in found.items():
            if what.endswith("measured"):
                arguments += short
            if what.endswith("closed form"):
                arguments += ["--text", "sampled", "--tokens", "512", "--alignment.sequence_length", "64"]
        return found

    return quick
