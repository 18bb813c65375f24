"""What `make bench` makes of its measurements; the measuring itself is never part of a test."""

import json
import sys

import pytest
import torch

import recipes.benchmarks.alignment as bench_alignment
import recipes.benchmarks.peers as bench_peers
import recipes.benchmarks.run as bench
import recipes.benchmarks.scan as bench_scan
from modeling_llamba.hybrid_cache import cache_nbytes
from modeling_llamba.ssd import ssd_recurrence
from recipes.benchmarks.decode import filled_cache
from recipes.benchmarks.measure import Target, allocated_peak, interleaved, save_report
from recipes.benchmarks.peers import find_peers
from recipes.benchmarks.scan import exponent, inputs
from tests.students import make_student


def test_a_target_is_met_from_below():
    assert Target("a", 1.0, 1.0).as_row()["met"] and not Target("a", 1.01, 1.0).as_row()["met"]


def test_exponent_of_a_power_law():
    assert exponent({n: 3 * n**1.5 for n in (2, 8, 64)}) == pytest.approx(1.5)


def test_interleaved_calls_everything_as_often():
    calls = []
    timings = interleaved({name: lambda name=name: calls.append(name) for name in "abc"}, 20)
    rounds = ["".join(calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert all(sorted(round) == ["a", "b", "c"] for round in rounds) and len(rounds) == 21
    assert {round[0] for round in rounds} == {"a", "b", "c"}  # none of them always comes after the same other
    assert all(t.least <= t.median <= t.most for t in timings.values())


def test_the_most_that_a_call_holds_at_once():
    given = torch.zeros(10_000)

    def call():
        first = given + 1  # 40 kB
        second = torch.zeros(5_000)  # 20 kB beside it
        del first
        third = torch.zeros(1_000)
        return second, third

    assert allocated_peak(call) == pytest.approx(60_000, abs=256)
    assert allocated_peak(lambda: torch.zeros(1_000)) == pytest.approx(4_000, abs=64), "results count"


def test_every_peer_does_the_same_work():
    """Those installed here, at mild decay; attention is a peer of speed only."""
    tensors = inputs(heads=2, length=128)
    expected = ssd_recurrence(*tensors)[0]
    found, absent = find_peers()
    assert found.keys() | absent.keys() == bench_peers.PEERS.keys() and "transformers Q64" in found
    for name, prepare in found.items():
        function, arguments = prepare(*tensors)
        y = function(*arguments)
        if name == "causal SDPA":
            assert y.shape == (1, 2, 128, 64)
        else:
            assert (y.double() - expected).norm() < 1e-4 * expected.norm(), name


def test_forward_and_backward_are_those_of_every_peer(monkeypatch):
    monkeypatch.setattr(
        bench_scan, "interleaved", lambda calls, repeats: {name: call() for name, call in calls.items()}
    )
    found, _ = find_peers()
    results = bench_scan.training((2, 128), found)
    y, gradients = results.pop("ours")
    assert results.keys() == found.keys() and len(gradients) == 4
    for name, (other, others) in results.items():
        if name == "causal SDPA":
            assert [g.shape for g in others] == [(1, 2, 128, 64)] * 3
            continue
        assert (y - other).norm() < 1e-4 * y.norm(), name
        for mine, theirs in zip(gradients[2:], others[2:], strict=True):  # of B and C
            assert (mine - theirs).norm() < 1e-4 * mine.norm(), name


def test_the_papers_listing_is_read_without_its_package(monkeypatch, tmp_path):
    """mamba_ssm itself cannot be imported without CUDA, nor what the listing imports from it."""
    (tmp_path / "mamba_ssm" / "modules").mkdir(parents=True)
    (tmp_path / "mamba_ssm" / "__init__.py").write_text("raise ImportError('no CUDA')\n")
    (tmp_path / "mamba_ssm" / "modules" / "ssd_minimal.py").write_text(
        "from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined\n"
        "def ssd_minimal_discrete(X, A, B, C, block_len):\n    return X * block_len, None\n"
    )
    monkeypatch.setattr(bench_peers, "FOLDER", tmp_path)
    function, tensors = bench_peers.ssd_minimal()(*inputs(2, 64))
    assert torch.equal(function(*tensors), 64 * tensors[0])
    assert "mamba_ssm.ops" not in sys.modules


@pytest.mark.parametrize("pattern", ["attention", "pure", "beside", "hybrid"])
@torch.no_grad()
def test_a_made_up_cache_is_as_long_as_it_says(pattern):
    model = make_student(pattern=pattern, dtype=torch.float32)
    cache = filled_cache(model, 300, 2)
    sizes = cache_nbytes(cache)
    out = model(torch.tensor([[5], [6]]), past_key_values=cache)
    assert out.logits.shape[:2] == (2, 1) and cache.get_seq_length() == 301
    config = model.config
    per_token = 2 * 2 * config.num_key_value_heads * config.head_dim * 4
    full = config.layer_types.count("full_attention")
    heads = sum(
        len({h // (config.num_attention_heads // config.num_key_value_heads) for h in of})
        for of in config.hybrid_full_heads or ()
    )
    assert sizes >= 300 * per_token * (full + heads / config.num_key_value_heads)


def test_absent_peers_are_named_with_the_reason(monkeypatch):
    monkeypatch.setattr(bench_peers.importlib.machinery.PathFinder, "find_spec", lambda name, path: None)
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
        one_layer = {"teacher": "1B", "peak_bytes": 10**9, "activation_bytes": 4 * 10**8, "total_minutes": 26.2}
        figures = {
            "decode": {"generate": [], "whole": [whole]},
            "alignment": {"one_layer": [one_layer], "stage_1": [{"length": 512, "ratio": 0.75}]},
        }.get(topic, {})
        save_report(output, topic, [target], machine={"commit": "abc"}, skipped={"a peer": "no package"}, **figures)
        return None

    monkeypatch.setattr(bench, "run_topic", run_topic)
    assert bench.main(tmp_path, ("decode", "conversion", "alignment", "loss")) == 1
    report = json.loads((tmp_path / "results.json").read_text())
    assert [(t["name"].split(":")[0], t["met"]) for t in report["targets"]] == [
        ("decode", True),
        ("conversion", False),
        ("alignment", False),
    ]
    assert all(t["smaller_is_better"] for t in report["targets"]) and report["failed"] == {"loss": "exit code 1"}
    text = (tmp_path / "results.md").read_text()
    assert "| 512 tokens | teacher | 90 | 10.0 | 2.0 |" in text
    assert "| decode: time over a peer | 0.5 | 1 | yes |" in text and "| 2 | 1 | **no** |" in text
    assert "a peer: skipped, no package." in text and "loss: failed, exit code 1." in text
    assert "decode, conversion, alignment: commit abc." in text
    assert "| 1B | 26 | 1.4 |" in text and "0.75 at 512 tokens." in text
    assert "1 of 3 met" in capsys.readouterr().out
    # another run of one topic keeps what the others measured
    assert bench.main(tmp_path, ("conversion",)) == 0
    assert len(json.loads((tmp_path / "results.json").read_text())["targets"]) == 3


def test_the_loss_is_reported_in_a_line():
    figures = {
        name: {"bytes": size, "seconds": 1.0} for name, size in (("chunked", 10**8), ("written out", 4 * 10**8))
    }
    (line,) = bench.loss_line({"tokens": 512, "vocabulary": 64, "figures": figures, "ratios": {"seconds": 0.9}})
    assert line.endswith("512 tokens of 64 logits: 100 MB against 400 MB written out, 0.90 of its time.")


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
