"""The version that a conversion records, and that decides whether kept fits are used again."""

import shutil

import pytest
from transformers import AutoConfig

from convert import convert
from convert.fit import aligner, fit
from convert.io import version
from tests.helpers.tiny_chat import save_chat_teacher


def test_every_source_that_computes_changes_the_version(tmp_path, monkeypatch):
    root = version.Path(version.__file__).parents[2]
    for package in version.PACKAGES:
        shutil.copytree(root / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(version, "__file__", str(tmp_path / "convert" / "io" / "version.py"))
    of_sources = version._hash_of_sources.__wrapped__
    assert of_sources() == version._hash_of_sources()
    for name in ("convert/plan.py", "modeling_llamba/kernels/c/rows.c", "modeling_llamba/kernels/c/layer.h"):
        before = of_sources()
        with (tmp_path / name).open("a") as file:
            file.write("\n")
        assert of_sources() != before, name


@pytest.mark.parametrize("sources, taken_up", [("the same", 1), ("others", 0)])
def test_fits_of_other_sources_are_not_taken_up(sources, taken_up, tmp_path, monkeypatch):
    teacher = save_chat_teacher(tmp_path / "teacher")
    original = fit._fit_one
    fitted = []

    def fit_one(*arguments):
        if len(fitted) == 1:
            raise KeyboardInterrupt
        fitted.append(arguments)
        return original(*arguments)

    def converted():
        alignment = {"text": "sampled", "tokens": 832, "sequence_length": 64}
        convert(str(teacher), tmp_path / "out", window=16, attention_layers="none", alignment=alignment)

    monkeypatch.setattr(fit, "_fit_one", fit_one)
    with pytest.raises(KeyboardInterrupt):
        converted()
    if sources == "others":
        monkeypatch.setattr(aligner, "project_version", lambda: "0+others")
    monkeypatch.setattr(fit, "_fit_one", lambda *arguments: fitted.append(arguments) or original(*arguments))
    fitted.clear()
    converted()
    layers = AutoConfig.from_pretrained(tmp_path / "out").num_hidden_layers
    assert len(fitted) == layers - taken_up
