"""A cache budget spent on heads, window and state together, and what the search of heads goes by."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from convert import convert
from convert.dry_run import plan_conversion
from convert.fit.aligner import Aligner
from convert.fit.layer_data import LayerData, Pieces
from convert.fit.memory_estimate import host_bytes
from convert.layout.cache import attention_bytes, cache_bytes
from convert.layout.config import hybrid_config
from convert.layout.placement import Attention, CacheBits, Decision, Hybrid, Mixer, Placement, everywhere
from convert.layout.presets import query_heads
from convert.options import evicted_tokens, make_options
from convert.pipeline import run
from convert.plan import describe, make_plan
from convert.resolve import resolve
from convert.scores import budget as of_budget
from convert.scores import decide, layer_costs
from convert.scores.budget import LONG_SEQUENCE, NARROW, NARROW_BITS, WIDE, Budget, follow_windows
from convert.scores.decide import decide_placement
from convert.scores.layer_costs import LOOKING_UP, POWER, spread_windows
from convert.teachers.teacher import find_teacher, teacher_layer_types
from convert.teachers.weights import TeacherWeights
from convert.train.mohawk.layerwise import run_key
from modeling_llamba import LlambaConfig
from modeling_llamba.compatibility import cache_of
from modeling_llamba.model.cache import cache_nbytes
from tests.helpers.hybrids import make_hybrid
from tests.helpers.teachers import TEACHERS, make_teacher, random_ids
from tests.helpers.tiny import config_of

CONTEXT, SHAPE = 400, (4, 2)
RANKED = [(1, 0), (3, 0), (3, 1), (0, 1), (2, 0), (0, 0), (1, 1), (2, 1)]
SEARCH = {
    "text": "sampled", "tokens": 320, "context": CONTEXT, "cache": 0.4,
    "alignment": {"sequence_length": 32, "held_out_sequences": 2},
}  # fmt: skip


def options_of(folder, **options):
    return make_options(str(folder), "o", **{"context": CONTEXT, "cache": 0.5} | options)


def budget_of(options):
    weights = TeacherWeights.of(find_teacher(options.model))
    return Budget(weights, resolve(options, weights))


def budget(folder, **options):
    return budget_of(options_of(folder, **options))


def placed(spent):
    """The placement by RANKED, and what it takes as the plan counts it."""
    placement = spent.placement([pair for pair in RANKED if pair not in spent.given_heads])
    plan = make_plan(spent.weights, Decision(placement), spent.resolved)
    return placement, cache_bytes(plan.config, CONTEXT)[1]


def kept_kv_heads(placement):
    kept = {(layer, kv) for layer in placement.attention_layers for kv in range(SHAPE[1])}
    return kept | {(layer, head // 2) for layer, heads in placement.full_heads.items() for head in heads}


@pytest.mark.parametrize("cache", [0.2, 0.35, 0.5, 0.7, 0.95])
def test_a_placement_keeps_within_the_budget_and_uses_it(cache, saved_teacher):
    spent = budget(saved_teacher("llama-gqa"), cache=cache)
    placement, taken = placed(spent)
    kept = kept_kv_heads(placement)
    assert taken <= spent.nbytes
    assert kept == set(RANKED[: len(kept)])
    hybrid = placement.hybrid
    assert hybrid.state
    assert (hybrid.sinks, hybrid.salient, hybrid.block) == (4, 16, 16)
    assert hybrid.window % hybrid.block == 0
    if hybrid.window < spent.longest_window:  # one block more and it would be too much
        wider = placement.with_windows(dict.fromkeys(placement.windows, hybrid.window + hybrid.block))
        config = hybrid_config(spent.weights, wider, spent.resolved.mixer)
        assert cache_bytes(config, CONTEXT)[1] > spent.nbytes


def test_more_cache_keeps_more_heads(saved_teacher):
    counts = [
        len(kept_kv_heads(placed(budget(saved_teacher("llama-gqa"), cache=cache))[0])) for cache in (0.25, 0.5, 0.75)
    ]
    assert counts == sorted(set(counts))


@pytest.mark.parametrize(
    "options, window, kept",
    [
        (dict(window=12), 12, None),
        (dict(block=8), None, None),
        (dict(attention_heads="1:0,1:1,2:3"), None, {(1, 0), (2, 1)}),
        (dict(attention_heads=2), None, {(1, 0), (3, 0)}),
        (dict(attention_layers=[2], window=6), 6, None),
        (dict(attention_layers=[2], attention_heads="0:1"), None, {(0, 0), (2, 0), (2, 1)}),
        (dict(mixer="none"), None, None),
    ],
)
def test_what_is_said_stays(options, window, kept, saved_teacher):
    spent = budget(saved_teacher("llama-gqa"), **options)
    placement, taken = placed(spent)
    assert window is None or placement.hybrid.window == window
    assert kept is None or kept_kv_heads(placement) == kept
    assert "attention_layers" not in options or 2 in placement.attention_layers
    assert placement.hybrid.state == ("mixer" not in options)
    assert placement.hybrid.block == options.get("block", {12: 4, 6: 2}.get(window, 16))
    assert taken <= spent.nbytes


def test_a_window_beside_a_state_leaves_half_of_a_sequence_to_fit_on(saved_teacher):
    """Its blocks are an eighth of that at most; a block that is given stays."""
    folder = saved_teacher("llama-gqa")
    beside = budget(folder, cache=0.6, attention_heads=1, sequence_length=64)
    assert (beside.longest_window, beside.block) == (32, 4)
    assert placed(beside)[0].hybrid.window == 32
    given = budget(folder, cache=0.6, attention_heads=1, sequence_length=64, block=10)
    assert (given.longest_window, given.block) == (30, 10)
    assert placed(given)[0].hybrid.window == 30
    short = budget(folder, cache=0.6, attention_heads=1, sequence_length=32)  # half would leave none but salient ones
    assert short.longest_window == 10
    assert evicted_tokens(32, 10, 20, short.block) > 0
    alone = budget(folder, cache=0.9, mixer="none", attention_heads=1, sequence_length=64)
    assert placed(alone)[0].hybrid.window > 200


def with_window(folder, copy, window):
    """A copy of a teacher whose own layers with a window see another."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"sliding_window": window}))
    return copy


@pytest.mark.parametrize("cache", [0.6, None], ids=["budget", "default"])
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo3", "qwen2-mixed-window"])
@torch.no_grad()
def test_the_teachers_own_windows_stay(name, cache, saved_teacher, tmp_path):
    """The budget goes to the other layers, whose heads alone can see everything, and the bytes are the cache's own.
    By default the share is of the others' cache."""
    share, own = cache or 0.08, 8 if cache else 150
    teacher = with_window(saved_teacher(name), tmp_path / "teacher", own)
    plan = convert(str(teacher), tmp_path / "out", **SEARCH | {"cache": cache})
    assert plan.placement.hybrid.state
    assert plan.placement.hybrid.salient
    windows = [i for i, kind in enumerate(plan.config.conversion["teacher_layer_types"]) if kind != "full_attention"]
    others = {0, 1, 2, 3} - set(windows)
    assert len(windows) == 2
    assert set(plan.placement.replaced_layers) <= others
    assert all(plan.config.layer_types[i] == "sliding_attention" for i in windows)
    assert plan.placement.full_heads.keys() <= others
    assert plan.placement.hybrid.window > 8
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    seen = model(random_ids(1, CONTEXT)).cache
    taken = cache_bytes(plan.config, CONTEXT)
    kept = 0 if cache else 2 * attention_bytes(plan.config, "sliding_attention", CONTEXT)
    assert cache_nbytes(seen) == taken[1] <= share * (taken[0] - kept) + kept
    whole = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.bfloat16)
    whole = cache_of(whole(random_ids(1, CONTEXT), use_cache=True))
    assert cache_nbytes(whole) == taken[0]


@pytest.mark.parametrize(
    "said", [dict(cache=0.3), dict(cache=None, window=8), dict(cache=None, window=8, align="none")]
)
def test_heads_of_a_layer_that_keeps_its_window_see_nothing_else(said, saved_teacher):
    folder = saved_teacher("gemma3")
    with pytest.raises(ValueError, match="heads of layer 0, which has a sliding window .* those of layers 0, 2"):
        plan_conversion(make_options(str(folder), "o", attention_heads="0:1,1:0,2:3", **said))
    kept = plan_conversion(make_options(str(folder), "o", attention_heads="1:0", **said)).placement
    assert kept.full_heads[1] == (0, 1)


def test_mixers_alone_are_no_search(saved_teacher):
    """A budget then says how many layers keep attention."""
    for said in (dict(align="none"), dict(export_ready=True), dict(shared_state=True), dict(mixer="mamba1")):
        options = options_of("m", **said)
        assert not options.searches_budget
        assert not options.has_windows
    config = plan_conversion(options_of(saved_teacher("llama-gqa"), cache=0.6, shared_state=True)).config
    assert set(config.layer_types) == {"full_attention", "linear_attention"}
    assert config.mixer_shared_state


def test_a_teacher_all_of_whose_layers_have_windows_keeps_them(saved_teacher):
    """By default with a note; mixers alone are made as many as a budget wants."""
    folder = str(saved_teacher("mistral-window"))
    options = make_options(folder, "o")
    decision = decide_placement(budget_of(options))
    assert decision.placement == everywhere(Attention(), 4)
    assert not decision.needs_scores
    assert "every layer has a window of 8 tokens" in describe(plan_conversion(options))
    asked = options_of(folder, cache=0.85, d_state=1, text="sampled", tokens=5120)
    placement = decide_placement(budget_of(asked)).placement
    assert placement.attention_layers == (1, 3)
    assert placement.replaced_layers == (0, 2)
    assert placement.hybrid is None
    within = dict(cache=0.8, mixer="none")
    for said in (
        dict(cache=0.5),
        within,
        dict(cache=0.8, attention_heads=2),
        dict(window=4),
        dict(window=4, attention_layers=0.5),
    ):
        with pytest.raises(ValueError, match="Every layer of this teacher has a window of 8"):
            budget_of(make_options(folder, "o", **said))


def test_the_plan_is_said_before_scores_and_its_placement_is_what_the_configuration_stores(saved_teacher, tmp_path):
    """Scores take minutes of a large teacher, and which heads they choose changes no bytes."""
    plans, doing = [], []

    def on_plan(plan):
        plans.append(plan)
        doing.append("plan")

    def progress(what, done, total):
        if doing[-1] != what:
            doing.append(what)

    options = make_options(str(saved_teacher("llama-gqa")), str(tmp_path / "out"), **SEARCH, rank=4, bits=16)
    plan = run(options, on_plan, progress)
    measuring = ["scoring heads, layers", "measuring heads, layers", "measuring layers"]
    assert doing == ["plan", "reading text, rows", *measuring, "plan", "aligning, layers", "writing, MB"]
    assert plans[0].notes
    assert not plan.notes
    assert plans[0].summary()["cache_bytes"] == plans[1].summary()["cache_bytes"] == plan.summary()["cache_bytes"]
    layers = plan.placement.windows
    assert plans[1].placement == plan.placement.with_ranks(dict.fromkeys(layers, 4))
    ranks = json.loads((tmp_path / "out" / "alignment.json").read_text())["ranks"]
    assert {int(layer): rank for layer, rank in ranks.items()} == {i: plan.config.rank_of(i) for i in layers}
    assert sum(ranks.values()) <= 4 * len(layers)
    assert Placement.of(LlambaConfig.from_pretrained(tmp_path / "out")) == plan.placement
    assert plan.placement.replaced_layers
    assert plan.placement.full_heads
    report = json.loads((tmp_path / "out" / "alignment.json").read_text())
    best_of_kv = {
        (layer, kv): LOOKING_UP * max(of[2 * kv : 2 * kv + 2]) + report["head_gains"][layer][kv]
        for layer, of in enumerate(report["retrieval_scores"])
        for kv in range(2)
    }
    kept = kept_kv_heads(plan.placement)
    assert min(best_of_kv[pair] for pair in kept) >= max(best_of_kv[pair] for pair in best_of_kv.keys() - kept)
    teacher, hybrid = cache_bytes(plan.config, CONTEXT)
    assert hybrid <= 0.4 * teacher
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = random_ids(1, 40)
    with torch.no_grad():
        cache = model(ids[:, :30], use_cache=True).cache
        stepped = model(ids[:, 30:], cache=cache).logits
        torch.testing.assert_close(stepped, model(ids).logits[:, 30:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name, layers",
    [
        ("llama-gqa", (Attention(), Mixer(), Attention(), Mixer())),
        ("mistral-window", (Attention(), Mixer(), Attention(), Mixer())),
        ("llama-gqa", (Hybrid(8, 2, 2), Attention(), Hybrid(8, 2, 2), Hybrid(8, 2, 2))),
        ("gemma3", (Attention(), Hybrid(8, 4, 2), Attention(), Hybrid(12, 4, 2))),
        ("llama-gqa", (Hybrid(8, 2, 0, (2, 3)), Hybrid(6, 2, 0), Attention(), Hybrid(8, 2, 0, (0, 1)))),
        ("llama-gqa", (Hybrid(8, 2, 2, rank=8), Hybrid(8, 2, 2), Attention(), Hybrid(8, 2, 2, rank=16))),
        ("llama-gqa", (Hybrid(8, 2, 2, planes=1), Hybrid(6, 2, 2, planes=1), Attention(), Hybrid(8, 2, 2, planes=1))),
        (
            "llama-gqa",
            (Hybrid(8, 2, 2, state=False), Hybrid(8, 2, 2, (2, 3), state=False), Attention(), Attention()),
        ),
        ("llama-gqa", (Mixer(), Hybrid(6, 3, 1, (0, 1), salient=3, rank=2), Attention(), Mixer())),
        ("llama-gqa", (Attention(),) * 4),
    ],
    ids=["mixers", "of windows", "windows", "own", "heads", "ranks", "planes", "no state", "all kinds", "attention"],
)
def test_a_configuration_stores_every_kind_of_placement(name, layers, saved_teacher, tmp_path):
    """As typed fields, from which the same placement is read back."""
    placement = Placement(layers)
    weights = TeacherWeights.of(find_teacher(str(saved_teacher(name))))
    config = config_of(weights, placement)
    config.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert Placement.of(type(config).from_pretrained(tmp_path)) == placement
    assert not any(isinstance(stored[field], str) for field in ("layer_types", "hybrid_full_heads", "hybrid_window"))
    assert placement.keeping(range(4)) == everywhere(Attention(), 4)


def test_windows_are_wide_where_layers_are_wrong():
    errors, alike = {0: 0.001, 2: 0.05, 3: 0.01, 5: 0.0001}, dict.fromkeys((0, 2, 3, 5), 1)
    windows = spread_windows(400, errors, alike, 320, 1)
    assert sum(windows.values()) == 400
    assert windows.keys() == errors.keys()
    assert windows[5] == windows[0] == 40 < windows[3] < windows[2] <= 320

    def left(widths):
        return sum(error * widths[layer] ** -POWER for layer, error in errors.items())

    for more in errors:  # no step from one layer to another would be better
        for less in errors.keys() - {more}:
            if windows[less] > 40 and windows[more] <= 300:
                assert left(windows) <= left(windows | {more: windows[more] + 20, less: windows[less] - 20})
    assert min(spread_windows(240, errors, alike, 320, 1).values()) == 20  # the narrowest that there is
    assert spread_windows(4 * 320, errors, alike, 320, 1) == dict.fromkeys(errors, 320)


@pytest.mark.parametrize("block, columns", [(1, 1000), (4, 1003), (16, 1000), (16, 2000), (16, 260)])
def test_windows_of_layers_with_fewer_heads_cost_less(block, columns):
    """Whole blocks, two at least; one more in any layer would be too much."""
    errors, heads = {0: 0.01, 1: 0.01, 2: 0.03, 3: 0.002}, {0: 1, 1: 3, 2: 2, 3: 2}
    windows = spread_windows(columns, errors, heads, 320, block)
    assert all(width % block == 0 and 2 * block <= width <= 320 for width in windows.values())
    spent = sum(width * heads[layer] for layer, width in windows.items())
    assert spent <= columns
    assert all(width == 320 or spent + block * heads[layer] > columns for layer, width in windows.items())
    assert windows[0] >= windows[1]


EVENLY = [(layer, kv) for kv in range(SHAPE[1]) for layer in range(SHAPE[0])]
NEVER_WHOLE = EVENLY[: SHAPE[0]]


@pytest.mark.parametrize("better", [(6, 4), (4, 4)])
@pytest.mark.parametrize("window", [None, 32])
def test_bits_are_those_of_the_smaller_errors(better, window, saved_teacher, monkeypatch):
    """Within one budget: fewer bits leave room for more heads, or else for wider windows."""
    monkeypatch.setattr(decide, "_ranked", lambda *args: NEVER_WHOLE)
    measured = []

    def layer_errors(aligner, placements):
        measured.extend(placements)
        return [dict.fromkeys(of.windows, 1.0 if of.bits.full == better else 1.2) for of in placements]

    monkeypatch.setattr(layer_costs, "layer_errors", layer_errors)
    options = dict(cache=0.4) if window is None else dict(cache=0.3, window=window)
    spent = budget(saved_teacher("qwen3"), sequence_length=128, **options)
    aligner = SimpleNamespace(report={})
    placement = decide_placement(spent, aligner).placement
    assert placement.bits == CacheBits(better, (8, 8))
    assert [of.bits.full for of in measured] == [(6, 4), (4, 4)]
    usual, fewer = measured
    assert len(fewer.full_heads) > len(usual.full_heads) or spent.columns(fewer) > spent.columns(usual)
    for of in (*measured, placement):
        assert cache_bytes(hybrid_config(spent.weights, of, spent.resolved.mixer), CONTEXT)[1] <= spent.nbytes
    assert [entry["full_attention_bits"] for entry in aligner.report["layer_errors"]] == [[6, 4], 4]
    shown = decide_placement(spent)
    assert "bits" in shown.undecided
    assert shown.placement.bits == CacheBits((6, 4), (8, 8))


@pytest.mark.parametrize(
    "said, ranked, tried",
    [
        (dict(bits=8), NEVER_WHOLE, []),
        (dict(mixer="none"), NEVER_WHOLE, []),
        (dict(attention_heads=0), [], []),
        ({}, NEVER_WHOLE, [(4, 4)]),
        ({}, [(0, 0), (0, 1), (1, 0)], [(4, 4), (8, 4), (8, 8)]),  # layer 0 keeps all of its attention
        (dict(attention_layers=[2], attention_heads="1:0", window=32, cache=0.25), [], [(4, 4), (8, 4)]),
    ],
)
def test_more_bits_are_tried_where_rounding_is_the_only_error(said, ranked, tried, saved_teacher, monkeypatch):
    monkeypatch.setattr(decide, "_ranked", lambda *args: ranked)
    measured = []

    def layer_errors(aligner, placements):
        measured.extend(placements)
        return [{0: 1.0}] * len(placements)

    monkeypatch.setattr(layer_costs, "layer_errors", layer_errors)
    options = dict(cache=0.4) | said
    spent = budget(saved_teacher("qwen3"), sequence_length=128, **options)
    assert ("bits" in decide_placement(spent).undecided) == bool(tried)
    if tried:  # windows of a given width are not spread, which would take real errors
        fixed = dataclasses.replace(spent, resolved=dataclasses.replace(spent.resolved, window=32))
        decide_placement(fixed, SimpleNamespace(report={}))
        assert [of.bits.full for of in measured[1:]] == tried


@pytest.mark.parametrize("better", [None, 2])
def test_states_that_take_much_may_keep_less_of_a_key(better, saved_teacher, monkeypatch):
    """Heads and windows get the bytes; the errors of both decide."""
    measured = []
    monkeypatch.setattr(decide, "_ranked", lambda *args: NEVER_WHOLE)
    monkeypatch.setattr(of_budget, "LEAST_PLANES", 1)
    monkeypatch.setattr(of_budget, "STATES_SHARE", 0.01)

    def layer_errors(aligner, placements):
        measured.extend(placements)
        return [dict.fromkeys(of.windows, 1.0 if of.hybrid.planes == better else 1.2) for of in placements]

    monkeypatch.setattr(layer_costs, "layer_errors", layer_errors)
    spent = budget(saved_teacher("qwen3"), sequence_length=512, cache=0.4, bits=8)
    aligner = SimpleNamespace(report={})
    placement = decide_placement(spent, aligner).placement
    assert placement.hybrid.planes == better
    half, quarter = aligner.report["layer_errors"]
    assert (half["planes"], quarter["planes"]) == (None, 2)
    assert sum(quarter["windows"].values()) > sum(half["windows"].values())
    assert hybrid_config(spent.weights, placement, spent.resolved.mixer).hybrid_state_planes == (better or 4)
    for of in (*measured, placement):
        assert cache_bytes(hybrid_config(spent.weights, of, spent.resolved.mixer), CONTEXT)[1] <= spent.nbytes
    assert "planes" in decide_placement(spent).undecided
    monkeypatch.setattr(of_budget, "STATES_SHARE", 1.0)
    assert "planes" not in decide_placement(spent).undecided


@pytest.mark.parametrize("context, cache", [(512, 0.4), (512, 0.46), (512, 0.52), (700, 0.37)])
def test_all_bits_keep_within_the_budget(context, cache, saved_teacher):
    """Also where a window takes more bytes than a kept head, so that more heads leave more room."""
    spent = budget(saved_teacher("qwen3"), context=context, cache=cache)
    placements = spent.placements(spent.every_head)
    assert [of.bits.full for of in placements] == [(6, 4), (4, 4), (8, 4), (8, 8)]
    for of in placements:
        assert of.full_heads
        assert cache_bytes(hybrid_config(spent.weights, of, spent.resolved.mixer), context)[1] <= spent.nbytes


@pytest.mark.parametrize("teacher", ["llama-gqa", "phi3-partial-rotary-window"])
@pytest.mark.parametrize("bits", [None, 8])
def test_what_is_not_replaced_is_rounded_if_the_user_says_so(teacher, bits, saved_teacher):
    """A budget of all bytes, and a teacher whose layers all have windows."""
    said = {} if bits is None else {"bits": bits}
    if teacher == "llama-gqa":
        options = options_of(saved_teacher(teacher), cache=1.0, **said)
    else:
        options = make_options(str(saved_teacher(teacher)), "o", **said)
    expected = CacheBits() if bits is None else CacheBits((bits, bits), (bits, bits))
    plan = plan_conversion(options)
    assert plan.placement == everywhere(Attention(), SHAPE[0], expected)
    assert (f"bits        {bits} in full attention" in describe(plan)) == (bits is not None)


def test_what_fits_in_fewer_bits_alone_is_not_refused(saved_teacher):
    """Heads that are named, and heads that are chosen."""
    named = "0:0,0:2,1:0,1:2,2:0"
    spent = budget(saved_teacher("qwen3"), attention_heads=named, cache=0.24)
    assert follow_windows(spent.weights, spent.resolved).bits.full == spent.resolved.bits.full
    assert decide_placement(spent).placement.bits.full == (4, 4)
    with pytest.raises(ValueError, match="too little"):
        decide_placement(budget(saved_teacher("qwen3"), attention_heads=named, cache=0.22))
    chosen = budget(saved_teacher("qwen3"), cache=0.12, sequence_length=128)
    usual, fewer, *_ = chosen.placements(chosen.every_head)
    assert not usual.full_heads
    assert fewer.full_heads
    assert "bits" in decide_placement(chosen).undecided


def test_the_error_of_rounding_is_that_of_the_layer(saved_teacher):
    """More bits, less error; layers with a window in the teacher are not measured."""
    spent = budget(saved_teacher("gemma3"), text="sampled", tokens=320, sequence_length=32)
    aligner = Aligner(spent.weights, spent.resolved)
    aligner.ids = random_ids(8, 32)
    teacher = everywhere(Attention(), SHAPE[0])
    placements = [dataclasses.replace(teacher, bits=CacheBits(full, (8, 8))) for full in ((4, 4), (8, 4), (8, 8))]
    found = layer_costs.layer_errors(aligner, [teacher, *placements])
    whole = [i for i, kind in enumerate(spent.weights.config.layer_types) if kind == "full_attention"]
    assert [list(errors) for errors in found] == [[], whole, whole, whole]
    for layer in whole:
        four, mixed, eight = (errors[layer] for errors in found[1:])
        assert 5e-2 > four > mixed > eight > 5e-8


def test_errors_are_measured_with_offsets(tmp_path):
    """Layers that keep all of their attention, and kept heads: all keys have much in common here."""
    teacher = make_teacher("qwen2")
    with torch.no_grad():
        for layer in teacher.model.layers:
            layer.self_attn.k_proj.bias.view(-1, 8)[:, [3, 7]] += 200.0
    teacher.save_pretrained(tmp_path / "teacher")
    spent = budget(tmp_path / "teacher", text="sampled", tokens=640, sequence_length=64)
    aligner = Aligner(spent.weights, spent.resolved)
    aligner.ids = random_ids(8, 64)
    kept = everywhere(Attention(), SHAPE[0])
    beside = spent.windows_alone().with_full_heads(query_heads(NEVER_WHOLE, spent.shared))
    placements = [dataclasses.replace(of, bits=CacheBits((8, 8), (8, 8))) for of in (kept, beside)]
    sums = []
    for offsets in (True, False):
        mixer = spent.resolved.mixer | {"key_offsets": offsets}
        found = layer_costs.layer_errors(aligner, placements, mixer)
        sums.append([sum(errors.values()) for errors in found])
    for with_offsets, without in zip(*sums, strict=True):
        assert with_offsets < 0.7 * without


def test_rounding_of_kept_heads_counts_more_since_it_stays(saved_teacher, monkeypatch):
    spent = budget(saved_teacher("qwen3"), text="sampled", tokens=640, sequence_length=64)
    aligner = Aligner(spent.weights, spent.resolved)
    aligner.ids = random_ids(8, 64)
    hybrid = spent.windows_alone().with_full_heads(query_heads([(0, 0), (1, 1)], spent.shared))
    placements = [dataclasses.replace(hybrid, bits=CacheBits(full, (8, 8))) for full in ((16, 16), (4, 4))]
    exact, counted = layer_costs.layer_errors(aligner, placements)
    monkeypatch.setattr(layer_costs, "ROUNDING_WEIGHT", 1)
    assert layer_costs.layer_errors(aligner, placements[:1]) == [exact]
    (rounded,) = layer_costs.layer_errors(aligner, placements[1:])
    for layer in range(2):
        assert counted[layer] - exact[layer] == pytest.approx(5 * max(rounded[layer] - exact[layer], 0), rel=1e-3)
    assert rounded[2] == counted[2]  # without kept heads


def test_kept_heads_are_rounded_again_after_memory_ran_out(monkeypatch):
    layer = make_hybrid(pattern="beside-only", full_attention_bits=8).model.layers[1].mixer
    assert layer.kept
    rounded = layer.kept_roundings
    monkeypatch.setattr(layer_costs, "_errors_before_fit", lambda *args: [1.0])
    monkeypatch.setattr(layer_costs, "held_out_error", lambda *args: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        layer_costs._error_before_fit(layer, LayerData(None, None, None, 1), Pieces())
    assert layer.kept_roundings == rounded


def test_a_conversion_records_the_errors_that_chose_its_bits(saved_teacher, tmp_path, monkeypatch):
    monkeypatch.setattr(decide, "_ranked", lambda *args: NEVER_WHOLE)
    plan = convert(str(saved_teacher("qwen3")), tmp_path / "out", **SEARCH)
    found = json.loads((tmp_path / "out" / "alignment.json").read_text())["layer_errors"]
    sums = {str(entry["full_attention_bits"]): sum(entry["errors"].values()) for entry in found}
    assert sums.keys() == {"[6, 4]", "4"}
    assert str(plan.config.full_attention_bits) == min(sums, key=sums.get)


def test_a_budget_reads_longer_sequences(saved_teacher, monkeypatch):
    """What lies beyond a window that the budget chooses has to be long, unless the length is said."""
    monkeypatch.setattr("convert.fit.text.sample_rows", lambda model, length, count, seed: random_ids(count, length))
    folder, text = str(saved_teacher("llama-gqa")), dict(text="sampled", tokens=5120)
    within, layers = text | dict(cache=0.5), text | dict(attention_layers=0.5)
    window = layers | dict(window=32)
    longer = within | dict(sequence_length=640)
    for said, shape in ((within, (5, 1024)), (longer, (8, 640)), (window, (5, 1024)), (layers, (10, 512))):
        made = budget_of(make_options(folder, "o", **said))
        assert Aligner(made.weights, made.resolved).ids.shape == shape


def test_sequences_are_lengthened_for_wide_windows(saved_teacher):
    """Within them a state has more tokens to be fitted on, and windows may be wider than half of the default."""

    def lengthened(limit=8192, **said):
        options = options_of(saved_teacher("llama-gqa"), **{"context": 4096, "attention_heads": 0} | said)
        weights = TeacherWeights.of(find_teacher(options.model))
        weights.config.max_position_embeddings = limit
        resolved = follow_windows(weights, resolve(options, weights))
        return resolved.sequence_length, Budget(weights, resolved).placement([]).hybrid.window

    length, window = lengthened(cache=0.15)
    assert length == LONG_SEQUENCE
    assert window > 512
    length, window = lengthened(cache=0.03)
    assert length == 1024
    assert window <= WIDE * length
    for reason_to_stay in (
        {"limit": 1024},
        {"context": 1024},
        {"window": 512},
        {"sequence_length": 1024},
        {"tokens": 8192},
    ):
        assert lengthened(cache=0.15, **reason_to_stay)[0] == 1024


def test_wide_windows_give_places_to_salient_tokens(saved_teacher):
    """A quarter of what the budget has for both, unless their number is said; none where no state is fitted."""

    def followed(**said):
        options = options_of(saved_teacher("llama-gqa"), **{"context": 4096, "attention_heads": 0} | said)
        weights = TeacherWeights.of(find_teacher(options.model))
        weights.config.max_position_embeddings = 8192
        return Budget(weights, follow_windows(weights, resolve(options, weights)))

    for share in (0.08, 0.15):  # at the second the windows are wide, and sequences are lengthened
        spent = followed(cache=share)
        before = followed(cache=share, salient=16).placement([]).hybrid
        hybrid = spent.placement([]).hybrid
        tokens = before.window + before.salient
        assert 32 <= hybrid.salient <= tokens / 4 < hybrid.salient + hybrid.block
        assert abs(hybrid.window + hybrid.salient - tokens) < hybrid.block
        assert spent.resolved.decided()["salient"]["value"] == hybrid.salient
    assert spent.resolved.sequence_length == LONG_SEQUENCE
    assert followed(cache=0.08, salient=20).resolved.salient == 20
    assert followed(cache=0.08, window=128).resolved.salient == 16
    assert followed(cache=0.08, mixer="none").resolved.salient == 0
    assert followed(cache=0.015).resolved.salient == 16


def test_narrow_windows_have_fewer_bits(saved_teacher):
    """And so are wider; not where the user gives bits, none decides them, or the teacher has windows of its own."""

    def followed(name="qwen3", **said):
        options = options_of(saved_teacher(name), **{"context": 4096, "attention_heads": 0, "cache": 0.02} | said)
        weights = TeacherWeights.of(find_teacher(options.model))
        before = resolve(options, weights)
        return Budget(weights, before), Budget(weights, follow_windows(weights, before))

    before, after = followed()
    assert before.placement([]).hybrid.window <= NARROW
    assert after.placement([]).hybrid.window > before.placement([]).hybrid.window
    assert {bits.window for bits in (after.resolved.bits, *after.resolved.other_bits)} == {NARROW_BITS}
    assert after.resolved.bits.full == before.resolved.bits.full
    assert "fewer" in after.resolved.decided()["bits"]["reason"]
    # nor where longer calibration sequences make a window a smaller share of one, or short ones bound it
    long, short = ({"alignment": {"sequence_length": length, "tokens": 2**18}} for length in (8192, 160))
    unchanged = ({"cache": 0.08}, {"bits": 8}, {"window": 64, "cache": 0.08}, {"mixer": "none"}, {"name": "gemma3"})
    for said in (*unchanged, {"cache": 0.08} | long, {"cache": 0.08} | short):
        before, after = followed(**said)
        assert after.resolved.bits == before.resolved.bits


def test_a_budget_for_windows_in_fewer_bits_alone_is_not_refused(saved_teacher):
    options = options_of(saved_teacher("qwen3"), context=4096, attention_heads=0, cache=0.02)
    weights = TeacherWeights.of(find_teacher(options.model))
    resolved = resolve(options, weights)

    def least(budget):
        return budget._bytes([], budget.narrowest_window)

    in_few = dataclasses.replace(resolved, bits=dataclasses.replace(resolved.bits, window=NARROW_BITS))
    between = (least(Budget(weights, in_few)) + least(Budget(weights, resolved))) // 2
    resolved = dataclasses.replace(resolved, cache_bytes=between)
    with pytest.raises(ValueError, match="too little"):
        Budget(weights, resolved).placement([])
    spent = Budget(weights, follow_windows(weights, resolved))
    assert spent.placement([]).hybrid.window == spent.narrowest_window


def test_the_same_tokens_in_longer_sequences_are_another_run(saved_teacher, tmp_path):
    """Fits, and what stages of training have done, are kept for a run that goes on."""
    spent, ids, folders, keys = budget(saved_teacher("llama-gqa")), random_ids(8, 64), set(), set()
    for rows in (ids, ids.view(4, 128), ids):
        aligner = Aligner(spent.weights, spent.resolved, work=tmp_path)
        aligner.ids = rows
        aligner.follow(everywhere(Mixer(), 4))
        folders.add(aligner.cache(spent.resolved.alignment.fit).folder)
        keys.add(run_key(spent.resolved.alignment.distillation, rows, 0, {}))
    assert len(folders) == len(keys) == 2


def test_fits_of_rounded_keys_are_another_run(saved_teacher, tmp_path):
    spent, folders = budget(saved_teacher("llama-gqa")), []
    few_bits = (CacheBits(full=(8, 8)), CacheBits(window=(8, 8)))
    for bits in (CacheBits(), *few_bits, CacheBits()):
        aligner = Aligner(spent.weights, spent.resolved, work=tmp_path)
        aligner.ids = random_ids(8, 64)
        aligner.follow(dataclasses.replace(everywhere(Hybrid(8, 4, 1), 4), bits=bits))
        folders.append(aligner.cache(spent.resolved.alignment.fit).folder)
    assert len(set(folders)) == 3
    assert folders[0] == folders[-1]


def test_a_dry_run_says_what_fits_and_reads_no_weight(saved_teacher, monkeypatch):
    monkeypatch.setattr("convert.io.reader.SafetensorsCheckpoint.read_rows", None)
    plan = plan_conversion(options_of(saved_teacher("llama-gqa")))
    text, shown = describe(plan), plan.summary()
    assert "window" in text
    assert "full heads" in text
    assert "the run chooses" in text
    assert shown["window"] > 1
    assert shown["attention_heads"]
    teacher, hybrid = cache_bytes(plan.config, CONTEXT)
    assert hybrid <= 0.5 * teacher


@pytest.mark.parametrize(
    "said, expected",
    [
        (dict(attention_layers=0.5), "cache already sets how many layers keep attention"),
        (dict(cache=1.5), "cache 1.5 is no share"),
        (dict(attention_layers=[1], align="none"), "cache already sets how many layers keep attention"),
        (dict(cache=0.0001), "too little"),
        (dict(cache="1KB"), "too little"),
        (dict(window=5000, mixer="none"), "too little"),
        (dict(attention_layers="all", cache=0.2), "too little"),
        (dict(window=5000), "cover whole calibration sequences"),
        (dict(attention_heads="9:0"), "layers are 0 to 3"),
    ],
)
def test_contradictions(said, expected, saved_teacher):
    with pytest.raises(ValueError, match=expected):
        plan_conversion(options_of(saved_teacher("llama-gqa"), **said))


SAID = (
    {"window": 32}, {"mixer": "mamba2"}, {"align": "none"}, {"align": "mohawk"}, {"attention_layers": 0.5},
    {"attention_heads": "0:1", "window": 8}, {"export_ready": True},
)  # fmt: skip


@pytest.mark.parametrize("said", SAID, ids=lambda said: next(iter(said)))
def test_a_small_share_of_the_cache_where_nothing_is_said_of_the_layers(said):
    assert make_options("m", "o", tokens=9999, dtype="float32").cache == 0.08
    assert make_options("m", "o", **said).cache is None
    assert make_options("m", "o", sinks=2).cache == 0.08
    assert make_options("m", "o", shared_state=True).cache == 0.08
    with pytest.raises(ValueError, match=r"placement.sinks has no effect without a window"):
        make_options("m", "o", sinks=2, shared_state=True)


def test_the_memory_of_aligning_is_said_and_grows_with_the_text(saved_teacher):
    folder = str(saved_teacher("llama-gqa"))
    few, many = (make_options(folder, "o", **SEARCH | {"tokens": tokens}) for tokens in (320, 3200))
    plan = plan_conversion(few)
    assert "to align    about" in describe(plan)
    estimates = [host_bytes(plan_conversion(options), resident=1000) for options in (few, many)]
    assert 1000 < estimates[0] < estimates[1] < plan.alignment_bytes
    assert plan_conversion(make_options(folder, "o", align="none")).alignment_bytes is None
    with pytest.raises(ValueError, match="device nowhere cannot be used here"):
        plan_conversion(make_options(folder, "o", device="nowhere"))


WINDOWED = [name for name, (_, config) in TEACHERS.items() if "sliding_attention" in teacher_layer_types(config)]
WITH_HEADS_OF_THEIR_OWN = [name for name in WINDOWED if name.startswith("gemma4")]
"""Teachers whose windows have other heads than full attention, so that they always stay."""


@pytest.mark.parametrize("name", WITH_HEADS_OF_THEIR_OWN)
@torch.no_grad()
def test_windows_with_heads_of_their_own_stay_whatever_their_width(name, saved_teacher, tmp_path):
    """The bytes of the plan are those of either cache, whose heads are of two widths and two numbers."""
    config = json.loads((saved_teacher(name) / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(saved_teacher(name) / "model.safetensors")
    for width in (8, 400, 2 * config["max_position_embeddings"]):
        (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": width}))
        output = tmp_path / f"out-{width}"
        plan = convert(str(tmp_path), output, align="none", window=32, attention_layers="none")
        assert plan.config.layer_types == ["sliding_attention", "hybrid"] * 2
        assert "hides nothing" not in describe(plan)
        teacher, hybrid = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (tmp_path, output))
        ids = random_ids(1, 200)
        held = [cache_nbytes(cache_of(model(ids, use_cache=True))) for model in (teacher, hybrid)]
        assert held == list(cache_bytes(plan.config, 200, torch.float32))
        of_window, of_whole = 4 * (16 + 16) * min(width - 1, 200), plan.config.num_key_value_heads * (32 + 32) * 200
        assert held[0] == 4 * 2 * (of_window + of_whole)


@pytest.mark.parametrize("name", [name for name in WINDOWED if name not in WITH_HEADS_OF_THEIR_OWN])
def test_a_window_that_hides_nothing_is_none(name, saved_teacher, tmp_path):
    """By its effect: wider than the model's positions it is as if absent, and so it is within a shorter context."""
    config = json.loads((saved_teacher(name) / "config.json").read_text())
    positions, context = config["max_position_embeddings"], 200
    folders = {"nominal": 2 * positions, "within": context, "narrow": 8}
    for which, width in folders.items():
        shutil.copytree(saved_teacher(name), tmp_path / which)
        (tmp_path / which / "config.json").write_text(json.dumps(config | {"sliding_window": width}))
    # with no budget of its own, which a teacher of windows alone refuses
    asked = {which: make_options(str(tmp_path / which), "o") for which in folders}
    asked["within"] = make_options(str(tmp_path / "within"), "o", context=context, cache=0.25)
    asked["nominal"] = make_options(str(tmp_path / "nominal"), "o", context=context, cache=0.25)
    plans = {}
    for which, options in asked.items():  # what it costs, which takes a second to measure, left out
        made = budget_of(options)
        plans[which] = make_plan(made.weights, decide_placement(made), made.resolved)
    said = {which: describe(plan) for which, plan in plans.items()}
    assert {"hybrid"} == set(plans["nominal"].config.layer_types) == set(plans["within"].config.layer_types)
    assert plans["nominal"].placement == plans["within"].placement != plans["narrow"].placement
    assert f"sliding_window {2 * positions} hides nothing within max_position_embeddings" in said["nominal"]
    assert f"sliding_window {context} hides nothing within {context} tokens" in said["within"]
    assert "hides nothing" not in said["narrow"]
    assert "sliding_attention" in plans["narrow"].config.layer_types
    longer = {"max_position_embeddings": 16384, "sliding_window": 4096}
    (tmp_path / "narrow" / "config.json").write_text(json.dumps(config | longer))
    wide = make_options(str(tmp_path / "narrow"), "o", window=8192, attention_layers=0.0, align="none")
    with pytest.raises(ValueError, match="window of 8192 tokens is wider than .*sliding_window of 4096"):
        plan_conversion(wide)
