"""What an exportable mixer costs, and llama.cpp's logits beside ours (with a stand-in for its engine)."""

import argparse
import json

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from convert import convert
from convert.alignment.divergence import kl_of_logits
from recipes import export_cost, gguf_logits
from recipes.fidelity import text_rows
from tests.modeling.test_training import tokenizer
from tests.teachers import make_teacher


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A teacher with a tokenizer, and a text."""
    path = tmp_path_factory.mktemp("export")
    make_teacher("llama-gqa").save_pretrained(path / "teacher")
    tokenizer().save_pretrained(path / "teacher")
    lines = [" ".join(f"w{30 + (i * j) % 69}" for i in range(100)) for j in range(1, 150)]
    (path / "text.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    return path


def test_what_an_exportable_mixer_costs(folder, tmp_path, capsys):
    arguments = argparse.Namespace(
        output=tmp_path / "cost", train=folder / "text.jsonl", validation=folder / "text.jsonl",
        model=str(folder / "teacher"),
        calibration_tokens=3072, validation_rows=2, only=["default", "export-ready"],
    )  # fmt: skip
    export_cost.main(arguments)
    rows = [json.loads(line) for line in (tmp_path / "cost" / "results.jsonl").read_text().splitlines()]
    assert [row["variant"] for row in rows] == ["default", "export-ready"]
    teacher, words = (
        AutoModelForCausalLM.from_pretrained(folder / "teacher"),
        AutoTokenizer.from_pretrained(folder / "teacher"),
    )
    ids = text_rows(folder / "text.jsonl", words, export_cost.LENGTH, 2)
    for row in rows:
        student = AutoModelForCausalLM.from_pretrained(tmp_path / "cost" / row["variant"], trust_remote_code=True)
        with torch.no_grad():
            per_row = [kl_of_logits(teacher(r[None]).logits, student(r[None]).logits).mean().item() for r in ids]
        assert row["kl"] == pytest.approx(sum(per_row) / len(per_row), rel=1e-4) and row["kl"] > 0
        assert row["held_out_error"]["refined"] <= row["held_out_error"]["solved"]
    config = json.loads((tmp_path / "cost" / "export-ready" / "config.json").read_text())
    assert config["mixer"] == "mamba2"
    export_cost.main(arguments)  # nothing is left to do
    assert len((tmp_path / "cost" / "results.jsonl").read_text().splitlines()) == 2


class Engine:
    """Answers as `llama_cpp.Llama` does, with the logits of a model of ours."""

    model, words, off = None, None, 0.0

    def __init__(self, path, n_ctx, logits_all, type_k, type_v, verbose):
        self.n_tokens, self.ids, self.scores = 0, [], torch.zeros(n_ctx, 128).numpy()

    def tokenize(self, text, add_bos):
        return self.words(text.decode(), add_special_tokens=add_bos).input_ids

    def eval(self, tokens):
        self.ids += tokens
        logits = self.model(torch.tensor([self.ids])).logits[0] + self.off
        self.n_tokens = len(self.ids)
        self.scores[: self.n_tokens] = logits.numpy()


def test_logits_are_compared(folder, tmp_path, monkeypatch):
    hybrid = tmp_path / "hybrid"
    convert(str(folder / "teacher"), hybrid, align="none")
    Engine.model = AutoModelForCausalLM.from_pretrained(hybrid, trust_remote_code=True)
    Engine.words = AutoTokenizer.from_pretrained(hybrid, trust_remote_code=True)
    # as Llama's does, which llama.cpp is asked not to do
    begins = TemplateProcessing(single="w1 $A", special_tokens=[("w1", 1)])
    Engine.words.backend_tokenizer.post_processor = begins
    Engine.words.save_pretrained(hybrid)
    assert AutoTokenizer.from_pretrained(hybrid)("w30").input_ids == [1, 30]
    monkeypatch.setattr(gguf_logits, "Llama", Engine)
    monkeypatch.setattr(gguf_logits, "TEXT", "w30 w41 w52 w63")
    figures = gguf_logits.main(str(hybrid), "unused.gguf")
    assert figures["largest_difference"] < 1e-5 and figures["same_tokenisation"] == 1
    assert figures["top1_agreement"] == figures["greedy_tokens_equal"] == 1
    monkeypatch.setattr(Engine, "off", torch.linspace(0, 20, 128))
    figures = gguf_logits.main(str(hybrid), "unused.gguf")
    assert figures["largest_difference"] == pytest.approx(20, rel=1e-3) and figures["greedy_tokens_equal"] < 1


def test_without_llama_cpp(monkeypatch):
    monkeypatch.setattr(gguf_logits, "Llama", None)
    with pytest.raises(SystemExit, match="pip install llama-cpp-python"):
        gguf_logits.main("hybrid", "file.gguf")
