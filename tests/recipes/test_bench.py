"""What `make bench` makes of its measurements; the measuring itself is never part of a test."""

import json

import pytest
import torch

import recipes.bench as bench
import recipes.bench_alignment as bench_alignment
import recipes.bench_peers as bench_peers
from modeling_llamba.ssd import ssd_recurrence
from recipes.bench_peers import find_peers
from recipes.bench_scan import exponent, inputs
from recipes.measure import Target, interleaved, save_report


def test_a_target_is_met_from_below():
    assert Target("a", 1.0, 1.0).as_row()["met"] and not Target("a", 1.01, 1.0).as_row()["met"]


def test_exponent_of_a_power_law():
    assert exponent({n: 3 * n**1.5 for n in (2, 8, 64)}) == pytest.approx(1.5)


def test_interleaved_calls_everything_as_often():
    calls = []
    timings = interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3)
    assert calls == ["a", "b"] * 4
    assert all(t.least <= t.median <= t.most for t in timings.values())


def test_every_peer_does_the_same_work():
    """Those installed here, at mild decay; attention is a peer of speed only."""
    x, log_a, B, C = inputs(heads=2, length=70)
    expected = ssd_recurrence(x, log_a, B, C)[0]
    found, absent = find_peers()
    assert found.keys() | absent.keys() == bench_peers.PEERS.keys() and "transformers Q64" in found
    for name, prepare in found.items():
        y = prepare(x, log_a, B, C)()
        if name == "causal SDPA":
            assert y.shape == (1, 2, 70, 64)
        elif name != "ssd_minimal":  # which takes whole chunks only
            assert (y.double() - expected).norm() < 1e-4 * expected.norm(), name


def test_absent_peers_are_named_with_the_reason(monkeypatch):
    monkeypatch.setattr(bench_peers.importlib.util, "find_spec", lambda name: None)
    found, absent = find_peers()
    assert absent == {"fla naive": "no package fla", "ssd_minimal": "no package mamba_ssm"}
    assert {"transformers Q64", "causal SDPA"} <= found.keys()


def test_topics_come_together_in_one_report(monkeypatch, tmp_path, capsys):
    def run_topic(topic, output):
        if topic == "loss":
            return "exit code 1"
        target = Target(f"{topic}: time over a peer", 0.5 if topic == "decode" else 2.0, 1.0)
        whole = {"context": 512, "which": "teacher", "prefill_tokens_per_second": 90.2, "cache_bytes": 2_000_000}
        whole["decode_tokens_per_second"] = 10.04
        figures = {"generate": [], "whole": [whole]} if topic == "decode" else {}
        save_report(output, topic, [target], machine={"commit": "abc"}, skipped={"a peer": "no package"}, **figures)
        return None

    monkeypatch.setattr(bench, "run_topic", run_topic)
    assert bench.main(tmp_path, ("decode", "conversion", "loss")) == 1
    report = json.loads((tmp_path / "results.json").read_text())
    assert [(t["name"].split(":")[0], t["met"]) for t in report["targets"]] == [
        ("decode", True),
        ("conversion", False),
    ]
    assert all(t["smaller_is_better"] for t in report["targets"]) and report["failed"] == {"loss": "exit code 1"}
    text = (tmp_path / "results.md").read_text()
    assert "| 512 tokens | teacher | 90 | 10.0 | 2.0 |" in text
    assert "| decode: time over a peer | 0.5 | 1 | yes |" in text and "| 2 | 1 | **no** |" in text
    assert "a peer: skipped, no package." in text and "loss: failed, exit code 1." in text
    assert "decode, conversion: commit abc." in text
    assert "1 of 2 met" in capsys.readouterr().out
    # another run of one topic keeps what the others measured
    assert bench.main(tmp_path, ("conversion",)) == 0
    assert len(json.loads((tmp_path / "results.json").read_text())["targets"]) == 2


def test_scaling_is_drawn(tmp_path):
    row = {"heads": 9, "length": 512, "ms": {"ours": {"median": 1.0}, "a peer": {"median": 2.0}}}
    growth = {"length": {"ms": {"512": 1.0, "1024": 2.0}, "exponent": 1.0}}
    bench.plot_scaling({"prefill": [row, row | {"length": 1024}], "growth": growth}, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_inputs_are_reproducible():
    assert all(map(torch.equal, inputs(2, 8), inputs(2, 8)))


def test_the_cost_of_alignment_is_extrapolated_from_one_layer(monkeypatch, tmp_path):
    shape, solved = dict(hidden_size=64, intermediate_size=128, num_attention_heads=16), []
    solve = bench_alignment.solve_out_proj

    def counted(mixer, data, ridges):
        solved.append(len(data.fitting()))
        return solve(mixer, data, ridges)

    monkeypatch.setattr(bench_alignment, "TEACHERS", {"tiny": (4, shape)})
    monkeypatch.setattr(bench_alignment, "solve_out_proj", counted)
    row = bench_alignment.one_layer("tiny", tmp_path)
    assert solved == [bench_alignment.ROWS, 1], "all of the text, and a part of it, for seconds per token"
    costs = bench_alignment.extrapolated(row)
    assert costs["total_minutes"] == pytest.approx(costs["stream_minutes"] + 2 * costs["fit_minutes_per_layer"])
