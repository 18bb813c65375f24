"""Probes, scores and the choice of layers."""

import json

import pytest
import torch
import yaml

import convert.fit.fit as fitting
import convert.io.writer as writer
from convert import convert, plan_conversion
from convert.fit.divergence import kl_of_logits
from convert.fit.probes import associative_probe, copy_probe, needle_probe, plain_tokens, with_needles
from convert.fit.teacher_model import replaced
from convert.options import make_options
from convert.scores.layer_costs import LOOKING_UP, cheapest_by_kl
from tests.helpers.command import check_one_line_error, run_as_is
from tests.helpers.teachers import make_teacher
from tests.helpers.tiny import LENGTH, rows, teacher_model

VOCABULARY = range(20, 100)
ALIGNMENT = {"sequence_length": LENGTH, "fit": {"refine_steps": 0}}
ALIGNED = {"text": "sampled", "tokens": 16 * LENGTH, "alignment": ALIGNMENT}


def test_probes_ask_for_what_was_said():
    probe = copy_probe(VOCABULARY, 3, 20, seed=0)
    assert probe.ids.shape == (3, 40)
    assert torch.equal(probe.ids[:, :20], probe.ids[:, 20:])
    assert probe.answers[:, 21:].all()
    assert not probe.answers[:, :21].any()
    assert all(len(set(row[:20])) == 20 for row in probe.ids.tolist())

    probe = associative_probe(VOCABULARY, 3, 10, seed=0)
    for ids, answers in zip(probe.ids.tolist(), probe.answers.tolist(), strict=True):
        pairs = dict(zip(ids[0:20:2], ids[1:20:2], strict=True))
        asked = [(ids[i - 1], ids[i]) for i, marked in enumerate(answers) if marked]
        assert len(asked) == 10
        assert all(pairs[key] == value for key, value in asked)
        assert [key for key, _ in asked] != ids[0:20:2]

    prose = rows(2)
    probe = needle_probe(prose, VOCABULARY, seed=0)
    assert torch.equal(probe.ids[:, 4:12], probe.ids[:, -8:])
    assert probe.answers.sum(1).tolist() == [4, 4]
    assert probe.answers[:, -4:].all()
    assert torch.equal(probe.ids[:, 12:-8], prose[:, 12:-8])
    again = needle_probe(prose, VOCABULARY, seed=0)
    assert torch.equal(again.ids, probe.ids)
    assert not torch.equal(needle_probe(prose, VOCABULARY, 1).ids, probe.ids)


def test_needles_are_hidden_in_a_share_of_the_rows():
    prose = torch.arange(20 * 64).view(20, 64) + 10_000
    vocabulary = plain_tokens(5_000)
    assert vocabulary[0] == 100
    assert vocabulary[-1] == 3_999
    ids = with_needles(prose, 0.25, vocabulary, seed=3)
    changed = [i for i in range(20) if not torch.equal(ids[i], prose[i])]
    assert len(changed) == 5
    assert torch.equal(ids, with_needles(prose, 0.25, vocabulary, seed=3))
    widths, places = set(), set()
    for i in changed:
        hidden, asked = ids[i, :48], ids[i, 48:].tolist()
        where = [(hidden == token).nonzero()[:, 0].tolist() for token in asked]
        assert all(len(place) == 1 and token in vocabulary for place, token in zip(where, asked, strict=True))
        drawn = (hidden != prose[i, :48]).nonzero()[:, 0].tolist()
        assert sorted(place for (place,) in where) == drawn
        # one needle of 16 tokens, or two of 8, each whole
        starts = [where[j][0] for j in (0, 8)]
        assert [place for (place,) in where] == [start + k for start in starts for k in range(8)]
        widths.add(16 if starts[1] == starts[0] + 8 else 8)
        places.add(min(drawn))
    assert widths == {8, 16}
    assert len(places) > 1
    assert torch.equal(with_needles(prose, 0.0, vocabulary, seed=3), prose)


@pytest.mark.parametrize(
    "name, mixer", [("qwen3", "discrete_mamba2"), ("llama-gqa", "none"), ("phi", "discrete_mamba2")]
)
def test_the_layers_that_lose_most_keep_their_attention(name, mixer, saved_teacher, tmp_path):
    """Found with a window and a state, also where none is wanted then; as many as were asked for."""
    options = ALIGNED | {"window": 6, "mixer": mixer, "alignment": {"sequence_length": LENGTH}}
    plan = convert(str(saved_teacher(name)), tmp_path / "out", attention_layers=0.5, **options)
    report = json.loads((tmp_path / "out" / "alignment.json").read_text())
    costs = {int(layer): cost for layer, cost in report["layer_costs"].items()}
    assert costs.keys() == {0, 1, 2, 3}
    assert len(set(costs.values())) == 4
    assert min(costs.values()) > 0
    assert plan.placement.attention_layers == tuple(sorted(sorted(costs, key=costs.get)[2:]))
    assert report["held_out_error"].keys() == {str(i) for i in plan.placement.replaced_layers}
    kinds = json.loads((tmp_path / "out" / "config.json").read_text())["layer_types"]
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == list(plan.placement.attention_layers)


@pytest.mark.parametrize("recalls", [True, False])
@pytest.mark.parametrize("name", ["llama-gqa", "phi"])
@torch.no_grad()
def test_mixers_alone_go_where_the_whole_model_diverges_least(name, recalls, saved_teacher, monkeypatch):
    """One after the other, each beside those that went before, and not where something else forbids it."""
    model, ids = teacher_model(saved_teacher(name)), rows(2)
    mixers, teacher = {layer: model.mixer(layer) for layer in range(4)}, make_teacher(name)(ids).logits
    probe = copy_probe(VOCABULARY, 2, 12, seed=0)
    monkeypatch.setattr("convert.scores.layer_costs.LEAST_RECALL", 0.0 if recalls else 0.2)

    def cost(layers):
        with replaced(model.whole(), {layer: mixers[layer] for layer in layers}) as student:
            kl = kl_of_logits(teacher, student(ids, use_cache=False).logits).mean()
            answered = student(probe.ids, use_cache=False).logits[:, :-1][probe.answers[:, 1:]]
        loss = torch.nn.functional.cross_entropy(answered, probe.ids[probe.answers])
        return (kl + 0.3 * recalls * loss).item()

    expected = set()
    for count in range(1, 4):
        expected = expected | {min({0, 1, 2, 3} - expected, key=lambda layer: cost(expected | {layer}))}
        if count in (1, 3):  # three rounds choose three one by one
            gone, alone = cheapest_by_kl(model, mixers, ids, probe, count)
            assert gone == expected
            assert alone == pytest.approx({i: cost({i}) for i in range(4)}, rel=1e-3)
    assert all(block.layer_type == "full_attention" for block in model.model.model.layers)


@pytest.mark.parametrize("length", [16, 24])
def test_layers_are_compared_on_short_sequences_too(length, saved_teacher, tmp_path):
    """The windows of the comparison and what is salient then leave enough of them."""
    options = ALIGNED | dict(window=4, mixer="none", alignment={"sequence_length": length})
    plan = convert(str(saved_teacher("llama-gqa")), tmp_path / "out", attention_layers=0.5, **options)
    assert len(plan.placement.attention_layers) == 2


def test_a_layer_that_looks_nowhere_far_is_the_first_to_go(tmp_path):
    """One layer attends to all tokens nearly alike, which a state can tell; the other looks up single ones."""
    teacher = make_teacher("llama-gqa", layers=2)
    with torch.no_grad():
        for block, size in zip(teacher.model.layers, (0.01, 8.0), strict=True):
            block.self_attn.q_proj.weight *= size
    teacher.save_pretrained(tmp_path / "teacher")
    options = ALIGNED | {"window": 4, "alignment": {"sequence_length": LENGTH}}
    plan = convert(str(tmp_path / "teacher"), tmp_path / "out", attention_layers=0.5, **options)
    assert plan.placement.attention_layers == (1,)


def test_layers_that_look_up_stay_whatever_they_lose(saved_teacher, tmp_path, monkeypatch):
    scores = torch.zeros(4, 4)
    scores[[0, 2], 1] = 400.0
    monkeypatch.setattr("convert.scores.layer_costs.retrieval_scores", lambda *args: scores)
    options = ALIGNED | dict(window=4, alignment={"sequence_length": LENGTH})
    plan = convert(str(saved_teacher("llama-gqa")), tmp_path / "out", attention_layers=0.5, **options)
    assert plan.placement.attention_layers == (0, 2)
    costs = json.loads((tmp_path / "out" / "alignment.json").read_text())["layer_costs"]
    assert [round(costs[str(i)] / LOOKING_UP / 100) for i in range(4)] == [1, 0, 1, 0]


def test_mixers_alone_are_placed_by_what_the_whole_model_loses(saved_teacher, tmp_path):
    plan = convert(str(saved_teacher("llama-gqa")), tmp_path / "out", attention_layers=0.5, **ALIGNED)
    costs = json.loads((tmp_path / "out" / "alignment.json").read_text())["layer_costs"]
    cheapest = min(range(4), key=lambda layer: costs[str(layer)])  # the first to go
    assert len(plan.placement.replaced_layers) == 2
    assert cheapest in plan.placement.replaced_layers


@pytest.mark.parametrize("share, free", [(0.2, 0), (0.5, 1), (0.8, 2)])
def test_a_share_is_of_the_layers_without_windows_of_their_own(share, free, saved_teacher, tmp_path):
    """The others keep their windows. A dry run keeps as many; layers are measured only where some of them stay."""
    options = ALIGNED | dict(attention_layers=share, window=4, alignment={"sequence_length": LENGTH})
    folder = str(saved_teacher("gemma3"))
    planned = plan_conversion(make_options(folder, "o", **options))
    assert planned.config.conversion["teacher_layer_types"] == ["sliding_attention", "full_attention"] * 2
    plan = convert(folder, tmp_path / "out", **options)
    kept = set(plan.placement.attention_layers)
    assert kept >= {0, 2}
    assert len(kept) == 2 + free
    assert planned.summary()["cache_bytes"] == plan.summary()["cache_bytes"]
    report = json.loads((tmp_path / "out" / "alignment.json").read_text()) if free < 2 else {}
    assert ("layer_costs" in report) == (free == 1) == bool(planned.notes)
    assert free != 1 or report["layer_costs"].keys() == {"1", "3"}
    assert free != 1 or kept - {0, 2} == {max((1, 3), key=lambda layer: report["layer_costs"][str(layer)])}


def test_nothing_is_measured_where_nothing_is_to_choose(two_layer_teacher, tmp_path):
    options = ALIGNED | dict(attention_layers=0.0, window=4, alignment={"sequence_length": LENGTH})
    convert(str(two_layer_teacher("llama-gqa")), tmp_path / "out", **options)
    report = json.loads((tmp_path / "out" / "alignment.json").read_text())
    assert "layer_costs" not in report
    assert len(report["held_out_error"]) == 2


def test_budget_in_bytes(saved_teacher, tmp_path):
    """As many attention layers as fit: at 1,000 tokens a layer keeps 64 kB, a mixer 1.6 kB."""
    folder = str(saved_teacher("llama-gqa"))
    for cache, context, attention in (("150KB", 1000, 2), ("1MB", 1000, 4), ("10KB", 1000, 0), ("150KB", 100, 4)):
        plan = plan_conversion(make_options(folder, "o", align="none", cache=cache, context=context))
        assert plan.config.layer_types.count("full_attention") == attention, (cache, context)
    convert(folder, tmp_path / "out", cache="150KB", context=1000, export_ready=True, **ALIGNED)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["layer_types"].count("full_attention") == 2
    with pytest.raises(ValueError, match="too little.* states alone take"):
        plan_conversion(make_options(folder, "o", align="none", cache="1KB"))


def test_budget_in_bytes_with_windows(saved_teacher):
    """At 1,000 tokens a layer keeps 64 kB, and one with a window of 8 some 1.9 kB. Windows of the teacher stay."""
    folder, own = str(saved_teacher("llama-gqa")), str(saved_teacher("gemma3"))
    windows = dict(align="none", window=8, context=1000)
    for cache, attention in (("150KB", 2), ("1MB", 4), ("12KB", 0)):
        plan = plan_conversion(make_options(folder, "o", cache=cache, **windows))
        assert plan.config.layer_types.count("full_attention") == attention, cache
        assert plan.config.layer_types.count("hybrid") == 4 - attention, cache
    with pytest.raises(ValueError, match="too little.* windows alone take.* a narrower window"):
        plan_conversion(make_options(folder, "o", cache="1KB", **windows))
    plan = plan_conversion(make_options(own, "o", cache=0.6, **windows))
    assert plan.config.layer_types == ["sliding_attention", "hybrid", "sliding_attention", "full_attention"]


@pytest.mark.parametrize("said", [True, False])
def test_work_dir_resumes(said, two_layer_teacher, tmp_path, monkeypatch):
    """Interrupted while writing, the second run fits nothing again; afterwards no fit is kept."""
    work, folder = tmp_path / ("work" if said else "out.work"), str(two_layer_teacher("llama-gqa"))
    options = ALIGNED | {"attention_layers": 0.5}
    convert(folder, tmp_path / "whole", **options)
    options |= {"work_dir": str(work)} if said else {}

    def fail(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_shards", fail)
        with pytest.raises(OSError, match="No space left"):
            convert(folder, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    assert list(work.rglob("layer-*.safetensors"))
    monkeypatch.setattr(fitting, "fit_layer", fail)
    convert(folder, tmp_path / "out", **options)
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not list(work.rglob("layer-*"))
    assert said == work.exists()


@pytest.mark.parametrize(
    "said, expected",
    [
        (dict(cache="1MB", attention_layers=0.5), "drop one"),
        (dict(device="tpu9", attention_layers=0.5), "device tpu9 cannot be used here"),
        (dict(align="mohawk", mixer="mamba1", alignment={"matrix_orientation": {"tokens": 9}}), "leave stage 1"),
    ],
)
def test_contradictions(two_layer_teacher, tmp_path, said, expected):
    with pytest.raises(ValueError, match=expected):
        convert(str(two_layer_teacher("llama-gqa")), tmp_path / "out", **ALIGNED | said)
    assert not (tmp_path / "out").exists()


def test_a_bias_that_a_mixer_cannot_hold_is_said_before_any_work(two_layer_teacher, tmp_path):
    """On the command line, in one line."""
    options = {"alignment": ALIGNMENT, "mixer": {"out_bias": False}, "placement": {"attention_layers": 0.5}}
    (tmp_path / "options.yaml").write_text(yaml.safe_dump(options))
    done = run_as_is(
        two_layer_teacher("phi"), tmp_path / "out", "--config", tmp_path / "options.yaml", "--text", "sampled"
    )
    check_one_line_error(done, "map only (--align none)")
    assert not (tmp_path / "out").exists()


def test_published_text_name_is_not_a_local_path(two_layer_teacher, tmp_path):
    (tmp_path / "secret").mkdir()
    text = tmp_path / "secret" / "my.jsonl"
    text.write_text(
        "\n".join(json.dumps({"text": " ".join(f"w{40 + (i * j) % 50}" for i in range(99))}) for j in range(9))
    )
    judged = ALIGNMENT | {"held_out_sequences": 2}
    options = ALIGNED | {"text": str(text), "attention_layers": "1", "alignment": judged}
    convert(str(two_layer_teacher("llama-gqa")), tmp_path / "out", **options)
    for name in ("config.json", "README.md", "alignment.json"):
        content = (tmp_path / "out" / name).read_text()
        assert "secret" not in content, name
        assert "my.jsonl" in content or name == "README.md", name
