"""Scores of heads beside ablation, on a tiny teacher."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from convert import convert
from convert.alignment import BudgetSearch
from convert.alignment.divergence import kl_of_hidden
from convert.cache_budget import budget_of
from convert.config import make_config
from convert.teacher import find_teacher
from recipes import budget_costs
from tests.recipes.test_cache_budget import tiny_teacher


@torch.no_grad()
def test_ablation_is_what_a_conversion_without_that_head_loses(tmp_path, capsys):
    tiny_teacher(tmp_path)
    text = ["--calibration-dataset", str(tmp_path / "text.jsonl"), "--calibration-tokens", "320"]
    common = [
        str(tmp_path / "out"),
        "--model",
        str(tmp_path / "teacher"),
        "--align-config",
        str(tmp_path / "align.yaml"),
    ]
    report = budget_costs.main(budget_costs.parsed([*common, *text, "--tested", "2"]))
    assert len(report["ablation"]) == 4 and set(report["rank_correlation"]) == {"first", "last", "mean"}
    integrated = [row["integrated"] for row in report["ablation"]]
    assert integrated == sorted(integrated, reverse=True), "the dearest, then others by rank"
    assert (tmp_path / "out" / "costs.png").stat().st_size > 1000
    assert json.loads((tmp_path / "out" / "costs.json").read_text()) == report
    assert "rank correlation with ablation over 4 heads" in capsys.readouterr().out

    options = make_config(
        model=str(tmp_path / "teacher"), output="o", cache_ratio=0.25, calibration_tokens=320,
        calibration_dataset=str(tmp_path / "text.jsonl"), align_config=str(tmp_path / "align.yaml"), dtype="float32",
    )  # fmt: skip
    found = find_teacher(options.model)
    search = BudgetSearch(budget_of(options, found, found.open_weights()), found.open_weights(), lambda *args: None)
    own, (layers, kv_heads) = report["ablation"][0], search.budget.shape
    head = tuple(map(int, own["head"].split(":")))
    every = [(i, j) for i in range(layers) for j in range(kv_heads)]
    teacher, shared = search.model.whole(), search.budget.shared

    def loss(kept: list) -> float:
        heads = ",".join(f"{i}:{j * shared + q}" for i, j in kept for q in range(shared))
        name = tmp_path / f"kept-{len(kept)}"
        convert(str(tmp_path / "teacher"), name, mixer="none", window=4, attention_ratio=0.0, align="none",
                attention_heads=heads or None, dtype="float32")  # fmt: skip
        student = AutoModelForCausalLM.from_pretrained(name).eval()
        hidden = student.model(search.scoring).last_hidden_state.flatten(0, 1)
        reference = teacher.model(search.scoring, use_cache=False).last_hidden_state.flatten(0, 1)
        total = kl_of_hidden(reference, hidden, teacher.lm_head).mean().item()
        if search.asked.counts:
            total += search.weight * search.asked.loss(student.model(search.asked.probe.ids).last_hidden_state).item()
        return total

    assert own["first"] == pytest.approx(loss([h for h in every if h != head]) - loss(every), abs=1e-5)
    assert own["last"] == pytest.approx(loss([]) - loss([head]), abs=1e-5)
    assert abs(own["first"]) > 1e-4
