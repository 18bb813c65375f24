"""A budget of cache spent on layers, heads, window and state together: costs, choices, the command."""

import dataclasses
import itertools
import json

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

import convert.placement.search as budget_search
from convert import convert
from convert.alignment.teacher_model import replaced
from convert.options import BudgetSettings, make_options
from convert.pipeline import plan_conversion
from convert.placement.budget import (
    HeadCosts,
    best_choices,
    best_of_count,
    budget_of,
    interpolated,
    longest_beside_state,
)
from convert.placement.cache import cache_bytes
from convert.placement.head_scores import final_hidden, gated_heads, gated_layers, integrated_costs
from convert.teachers.teacher import find_teacher
from tests.alignment.tiny import teacher_model
from tests.convert.test_bad_input import check_one_line_error, run_as_is
from tests.teachers import random_ids

CONTEXT, SHAPE = 400, (4, 2)
WINDOW = {"window": 5, "sinks": 1, "mixer": "none"}


def budget(folder, **options):
    found = find_teacher(str(folder))
    settings = dict(model=str(folder), output="o", context=CONTEXT, cache=0.5) | options
    if "cache_bytes" in options:
        settings.pop("cache")
    return budget_of(make_config(**settings), found, found.open_weights())


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


def test_choices_keep_within_the_budget_and_use_it(saved_teacher):
    spent = budget(saved_teacher("llama-gqa"))
    kl = torch.ones(SHAPE)
    kl[1, 0] = kl[3] = 100.0
    assert not any(choice.has_state for choice in best_choices(spent, made_up_costs(kl), 16)), "none was scored"
    choices = best_choices(spent, made_up_costs(kl, left=[1.0] * 4), 16)
    assert [c.predicted for c in choices] == sorted(c.predicted for c in choices)
    assert choices[0].kept == ((1, 0), (3, 0), (3, 1)) and not choices[0].has_state
    assert choices[0].layers(SHAPE) == (3,) and choices[0].heads(SHAPE) == [(1, 0)]
    for choice in choices:
        plan = plan_conversion(spent.applied(choice))
        assert cache_bytes(plan.config, CONTEXT, torch.float32)[1] == choice.nbytes <= spent.nbytes
        if not choice.has_state:  # one token more and it would be too much
            assert spent.sizes(False)(choice.kept, choice.window + 1) > spent.nbytes
    assert {c.has_state for c in choices} == {False, True}
    with_state = best_choices(spent, made_up_costs(kl, left=[0.0] * 4), 16)[0]
    assert with_state.has_state and with_state.predicted == 0.0


@pytest.mark.parametrize(
    "options, window, kept",
    [
        (dict(window=9), {9}, None),
        (dict(attention_heads="1:0,1:1,2:3"), None, ((1, 0), (2, 1))),
        (dict(attention_heads="2"), None, 2),
        (dict(attention_layers="2", window=6), {6}, None),
        (dict(attention_layers="2", attention_heads="0:1"), None, ((0, 0), (2, 0), (2, 1))),
    ],
)
def test_what_is_said_stays(options, window, kept, saved_teacher):
    spent = budget(saved_teacher("llama-gqa"), **options)
    choices = best_choices(spent, made_up_costs(torch.rand(SHAPE)), 16)
    for choice in (*choices, *spent.what_fits(32)):
        assert window is None or choice.window in window
        assert kept is None or (len(choice.kept) if isinstance(kept, int) else choice.kept) == kept
        assert "attention_layers" not in options or 2 in choice.layers(SHAPE)
        assert choice.nbytes <= spent.nbytes


def test_a_window_beside_a_state_leaves_something_to_fit_on(saved_teacher):
    """Half of a sequence at least, where the window is chosen; something, where it is said."""
    spent = budget(saved_teacher("llama-gqa"), cache=0.9, shared_state=True)
    assert (
        {choice.window for choice in spent.what_fits(64) if choice.has_state} == {longest_beside_state(64, 4)} == {28}
    )
    alone = budget(saved_teacher("llama-gqa"), cache=0.9, mixer="none")
    assert max(choice.window for choice in alone.what_fits(64)) > 200
    said = budget(saved_teacher("llama-gqa"), cache=0.9, shared_state=True, window=60)
    with pytest.raises(ValueError, match="60 and 4 sinks leaves nothing of sequences of 64 tokens"):
        said.what_fits(64)
    assert {choice.window for choice in said.what_fits(65)} == {60}
    assert budget(saved_teacher("llama-gqa"), cache=0.9, mixer="none", window=60).what_fits(64)


def test_answers_have_to_fit_between_needle_and_question():
    assert BudgetSettings(prose_tokens=64, answers=14).answers == 14
    with pytest.raises(ValueError, match="64 has no room for two times 15 answers"):
        BudgetSettings(prose_tokens=64, answers=15)


def test_what_is_said_of_the_mixer_decides_whether_there_is_one(saved_teacher):
    folder = saved_teacher("llama-gqa")
    assert budget(folder).states() == (False, True)
    wide = budget(folder, window=12)
    assert wide.states_beside(11) == (False,) and wide.states_beside(12) == (False, True)
    assert not [choice for choice in wide.what_fits(32 - 8) if choice.has_state], "too little of a sequence is left"
    assert budget(folder, window=12, shared_state=True).states_beside(11) == (True,), "said is said"
    assert budget(folder, mixer="none").states() == (False,)
    for said in (dict(mixer="mamba2"), dict(shared_state=True), dict(scope="all"), dict(gate_bias=False)):
        assert budget(folder, **said).states() == (True,)
    assert budget(folder, align="none") is budget(folder, selection="kl") is None
    assert budget(saved_teacher("mistral-window")) is None, "its heads may not see more than they do"
    for said in (dict(attention_layers="1"), dict(attention_heads="2"), dict(mixer="none")):
        with pytest.raises(ValueError, match="own layers see a window"):
            budget(saved_teacher("mistral-window"), **said)
    with pytest.raises(ValueError, match="too little"):
        best_choices(budget(folder, cache_bytes="100"), made_up_costs(torch.ones(SHAPE)), 16)


@pytest.fixture
def align_file(tmp_path):
    settings = {
        "sequence_length": 32, "held_out_sequences": 2, "fit": {"refine_steps": 0},
        "budget": {"windows": [4, 12], "prose_tokens": 64, "answers": 4, "points": 2, "rounds": 2, "state": True},
    }  # fmt: skip
    (tmp_path / "align.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path / "align.yaml"


def converted(folder, output, align_file, **options):
    options = dict(
        text="sampled", tokens=320, align_config=str(align_file), context=CONTEXT,
        cache=0.4,
    ) | options  # fmt: skip
    return convert(str(folder), output, **options)


def test_the_command_chooses_measures_and_keeps_what_it_found(saved_teacher, tmp_path, align_file, monkeypatch):
    folder, work = saved_teacher("llama-gqa"), tmp_path / "work"
    plan = converted(folder, tmp_path / "out", align_file, work_dir=str(work), measure=9)
    report = json.loads((tmp_path / "out" / "alignment.json").read_text())["budget"]
    (taken,) = [row for row in report["choices"] if row["taken"]]
    assert taken["measured"]["total"] == min(row["measured"]["total"] for row in report["choices"])
    assert taken["bytes"] == cache_bytes(plan.config, CONTEXT, torch.float32)[1] <= report["bytes"]
    assert {"a state" in row["choice"] for row in report["choices"]} == {True, False}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = random_ids(1, 40)
    cache = model(ids[:, :30], use_cache=True).past_key_values
    stepped = model(ids[:, 30:], past_key_values=cache).logits
    torch.testing.assert_close(stepped, model(ids).logits[:, 30:], rtol=1e-4, atol=1e-4)

    def fail(*args):
        raise AssertionError("this was found before")

    monkeypatch.setattr(budget_search, "integrated_costs", fail)
    monkeypatch.setattr(budget_search.BudgetSearch, "_measure", fail)
    again = converted(folder, tmp_path / "again", align_file, work_dir=str(work), measure=9)
    assert again.budget["choices"] == report["choices"]
    settings = yaml.safe_load(align_file.read_text())
    align_file.write_text(yaml.safe_dump(settings | {"selection": {"recall_weight": 2.0}}))
    with pytest.raises(AssertionError, match="found before"):  # totals of another weight are not these
        converted(folder, tmp_path / "weighted", align_file, work_dir=str(work), measure=9)


def test_a_budget_reads_longer_sequences(saved_teacher):
    """What lies beyond a window that the budget chooses has to be long, unless the file says otherwise."""
    spent = budget(saved_teacher("llama-gqa"), cache=0.4, text="sampled", tokens=5120)
    search = budget_search.BudgetSearch(spent, spent.teacher.open_weights(), lambda *args: None)
    assert search.aligner.ids.shape == (5, 1024)


def test_heads_are_scored_again_among_those_left(saved_teacher, align_file, monkeypatch):
    """Costs that depend on which heads are left: two that stand in for each other are cheap while both are there."""
    options = dict(text="sampled", tokens=320, align_config=str(align_file), mixer="none")
    spent = budget(saved_teacher("llama-gqa"), cache=0.4, **options)
    search = budget_search.BudgetSearch(spent, spent.teacher.open_weights(), lambda *args: None)
    alone = torch.tensor([[5.0, 4.0], [3.0, 2.0], [1.0, 0.0], [0.0, 0.0]])
    costs = HeadCosts({4: alone.tolist()}, torch.zeros(SHAPE).tolist(), None, CONTEXT, 0.3)
    chosen = best_of_count(spent, costs, "heads", 2, False, 16, spent.sizes(False))
    assert chosen.kept == ((0, 0), (0, 1)), "each by what it costs alone"
    asked = []

    def again(kept, window):
        asked.append(len(kept))
        table = torch.zeros(SHAPE)
        for layer, kv in kept:
            table[layer, kv] = 1.0 if (layer, kv) in ((1, 0), (1, 1)) else 0.5
        return table.tolist()

    monkeypatch.setattr(search, "_again", again)
    found = search.in_rounds(spent, chosen, costs, rounds=2)
    assert (
        found.kept == ((1, 0), (1, 1))
        and found.in_rounds
        and "2 heads with full attention, chosen in rounds" in found.text((4, 3))
    )
    assert asked == [4, 3] and found.nbytes <= spent.nbytes


def test_what_a_head_costs_when_others_see_a_window(saved_teacher, align_file):
    """Of two heads left, the costs add up to what it costs to take both away."""
    options = dict(text="sampled", tokens=320, align_config=str(align_file), mixer="none")
    spent = budget(saved_teacher("llama-gqa"), cache=0.4, **options)
    search = budget_search.BudgetSearch(spent, spent.teacher.open_weights(), lambda *args: None)
    search.settings = dataclasses.replace(search.settings, points=12)
    kept, window = {(1, 0), (2, 1)}, 5
    table = torch.tensor(search._again(kept, window))
    assert all((table[pair] != 0) == (pair in kept) for pair in itertools.product(range(4), range(2)))

    gates = torch.ones(4, 4)
    gates[1, :2] = gates[2, 2:] = 0
    kl = search.kl_loss()
    recall = search.asked
    ends = []
    for end in (gates, torch.ones(4, 4)):
        with torch.no_grad(), gated_heads(search.model, window, spent.options.sinks, end):
            total = kl(final_hidden(search.model, search.scoring)).item()
            if recall.counts:
                beyond = search.weight * (1 - window / CONTEXT)
                total += beyond * recall.loss(final_hidden(search.model, recall.probe.ids)).item()
        ends.append(total)
    assert table.sum().item() == pytest.approx(ends[1] - ends[0], rel=0.05, abs=1e-5)


def test_the_measure_is_the_models_own(saved_teacher, tmp_path, align_file):
    """What is reported of the choice taken, computed again from the checkpoint that was written."""
    folder = saved_teacher("llama-gqa")
    converted(folder, tmp_path / "out", align_file, mixer="none", work_dir=str(tmp_path / "work"))
    report = json.loads((tmp_path / "out" / "alignment.json").read_text())["budget"]
    (taken,) = [row for row in report["choices"] if row["taken"]]
    options = dict(text="sampled", tokens=320, align_config=str(align_file), mixer="none")
    spent = budget(folder, cache=0.4, **options)
    search = budget_search.BudgetSearch(spent, spent.teacher.open_weights(), lambda *args: None)
    teacher = search.model.whole()
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        of_teacher, of_student = (m(search.judging).logits.log_softmax(-1) for m in (teacher, student))
    kl = (of_teacher.exp() * (of_teacher - of_student)).sum(-1).mean().item()
    assert taken["measured"]["kl"] == pytest.approx(kl, rel=1e-3, abs=1e-6)


def test_dry_run_says_what_fits_and_reads_no_weight(saved_teacher, tmp_path, monkeypatch):
    monkeypatch.setattr("convert.weights.reader.SafetensorsCheckpoint.read_rows", None)
    flags = ("--align", "closed-form", "--cache", 0.5, "--context", CONTEXT, "--dry-run")
    done = run_as_is(saved_teacher("llama-gqa"), tmp_path / "out", *flags)
    assert done.returncode == 0, done.stderr
    assert "window" in done.stderr and "heads with full attention" in done.stderr and "a state beside" in done.stderr
    assert "->" not in done.stderr.split("budget")[1] and "scores decide when this is run" in done.stderr
    shown = json.loads(run_as_is(saved_teacher("llama-gqa"), tmp_path / "out", *flags, "--json").stdout)
    assert all(row["bytes"] <= shown["budget"]["bytes"] for row in shown["budget"]["choices"])
    assert not any(row["taken"] for row in shown["budget"]["choices"])
    assert shown["window"] > 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flags, expected",
    [
        (("--cache", "0.5", "--cache", "1MB"), "contradict"),
        (("--cache", "0.5", "--attention-layers", "0.5"), "contradict"),
        (("--cache", "1.5"), "in (0, 1]"),
        (("--cache", "0.5", "--measure", "-1"), "cannot be negative"),
        (("--cache", "0.5", "--attention-layers", "1", "--align", "none"), "contradict"),
        (("--cache", "0.0001"), "too little"),
        (("--cache", "0.5", "--window", "5000"), "too little"),
        (("--cache", "0.5", "--attention-heads", "9:0"), "layers are 0 to 3"),
    ],
)
def test_contradictions(flags, expected, saved_teacher, tmp_path):
    align = () if "--align" in flags else ("--align", "closed-form")
    done = run_as_is(saved_teacher("llama-gqa"), tmp_path / "out", *align, *flags, "--dry-run")
    check_one_line_error(done, expected)


def test_measure_without_a_budget_warns():
    with pytest.warns(UserWarning, match="measure has no effect"):
        make_options(model="m", output="o", measure=2, attention_layers=0.5)


SAID = (
    {"window": 32}, {"mixer": "mamba2"}, {"align": "none"}, {"align": "mohawk"}, {"attention_layers": 0.5},
    {"low_memory": True}, {"selection": "uniform"}, {"shared_state": True}, {"export_ready": True},
)  # fmt: skip


@pytest.mark.parametrize("said", SAID, ids=lambda said: next(iter(said)))
def test_a_quarter_of_the_cache_where_nothing_is_said_of_the_layers(said):
    assert make_options(model="m", output="o", tokens=9999, dtype="float32").cache == 0.25
    assert make_options(model="m", output="o", **said).cache is None
