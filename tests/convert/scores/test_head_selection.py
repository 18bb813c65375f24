"""Heads that keep full attention: named, counted, found by a needle, and what they cost."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from convert import convert
from convert.dry_run import open_teacher, plan_conversion, resolve_all
from convert.fit.aligner import Aligner
from convert.fit.probes import needle_probe
from convert.layout.cache import cache_bytes
from convert.layout.presets import counted_heads, kept_heads, query_heads, whole_groups
from convert.options import make_options
from convert.scores.budget import Budget
from convert.scores.layer_costs import LOOKING_UP, head_gains
from convert.scores.retrieval import FOLLOWING, NEEDLE, ROWS, ranked_heads, retrieval_scores
from modeling_llamba.model.cache import cache_nbytes
from tests.helpers.teachers import TEACHERS, make_teacher, random_ids
from tests.helpers.tiny import teacher_model


def test_heads_by_name_by_file_and_back(tmp_path):
    assert kept_heads("2:1, 0:3,2:0", 4, 4) == {0: (3,), 2: (0, 1)}
    (tmp_path / "heads.json").write_text('{"2": [1, 0], "0": [3]}')
    assert kept_heads(str(tmp_path / "heads.json"), 4, 4) == {0: (3,), 2: (0, 1)}
    for wrong in ('{"2": "13"}', '{"2": [1.5]}', "[2]"):
        (tmp_path / "heads.json").write_text(wrong)
        with pytest.raises(ValueError, match="is neither"):
            kept_heads(str(tmp_path / "heads.json"), 4, 4)
    with pytest.raises(ValueError, match="is neither"):
        kept_heads("x" * 5000, 4, 4)
    assert kept_heads({0: [3], 2: [1, 0]}, 4, 4) == {0: (3,), 2: (0, 1)}
    assert kept_heads(3, 4, 4) is kept_heads(0.02, 4, 4) is None, "a number says how many, not which"


@pytest.mark.parametrize("text", ["2", "2:x", "nowhere.json", "2:1:0", "4:0", "0:4"])
def test_heads_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="attention_heads"):
        kept_heads(text, 4, 4)


def test_counts():
    assert counted_heads(3, 90) == 3
    assert counted_heads(0.02, 90) == 2
    assert counted_heads(1.0, 90) == 90
    with pytest.raises(ValueError, match="between 0 and the teacher's 90"):
        counted_heads(91, 90)
    assert query_heads([(2, 1), (0, 0)], 3) == {0: (0, 1, 2), 2: (3, 4, 5)}
    assert whole_groups({2: (4,), 0: (1, 5)}, 3) == {0: (0, 1, 2, 3, 4, 5), 2: (3, 4, 5)}
    assert whole_groups({2: (4,)}, 1) == {2: (4,)}


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "phi-gqa-qk-norm", "qwen3"])
@torch.no_grad()
def test_retrieval_scores_are_the_teachers_attention_on_the_needle(name, saved_teacher):
    ids = random_ids(ROWS + 1, 64)
    scores = retrieval_scores(teacher_model(saved_teacher(name)), ids)
    teacher = make_teacher(name)
    teacher.set_attn_implementation("eager")
    size = TEACHERS[name][1].vocab_size
    probe = needle_probe(ids[:ROWS], range(size // 50, size - size // 5), 0, NEEDLE, 8)
    assert probe.ids[:, 8 : 8 + NEEDLE].equal(probe.ids[:, -NEEDLE:])
    attentions = teacher(probe.ids, output_attentions=True).attentions
    expected, same = [], []
    for attention in attentions:
        on_needle = attention[:, :, -NEEDLE:, 8 : 8 + NEEDLE]
        following = torch.stack([on_needle[:, :, i, i + 1] for i in range(NEEDLE - 1)]).mean(0)
        expected.append((on_needle.sum(-1).amax(-1) + FOLLOWING * following).mean(0))
        at_same = torch.stack([on_needle[:, :, i, i] for i in range(NEEDLE)]).mean((0, 1))
        same.append(at_same > on_needle.sum(-1).mean((0, 2)) / 2)
    expected, same = torch.stack(expected), torch.stack(same)
    others = same & (expected < expected[same].max()) if same.any() else same
    torch.testing.assert_close(scores, torch.where(others, expected / 2, expected), rtol=1e-4, atol=1e-6)


def test_of_heads_that_find_the_same_token_one_counts_in_full(saved_teacher, monkeypatch):
    shares = [torch.zeros(ROWS, 4, NEEDLE, 64) for _ in range(TEACHERS["llama-gqa"][1].num_hidden_layers)]
    for head, share in enumerate((0.9, 0.8)):  # they look at the same token
        for i in range(NEEDLE):
            shares[0][:, head, i, 8 + i] = share
    for i in range(NEEDLE - 1):  # this one at the next
        shares[1][:, 0, i, 9 + i] = 0.7
    given = iter(shares)
    monkeypatch.setattr("convert.scores.retrieval.attention_rows", lambda *of, **more: [(None, next(given))])
    scores = retrieval_scores(teacher_model(saved_teacher("llama-gqa")), random_ids(ROWS, 64))
    torch.testing.assert_close(scores[0, :2], torch.tensor([0.9, 0.4]))
    torch.testing.assert_close(scores[1, 0], torch.tensor(0.7 * (1 + FOLLOWING)))


def test_key_value_heads_rank_by_their_best_query_head():
    scores = torch.tensor([[0.9, 0.1, 0.2, 0.3], [0.0, 0.8, 0.5, 0.7]])
    assert ranked_heads(scores, shared=2) == [(0, 0), (1, 0), (1, 1), (0, 1)]


@torch.no_grad()
def test_named_heads_see_everything_and_cost_what_the_plan_says(saved_teacher, tmp_path):
    """With those that share their keys and values. A layer all of whose heads are named stays attention."""
    options = dict(attention_layers=0.0, align="none", window=6, sinks=1)
    plan = convert(str(saved_teacher("llama-gqa")), tmp_path / "some", attention_heads="1:0,1:1,3:2", **options)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "some").eval()
    ids = random_ids(2, 40)
    cache = model(ids).cache
    assert cache_nbytes(cache) == 2 * cache_bytes(plan.config, 40, torch.float32)[1]
    assert plan.summary()["attention_heads"] == {1: [0, 1], 3: [2, 3]}
    (tmp_path / "heads.json").write_text('{"1": [0, 1], "3": [3]}')
    from_file = convert(
        str(saved_teacher("llama-gqa")), tmp_path / "file", attention_heads=str(tmp_path / "heads.json"), **options
    )
    assert from_file.placement == plan.placement
    for name in ("config.json", "README.md"):
        assert str(tmp_path) not in (tmp_path / "file" / name).read_text()
    every = ",".join(f"{layer}:{head}" for layer in range(4) for head in range(4))
    whole = convert(str(saved_teacher("llama-gqa")), tmp_path / "all", attention_heads=every, **options)
    assert whole.config.layer_types == ["full_attention"] * 4
    everything = AutoModelForCausalLM.from_pretrained(tmp_path / "all").eval()
    torch.testing.assert_close(everything(ids).logits, make_teacher("llama-gqa")(ids).logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(ids).logits, everything(ids).logits, atol=1e-2)


def test_a_head_gains_what_its_layer_loses_without_it(saved_teacher, tmp_path):
    """Nothing where no output depends on it."""
    teacher = make_teacher("llama-gqa")
    with torch.no_grad():
        teacher.model.layers[1].self_attn.o_proj.weight[:, 16:] = 0  # heads 2 and 3, which share a key/value head
    teacher.save_pretrained(tmp_path / "teacher")
    options = make_options(
        str(tmp_path / "teacher"), "out", cache=0.6, context=64, text="sampled", tokens=640,
        alignment={"sequence_length": 64}, attention_layers="0",
    )  # fmt: skip
    weights, _ = open_teacher(options)
    resolved = resolve_all(options, weights)
    budget = Budget(weights, resolved)
    gains = head_gains(Aligner(weights, resolved), budget.windows_alone().keeping([0]), budget.shared)
    assert gains.shape == (4, 2)
    assert not gains[0].any()
    assert gains[1, 0] > 0.01
    assert abs(gains[1, 1]) < 1e-6
    assert (gains[2:] > 0).all()


def test_a_layer_of_one_key_value_head_gains_all_that_it_loses(saved_teacher, tmp_path):
    options = dict(cache=0.4, context=64, text="sampled", tokens=640, alignment={"sequence_length": 64})
    plan = convert(str(saved_teacher("llama-mqa-wide-heads")), tmp_path / "out", **options)
    gains = torch.tensor(json.loads((tmp_path / "out" / "alignment.json").read_text())["head_gains"])
    assert gains.shape == (plan.config.num_hidden_layers, 1)
    assert (gains > 0).all()


def test_counted_heads_are_chosen_while_aligning(saved_teacher, tmp_path):
    """Three of four, so that one of the two layers keeps all of its heads, and with them its attention."""
    options = dict(
        attention_layers=[1, 3], window=4, attention_heads=3, text="sampled",
        tokens=320, sequence_length=32, held_out_sequences=2,
    )  # fmt: skip
    plan = convert(str(saved_teacher("llama-gqa")), tmp_path / "out", **options)
    report = json.loads((tmp_path / "out" / "alignment.json").read_text())
    scores, gains = (torch.tensor(report[name]) for name in ("retrieval_scores", "head_gains"))
    scores = LOOKING_UP * scores + gains.repeat_interleave(2, dim=1)
    best = [pair for pair in ranked_heads(scores, shared=2) if pair[0] in (0, 2)]
    expected = query_heads(best[:3], 2)
    assert plan.summary()["attention_heads"] == {i: list(of) for i, of in expected.items() if len(of) == 2}
    assert plan.summary()["attention_layers"] == sorted([1, 3, *(i for i, of in expected.items() if len(of) == 4)])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = random_ids(1, 30)
    grown = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert model(grown[:, :-1]).logits[0, -1].argmax() == grown[0, -1]
    planned = plan_conversion(make_options(model=str(saved_teacher("llama-gqa")), output="o", **options))
    assert planned.summary()["cache_bytes"] == plan.summary()["cache_bytes"]


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(attention_heads="1:0"), "beside a window"),
        (dict(attention_heads="3", window=4, align="none"), "chosen by the alignment"),
    ],
)
def test_heads_without_a_window_or_a_choice_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_options(model="m", output="o", **options)


def test_heads_of_a_layer_that_stays_attention_are_kept_with_it(saved_teacher, tmp_path):
    plan = convert(
        str(saved_teacher("llama-gqa")), tmp_path / "out", attention_layers="1", align="none", window=4,
        attention_heads="1:0,2:3",
    )  # fmt: skip
    assert plan.summary()["attention_heads"] == {2: [2, 3]}


@pytest.mark.parametrize(
    "name, heads, message",
    [
        ("llama-gqa", "5", "the replaced layers have 4"),
        ("llama-gqa", "0.01", "less than one"),
        ("llama-gqa", "heads.json", "no such file"),
        ("mistral-window", "0:0", "Every layer of this teacher has a window of 8"),
        ("gemma3", "0:0", "heads of layer 0, which has a sliding window or a state in the teacher"),
    ],
)
def test_heads_that_cannot_be_are_refused_before_any_work(name, heads, message, saved_teacher):
    options = make_options(model=str(saved_teacher(name)), output="o", window=4, sinks=0, attention_heads=heads)
    with pytest.raises(ValueError, match=message):
        plan_conversion(options)


@pytest.mark.parametrize("written, read", [("8", 8), ("0.05", 0.05), ("'16:3'", "16:3"), ("16:3,18:0", "16:3,18:0")])
def test_heads_in_yaml(written, read, tmp_path):
    (tmp_path / "c.yaml").write_text(f"placement:\n  window: 4\n  attention_heads: {written}\n")
    assert make_options("m", "o", config=tmp_path / "c.yaml").placement.attention_heads == read
    assert make_options("m", "o", window=4, attention_heads=written.strip("'")).placement.attention_heads == read


@pytest.mark.parametrize("line", ["  attention_heads: 16:3\n", "  attention_heads: 16:3  # one\n  window: 4\n"])
def test_a_pair_that_yaml_reads_as_a_number_needs_quotes(line, tmp_path):
    (tmp_path / "c.yaml").write_text(f"placement:\n{line}")
    with pytest.raises(ValueError, match="16:3 needs quotes"):
        make_options("m", "o", config=tmp_path / "c.yaml")
