"""The fit of one mixer, and of a whole teacher."""

import dataclasses
import json

import pytest
import torch

from convert import convert
from convert.fit.activations import ActivationStream
from convert.fit.closed_form import features, fit_layer, normal_equations, solve_out_proj
from convert.fit.fit import FitCache, fit_layers
from convert.fit.layer_data import LayerData, held_out_error
from convert.hybrids.mapping import set_decay
from convert.layout.placement import Attention, Hybrid, Placement
from convert.options import FitOptions
from convert.train.mohawk.train import load_hybrid
from modeling_llamba.kernels.softmax import causal_bias
from tests.helpers.teachers import FIRST, TEACHERS, WITHOUT_MIXERS, make_teacher, random_ids
from tests.helpers.tiny import config_of, layer_data, rows, teacher_model

EXACT = FitOptions(decays=(0.5, 0.8, 0.95), ridges=(1e-12,), refine_steps=0)
QUICK = FitOptions(refine_steps=20)


@pytest.mark.parametrize("mixer_name", ["discrete_mamba2", "mamba2", "mamba1"])
@pytest.mark.parametrize("name", ["llama-gqa", "phi"])
def test_recovers_a_known_mixer(saved_teacher, name, mixer_name):
    """The target is the mapped mixer with a decay of the list and another out_proj: the fit finds both."""
    model = teacher_model(saved_teacher(name), mixer=mixer_name)
    truth = model.mixer(1)
    with torch.no_grad():
        set_decay(truth, 0.8)
        truth.out_proj.weight.normal_(std=0.2)
        truth.out_proj.bias.normal_()
    fitted, unread = fit_layer(model.mixer(1), layer_data(model, truth), EXACT)
    report = unread.read()
    assert report.decay == 0.8
    assert report.mapped > 0.1
    assert report.refined < 1e-8
    torch.testing.assert_close(fitted.out_proj.weight, truth.out_proj.weight, atol=2e-3, rtol=0)
    torch.testing.assert_close(fitted.out_proj.bias, truth.out_proj.bias, atol=2e-3, rtol=0)
    torch.testing.assert_close(fitted.in_proj.weight, truth.in_proj.weight)


def test_solution_is_the_ridge_regression_towards_the_out_proj_at_hand(saved_teacher):
    """Against a plain least-squares solve of the stacked system."""
    model = teacher_model(saved_teacher("llama-gqa"))
    mixer = model.mixer(0)
    data = layer_data(model, mixer)
    data = dataclasses.replace(data, y=torch.randn_like(data.y) + data.y)
    with torch.no_grad():
        mixer.out_proj.weight.normal_()
        prior = torch.cat([mixer.out_proj.weight.T, mixer.out_proj.bias[None]]).double()
        u, y = data.batch(data.fitting())
        F = features(mixer, u, data.rotary).flatten(0, 1).double()
        F = torch.cat([F, torch.ones(len(F), 1)], 1)
        gram, moment = normal_equations(mixer, data)
        torch.testing.assert_close(gram, F.T @ F)
        torch.testing.assert_close(moment, F.T @ y.flatten(0, 1).double())
        penalty = torch.full((F.shape[1],), 0.3 * gram.diagonal()[:-1].mean().item(), dtype=torch.float64)
        penalty[-1] *= 1e-6
        stacked = torch.cat([F, penalty.sqrt().diag()])
        target = torch.cat([y.flatten(0, 1).double(), penalty.sqrt()[:, None] * prior])
        expected = torch.linalg.lstsq(stacked, target).solution
        error, number = solve_out_proj(mixer, data, (0.3,))
    assert number == 1
    torch.testing.assert_close(mixer.out_proj.weight.double(), expected[:-1].T, atol=1e-5, rtol=1e-4)
    assert error.item() == pytest.approx(held_out_error(mixer, data).item(), rel=1e-4)


def test_a_fit_that_does_not_help_is_taken_back(saved_teacher):
    """The mixer is already exact: no ridge and no refinement may make it worse."""
    model = teacher_model(saved_teacher("llama-gqa"))
    truth = model.mixer(0)
    set_decay(truth, 0.8)
    data = layer_data(model, truth)
    fitted, unread = fit_layer(truth, data, FitOptions(decays=(0.8,), ridges=(10.0,), refine_steps=5))
    report = unread.read()
    assert report.ridge is None
    assert report.refined == report.solved < 1e-12
    torch.testing.assert_close(fitted.out_proj.weight, truth.out_proj.weight)


def test_refinement_lowers_the_error(saved_teacher):
    model = teacher_model(saved_teacher("llama-gqa"))
    stream = ActivationStream(model, rows(24), 4, 10**9)
    _, unread = fit_layer(model.mixer(0), stream.attention_data(0), FitOptions(refine_steps=60))
    report = unread.read()
    assert report.refined < 0.98 * report.solved < 0.1 * report.mapped


@torch.no_grad()
def test_fits_where_the_caller_turned_gradients_off(saved_teacher):
    model = teacher_model(saved_teacher("llama-gqa"))
    data = ActivationStream(model, rows(24), 4, 10**9).attention_data(0)
    fitted, unread = fit_layer(model.mixer(0), data, FitOptions(refine_steps=60))
    report = unread.read()
    assert report.refined < report.solved
    assert not any(p.requires_grad for p in fitted.parameters())


def test_singular_system_keeps_what_it_has(saved_teacher):
    model = teacher_model(saved_teacher("llama-gqa"))
    mixer = model.mixer(0)
    data = layer_data(model, mixer)
    data = LayerData(torch.zeros_like(data.u), data.y, data.rotary, data.held_out)
    before = mixer.out_proj.weight.clone()
    error, number = solve_out_proj(mixer, data, (0.0,))
    assert number == 0
    assert torch.equal(mixer.out_proj.weight, before)
    assert 0 < error < float("inf")


def test_activations_that_are_not_finite_are_refused(saved_teacher):
    model = teacher_model(saved_teacher("llama-gqa"))
    data = layer_data(model, model.mixer(0))
    data.y[3, 5, 7] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinity"):
        fit_layer(model.mixer(0), data, QUICK)[1].read()
    model.block(0).self_attn.o_proj.weight[0, 0] = float("inf")
    assert not ActivationStream(model, rows(6), 2, 10**9).attention_data(0).finite


def test_decay_without_a_parameter_is_said(saved_teacher):
    model = teacher_model(saved_teacher("llama-gqa"), decay_bias=False)
    fitted, unread = fit_layer(model.mixer(0), layer_data(model, model.mixer(0)), EXACT)
    report = unread.read()
    assert report.decay is None
    assert not hasattr(fitted.A_log_bias, "shape")


@pytest.mark.parametrize("name", sorted(TEACHERS))
def test_stream_equals_the_teacher(saved_teacher, name):
    """The residual stream after the last block, block by block, in memory or on disk, is the teacher's own."""
    ids = rows(6)
    with torch.no_grad():
        # transformers' last entry is after the final norm; a hook sees the block's own
        seen = []
        teacher = make_teacher(name)
        teacher.model.layers[-1].register_forward_hook(
            lambda m, a, o: seen.append(o[0] if isinstance(o, tuple) else o)
        )
        teacher(ids)
    model = teacher_model(saved_teacher(name), **({"window": 8} if name in WITHOUT_MIXERS else {}))
    for memory in (10**9, 1):
        stream = ActivationStream(model, ids, 2, memory)
        assert (stream._folder is None) == (memory > 1)
        for layer in range(model.num_layers):
            data = stream.attention_data(layer)
            loaded = [i for i, b in enumerate(model.model.model.layers) if not next(b.parameters()).is_meta]
            assert loaded == [layer]  # one block at a time
        torch.testing.assert_close(stream.hidden, seen[0], atol=1e-4, rtol=1e-4)
        assert data.u.dtype == torch.bfloat16
        assert len(data.fitting()) == 4
        stream.close()


def test_fits_are_resumed(saved_teacher, tmp_path, monkeypatch):
    """Interrupted after two layers, the second run fits only the others and ends the same."""
    import convert.fit.fit as align

    model, ids = teacher_model(saved_teacher("llama-gqa")), rows(12)
    whole = fit_layers(model, [0, 1, 2, 3], ids, 4, QUICK, FitCache(None, {}), 10**9)
    fitted = []

    def interrupted(mixer, data, settings, seed):
        if len(fitted) == 2:
            raise KeyboardInterrupt
        fitted.append(seed)
        return fit_layer(mixer, data, settings, seed)

    monkeypatch.setattr(align, "fit_layer", interrupted)
    cache = FitCache(tmp_path, {"a": 1})
    with pytest.raises(KeyboardInterrupt):
        fit_layers(model, [0, 1, 2, 3], ids, 4, QUICK, cache, 10**9)
    fitted[:] = []
    resumed = fit_layers(model, [0, 1, 2, 3], ids, 4, QUICK, FitCache(tmp_path, {"a": 1}), 10**9)
    assert fitted == [2, 3]
    for layer, (mixer, report) in whole.items():
        assert resumed[layer][1] == report
        for name, tensor in mixer.state_dict().items():
            assert torch.equal(tensor, resumed[layer][0].state_dict()[name]), name
    assert FitCache(tmp_path, {"a": 2}).load_mixer(0, model.mixer(0)) is None  # another key, another fit
    cache.drop()
    assert not list(tmp_path.rglob("layer-*"))


@pytest.mark.parametrize(
    "name, options",
    [
        ("llama-gqa", {}),
        ("llama-biases", {"mixer": "mamba2"}),
        ("mistral-window", {}),
        ("qwen3", {"expand_kv_heads": True}),
        ("phi3", {"mixer": "mamba1"}),
        ("phi", {"mixer": "mamba2"}),
        ("llama-gqa", {"out_bias": False}),
    ],
)
def test_conversion_is_aligned(two_layer_teacher, tmp_path, name, options):
    """Closer to the teacher than the mapping alone, on text that was not used, for every family and mixer."""
    aligned = {"text": "sampled", "tokens": 1536, "attention_layers": "1"}
    aligned["alignment"] = {"sequence_length": 32, "fit": {"refine_steps": 10}}
    plan, kl, report = mapped_and_aligned(name, two_layer_teacher(name), tmp_path, options, aligned)
    assert kl["closed-form"] < kl["none"], kl
    (fit,) = report["held_out_error"].values()
    assert report["held_out_error"].keys() == {"0"}
    assert fit["refined"] <= fit["solved"] < fit["mapped"]
    assert plan.config.conversion["align"] == "closed-form"


@pytest.mark.parametrize("name", [name for name in TEACHERS if name not in FIRST])
def test_other_blocks_are_aligned(name, two_layer_teacher, tmp_path, monkeypatch):
    """Beside a window, as by default; the layer's own error falls, and KL with it."""
    monkeypatch.setattr(  # sampling takes most of the time
        "convert.fit.text.sample_rows", lambda model, length, count, seed: random_ids(count, length)
    )
    options = {"window": 4, "sinks": 1, "attention_layers": "0"}
    aligned = {"text": "sampled", "tokens": 3072}
    aligned["alignment"] = {"sequence_length": 32}
    _, kl, report = mapped_and_aligned(name, two_layer_teacher(name), tmp_path, options, aligned)
    (fit,) = report["held_out_error"].values()
    assert fit["solved"] < fit["mapped"]
    assert kl["closed-form"] < kl["none"], kl


@torch.no_grad()
def mapped_and_aligned(name, folder, output, options, aligned):
    """The plan, KL to the teacher of both, and the record of the fit."""
    ids = random_ids(4, 32, seed=5)
    teacher = make_teacher(name, layers=2)(ids).logits.log_softmax(-1)
    kl = {}
    for kind, extra in (("none", {}), ("closed-form", aligned)):
        plan = convert(str(folder), output / kind, align=kind, **extra, **options)
        student = load_hybrid(output / kind)(ids).logits.log_softmax(-1)
        kl[kind] = (teacher.exp() * (teacher - student)).sum(-1).mean().item()
    return plan, kl, json.loads((output / "closed-form" / "alignment.json").read_text())


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("name", ["llama-gqa", "gemma2"])
@torch.no_grad()
def test_kept_heads_are_the_teachers(saved_teacher, name, state):
    """Also where the layer stands in no model, and where scores have a cap, which not every function knows. Half of
    the heads are kept, and here o_proj takes nothing from the others."""
    model = teacher_model(saved_teacher(name))
    layers = (Attention(), Hybrid(4, 2, 1, (0, 1), state=state), Attention(), Attention())
    model.follow(config_of(model.weights, Placement(layers)))
    stream = ActivationStream(model, rows(6), 2, 10**9)
    data = [stream.attention_data(i) for i in range(2)][-1]
    layer, teacher = model.mixer(1), model.block(1).self_attn
    for projection in (layer.o_proj, teacher.o_proj):
        projection.weight[:, 2 * layer.head_dim :] = 0
    u, _ = data.batch(data.judging())
    expected, _ = teacher(u, data.rotary, causal_bias(u[:, None])[None, None])
    torch.testing.assert_close(layer(u, data.rotary), expected, rtol=1e-4, atol=1e-5)
