"""What `make bench` makes of its measurements, and every topic at its smallest; no figure is judged."""

import json

import pytest
import torch

import recipes.benchmarks.gpu as gpu
import recipes.benchmarks.layer as bench_layer
import recipes.benchmarks.peers as bench_peers
import recipes.benchmarks.run as bench
import recipes.benchmarks.scan as bench_scan
from modeling_llamba.hybrid_cache import cache_nbytes
from modeling_llamba.ssd import ssd_recurrence
from recipes.benchmarks.decode import HYBRIDS, PRODUCTS, add_targets, filled_cache
from recipes.benchmarks.measure import (
    Report,
    Table,
    Timing,
    in_own_process,
    interleaved,
    peak_bytes,
)
from recipes.benchmarks.peers import find_peers
from recipes.benchmarks.scan import inputs
from tests.students import make_student


def test_interleaved_calls_everything_as_often():
    calls = []
    timings = interleaved({name: lambda name=name: calls.append(name) for name in "abc"}, 20)
    rounds = ["".join(calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert all(sorted(round) == ["a", "b", "c"] for round in rounds) and len(rounds) == 21
    assert {round[0] for round in rounds} == {"a", "b", "c"}  # none of them always comes after the same other
    assert all(t.least <= t.median <= t.most for t in timings.values())


def test_every_peer_does_the_same_work():
    """Those installed here, at mild decay; attention is a peer of speed only."""
    tensors = inputs(heads=2, length=128)
    expected = ssd_recurrence(*tensors)[0]
    found, absent = find_peers()
    assert found.keys() | absent.keys() == bench_peers.PEERS.keys() and "transformers" in found
    for name, prepare in found.items():
        function, arguments = prepare(*tensors)
        y = function(*arguments)
        if name == "causal SDPA":
            assert y.shape == (1, 2, 128, 64)
        else:
            assert (y.double() - expected).norm() < 1e-4 * expected.norm(), name


def test_forward_and_backward_are_those_of_every_peer():
    y, gradients = bench_scan.scan_call("ours", (2, 128), bench_scan.TRAINING)()
    assert len(gradients) == 4
    for name in find_peers()[0]:
        other, others = bench_scan.scan_call(name, (2, 128), bench_scan.TRAINING)()
        if name == "causal SDPA":
            assert [g.shape for g in others] == [(1, 2, 128, 64)] * 3
            continue
        assert (y - other).norm() < 1e-4 * y.norm(), name
        for mine, theirs in zip(gradients[2:], others[2:], strict=True):  # of B and C
            assert (mine - theirs).norm() < 1e-4 * mine.norm(), name


def test_the_scans_error_is_that_of_float32():
    errors = bench_scan.accuracy(((2, 64),))
    assert errors.keys() == {"2 heads, mild decays", "2 heads, extreme decays"}
    assert all(0 < error < bench_scan.ERROR_LIMIT for error in errors.values())


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


def test_a_layer_is_read_and_stepped_in_every_way(monkeypatch, tmp_path):
    for name, small in {"LENGTHS": (64, 300), "LONGEST_CHUNK": 250, "CONTEXT": 300, "STEPS": 2, "LAYERS": 1}.items():
        monkeypatch.setattr(bench_layer, name, small)
    report = bench_layer.measure(tmp_path)
    (target,), (table,) = report.targets, report.tables
    assert 0 < target.value and target.limit == bench_layer.STEP_LIMIT
    assert [row[0] for row in table.rows] == ["64", "300", "a token after 300"]
    cache = bench_layer.read(bench_layer.models(1)["normalised read"], 300)
    assert cache.get_seq_length() == 300 and cache.layers[0].recurrent_states[0].any()


def test_absent_peers_are_named_with_the_reason(monkeypatch):
    finder = bench_peers.importlib.machinery.PathFinder
    found_by = finder.find_spec
    without_fla = lambda name, *where: None if name == "fla" else found_by(name, *where)  # noqa: E731
    monkeypatch.setattr(finder, "find_spec", without_fla)
    found, absent = find_peers()
    assert absent == {"fla naive": "no package fla"}
    assert {"transformers", "causal SDPA"} == found.keys()


def _forty_megabytes(size):
    given = torch.ones(size)
    return lambda: given + 1, lambda: given[:8] + 1


def test_peak_memory_above_the_inputs():
    assert 40e6 <= in_own_process(peak_bytes, _forty_megabytes, (10_000_000,)) < 50e6


def _run_topic(topic, output):
    """Stands in for the process of a topic."""
    if topic == "scan":
        return 3
    report = Report(skipped={"a peer": "no package"})
    report.add(f"{topic}: time over a peer", 0.5 if topic == "decode" else 2.0, 1.0)
    report.tables.append(Table(["context", "tokens/s"], [["512", "90"]]))
    bench.save(topic, report, 1, output)
    return 0


def test_topics_come_together_in_one_report(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "run_topic", _run_topic)
    assert bench.main(tmp_path, ("decode", "conversion", "scan")) == 1, "one of them failed"
    assert {path.stem for path in tmp_path.glob("*.json")} == {"decode", "conversion"}
    report = json.loads((tmp_path / "decode.json").read_text())
    assert report["machine"]["torch"] == torch.__version__
    assert report["targets"] == [{"name": "decode: time over a peer", "value": 0.5, "limit": 1.0}]
    text = (tmp_path / "results.md").read_text()
    assert "| decode: time over a peer | 0.5 | 1 | yes |" in text and "| 2 | 1 | **no** |" in text
    assert "| context | tokens/s |\n| --- | --- |\n| 512 | 90 |" in text and "a peer: skipped, no package." in text
    assert "decode: commit" in text
    printed = capsys.readouterr()
    assert "1 of 2 targets met" in printed.out and "scan failed with exit code 3" in printed.err
    # another run of one topic keeps what the others measured
    assert bench.main(tmp_path, ("conversion",)) == 0
    assert "decode: time over a peer" in (tmp_path / "results.md").read_text()


def test_memory_of_the_scan_has_targets(monkeypatch):
    monkeypatch.setattr(bench_scan, "in_own_process", lambda *call: 10**7)
    report = Report()
    bench_scan.memory(["fla naive"], report)
    assert len(report.targets) == 4
    assert report.targets[0].name == "forward, 9 heads: bytes beyond the output"
    assert report.targets[0].value == 10**7 - 9 * 8192 * 64 * 4
    (table,) = report.tables
    assert table.columns[-1] == "fla naive" and [len(row) for row in table.rows] == [3] * 4
    assert table.rows[0][-1] == "10" and table.rows[1][-1] == ""


def test_the_scan_has_targets_for_every_peer(monkeypatch):
    times = dict.fromkeys(["ours", "fla naive", "transformers", "causal SDPA", "matmul"], Timing(2.0, 1.0, 3.0))
    monkeypatch.setattr(bench_scan, "share_of_peak", lambda shape, timings: 0.5)
    report = Report()
    bench_scan.add_targets("forward", (9, 512), times, report)
    bench_scan.add_targets("forward", (9, 8192), times, report)
    bench_scan.add_targets("forward and backward", (9, 2048), times, report)
    found = {target.name: (target.value, target.limit) for target in report.targets}
    assert found == {
        "forward, 9 heads, 512 tokens: time over fla naive": (1.0, 1.0),
        "forward, 9 heads, 512 tokens: time over causal SDPA": (1.0, 1.0),
        "forward, 9 heads, 8192 tokens: time over fla naive": (1.0, 1.0),
        "forward, 9 heads, 8192 tokens: time over transformers": (1.0, 0.65),
        "forward, 9 heads, 8192 tokens: time over causal SDPA": (1.0, 1 / 16),
        "forward, 9 heads, 8192 tokens: matrix product's speed over ours": (2.0, 1 / 0.35),
        "forward and backward, 9 heads, 2048 tokens: time over fla naive": (1.0, 0.75),
        "forward and backward, 9 heads, 2048 tokens: time over transformers": (1.0, 0.75),
        "forward and backward, 9 heads, 2048 tokens: time over causal SDPA": (1.0, 0.75),
    }


def test_decoding_has_targets_for_every_hybrid():
    times = dict.fromkeys(["teacher", PRODUCTS, *HYBRIDS], 2.0)
    report = Report()
    add_targets({512: times, 32768: dict.fromkeys(times, 3.0)}, report)
    found = {target.name: target.value for target in report.targets}
    assert found["generate, no attention, context 512: time over its matrix-vector products"] == 1.0
    assert found["generate, no attention: time at 32768 over 512"] == 1.5
    assert sum("over the teacher" in name for name in found) == 2 * len(HYBRIDS)


def test_inputs_are_reproducible():
    assert all(map(torch.equal, inputs(2, 8), inputs(2, 8)))


TINY_SHAPE = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def test_the_gpu_topic_on_a_cpu(tmp_path, monkeypatch):
    """The same code, at its smallest; without a device the command says so."""
    monkeypatch.setattr(gpu, "CONTEXTS", (256,))
    report = gpu.measure(tmp_path, "cpu", {"tiny": TINY_SHAPE}, (256,))
    assert {target.name: target.value <= target.limit for target in report.targets} == {
        "torch, float32: error against float64": True,
        "torch, bfloat16: error against float64": True,
    }
    tables = {table.columns[0]: table.rows for table in report.tables}
    assert [row[0] for row in tables["model, context"]] == ["tiny, teacher, 256", "tiny, default, 256"]
    assert [row[0] for row in tables["training step"]] == ["tiny, teacher", "tiny, default"]
    assert tables["scan of bf16: heads, tokens"][0][2:4] == ["", ""] and not report.skipped
    bench.save("gpu", report, 1.0, tmp_path)
    assert "tiny, default, 256" in bench.as_markdown({"gpu": json.loads((tmp_path / "gpu.json").read_text())})
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="no CUDA device"):
            bench.main(tmp_path, ("gpu",))


def test_operations_of_a_training_step():
    """Six per parameter and token, and what attention adds; checked where that can be written down."""
    tokens, shape = 128, TINY_SHAPE | {"tie_word_embeddings": True}
    cost = gpu.step_cost(gpu.teacher_config, shape, tokens)
    norms = 128 * (2 * shape["num_hidden_layers"] + 1)
    attention = shape["num_hidden_layers"] * 12 * tokens**2 * 128
    assert cost["flops"] == 6 * (cost["parameters"] - norms) * tokens + attention
