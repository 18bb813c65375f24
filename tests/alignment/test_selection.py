"""Probes, scores and the choice of layers."""

import json

import pytest
import torch
import yaml

import convert.alignment.fit as fitting
import convert.weights.writer as writer
from convert import convert, plan_conversion
from convert.alignment import aligner as alignment
from convert.alignment.fit import FitCache
from convert.alignment.probes import associative_probe, copy_probe, needle_probe, plain_tokens, with_needles
from convert.alignment.teacher_model import replaced
from convert.options import make_options
from convert.placement.layer_scores import LayerEvaluator, LayerScore, Scores, select_layers
from tests.alignment.tiny import LENGTH, rows, teacher_model
from tests.convert.test_bad_input import check_one_line_error, run_as_is
from tests.teachers import make_teacher

VOCABULARY = range(20, 100)
ALIGNMENT = {"sequence_length": LENGTH, "fit": {"refine_steps": 0}}
ALIGNED = {"text": "sampled", "tokens": 16 * LENGTH, "alignment": ALIGNMENT}


def test_probes_ask_for_what_was_said():
    probe = copy_probe(VOCABULARY, 3, 20, seed=0)
    assert probe.ids.shape == (3, 40) and torch.equal(probe.ids[:, :20], probe.ids[:, 20:])
    assert probe.answers[:, 21:].all() and not probe.answers[:, :21].any()
    assert all(len(set(row[:20])) == 20 for row in probe.ids.tolist())

    probe = associative_probe(VOCABULARY, 3, 10, seed=0)
    for ids, answers in zip(probe.ids.tolist(), probe.answers.tolist(), strict=True):
        pairs = dict(zip(ids[0:20:2], ids[1:20:2], strict=True))
        asked = [(ids[i - 1], ids[i]) for i, marked in enumerate(answers) if marked]
        assert len(asked) == 10 and all(pairs[key] == value for key, value in asked)
        assert [key for key, _ in asked] != ids[0:20:2]

    prose = rows(2)
    probe = needle_probe(prose, VOCABULARY, seed=0)
    assert torch.equal(probe.ids[:, 4:12], probe.ids[:, -8:])
    assert probe.answers.sum(1).tolist() == [4, 4] and probe.answers[:, -4:].all()
    assert torch.equal(probe.ids[:, 12:-8], prose[:, 12:-8])
    again = needle_probe(prose, VOCABULARY, seed=0)
    assert torch.equal(again.ids, probe.ids) and not torch.equal(needle_probe(prose, VOCABULARY, 1).ids, probe.ids)


def test_needles_are_hidden_in_a_share_of_the_rows():
    prose = torch.arange(20 * 64).view(20, 64) + 10_000
    vocabulary = plain_tokens(5_000)
    assert vocabulary[0] == 100 and vocabulary[-1] == 3_999
    ids = with_needles(prose, 0.25, vocabulary, seed=3)
    changed = [i for i in range(20) if not torch.equal(ids[i], prose[i])]
    assert len(changed) == 5 and torch.equal(ids, with_needles(prose, 0.25, vocabulary, seed=3))
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
    assert widths == {8, 16} and len(places) > 1
    assert torch.equal(with_needles(prose, 0.0, vocabulary, seed=3), prose)


@pytest.mark.parametrize("name", ["llama-gqa", "phi"])
def test_scores_are_those_of_the_whole_model(saved_teacher, name, monkeypatch):
    """A layer scored from the remembered block inputs equals the model run from its start."""
    model = teacher_model(saved_teacher(name))
    prose = rows(2)
    monkeypatch.setattr("convert.placement.layer_scores.PROBE_LENGTH", 12)
    evaluator = LayerEvaluator(model, prose)
    nothing = evaluator.base({})
    assert nothing.kl < 1e-6 and nothing == evaluator.teacher_scores
    evaluator.base({1: model.mixer(1)})
    scores = evaluator.with_layer(2, model.mixer(2))
    with replaced(model.whole(), {1: model.mixer(1), 2: model.mixer(2)}) as student, torch.no_grad():
        logits = student(prose, use_cache=False).logits.log_softmax(-1)
        probe = evaluator.probes["copy"]
        answered = student(probe.ids, use_cache=False).logits[:, :-1][probe.answers[:, 1:]]
    teacher = make_teacher(name)(prose).logits.log_softmax(-1)
    expected = (teacher.exp() * (teacher - logits)).sum(-1).mean().item()
    assert scores.kl == pytest.approx(expected, rel=1e-3) and scores.kl > 0.01
    truth = probe.ids[probe.answers]
    assert scores.loss["copy"] == pytest.approx(torch.nn.functional.cross_entropy(answered, truth).item(), rel=1e-4)
    assert scores.accuracy["copy"] == (answered.argmax(-1) == truth).float().mean().item()
    assert all(block.layer_type != "linear_attention" for block in model.model.model.layers)


class Graded(LayerEvaluator):
    """Scores from a table: what a layer costs, and that 0 and 1 together cost much more than apart."""

    def __init__(self, kl, recall):
        self.kl, self.recall = kl, recall
        self.asked, self._mixers = 0, {}
        self.probes = {"copy": copy_probe(VOCABULARY, 1, 8, seed=0)}
        self.teacher_scores, self.counted = Scores(0.0, {"copy": 0.0}, {"copy": 1.0}), ["copy"]

    def _of(self, layers):
        kl = sum(self.kl[layer] for layer in layers) + (1.0 if {0, 1} <= set(layers) else 0.0)
        return Scores(kl, {"copy": sum(self.recall[layer] for layer in layers)}, {"copy": 1.0})

    def base(self, mixers):
        self._mixers = mixers
        return self._of(mixers)

    def with_layer(self, layer, mixer):
        self.asked += 1
        return self._of([*self._mixers, layer])


KL, RECALL = [0.01, 0.02, 0.03, 0.9], [0.0, 0.0, 5.0, 0.0]


@pytest.mark.parametrize(
    "weight, rounds, count, expected",
    [
        (0.0, 1, 3, (0, 1, 2)),  # by KL alone
        (0.3, 1, 3, (0, 1, 3)),  # recall forbids layer 2
        (0.0, 3, 2, (0, 2)),  # scored anew after layer 0, layer 1 has become dear
        (0.0, 1, 2, (0, 1)),  # which one round cannot see
        (0.0, 1, 0, ()),
        (0.0, 2, 4, (0, 1, 2, 3)),
    ],
)
def test_cheapest_layers_are_replaced(weight, rounds, count, expected):
    mixers, cache = dict.fromkeys(range(4)), FitCache(None, {})
    chosen, scores = select_layers(mixers, Graded(KL, RECALL), count, weight, rounds, cache)
    assert chosen == expected
    assert [round(scores[i].kl, 6) for i in range(4)] == KL and [scores[i].recall for i in range(4)] == RECALL


def test_recall_better_than_the_teachers_is_no_merit():
    assert LayerScore(kl=0.1, recall=-5.0).total(0.3) == 0.1 < LayerScore(kl=0.1, recall=0.1).total(0.3)


def test_scores_are_kept_and_resumed(tmp_path):
    mixers, first, again = dict.fromkeys(range(4)), Graded(KL, RECALL), Graded(KL, RECALL)
    chosen, _ = select_layers(mixers, first, 3, 0.0, 2, FitCache(tmp_path, {}))
    path = next(tmp_path.rglob("scores.json"))
    known = json.loads(path.read_text())
    assert len(known) == first.asked
    path.write_text(json.dumps(dict(list(known.items())[:3])))
    assert select_layers(mixers, again, 3, 0.0, 2, FitCache(tmp_path, {}))[0] == chosen
    assert again.asked == first.asked - 3


@pytest.mark.parametrize("method", ["kl", "kl+recall"])
def test_layers_are_chosen_by_score(saved_teacher, tmp_path, method):
    plan = convert(str(saved_teacher("qwen3")), tmp_path / "out", selection=method, **ALIGNED)
    report = json.loads((tmp_path / "out" / "alignment.json").read_text())
    scores = {int(layer): score["kl"] for layer, score in report["layer_scores"].items()}
    cheapest = sorted(sorted(scores, key=scores.get)[:2])
    layer_types = json.loads((tmp_path / "out" / "config.json").read_text())["layer_types"]
    assert [i for i, kind in enumerate(layer_types) if kind == "linear_attention"] == cheapest
    assert list(plan.placement.replaced_layers) == cheapest
    # a random teacher recalls nothing, so no probe counts
    assert report["probes_counted"] == [] and report["held_out_error"].keys() == {str(i) for i in cheapest}


def test_nothing_is_scored_where_nothing_is_to_choose(two_layer_teacher, tmp_path):
    convert(str(two_layer_teacher("llama-gqa")), tmp_path / "out", attention_layers=0.0, **ALIGNED)
    report = json.loads((tmp_path / "out" / "alignment.json").read_text())
    assert "layer_scores" not in report and len(report["held_out_error"]) == 2


def test_budget_in_bytes(saved_teacher, tmp_path):
    """As many attention layers as fit: at 1,000 tokens a layer keeps 128 kB, a mixer 1.6 kB."""
    folder = str(saved_teacher("llama-gqa"))
    for cache, context, attention in (("300KB", 1000, 2), ("1MB", 1000, 4), ("10KB", 1000, 0), ("300KB", 100, 4)):
        plan = plan_conversion(make_options(folder, "o", align="none", cache=cache, context=context))
        assert plan.config.layer_types.count("full_attention") == attention, (cache, context)
    convert(folder, tmp_path / "out", cache="300KB", context=1000, selection="kl+recall", **ALIGNED)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["layer_types"].count("full_attention") == 2
    with pytest.raises(ValueError, match="too little.* states alone take"):
        plan_conversion(make_options(folder, "o", align="none", cache="1KB"))


@pytest.mark.parametrize("steps", [0, 3])
def test_the_fit_that_scored_a_layer_is_not_done_again(two_layer_teacher, tmp_path, monkeypatch, steps):
    """And is refined to the same bits as one that begins anew."""
    begun, fit_layer, fit_mixers = [], fitting.fit_layer, fitting.fit_mixers
    options = ALIGNED | {"attention_layers": 0.5, "alignment": ALIGNMENT | {"fit": {"refine_steps": steps}}}

    def count(mixer, data, settings, seed, before):
        begun.append((before is None, settings.refine_steps))
        return fit_layer(mixer, data, settings, seed, before)

    monkeypatch.setattr(fitting, "fit_layer", count)
    convert(str(two_layer_teacher("llama-gqa")), tmp_path / "out", **options)
    assert begun == [(True, 0)] * 2 + ([(False, 3)] if steps else [])

    def forget(*args, solved, **options):
        return fit_mixers(*args, **options)

    monkeypatch.setattr(alignment, "fit_mixers", forget)
    begun.clear()
    convert(str(two_layer_teacher("llama-gqa")), tmp_path / "anew", **options)
    assert begun == [(True, 0)] * 2 + ([(True, steps)] if steps else [])  # else the same fit is on disk
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "anew" / name).read_bytes()


@pytest.mark.parametrize("said", [True, False])
def test_work_dir_resumes(said, two_layer_teacher, tmp_path, monkeypatch):
    """Interrupted while writing, the second run fits and scores nothing again; what it keeps afterwards is small."""
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
    assert not (tmp_path / "out").exists() and list(work.rglob("layer-*.safetensors"))
    monkeypatch.setattr(fitting, "fit_layer", fail)
    monkeypatch.setattr(LayerEvaluator, "with_layer", fail)
    convert(folder, tmp_path / "out", **options)
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not list(work.rglob("layer-*")) and bool(list(work.rglob("scores.json"))) == said == work.exists()


@pytest.mark.parametrize(
    "said, expected",
    [
        (dict(selection="kl", align="none"), "needs an alignment"),
        (dict(selection="kl", attention_layers=[1]), "attention_layers names them"),
        (dict(selection="best"), "selection must be uniform or kl or kl.recall"),
        (dict(cache="1MB", attention_layers=0.5), "give one"),
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
    options = ALIGNED | {"text": str(text), "selection": "uniform", "alignment": ALIGNMENT | {"held_out_sequences": 2}}
    convert(str(two_layer_teacher("llama-gqa")), tmp_path / "out", **options)
    for name in ("config.json", "README.md", "alignment.json"):
        content = (tmp_path / "out" / name).read_text()
        assert "secret" not in content and ("my.jsonl" in content or name == "README.md"), name
