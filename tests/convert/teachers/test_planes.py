"""Planes of queries and keys scaled for rounding: the same model for every family, and keys that lose less."""

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM

from convert import convert
from convert.teachers.planes import PlaneScales, with_scaled_planes
from tests.helpers.teachers import STATEFUL, TEACHERS, make_teacher, random_ids

LAYERS = 2
UNSCALED = {"gemma3", "qwen3-5", "qwen3-5-moe", "qwen3-next"}
"""Norms of 1 + weight on queries and keys."""


def drawn(self, checkpoint):
    """Exponents that differ from plane to plane, as large as real teachers have them."""
    kv_heads = self.sources["k_proj.weight"].shape[0] // self.dim
    exponents = torch.randint(-4, 5, (1 if self.shared_by_heads else kv_heads, self.dim)).double()
    exponents[:, self.rotated : 2 * self.rotated] = exponents[:, : self.rotated]
    return exponents


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def rounded(teacher, output, **options):
    plan = convert(str(teacher), output, align="none", bits=8, **options)
    return AutoModelForCausalLM.from_pretrained(output).eval(), {rule.kind for rule in plan.rules}


def without_rounding(folder):
    return AutoModelForCausalLM.from_pretrained(folder, full_attention_bits=16, window_bits=16).eval()


@pytest.mark.parametrize("name", TEACHERS)
def test_any_scales_make_the_same_model(name, saved_teacher, tmp_path, monkeypatch):
    monkeypatch.setattr(PlaneScales, "_exponents", drawn)
    _, kinds = rounded(saved_teacher(name, LAYERS), tmp_path / "out", attention_layers="all")
    assert ("scaled" in kinds) != (name in UNSCALED)
    hybrid, teacher, ids = without_rounding(tmp_path / "out"), make_teacher(name, layers=LAYERS), random_ids(2, 24)
    tolerance = dict(rtol=0, atol=1e-4) if name in STATEFUL else {}
    torch.testing.assert_close(logits(hybrid, ids), logits(teacher, ids), **tolerance)


REPLACEMENTS = {"state": dict(window=8, sinks=2), "no state": dict(window=8, sinks=2, mixer="none"), "mixer": {}}


@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_any_scales_make_the_same_hybrid(replacement, saved_teacher, tmp_path, monkeypatch):
    options = dict(align="none", attention_layers="1") | REPLACEMENTS[replacement]
    convert(str(saved_teacher("qwen2")), tmp_path / "plain", bits=16, **options)
    monkeypatch.setattr(PlaneScales, "_exponents", drawn)
    convert(str(saved_teacher("qwen2")), tmp_path / "scaled", bits=8, **options)
    plain, scaled, ids = without_rounding(tmp_path / "plain"), without_rounding(tmp_path / "scaled"), random_ids(2, 24)
    torch.testing.assert_close(logits(scaled, ids), logits(plain, ids))


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma2", "glm4", "olmo2", "phi"])
def test_sizes_of_planes_are_those_of_queries_and_keys(name, saved_teacher, tmp_path, monkeypatch):
    """Measured on inputs that are independent: with biases, norms of heads, of all heads and of 1 + weight, and with
    dimensions that are not turned."""
    layers, exponents = [], PlaneScales._exponents

    def recorded(self, checkpoint):
        layers.append((self.rotated, [self._energies(checkpoint, which) for which in "qk"]))
        return exponents(self, checkpoint)

    monkeypatch.setattr(PlaneScales, "_exponents", recorded)
    convert(str(saved_teacher(name, 1)), tmp_path / "out", align="none", bits=8, attention_layers="all")
    ((rotated, found),) = layers
    teacher = make_teacher(name, layers=1)
    block = teacher.model.layers[0]
    inputs = torch.randn(20_000, teacher.config.hidden_size)
    if name != "olmo2":  # it has norms behind a block alone
        inputs = block.input_layernorm(inputs)
    for which, energies in zip("qk", found, strict=True):
        heads, dim = energies.shape
        vectors = getattr(block.self_attn, f"{which}_proj")(inputs)
        if norm := getattr(block.self_attn, f"{which}_norm", None):
            vectors = norm(vectors.unflatten(-1, (heads, dim)) if name == "qwen3" else vectors)
        measured = vectors.detach().double().view(-1, heads, dim).pow(2).mean(0)
        planes = measured[:, : 2 * rotated]
        # the two dimensions of a plane are neighbours in GLM
        turned = planes.unflatten(1, (-1, 2)).mean(2) if name == "glm4" else planes.unflatten(1, (2, -1)).mean(1)
        measured = torch.cat([turned, turned, measured[:, 2 * rotated :]], dim=1)
        assert (energies / measured).log2().abs().max() < 0.5  # an exponent of two takes a factor of 16


def with_large_biases(folder):
    """A Qwen2 whose keys have a bias far larger than all else in two planes, as Qwen2.5 has."""
    teacher = make_teacher("qwen2", layers=LAYERS)
    with torch.no_grad():
        for layer in teacher.model.layers:
            bias, dim = layer.self_attn.k_proj.bias, layer.self_attn.head_dim
            for head in range(len(bias) // dim):
                bias[head * dim + dim // 2 - 1] += 100.0
            layer.self_attn.q_proj.weight.view(-1, dim, layer.self_attn.q_proj.in_features)[
                :, dim // 2 - 1 :: dim // 2
            ] /= 50
    teacher.save_pretrained(folder)
    return teacher


def test_large_biases_cost_little(tmp_path, monkeypatch):
    teacher, ids = with_large_biases(tmp_path / "teacher"), random_ids(4, 60)
    expected = logits(teacher, ids).log_softmax(-1)
    lost = {}
    for scaled in (True, False):
        if not scaled:
            monkeypatch.setattr(
                PlaneScales, "_exponents", lambda self, checkpoint: torch.zeros_like(drawn(self, checkpoint))
            )
        hybrid, _ = rounded(tmp_path / "teacher", tmp_path / f"{scaled}", attention_layers="all")
        found = logits(hybrid, ids).log_softmax(-1)
        lost[scaled] = kl_div(found, expected, log_target=True, reduction="batchmean").item()
    assert 0 < 10 * lost[True] < lost[False]


def test_weights_in_16_bits_are_multiplied_exactly(tmp_path):
    with_large_biases(tmp_path / "float32")
    convert(
        str(tmp_path / "float32"),
        tmp_path / "teacher",
        align="none",
        bits=16,
        attention_layers="all",
        dtype="bfloat16",
    )
    convert(
        str(tmp_path / "float32"), tmp_path / "out", align="none", bits=8, attention_layers="all", dtype="bfloat16"
    )
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("teacher", "out"))
    changed = [name for name in before if not before[name].equal(after[name])]
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "k_proj"}
    for name in changed:
        ratio = after[name].double() / before[name].double()
        exponents = ratio[ratio.isfinite()].log2()
        assert exponents.equal(exponents.round())
    for name in before:
        if name.endswith("q_proj.weight"):
            query, key = name, name.replace("q_proj", "k_proj")
            ratios = [after[of].double() / before[of].double() for of in (query, key)]
            of_query, of_key = (ratio.nan_to_num(1)[:, 0].view(2, -1, 8)[:, 0] for ratio in ratios)
            torch.testing.assert_close(of_query * of_key, torch.ones_like(of_query))


def test_norms_of_one_plus_weight_are_left_alone(saved_teacher):
    from convert.dry_run import open_teacher
    from convert.options import make_options

    weights, _ = open_teacher(make_options(str(saved_teacher("gemma3")), "out"))
    assert weights.config.qk_norm and weights.config.norm_unit_offset
    assert with_scaled_planes(weights.sources, weights.config) == weights.sources
