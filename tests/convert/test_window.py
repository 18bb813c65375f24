"""Conversion to layers that hold a window and sinks beside the mixer: mapping, bytes, alignment, refusals."""

import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from convert import convert
from convert.alignment.closed_form import balance_features, features, fit_layer, held_out_error, refine
from convert.alignment.mohawk.train import train_existing
from convert.cli import parser_of
from convert.options import FitOptions, make_options
from convert.placement.cache import cache_bytes
from modeling_llamba.hybrid_cache import cache_nbytes
from tests.alignment.tiny import layer_data, teacher_model
from tests.teachers import FIRST, TEACHERS, make_teacher, random_ids

LENGTH, LAYERS = 40, 2


def converted(folder, output, **options):
    options = {"attention_layers": 0.0, "align": "none", "read": "linear"} | options
    plan = convert(str(folder), output, **options)
    return AutoModelForCausalLM.from_pretrained(output).eval(), plan


@pytest.mark.parametrize(
    "name, mixer",
    [
        (n, m)
        for n in TEACHERS
        for m in ("discrete_mamba2", "mamba2", "mamba1", "none")
        if n in FIRST or m == "discrete_mamba2"
    ],
)
@torch.no_grad()
def test_a_window_that_sees_everything_is_the_teacher(name, mixer, saved_teacher, tmp_path):
    """Nothing is fitted, so out_proj holds the teacher's o_proj for the window and nothing for the mixer."""
    sliding = getattr(TEACHERS[name][1], "sliding_window", None)
    window = dict(window=sliding, sinks=0) if sliding else dict(window=LENGTH, sinks=3)
    hybrid, plan = converted(saved_teacher(name, LAYERS), tmp_path / "out", mixer=mixer, **window)
    ids = random_ids(2, LENGTH)
    if sliding and "full_attention" in plan.config.conversion["teacher_layer_types"]:
        ids = ids[:, :sliding]
    assert set(plan.config.layer_types) == {"hybrid"}
    torch.testing.assert_close(hybrid(ids).logits, make_teacher(name, layers=LAYERS)(ids).logits, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_without_a_fit_it_is_the_teacher_that_sees_only_window_and_sinks(saved_teacher, tmp_path):
    hybrid, _ = converted(saved_teacher("llama-gqa"), tmp_path / "out", window=5, sinks=2)
    teacher, ids = make_teacher("llama-gqa"), random_ids(2, LENGTH)
    positions = torch.arange(LENGTH)
    distance = positions[:, None] - positions
    seen = (distance >= 0) & ((distance < 5) | (positions < 2))
    mask = torch.zeros(LENGTH, LENGTH).masked_fill(~seen, -1e30)[None, None]
    torch.testing.assert_close(hybrid(ids).logits, teacher(ids, attention_mask=mask).logits, rtol=1e-4, atol=1e-5)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Not aligned" in card and "not yet a language model" not in card and "restricted to the last tokens" in card


@pytest.mark.parametrize("shared_state", [False, True])
@pytest.mark.parametrize("mixer", ["discrete_mamba2", "mamba2", "mamba1", "none"])
@pytest.mark.parametrize("window", [5, 2 * LENGTH])
@torch.no_grad()
def test_the_bytes_of_the_plan_are_those_of_the_cache(mixer, shared_state, window, saved_teacher, tmp_path):
    """Of a text longer than the window, and of a shorter one."""
    options = dict(mixer=mixer, window=window, sinks=2)
    if mixer not in ("mamba1", "none"):
        options["shared_state"] = shared_state
    hybrid, plan = converted(saved_teacher("llama-gqa"), tmp_path / "out", **options)
    cache = hybrid(random_ids(1, LENGTH)).past_key_values
    planned = cache_bytes(plan.config, LENGTH, torch.float32)[1]
    assert cache_nbytes(cache) == planned


def test_the_fit_uses_the_mixer_for_what_the_window_does_not_see(saved_teacher):
    """Targets made by a wider window: out_proj has to take the rest from the mixer."""
    model = teacher_model(saved_teacher("llama-gqa"), window=3, sinks=1, read="linear")
    wide = teacher_model(saved_teacher("llama-gqa"), window=40, sinks=1, read="linear")
    data = layer_data(model, wide.mixer(1), sequences=24)
    window_alone = held_out_error(model.mixer(1), data)
    solved, fit = fit_layer(model.mixer(1), data, FitOptions(refine_steps=0))
    assert fit.mapped == pytest.approx(window_alone)
    assert fit.solved < 0.8 * window_alone
    assert fit.decay in FitOptions().decays + FitOptions().decays_beside_window
    assert solved.out_proj.weight[:, solved.attention_size :].abs().max() > 0


@pytest.mark.parametrize("name", ["llama-gqa", "phi", "qwen3"])
def test_the_mixers_features_are_as_large_as_the_windows_and_the_layer_the_same(saved_teacher, name):
    """Or one step of Adam on weights of 1e-5 would undo the fit; norms on queries fix the size, so they are left."""
    model = teacher_model(saved_teacher(name), window=3, sinks=1, read="linear")
    data = layer_data(model, model.mixer(1))
    mixer, _ = fit_layer(model.mixer(1), data, FitOptions(refine_steps=0, decays_beside_window=(0.99,)))
    with torch.no_grad():
        mixer.out_proj.weight[:, mixer.attention_size :] /= 100
        mixer.ssd.conv1d.weight[-mixer.ssd.C_size :] *= 100
        mixer.ssd.D *= 100
        unbalanced = copy.deepcopy(mixer)
        balance_features(mixer, data)
        u, _ = data.batch(range(4))
        torch.testing.assert_close(mixer(u, data.rotary), unbalanced(u, data.rotary), rtol=1e-4, atol=1e-5)
        near, far = features(mixer, data.batch(data.judging())[0], data.rotary)[:, 4:].split(mixer.sizes, dim=-1)
    sizes = far.unflatten(-1, (mixer.ssd.num_heads, -1)).pow(2).mean((0, 1, 3)).sqrt()
    if name == "qwen3":
        assert torch.equal(mixer.ssd.D, unbalanced.ssd.D)
    else:
        torch.testing.assert_close(sizes, near.pow(2).mean().sqrt().expand_as(sizes), rtol=1e-3, atol=0)


def test_alignment_by_the_command_line_and_what_it_records(saved_teacher, tmp_path):
    hybrid, plan = converted(
        saved_teacher("llama-gqa"), tmp_path / "out", window=4, sinks=1, align="closed-form", attention_layers="MA",
        text="sampled", tokens=320, sequence_length=32, held_out_sequences=2, refine_steps=4,
    )  # fmt: skip
    assert plan.config.layer_types == ["hybrid", "full_attention"] * 2
    report = json.loads((tmp_path / "out" / "alignment.json").read_text())
    for fit in report["held_out_error"].values():
        assert fit["refined"] <= fit["solved"] <= fit["mapped"]
    assert "beside softmax attention to 4 tokens" in (tmp_path / "out" / "README.md").read_text()
    ids = random_ids(1, 12)
    grown = hybrid.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    torch.testing.assert_close(
        hybrid(grown[:, :-1]).logits[:, -1].argmax(-1), grown[:, -1], msg="cached decoding is the plain forward"
    )


def test_the_stages_train_window_and_mixer_alike(saved_teacher, tmp_path):
    stage = dict(tokens=1280, sequences=4, learning_rate=3e-4)
    alignment = {"fit": {"refine_steps": 0}, "hidden_state_alignment": stage, "distillation": stage}
    converted(
        saved_teacher("phi"), tmp_path / "out", window=4, sinks=1, align="mohawk", attention_layers="MA",
        text="sampled", tokens=320, sequence_length=32, held_out_sequences=2, alignment=alignment,
    )  # fmt: skip
    (report,) = json.loads((tmp_path / "out" / "alignment.json").read_text())["stages"]
    hidden = report["hidden_state_alignment"]
    assert hidden["held_out_loss_after"] < hidden["held_out_loss_before"]
    assert report["distillation"]["held_out_kl_after"] < report["distillation"]["held_out_kl_before"]


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(window=0), "window must be a whole number above 0"),
        (dict(window=8, sinks=-1), "sinks must be a whole number of at least 0"),
        (dict(window=8, mixer="mamba1", scope="beyond"), "mamba1 beside a window"),
        (dict(window=8, scope="most"), "scope must be beyond or all"),
        (dict(mixer="none"), "say how wide"),
        (dict(mixer="none", window=8, scope="all"), "scope has nothing to set"),
        (dict(mixer="none", window=8, shared_state=True), "no state"),
    ],
)
def test_windows_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_options(model="m", output="o", **options)


def test_a_window_wider_than_the_teachers_own_is_refused(saved_teacher, tmp_path):
    with pytest.raises(ValueError, match="larger than the teacher's own"):
        converted(saved_teacher("mistral-window"), tmp_path / "out", window=9)


def test_a_window_alone_is_the_teacher_behind_it_and_says_so(saved_teacher, tmp_path):
    options = dict(window=4, sinks=1, mixer="none")
    aligned, plan = converted(
        saved_teacher("phi"), tmp_path / "out", align="closed-form", attention_layers=0.5, text="sampled",
        tokens=320, sequence_length=32, held_out_sequences=2, **options,
    )  # fmt: skip
    report = json.loads((tmp_path / "out" / "alignment.json").read_text())
    assert all(fit["mapped"] == fit["refined"] > 0 for fit in report["held_out_error"].values())
    assert "no weight was changed" in (tmp_path / "out" / "README.md").read_text()
    assert plan.summary()["state_bytes"] == 0
    layers = plan.summary()["attention_layers"]
    mapped, _ = converted(saved_teacher("phi"), tmp_path / "mapped", attention_layers=layers, **options)
    ids = random_ids(2, LENGTH)
    torch.testing.assert_close(aligned(ids).logits, mapped(ids).logits, rtol=0, atol=0)


def test_a_window_alone_is_trained_like_a_mixer(saved_teacher, tmp_path):
    folder = saved_teacher("llama-gqa")
    before, _ = converted(folder, tmp_path / "window", mixer="none", window=3, sinks=1)
    stage = dict(tokens=2560, sequences=4, learning_rate=2e-4)
    options = parser_of("mohawk").from_values({
        "hybrid": str(tmp_path / "window"), "teacher": str(folder), "stages": "2,3",
        "alignment": {"text": "sampled", "sequence_length": 32, "held_out_sequences": 2,
                      "hidden_state_alignment": stage, "distillation": stage},
        "output": {"folder": str(tmp_path / "out")},
    })  # fmt: skip
    report = train_existing(options, lambda *args: None)
    hidden = report["hidden_state_alignment"]
    assert hidden["held_out_loss_after"] < hidden["held_out_loss_before"]
    assert report["distillation"]["held_out_kl_after"] < report["distillation"]["held_out_kl_before"]
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert after.config.mixer == "none" and "Aligned with MOHAWK" in (tmp_path / "out" / "README.md").read_text()
    assert not torch.equal(after.model.layers[0].mixer.out_proj.weight, before.model.layers[0].mixer.out_proj.weight)


@pytest.mark.parametrize(
    "alignment, message",
    [({"matrix_orientation": {"tokens": 64}}, "one matrix with another")],
)
def test_what_a_window_excludes_is_refused_before_any_work(alignment, message, saved_teacher, tmp_path):
    options = dict(window=4, align="mohawk", text="sampled", alignment=alignment)
    with pytest.raises(ValueError, match=message):
        converted(saved_teacher("llama-gqa"), tmp_path / "out", **options)


def test_sequences_all_within_the_window_are_nothing_to_fit(saved_teacher):
    model = teacher_model(saved_teacher("llama-gqa"), window=40, sinks=1, read="linear")
    mixer = model.mixer(1)
    with pytest.raises(ValueError, match="set sequence_length higher"):
        fit_layer(mixer, layer_data(model, model.mixer(0)), FitOptions(refine_steps=0))


def test_refinement_keeps_the_first_tokens(saved_teacher):
    model = teacher_model(saved_teacher("llama-gqa"), window=3, sinks=1, read="linear")
    other = teacher_model(saved_teacher("llama-gqa"), window=3, sinks=1, read="linear").mixer(2)
    before = model.mixer(1)
    data = layer_data(model, model.mixer(1))
    mixer = model.mixer(1).requires_grad_(True)
    refine(mixer, layer_data(model, other), FitOptions(refine_steps=3), seed=0)
    kept = [torch.equal(mixer.state_dict()[name], value) for name, value in before.state_dict().items()
            if name.startswith(("attention.", "near_proj."))]  # fmt: skip
    assert all(kept)
    assert not torch.equal(mixer.ssd.in_proj.weight, before.ssd.in_proj.weight)
    u, _ = data.batch(range(2))
    first = [m(u, data.rotary)[:, :4] for m in (mixer, before)]
    assert torch.equal(*first)
