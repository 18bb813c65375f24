"""What `make bench` makes of its measurements, and every topic at its smallest; no figure is judged."""

import json

import pytest
import torch

import recipes.benchmarks.gpu as gpu
import recipes.benchmarks.hybrid as bench_hybrid
import recipes.benchmarks.memory as bench_memory
import recipes.benchmarks.run as bench
from modeling_llamba.compatibility import CACHE_NAME
from modeling_llamba.model.cache import cache_nbytes
from recipes.benchmarks.decode import HYBRIDS, PRODUCTS, add_targets, filled_cache, step_timings
from recipes.benchmarks.measure import Report, Table, in_own_process, interleaved, peak_bytes
from recipes.evaluation.speed import fill_cache
from tests.helpers.hybrids import make_hybrid
from tests.helpers.teachers import make_teacher


def test_interleaved_calls_everything_as_often():
    calls = []
    timings = interleaved({name: lambda name=name: calls.append(name) for name in "abc"}, 20)
    rounds = ["".join(calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert all(sorted(round) == ["a", "b", "c"] for round in rounds)
    assert len(rounds) == 21
    assert {round[0] for round in rounds} == {"a", "b", "c"}  # none of them always comes after the same other
    assert all(t.least <= t.median <= t.most for t in timings.values())


@pytest.mark.parametrize("pattern", ["attention", "pure", "beside", "hybrid"])
@torch.no_grad()
def test_a_made_up_cache_is_as_long_as_it_says(pattern):
    model = make_hybrid(pattern=pattern, dtype=torch.float32)
    cache = filled_cache(model, 300, 2)
    sizes = cache_nbytes(cache)
    out = model(torch.tensor([[5], [6]]), **{CACHE_NAME: cache})
    assert out.logits.shape[:2] == (2, 1)
    assert cache.get_seq_length() == 301
    config = model.config
    per_token = 2 * 2 * config.num_key_value_heads * config.head_dim * 4
    full = config.layer_types.count("full_attention")
    heads = sum(
        len({h // (config.num_attention_heads // config.num_key_value_heads) for h in of})
        for of in config.hybrid_full_heads or ()
    )
    assert sizes >= 300 * per_token * (full + heads / config.num_key_value_heads)


SMALL = {
    "PROMPTS": {48: 1.0}, "TOKENS": {48: 1.0, 200: 0.5}, "TOGETHER": (48,), "BATCH": 2, "FILLED": 64, "STEPS": 3,
    "TRAINED": 60, "PACKED": (10, 30, 20),
    "DEFAULT": {
        "attention_layers": "none", "attention_heads": {1: [0, 1]}, "window": 8,
        "placement": {"salient": 3, "rank": 4},
    },
}  # fmt: skip


def test_the_default_hybrid_is_measured_in_every_way(monkeypatch, tmp_path):
    """Beside its teacher, both at their smallest; what trains in a process of its own does so here."""
    make_teacher("llama-gqa", layers=2, vocab_size=40_000).save_pretrained(tmp_path / "teacher")
    for name, small in SMALL.items():
        monkeypatch.setattr(bench_hybrid, name, small)
    monkeypatch.setattr(bench_hybrid, "embedded_teacher", lambda: tmp_path / "teacher")
    trained = []

    def in_this_process(measured, prepare, arguments):
        call, small = prepare(*arguments)
        small()
        call()
        trained.append(arguments[1])
        return 10**7

    monkeypatch.setattr(bench_hybrid, "in_own_process", in_this_process)
    report = bench_hybrid.measure(tmp_path)
    assert {target.name: target.limit for target in report.targets} == {
        "parameters over the teacher's": 1.035,
        "a prompt, 48 tokens: time over the teacher's": 1.0,
        "a token after 48 tokens: time over the teacher's": 1.0,
        "a token after 200 tokens: time over the teacher's": 0.5,
        "a training step, packed: time over the teacher's": 1.2,
        "a training step, packed: peak memory over the teacher's": 1.2,
    }
    assert all(target.value > 0 for target in report.targets)
    generation, training = report.tables
    assert [row[0] for row in generation.rows] == [
        "a prompt, 48 tokens", "a token after 48 tokens", "a token after 200 tokens", "a prompt, 2 texts of 48 tokens",
        "a token after 2 texts of 48 tokens",
    ]  # fmt: skip
    assert [row[0] for row in training.rows] == ["a training step, packed", "its peak memory, MB"]
    assert all(len(row) == len(table.columns) for table in report.tables for row in table.rows)
    assert trained == ["teacher", "hybrid"]
    assert not (tmp_path / "scratch-hybrid").exists()


@torch.no_grad()
def test_a_long_context_of_the_default_is_made_up(monkeypatch, tmp_path):
    """What was read and what was not together are as long as they say, and the window is full."""
    make_teacher("llama-gqa", layers=2).save_pretrained(tmp_path / "teacher")
    for name, small in SMALL.items():
        monkeypatch.setattr(bench_hybrid, name, small)
    monkeypatch.setattr(bench_hybrid, "embedded_teacher", lambda: tmp_path / "teacher")
    for model in bench_hybrid.load_models(tmp_path / "hybrid").values():
        for length in (7, 48, 77, 203):
            cache = bench_hybrid.cache_after(model, length, 2)
            assert cache.get_seq_length() == length
            bench_hybrid.decoding(model, cache, 2)()
            assert cache.get_seq_length() == length + SMALL["STEPS"]


@pytest.mark.slow  # processes of its own, each of which imports all
def test_the_memory_of_a_long_context_is_measured(monkeypatch, tmp_path):
    """All in this process, whose memory is taken to be its caches: each is as long as it says."""
    make_teacher("llama-gqa", layers=2).save_pretrained(tmp_path / "teacher")
    caches = []

    def filled(cache, length):
        caches.append(cache)
        fill_cache(cache, length)

    monkeypatch.setattr(bench_hybrid, "DEFAULT", SMALL["DEFAULT"])
    monkeypatch.setattr(bench_memory, "embedded_teacher", lambda: tmp_path / "teacher")
    monkeypatch.setattr(bench_memory, "CONTEXTS", (256, 20_000))
    monkeypatch.setattr(bench_memory, "CHUNK", 64)
    monkeypatch.setattr(bench_memory, "fill_cache", filled)
    monkeypatch.setattr(bench_memory, "in_own_process", lambda measured, *arguments: measured(*arguments))
    monkeypatch.setattr(
        bench_memory, "status_bytes", lambda key: 1000 * (cache_nbytes(caches[-1]) if key == "VmHWM" else 0)
    )
    report = bench_memory.measure(tmp_path)
    assert [cache.get_seq_length() for cache in caches] == [256 + bench_memory.STEPS] * 3 + [
        20_000 + bench_memory.STEPS
    ] * 3
    short, long = ([int(cell) for cell in row[1:]] for row in report.tables[0].rows)
    teacher, rounded, hybrid = (after - before for before, after in zip(short, long, strict=True))
    numbers = (20_000 - 256) * 2 * 2 * 2 * 8  # layers, keys and values, heads, dimensions
    assert teacher == pytest.approx(numbers * 2 / 1000, rel=1e-2), "two bytes each"
    assert rounded == pytest.approx(numbers * (1 + 2 / 8) / 1000, rel=1e-2), "a byte each, and a scale"
    assert hybrid < rounded
    assert [target.limit for target in report.targets] == [1.0] * 4
    assert not (tmp_path / "scratch-memory").exists()


def _forty_megabytes(size):
    given = torch.ones(size)
    return lambda: given + 1, lambda: given[:8] + 1


def test_peak_memory_above_the_inputs():
    assert 40e6 <= in_own_process(peak_bytes, _forty_megabytes, (10_000_000,)) < 50e6


def _run_topic(topic, output):
    """Stands in for the process of a topic."""
    if topic == "hybrid":
        return 3
    report = Report(skipped={"a peer": "no package"})
    report.add(f"{topic}: time over a peer", 0.5 if topic == "decode" else 2.0, 1.0)
    report.tables.append(Table(["context", "tokens/s"], [["512", "90"]]))
    bench.save(topic, report, 1, output)
    return 0


def test_topics_come_together_in_one_report(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "run_topic", _run_topic)
    assert bench.main(tmp_path, ("decode", "conversion", "hybrid")) == 1, "one of them failed"
    assert {path.stem for path in tmp_path.glob("*.json")} == {"decode", "conversion"}
    report = json.loads((tmp_path / "decode.json").read_text())
    assert torch.__version__.startswith(report["machine"]["torch"])
    assert report["targets"] == [{"name": "decode: time over a peer", "value": 0.5, "limit": 1.0}]
    text = (tmp_path / "results.md").read_text()
    assert "| decode: time over a peer | 0.5 | 1 | yes |" in text
    assert "| 2 | 1 | **no** |" in text
    assert "| context | tokens/s |\n| --- | --- |\n| 512 | 90 |" in text
    assert "a peer: skipped, no package." in text
    assert "decode: commit" in text
    printed = capsys.readouterr()
    assert "1 of 2 targets met" in printed.out
    assert "hybrid failed with exit code 3" in printed.err
    # another run of one topic keeps what the others measured
    assert bench.main(tmp_path, ("conversion",)) == 0
    assert "decode: time over a peer" in (tmp_path / "results.md").read_text()


def test_decoding_has_targets_for_every_hybrid():
    times = dict.fromkeys(["teacher", PRODUCTS, *HYBRIDS], 2.0)
    report = Report()
    add_targets({512: times, 32768: dict.fromkeys(times, 3.0)}, report)
    found = {target.name: target.value for target in report.targets}
    assert found["generate, no attention, context 512: time over its matrix-vector products"] == 1.0
    assert found["generate, no attention: time at 32768 over 512"] == 1.5
    assert sum("over the teacher" in name for name in found) == 2 * len(HYBRIDS)


def test_a_step_is_timed_beside_transformers():
    timings = step_timings(2, calls_per_sample=1)
    assert timings.keys() == {"ours", "transformers"}
    assert all(timing.median > 0 for timing in timings.values())


TINY_SHAPE = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.slow  # a benchmark, as `make bench-gpu` runs it
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
    of_graphs = tables["static cache, compiled: model, context"]
    assert [row[0] for row in of_graphs] == ["tiny, teacher, 256", "tiny, default, 256"]
    assert all(float(row[1]) > 0 for row in of_graphs)
    assert [row[0] for row in tables["training step"]] == ["tiny, teacher", "tiny, default"]
    assert tables["scan of bf16: heads, tokens"][0][2:4] == ["", ""]
    assert not report.skipped
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
