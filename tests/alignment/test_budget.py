"""A cache budget spent on heads, window and state together, and what the search of heads goes by."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from convert import convert
from convert.alignment.aligner import Aligner
from convert.alignment.cost import Rates, cost_of
from convert.alignment.mohawk.layerwise import run_key
from convert.dry_run import plan_conversion
from convert.options import make_options
from convert.pipeline import run
from convert.placement.budget import Budget
from convert.placement.cache import attention_bytes, cache_bytes
from convert.placement.decide import decide_placement, options_for_teacher
from convert.placement.layer_costs import POWER, spread_windows
from convert.placement.placement import Attention, Decision, Hybrid, Mixer, Placement, everywhere
from convert.plan import TeacherWeights, describe, hybrid_config, make_plan
from convert.teachers.teacher import find_teacher
from modeling_llamba import LlambaConfig
from modeling_llamba.hybrid_cache import cache_nbytes
from tests.teachers import random_ids

CONTEXT, SHAPE = 400, (4, 2)
RANKED = [(1, 0), (3, 0), (3, 1), (0, 1), (2, 0), (0, 0), (1, 1), (2, 1)]
SEARCH = {
    "text": "sampled", "tokens": 320, "context": CONTEXT, "cache": 0.4,
    "alignment": {"sequence_length": 32, "held_out_sequences": 2},
}  # fmt: skip


def options_of(folder, **options):
    return make_options(str(folder), "o", **{"context": CONTEXT, "cache": 0.5} | options)


def budget(folder, **options):
    return Budget(TeacherWeights.of(find_teacher(str(folder))), options_of(folder, **options))


def placed(spent):
    """The placement by RANKED, and what it takes as the plan counts it."""
    placement = spent.placement([pair for pair in RANKED if pair not in spent.given_heads])
    plan = make_plan(spent.weights, Decision(placement), spent.options)
    return placement, cache_bytes(plan.config, CONTEXT, torch.float32)[1]


def kept_kv_heads(placement):
    kept = {(layer, kv) for layer in placement.attention_layers for kv in range(SHAPE[1])}
    return kept | {(layer, head // 2) for layer, heads in placement.full_heads.items() for head in heads}


@pytest.mark.parametrize("cache", [0.2, 0.35, 0.5, 0.7, 0.95])
def test_a_placement_keeps_within_the_budget_and_uses_it(cache, saved_teacher):
    spent = budget(saved_teacher("llama-gqa"), cache=cache)
    placement, taken = placed(spent)
    kept = kept_kv_heads(placement)
    assert taken <= spent.nbytes and kept == set(RANKED[: len(kept)])
    hybrid = placement.hybrid
    assert hybrid.state and hybrid.sinks == 4
    if hybrid.window < spent.longest_window:  # one token more and it would be too much
        wider = Placement(
            tuple(Hybrid(hybrid.window + 1, 4, x.full_heads) if isinstance(x, Hybrid) else x for x in placement.layers)
        )
        config = hybrid_config(spent.weights, wider, spent.options)
        assert cache_bytes(config, CONTEXT, torch.float32)[1] > spent.nbytes


def test_more_cache_keeps_more_heads(saved_teacher):
    counts = [
        len(kept_kv_heads(placed(budget(saved_teacher("llama-gqa"), cache=cache))[0])) for cache in (0.25, 0.5, 0.75)
    ]
    assert counts == sorted(set(counts))


@pytest.mark.parametrize(
    "options, window, kept",
    [
        (dict(window=9), 9, None),
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
    assert placement.hybrid.state == ("mixer" not in options) and taken <= spent.nbytes


def test_a_window_beside_a_state_leaves_half_of_a_sequence_to_fit_on(saved_teacher):
    folder = saved_teacher("llama-gqa")
    beside = budget(folder, cache=0.6, attention_heads=1, sequence_length=64)
    assert beside.longest_window == 28 == placed(beside)[0].hybrid.window
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
def test_the_teachers_own_windows_stay_where_they_are_cheap(name, cache, saved_teacher, tmp_path):
    """The budget goes to the other layers, whose heads alone can see everything, and the bytes are the cache's own.
    They are read as every default is. By default windows stay whatever they cost, and the share is of the others'."""
    share, own = cache or 0.15, 8 if cache else 150
    teacher = with_window(saved_teacher(name), tmp_path / "teacher", own)
    plan = convert(str(teacher), tmp_path / "out", **SEARCH | {"cache": cache})
    assert plan.placement.hybrid.read == "normalised" and plan.placement.hybrid.salient
    windows = [i for i, kind in enumerate(plan.config.conversion["teacher_layer_types"]) if kind != "full_attention"]
    others = {0, 1, 2, 3} - set(windows)
    assert len(windows) == 2 and set(plan.placement.replaced_layers) <= others
    assert all(plan.config.layer_types[i] == "sliding_attention" for i in windows)
    assert plan.placement.full_heads.keys() <= others and plan.placement.hybrid.window > 8
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    seen = model(random_ids(1, CONTEXT)).past_key_values
    taken = cache_bytes(plan.config, CONTEXT, torch.float32)
    kept = 0 if cache else 2 * attention_bytes(plan.config, "sliding_attention", CONTEXT, torch.float32)
    assert cache_nbytes(seen) == taken[1] <= share * (taken[0] - kept) + kept
    whole = AutoModelForCausalLM.from_pretrained(teacher)(random_ids(1, CONTEXT), use_cache=True).past_key_values
    assert cache_nbytes(whole) == taken[0]


def test_the_teachers_own_windows_go_where_a_state_is_cheaper(saved_teacher, tmp_path):
    spent = budget(with_window(saved_teacher("gemma3"), tmp_path / "wide", 300), cache=0.3, read="linear")
    placement, taken = placed(spent)
    assert not placement.attention_layers and not placement.full_heads.keys() & {0, 2} and taken <= spent.nbytes
    assert budget(tmp_path / "wide", cache=0.97, read="linear").kept_windows == (0, 2)
    with pytest.raises(ValueError, match="window 301 is larger than the teacher's own"):
        hybrid_config(spent.weights, everywhere(Hybrid(301, 4), 4), spent.options)
    with pytest.raises(ValueError, match="set mixer.read: linear"):
        hybrid_config(spent.weights, everywhere(Hybrid(9, 4, read="normalised"), 4), spent.options)
    with pytest.raises(ValueError, match="names heads of layers that see a sliding window only"):
        heads = everywhere(Hybrid(9, 4), 4).with_full_heads({0: [1]})
        hybrid_config(spent.weights, heads, spent.options)
    named = budget(tmp_path / "wide", cache=0.3, attention_heads="0:1,1:0")
    with pytest.raises(ValueError, match="names heads of layer 0, which sees a sliding window only"):
        named.placement([])


def test_heads_that_share_keys_share_a_state_within_a_budget(saved_teacher):
    for said, shared in ((dict(), True), (dict(shared_state=False), False), (dict(expand_kv_heads=True), False)):
        spent = budget(saved_teacher("llama-gqa"), cache=0.7, **said)
        config = make_plan(spent.weights, Decision(placed(spent)[0]), spent.options).config
        assert config.mixer_shared_state == shared
    for said in (dict(align="none"), dict(export_ready=True)):
        assert not options_of("m", **said).searches_budget


def test_a_teacher_with_windows_of_its_own_keeps_as_many_layers_as_fit(saved_teacher):
    """Its heads may not see more than they do; so the budget says how many of its layers stay."""
    weights = TeacherWeights.of(find_teacher(str(saved_teacher("mistral-window"))))
    asked = options_of("m", cache=0.8, d_state=1, text="sampled", tokens=5120)
    options = options_for_teacher(asked, weights)
    placement = decide_placement(weights, options).placement
    assert placement.attention_layers == (1, 3) and placement.hybrid is None and not placement.full_heads
    read = dict(mixer={"read": "normalised"})
    for said in (dict(attention_layers=[1]), dict(attention_heads=2), dict(mixer="none"), read):
        with pytest.raises(ValueError, match="own layers see a window"):
            options_for_teacher(options_of("m", **said), weights)


def test_the_plan_is_said_before_scores_and_its_placement_is_what_the_configuration_stores(saved_teacher, tmp_path):
    """Scores take minutes of a large teacher, and which heads they choose changes no bytes."""
    plans, doing = [], []

    def on_plan(plan):
        plans.append(plan)
        doing.append("plan")

    def progress(what, done, total):
        if doing[-1] != what:
            doing.append(what)

    options = make_options(str(saved_teacher("llama-gqa")), str(tmp_path / "out"), **SEARCH)
    plan = run(options, on_plan, progress)
    assert doing == ["plan", "reading text, rows", "scoring heads, layers", "measuring layers", "plan",
                     "aligning, layers", "writing, MB"]  # fmt: skip
    assert plans[0].notes and plans[1] is plan and not plan.notes
    assert plans[0].summary()["cache_bytes"] == plan.summary()["cache_bytes"]
    assert Placement.of(LlambaConfig.from_pretrained(tmp_path / "out")) == plan.placement
    assert plan.placement.replaced_layers and plan.placement.full_heads
    scores = json.loads((tmp_path / "out" / "alignment.json").read_text())["retrieval_scores"]
    best_of_kv = {(layer, kv): max(of[2 * kv : 2 * kv + 2]) for layer, of in enumerate(scores) for kv in range(2)}
    kept = kept_kv_heads(plan.placement)
    assert min(best_of_kv[pair] for pair in kept) >= max(best_of_kv[pair] for pair in best_of_kv.keys() - kept)
    teacher, hybrid = cache_bytes(plan.config, CONTEXT, torch.float32)
    assert hybrid <= 0.4 * teacher
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = random_ids(1, 40)
    with torch.no_grad():
        cache = model(ids[:, :30], use_cache=True).past_key_values
        stepped = model(ids[:, 30:], past_key_values=cache).logits
        torch.testing.assert_close(stepped, model(ids).logits[:, 30:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "layers",
    [
        (Attention(), Mixer(), Attention(), Mixer()),
        (Hybrid(7, 2), Attention(), Hybrid(7, 2), Hybrid(7, 2)),
        (Hybrid(7, 0, (1, 3)), Hybrid(7, 0), Attention(), Hybrid(7, 0, (0,))),
        (Hybrid(7, 2, state=False), Hybrid(7, 2, (2,), state=False), Attention(), Attention()),
        (Mixer(), Hybrid(5, 1, (0, 1)), Attention(), Mixer()),
        (Attention(),) * 4,
    ],
    ids=["mixers", "windows", "heads", "no state", "all kinds", "attention"],
)
@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window"])
def test_a_configuration_stores_every_kind_of_placement(name, layers, saved_teacher, tmp_path):
    """As typed fields, from which the same placement is read back."""
    placement = Placement(layers)
    if name == "mistral-window" and placement.full_heads:
        placement = placement.with_full_heads({})
    weights = TeacherWeights.of(find_teacher(str(saved_teacher(name))))
    config = hybrid_config(weights, placement, make_options("m", "o", attention_layers="none"))
    config.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert Placement.of(type(config).from_pretrained(tmp_path)) == placement
    assert not any(isinstance(stored[field], str) for field in ("layer_types", "hybrid_full_heads", "hybrid_window"))
    assert placement.keeping(range(4)) == everywhere(Attention(), 4)


def test_windows_are_wide_where_layers_are_wrong():
    errors = {0: 0.001, 2: 0.05, 3: 0.01, 5: 0.0001}
    windows = spread_windows(100, errors, 320)
    assert sum(windows.values()) == 400 and windows.keys() == errors.keys()
    assert windows[5] == windows[0] == 40 < windows[3] < windows[2] <= 320

    def left(widths):
        return sum(error * widths[layer] ** -POWER for layer, error in errors.items())

    for more in errors:  # no step from one layer to another would be better
        for less in errors.keys() - {more}:
            if windows[less] > 40 and windows[more] <= 300:
                assert left(windows) <= left(windows | {more: windows[more] + 20, less: windows[less] - 20})
    assert min(spread_windows(60, errors, 320).values()) == 20  # the narrowest that there is
    assert spread_windows(320, errors, 320) == dict.fromkeys(errors, 320)
    assert spread_windows(3, errors, 320) == dict.fromkeys(errors, 3)


def test_a_budget_reads_longer_sequences(saved_teacher, monkeypatch):
    """What lies beyond a window that the budget chooses has to be long, unless the length is said."""
    monkeypatch.setattr(
        "convert.alignment.text.sample_rows", lambda model, length, count, seed: random_ids(count, length)
    )
    folder, text = str(saved_teacher("llama-gqa")), dict(text="sampled", tokens=5120)
    within, layers = text | dict(cache=0.5), text | dict(attention_layers=0.5)
    for said, shape in ((within, (5, 1024)), (within | dict(sequence_length=640), (8, 640)), (layers, (10, 512))):
        options = make_options(folder, "o", **said)
        assert Aligner(TeacherWeights.of(find_teacher(folder)), options).ids.shape == shape


def test_the_same_tokens_in_longer_sequences_are_another_run(saved_teacher, tmp_path):
    """Fits, and what stages of training have done, are kept for a run that goes on."""
    spent, ids, folders, keys = budget(saved_teacher("llama-gqa")), random_ids(8, 64), set(), set()
    for rows in (ids, ids.view(4, 128), ids):
        aligner = Aligner(spent.weights, spent.options, work=tmp_path)
        aligner.ids = rows
        aligner.follow(everywhere(Mixer(), 4))
        folders.add(aligner.cache(spent.options.alignment.fit).folder)
        keys.add(run_key(spent.options.alignment.distillation, rows, 0, {}))
    assert len(folders) == len(keys) == 2


def test_a_dry_run_says_what_fits_and_reads_no_weight(saved_teacher, monkeypatch):
    monkeypatch.setattr("convert.weights.reader.SafetensorsCheckpoint.read_rows", None)
    plan = plan_conversion(options_of(saved_teacher("llama-gqa")))
    text, shown = describe(plan), plan.summary()
    assert "window" in text and "full heads" in text and "is decided by scores" in text
    assert shown["window"] > 1 and shown["attention_heads"]
    teacher, hybrid = cache_bytes(plan.config, CONTEXT, torch.float32)
    assert hybrid <= 0.5 * teacher


@pytest.mark.parametrize(
    "said, expected",
    [
        (dict(attention_layers=0.5), "cache chooses how many layers keep attention"),
        (dict(cache=1.5), "cache 1.5 is no share"),
        (dict(attention_layers=[1], align="none"), "cache chooses how many layers keep attention"),
        (dict(cache=0.0001), "too little"),
        (dict(cache="1KB"), "too little"),
        (dict(window=5000, mixer="none"), "too little"),
        (dict(window=5000), "covers whole calibration sequences"),
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
    assert make_options("m", "o", tokens=9999, dtype="float32").cache == 0.15
    assert make_options("m", "o", **said).cache is None
    assert make_options("m", "o", sinks=2, shared_state=True).cache == 0.15


def test_the_cost_of_aligning_is_said_and_grows_with_the_text(saved_teacher):
    folder, rates = str(saved_teacher("llama-gqa")), Rates(1e9, 5e8, 1e8)
    few, many = (make_options(folder, "o", **SEARCH | {"tokens": tokens}) for tokens in (320, 3200))
    plan = plan_conversion(few)
    assert plan.alignment_cost.seconds > 0 and "to align" in describe(plan)
    costs = [cost_of(plan, options, rates, resident=1000) for options in (few, many)]
    assert costs[0].seconds < costs[1].seconds < 10 * costs[0].seconds  # the solutions take the same for any text
    assert 1000 < costs[0].nbytes < costs[1].nbytes
    assert plan_conversion(make_options(folder, "o", align="none")).alignment_cost is None
    with pytest.raises(ValueError, match="device nowhere cannot be used here"):
        plan_conversion(make_options(folder, "o", device="nowhere"))
