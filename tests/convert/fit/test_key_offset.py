"""Offsets of keys: softmax does not notice them, and rounding loses less."""

import json

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from convert import convert
from convert.fit.hybrid_fit import fit_hybrid_layer
from convert.fit.key_offset import FIRST, QUERIES, key_offset, offset_on, score_weights
from convert.formats.export import export_checkpoint
from convert.layout.placement import CacheBits
from modeling_llamba import LlambaConfig
from modeling_llamba.model.rotary import rotate_keys, rotate_queries
from tests.helpers.hybrid_fit import layer_and_data
from tests.helpers.hybrids import make_hybrid
from tests.helpers.teachers import make_teacher, random_ids
from tests.helpers.transfer import exporting

KEPT = (0, 1)
"""The query heads of the first key/value head."""
FEW_BITS = CacheBits(full=(8, 8), window=(8, 8))


def means_over(length):
    cos, sin = positions(length)
    return cos.mean(1, keepdim=True), sin.mean(1, keepdim=True), torch.ones(1, 1, 8)


def positions(length):
    """Rotary embedding of a context for heads of four planes."""
    angles = torch.arange(length)[:, None] * 1e4 ** (-torch.arange(4) / 4)
    return tuple(t.repeat(1, 2)[None] for t in (angles.cos(), angles.sin()))


@pytest.mark.parametrize("types", [["full_attention"] * 2, ["hybrid"] * 2, ["sliding_attention", "hybrid"]])
@torch.no_grad()
def test_softmax_does_not_notice_an_offset(types):
    """In the model's own type, at sinks that are far away, too; while a prompt is read and for each token after it."""
    stateless = dict(mixer="none", mixer_decay_bias=False, hybrid_sink_reach=10)
    stateless["hybrid_full_heads"] = [[0, 1] if kind == "hybrid" else [] for kind in types]
    model, ids = make_hybrid(pattern="beside-only", layer_types=types, **stateless), random_ids(2, 40)
    expected = model(ids, use_cache=False).logits
    for module in model.modules():
        if hasattr(module, "key_offset"):
            shape = len(getattr(module, "kept", range(2))), module.head_dim
            module.key_offset = nn.Parameter(torch.randn(shape, dtype=torch.float64), requires_grad=False)
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected)
    cache = model.new_cache()
    steps = [model(part, cache=cache).logits for part in ids.split([25, *[1] * 15], dim=1)]
    torch.testing.assert_close(torch.cat(steps, dim=1), expected)


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
@torch.no_grad()
def test_attention_that_stays_loses_less(kind):
    """Its keys have much in common."""
    fields = dict(layer_types=[kind] * 2, attention_bias=True, key_offsets=True)
    rounded = make_hybrid(pattern="attention", full_attention_bits=8, window_bits=8, **fields)
    for layer in rounded.model.layers:
        layer.self_attn.k_proj.bias.view(-1, 8)[:, [3, 7]] += 50.0
    exact = make_hybrid(pattern="attention", **fields)
    exact.load_state_dict(rounded.state_dict(), strict=False)
    ids, lost = random_ids(2, 40), []
    for offset in (0.0, 50.0):
        for layer in rounded.model.layers:
            layer.self_attn.key_offset.zero_()[:, [3, 7]] = offset
        lost.append((rounded(ids).logits - exact(ids).logits).norm())
    assert lost[1] < lost[0] / 5


@torch.no_grad()
def test_an_offset_is_a_mean_of_keys_over_a_contexts_positions(saved_teacher):
    layer, data = layer_and_data(saved_teacher("qwen2"), heads=KEPT, bits=FEW_BITS)
    layer.k_proj.bias.add_(3.0)
    data.mean_rotary = means_over(200)
    fit_hybrid_layer(layer, data)
    query, keys, value = layer.project_heads(data.batch(data.fitting()[:2])[0])
    turned = rotate_keys(keys, data.rotary)
    weights = score_weights(layer, rotate_queries(query, data.rotary), turned, value)[..., None]
    sinks = (weights * turned)[:, :, :FIRST].sum((0, 2))
    others = (weights * keys)[:, :, FIRST:].sum((0, 2))
    others = rotate_keys(others[None, :, None].expand(1, -1, 200, -1), positions(200))[0].mean(1)
    slow = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1])  # two planes of four turn by 0.2 and 2 in 200 tokens
    expected = (sinks + others) / weights.sum((0, 2)) * slow
    torch.testing.assert_close(layer.key_offset, expected[layer.kept])
    assert layer.key_offset[:, 3].abs().min() > 1
    data.mean_rotary = means_over(4000)
    fit_hybrid_layer(layer, data)
    assert not layer.key_offset[:, [2, 6]].any()


@pytest.mark.parametrize("window", [None, 12])
def test_weights_of_keys_are_squared_gradients_of_attention(window):
    """Of its outputs, by the score of each key, for the queries that are asked."""
    layer = make_hybrid(pattern="beside-only").model.layers[0].mixer
    layer.sliding_window = window
    query = torch.randn(2, 4, 40, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, 40, 8, dtype=torch.float64)
    shift = torch.zeros(2, 2, 2, 40, 40, dtype=torch.float64, requires_grad=True)
    scores = query.unflatten(1, (2, 2)) @ key[:, :, None].mT * layer.scaling + shift
    hidden = torch.ones(40, 40, dtype=torch.bool).triu(1)
    if window is not None:
        hidden |= torch.ones(40, 40, dtype=torch.bool).tril(-window)
    output = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value[:, :, None]
    squares = 0.0
    for dim in range(8):
        squares = squares + torch.autograd.grad(output[..., dim].sum(), shift, retain_graph=True)[0].square()
    asked = torch.linspace(10, 39, QUERIES).long()
    expected = squares[:, :, :, asked].sum((2, 3))
    torch.testing.assert_close(score_weights(layer, query, key, value), expected)


@torch.no_grad()
def test_rounding_loses_less(saved_teacher):
    """Of keys with much in common."""
    layer, data = layer_and_data(saved_teacher("qwen2"), heads=KEPT, bits=FEW_BITS)
    u, rounding = data.batch(data.fitting()[:2])[0], layer.kept_roundings[0]
    for dim in (3, 7):
        layer.k_proj.bias.view(-1, 8)[:, dim] += 50.0
    lost = []
    data.mean_rotary = means_over(data.u.shape[1])
    for offset in (torch.zeros_like(layer.key_offset), offset_on(layer, data)):
        layer.key_offset.copy_(offset)
        keys = layer.less_offset(rotate_keys(layer.project_heads(u)[1], data.rotary)[:, layer.kept])
        lost.append((rounding.decode(rounding.encode(keys), keys.dtype) - keys).norm())
    assert lost[1] < lost[0] / 5


def test_a_conversion_writes_offsets_of_all_that_is_rounded(saved_teacher, tmp_path):
    options = dict(text="sampled", tokens=2048, context=256, alignment={"sequence_length": 128})
    convert(str(saved_teacher("qwen2")), tmp_path / "out", bits=8, cache=0.5, attention_layers="0", sinks=2, **options)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    offsets = {name: p for name, p in model.named_parameters() if name.endswith("key_offset")}
    config = model.config
    with_offset = {layer for layer in range(config.num_hidden_layers) if not layer or config.full_heads_of(layer)}
    assert len(offsets) == len(with_offset)
    assert all(offset.any() and not offset.requires_grad for offset in offsets.values())
    assert "model.layers.0.self_attn.key_offset" in offsets
    options.pop("context")
    convert(str(saved_teacher("llama-biases")), tmp_path / "kept", bits=8, attention_layers="all", **options)
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "kept")
    teacher, ids = make_teacher("llama-biases"), random_ids(1, 40)
    assert all(layer.self_attn.key_offset is not None for layer in kept.model.layers)
    assert (kept(ids).logits - teacher(ids).logits).norm() < 0.05 * teacher(ids).logits.norm()
    convert(str(saved_teacher("qwen2")), tmp_path / "whole", bits=16, window=8, sinks=2, **options)
    assert not json.loads((tmp_path / "whole" / "config.json").read_text()).get("key_offsets", False)


@pytest.mark.parametrize("field", [dict(learned_sinks=True), dict(attn_logit_softcapping=30.0)])
def test_absolute_scores_have_no_offset(field, saved_teacher, tmp_path):
    with pytest.raises(ValueError, match="scores change with key_offsets"):
        LlambaConfig(key_offsets=True, **field)
    name = "gpt-oss" if "learned_sinks" in field else "gemma2"
    plan = convert(str(saved_teacher(name)), tmp_path / "out", bits=8, window=8, sinks=2, text="sampled", tokens=2048,
                   alignment={"sequence_length": 128})  # fmt: skip
    assert not plan.config.key_offsets


def test_an_export_leaves_offsets_out(saved_teacher, tmp_path):
    options = dict(text="sampled", tokens=2048, alignment={"sequence_length": 128})
    convert(str(saved_teacher("llama-gqa")), tmp_path / "hybrid", bits=8, attention_layers="all", **options)
    hybrid, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "hybrid"), random_ids(1, 30)
    assert any(name.endswith("key_offset") for name, _ in hybrid.named_parameters())
    plan = export_checkpoint(exporting(tmp_path / "hybrid", tmp_path / "native", to="bamba"))
    assert set(plan.dropped) == {name for name, _ in hybrid.named_parameters() if name.endswith("key_offset")}
    assert "but for the rounding" in (tmp_path / "native" / "README.md").read_text()
    native = AutoModelForCausalLM.from_pretrained(tmp_path / "native")
    assert (native(ids).logits - hybrid(ids).logits).norm() < 0.05 * hybrid(ids).logits.norm()


def test_a_key_offset_needs_a_few_tokens_alone():
    options = dict(full_attention_bits=8, hybrid_full_heads=[[2, 3], []])
    layer = make_hybrid(key_offsets=True, pattern="beside-only", **options).model.layers[0].mixer
    u = torch.randn(1, FIRST + 1, 32, dtype=torch.float64)
    unturned = torch.ones(1, 1, 8, dtype=torch.float64), torch.zeros(1, 1, 8), torch.ones(1, 1, 8)
    rotary = tuple(t.double().expand(-1, FIRST + 1, -1) for t in unturned[:2])
    assert key_offset(layer, [u], rotary, unturned).shape == layer.key_offset.shape
