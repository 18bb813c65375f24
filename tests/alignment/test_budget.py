"""A cache budget spent on layers, heads, window and state together: costs, candidates, the search."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import convert.placement.search as budget_search
from convert import convert
from convert.alignment import aligner as alignment
from convert.alignment.aligner import Aligner
from convert.alignment.teacher_model import replaced
from convert.options import SearchOptions, make_options
from convert.pipeline import plan_conversion
from convert.placement.budget import (
    Budget,
    HeadCosts,
    best_candidates,
    best_of_count,
    interpolated,
    longest_beside_state,
)
from convert.placement.cache import cache_bytes
from convert.placement.decide import decide_placement, options_for_teacher
from convert.placement.head_scores import final_hidden, gated_heads, gated_layers, integrated_costs
from convert.placement.placement import Decision, Placement
from convert.placement.search import BudgetSearch
from convert.plan import TeacherWeights, describe, make_plan
from convert.teachers.teacher import find_teacher
from modeling_llamba import LlambaConfig
from tests.alignment.tiny import teacher_model
from tests.teachers import random_ids

CONTEXT, SHAPE = 400, (4, 2)
WINDOW = {"window": 5, "sinks": 1, "mixer": "none"}
SEARCH = {
    "text": "sampled", "tokens": 320, "context": CONTEXT, "cache": 0.4,
    "alignment": {"sequence_length": 32, "held_out_sequences": 2, "fit": {"refine_steps": 0}},
    "placement": {"search": {"prose_tokens": 64, "answers": 4}},
}  # fmt: skip


def options_of(folder, **options):
    return make_options(str(folder), "o", **{"context": CONTEXT, "cache": 0.5} | options)


def budget(folder, **options):
    return Budget(TeacherWeights.of(find_teacher(str(folder))), options_of(folder, **options))


def search(folder, **options):
    found = budget(folder, **SEARCH | options)
    return BudgetSearch(found, Aligner(found.weights, found.options))


def made_up_costs(kl, recall=0.0, left=None):
    """Costs of 4 layers by 2 heads that fall as 1 / window."""
    table = torch.as_tensor(kl, dtype=torch.float64)
    return HeadCosts(
        {w: (table / w).tolist() for w in (4, 16, 64)}, torch.full(SHAPE, recall).tolist(), left, CONTEXT, 0.3
    )


@pytest.mark.parametrize("name", ["llama-gqa", "phi-gqa-qk-norm"])
@torch.no_grad()
def test_gates_lead_from_the_teacher_to_its_windows(name, saved_teacher):
    model = teacher_model(saved_teacher(name), **WINDOW)
    ids = random_ids(2, 30)
    mixers = {layer: model.mixer(layer) for layer in range(4)}
    teacher = final_hidden(model, ids)
    with replaced(model.whole(), mixers):
        windows = final_hidden(model, ids)
    for gate, expected in ((0.0, teacher), (1.0, windows)):
        with gated_heads(model, 5, 1, torch.full((4, 4), gate)):
            torch.testing.assert_close(final_hidden(model, ids), expected, rtol=1e-4, atol=1e-5)
        with gated_layers(model, mixers, torch.full((4,), gate)):
            torch.testing.assert_close(final_hidden(model, ids), expected, rtol=1e-4, atol=1e-5)
    only = torch.zeros(4, 4)
    only[2] = 1.0
    with gated_heads(model, 5, 1, only), replaced(model.whole(), {}):
        one = final_hidden(model, ids)
    with replaced(model.whole(), {2: mixers[2]}):
        torch.testing.assert_close(one, final_hidden(model, ids), rtol=1e-4, atol=1e-5)


def test_costs_of_heads_add_up_to_what_all_windows_cost(saved_teacher):
    model, ids = teacher_model(saved_teacher("llama-gqa"), **WINDOW), random_ids(2, 30)
    with torch.no_grad():
        reference = final_hidden(model, ids)
        with gated_heads(model, 5, 1, torch.ones(4, 4)):
            whole = (final_hidden(model, ids) - reference).square().mean().item()

    def loss(hidden):
        return (hidden - reference).square().mean()

    costs = integrated_costs(model, ids, loss, (4, 4), lambda gates: gated_heads(model, 5, 1, gates), points=12)
    assert costs.sum().item() == pytest.approx(whole, rel=0.02)
    assert all(p.grad is None for p in model.model.parameters())


def test_interpolation_between_measured_windows():
    costs = {8: 0.8, 32: 0.2, 128: 0.05}
    assert interpolated(costs, 32, 1000) == pytest.approx(0.2)
    assert interpolated(costs, 16, 1000) == pytest.approx(0.4)
    assert interpolated(costs, 4, 1000) == pytest.approx(1.6)
    assert interpolated(costs, 564, 1000) == pytest.approx(0.025)
    assert interpolated(costs, 1000, 1000) == 0.0


def test_recall_counts_for_what_lies_beyond_the_window():
    costs = made_up_costs(torch.ones(SHAPE), recall=2.0, left=[0.5, 1.0, 1.0, 1.0])
    near, far = costs.at(4, False), costs.at(200, False)
    assert near[0][0] == pytest.approx(1 / 4 + 0.3 * 2.0 * (1 - 4 / CONTEXT))
    assert far[0][0] - interpolated({w: 1 / w for w in (4, 16, 64)}, 200, CONTEXT) == pytest.approx(0.3)
    assert costs.at(4, True)[0][0] == pytest.approx(near[0][0] / 2) and costs.at(4, True)[1] == near[1]


def test_candidates_keep_within_the_budget_and_use_it(saved_teacher):
    spent = budget(saved_teacher("llama-gqa"))
    kl = torch.ones(SHAPE)
    kl[1, 0] = kl[3] = 100.0
    assert not any(found.has_state for found in best_candidates(spent, made_up_costs(kl), 16)), "none was scored"
    candidates = best_candidates(spent, made_up_costs(kl, left=[1.0] * 4), 16)
    assert [c.predicted for c in candidates] == sorted(c.predicted for c in candidates)
    assert candidates[0].kept == ((1, 0), (3, 0), (3, 1)) and not candidates[0].has_state
    assert candidates[0].layers(SHAPE) == (3,) and candidates[0].heads(SHAPE) == [(1, 0)]
    for candidate in candidates:
        plan = make_plan(spent.weights, Decision(spent.placement(candidate)), spent.options)
        assert cache_bytes(plan.config, CONTEXT, torch.float32)[1] == candidate.nbytes <= spent.nbytes
        if not candidate.has_state:  # one token more and it would be too much
            assert spent.sizes(False)(candidate.kept, candidate.window + 1) > spent.nbytes
    assert {c.has_state for c in candidates} == {False, True}
    with_state = best_candidates(spent, made_up_costs(kl, left=[0.0] * 4), 16)[0]
    assert with_state.has_state and with_state.predicted == 0.0


def test_heads_are_chosen_by_what_each_costs(saved_teacher):
    spent = budget(saved_teacher("llama-gqa"), cache=0.4, mixer="none")
    alone = torch.tensor([[5.0, 4.0], [3.0, 2.0], [1.0, 0.0], [0.0, 0.0]])
    costs = HeadCosts({4: alone.tolist()}, torch.zeros(SHAPE).tolist(), None, CONTEXT, 0.3)
    assert best_of_count(spent, costs, "heads", 2, False, 16, spent.sizes(False)).kept == ((0, 0), (0, 1))
    alone[1] = 4.4  # together more than layer 0, and each less than its dearest head
    costs = HeadCosts({4: alone.tolist()}, torch.zeros(SHAPE).tolist(), None, CONTEXT, 0.3)
    assert best_of_count(spent, costs, "heads", 1, False, 16, spent.sizes(False)).kept == ((0, 0),)
    alone[1] = 4.6
    costs = HeadCosts({4: alone.tolist()}, torch.zeros(SHAPE).tolist(), None, CONTEXT, 0.3)
    assert best_of_count(spent, costs, "layers", 2, False, 16, spent.sizes(False)).kept == ((1, 0), (1, 1))


@pytest.mark.parametrize(
    "options, window, kept",
    [
        (dict(window=9), {9}, None),
        (dict(attention_heads="1:0,1:1,2:3"), None, ((1, 0), (2, 1))),
        (dict(attention_heads=2), None, 2),
        (dict(attention_layers=[2], window=6), {6}, None),
        (dict(attention_layers=[2], attention_heads="0:1"), None, ((0, 0), (2, 0), (2, 1))),
    ],
)
def test_what_is_said_stays(options, window, kept, saved_teacher):
    spent = budget(saved_teacher("llama-gqa"), **options)
    candidates = best_candidates(spent, made_up_costs(torch.rand(SHAPE)), 16)
    for candidate in (*candidates, *spent.unscored_candidates(32)):
        assert window is None or candidate.window in window
        assert kept is None or (len(candidate.kept) if isinstance(kept, int) else candidate.kept) == kept
        assert "attention_layers" not in options or 2 in candidate.layers(SHAPE)
        assert candidate.nbytes <= spent.nbytes


def test_a_window_beside_a_state_leaves_something_to_fit_on(saved_teacher):
    """Half of a sequence at least, where the window is chosen; something, where it is said."""
    folder = saved_teacher("llama-gqa")
    found = budget(folder, cache=0.9, shared_state=True).unscored_candidates(64)
    assert {candidate.window for candidate in found if candidate.has_state} == {longest_beside_state(64, 4)} == {28}
    alone = budget(folder, cache=0.9, mixer="none")
    assert max(candidate.window for candidate in alone.unscored_candidates(64)) > 200
    said = budget(folder, cache=0.9, shared_state=True, window=60)
    with pytest.raises(ValueError, match="60 and 4 sinks leaves nothing of sequences of 64 tokens"):
        said.unscored_candidates(64)
    assert {candidate.window for candidate in said.unscored_candidates(65)} == {60}
    assert budget(folder, cache=0.9, mixer="none", window=60).unscored_candidates(64)


def test_answers_have_to_fit_between_needle_and_question():
    assert SearchOptions(prose_tokens=64, answers=14).answers == 14
    with pytest.raises(ValueError, match="prose_tokens 64 has no room for a needle of 30 tokens"):
        SearchOptions(prose_tokens=64, answers=15)


def test_what_is_said_of_the_mixer_decides_whether_there_is_one(saved_teacher):
    folder = saved_teacher("llama-gqa")
    assert budget(folder).states == (False, True)
    wide = budget(folder, window=12)
    assert wide.states_beside(11) == (False,) and wide.states_beside(12) == (False, True)
    assert not any(found.has_state for found in wide.unscored_candidates(24)), "too little of a sequence is left"
    assert budget(folder, window=12, shared_state=True).states_beside(11) == (True,), "said is said"
    assert budget(folder, mixer="none").states == (False,)
    for said in (dict(mixer="mamba2"), dict(shared_state=True), dict(scope="all"), dict(gate_bias=False)):
        assert budget(folder, **said).states == (True,)
    assert budget(folder, state=False).states == (False,)
    assert budget(folder, state=False, mixer="mamba2").states == (True,)
    assert not any(options_of(folder, **said).searches_budget for said in (dict(align="none"), dict(selection="kl")))
    with pytest.raises(ValueError, match="too little"):
        best_candidates(budget(folder, cache="1KB"), made_up_costs(torch.ones(SHAPE)), 16)


def test_a_teacher_with_windows_of_its_own_keeps_as_many_layers_as_fit(saved_teacher, monkeypatch):
    """Its heads may not see more than they do; so its layers are chosen as without a budget, on text as short."""
    weights = TeacherWeights.of(find_teacher(str(saved_teacher("mistral-window"))))
    asked = options_of("m", cache=0.75, d_state=1, text="sampled", tokens=5120)
    options = options_for_teacher(asked, weights)
    decision = decide_placement(weights, options)
    assert decision.search is None and len(decision.placement.attention_layers) == 2
    assert decision.placement.hybrid is None and not decision.placement.full_heads
    monkeypatch.setattr(alignment, "sample_rows", lambda model, length, count, seed: random_ids(count, length))
    aligner = Aligner(weights, options)
    assert aligner.ids.shape == (10, 512) and aligner.prose.shape == (2, 512)
    for said in (dict(attention_layers=[1]), dict(attention_heads=2), dict(mixer="none")):
        with pytest.raises(ValueError, match="own layers see a window"):
            options_for_teacher(options_of("m", **said), weights)


def test_the_search_measures_and_keeps_what_it_found(saved_teacher, tmp_path, monkeypatch):
    """In one default conversion: the plan is made once, and its placement is what the configuration stores."""
    monkeypatch.setattr(budget_search, "WINDOWS", (4, 12))
    folder, plans = saved_teacher("llama-gqa"), []

    def converted(name, **search):
        search = SEARCH["placement"]["search"] | {"candidates": 9} | search
        options = SEARCH | {"placement": {"search": search}, "work_dir": str(tmp_path / "work")}
        return convert(str(folder), tmp_path / name, **options)

    def counted(*args):
        plans.append(make_plan(*args))
        return plans[-1]

    monkeypatch.setattr("convert.pipeline.make_plan", counted)
    plan = converted("out")
    assert len(plans) == 1 and plans[0] is plan
    stored = LlambaConfig.from_pretrained(tmp_path / "out")
    assert Placement.of(stored) == plan.placement and plan.placement.replaced_layers
    report = json.loads((tmp_path / "out" / "alignment.json").read_text())["budget"]
    assert report == plan.search
    (taken,) = [row for row in report["candidates"] if row["taken"]]
    assert taken["measured"]["total"] == min(row["measured"]["total"] for row in report["candidates"])
    assert taken["bytes"] == cache_bytes(plan.config, CONTEXT, torch.float32)[1] <= report["bytes"]
    assert {"a state" in row["candidate"] for row in report["candidates"]} == {True, False}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = random_ids(1, 40)
    cache = model(ids[:, :30], use_cache=True).past_key_values
    stepped = model(ids[:, 30:], past_key_values=cache).logits
    torch.testing.assert_close(stepped, model(ids).logits[:, 30:], rtol=1e-4, atol=1e-4)

    def fail(*args):
        raise AssertionError("this was found before")

    monkeypatch.setattr(budget_search, "integrated_costs", fail)
    monkeypatch.setattr(BudgetSearch, "_measure", fail)
    assert converted("again").search["candidates"] == report["candidates"]
    with pytest.raises(AssertionError, match="found before"):  # totals of another weight are not these
        converted("weighted", recall_weight=2.0)


def test_a_budget_reads_longer_sequences(saved_teacher, monkeypatch):
    """What lies beyond a window that the budget chooses has to be long, unless the length is said."""
    monkeypatch.setattr(alignment, "sample_rows", lambda model, length, count, seed: random_ids(count, length))
    for said, shape in ((dict(), (5, 1024)), (dict(sequence_length=640), (8, 640)), (dict(selection="kl"), (10, 512))):
        spent = budget(saved_teacher("llama-gqa"), text="sampled", tokens=5120, **said)
        assert Aligner(spent.weights, spent.options).ids.shape == shape


def test_what_all_heads_cost_is_what_their_windows_cost(saved_teacher, monkeypatch):
    """The sum of the costs of all heads, in KL and in recall, against the teacher with a window in every layer."""
    monkeypatch.setattr(budget_search, "POINTS", 20)
    monkeypatch.setattr(budget_search, "MIN_TEACHER_ACCURACY", 0.0)  # a random teacher recalls nothing
    monkeypatch.setattr(budget_search, "WINDOWS", (5,))
    found = search(saved_teacher("llama-gqa"), mixer="none")
    recall, ids = found.asked, found.scoring
    with torch.no_grad():
        teacher = found.model.whole()(ids).logits.log_softmax(-1)
        with gated_heads(found.model, 5, 4, torch.ones(4, 4)):
            windows = found.model.whole()(ids).logits.log_softmax(-1)
            lost = recall.loss(final_hidden(found.model, recall.probe.ids)).item() - recall.of_teacher
    kl = (teacher.exp() * (teacher - windows)).sum(-1).mean().item()
    assert torch.tensor(found._kl_costs(5)).sum().item() == pytest.approx(kl, rel=0.05)
    assert torch.tensor(found._recall_costs()).sum().item() == pytest.approx(lost, rel=0.05, abs=1e-3)


def test_the_measure_is_the_models_own(saved_teacher, tmp_path):
    """What is reported of the candidate taken, computed again from the checkpoint that was written."""
    folder = saved_teacher("llama-gqa")
    plan = convert(str(folder), tmp_path / "out", **SEARCH | {"mixer": "none"})
    (taken,) = [row for row in plan.search["candidates"] if row["taken"]]
    found = search(folder, mixer="none")
    teacher = found.model.whole()
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        of_teacher, of_student = (m(found.judging).logits.log_softmax(-1) for m in (teacher, student))
    kl = (of_teacher.exp() * (of_teacher - of_student)).sum(-1).mean().item()
    assert taken["measured"]["kl"] == pytest.approx(kl, rel=1e-3, abs=1e-6)


def test_a_dry_run_says_what_fits_and_reads_no_weight(saved_teacher, monkeypatch):
    monkeypatch.setattr("convert.weights.reader.SafetensorsCheckpoint.read_rows", None)
    plan = plan_conversion(options_of(saved_teacher("llama-gqa")))
    text, shown = describe(plan), plan.summary()
    assert "window" in text and "heads with full attention" in text and "a state beside" in text
    assert "->" not in text.split("budget")[1] and "scores decide when this is run" in text
    assert all(row["bytes"] <= shown["budget"]["bytes"] for row in shown["budget"]["candidates"])
    assert not any(row["taken"] for row in shown["budget"]["candidates"]) and shown["window"] > 1


@pytest.mark.parametrize(
    "said, expected",
    [
        (dict(attention_layers=0.5), "cache chooses how many layers keep attention"),
        (dict(cache=1.5), "cache 1.5 is no share"),
        (dict(candidates=-1), "of at least 0"),
        (dict(attention_layers=[1], align="none"), "cache chooses how many layers keep attention"),
        (dict(cache=0.0001), "too little"),
        (dict(window=5000), "too little"),
        (dict(attention_heads="9:0"), "layers are 0 to 3"),
    ],
)
def test_contradictions(said, expected, saved_teacher):
    with pytest.raises(ValueError, match=expected):
        plan_conversion(options_of(saved_teacher("llama-gqa"), **said))


SAID = (
    {"window": 32}, {"mixer": "mamba2"}, {"align": "none"}, {"align": "mohawk"}, {"attention_layers": 0.5},
    {"low_memory": True}, {"selection": "uniform"}, {"shared_state": True}, {"export_ready": True},
)  # fmt: skip


@pytest.mark.parametrize("said", SAID, ids=lambda said: next(iter(said)))
def test_a_quarter_of_the_cache_where_nothing_is_said_of_the_layers(said):
    assert make_options("m", "o", tokens=9999, dtype="float32").cache == 0.25
    assert make_options("m", "o", **said).cache is None
