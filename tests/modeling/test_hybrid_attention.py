"""The hybrid layer against its equations, which `naive.py` follows token by token in float64."""

import copy
import functools

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_mask

import modeling_llamba.hybrid.readout as readout
import modeling_llamba.kernels.flex as flex
import modeling_llamba.kernels.torch_backend as torch_backend
from modeling_llamba import LlambaForCausalLM
from modeling_llamba.hybrid.eviction import State, outer_products, salient_before
from modeling_llamba.hybrid.hybrid_attention import HybridAttention
from modeling_llamba.hybrid.inputs import HybridInputs
from modeling_llamba.hybrid.naive import naive_hybrid_attention
from modeling_llamba.model.attention import SoftmaxAttention
from modeling_llamba.model.rotary import rotary_embedding
from tests.helpers.hybrids import make_hybrid, tiny_config, trained_parameters
from tests.helpers.teachers import LLAMA3_ROPE, MINISTRAL_ROPE, random_ids

LENGTH = 83
"""Tokens of an example: two groups of blocks behind the window, and a part of a block."""
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LOCAL_ROPE = {"rope_type": "default", "rope_theta": 100.0}
OTHER_HEADS = {"head_dim": 8, "num_key_value_heads": 2}
OF_WINDOWS = dict(
    layer_types=["sliding_attention", "hybrid"], sliding_window=8, layer_rope=["local", "main"],
    local_rope_parameters=LOCAL_ROPE, attention_multiplier=1.0,
)  # fmt: skip
"""A layer with a window, whose heads may be other ones."""
ONE_LAYER = dict(layer_types=["hybrid"], hybrid_window=6, hybrid_full_heads=None)
CASES = {
    "two queries to a key head": {},
    "one key head": dict(num_key_value_heads=1),
    "as many key heads": dict(num_key_value_heads=4),
    "the last key head kept": dict(hybrid_full_heads=[[2, 3]]),
    "the middle of four kept": dict(num_key_value_heads=4, hybrid_full_heads=[[1, 2]]),
    "two apart kept": dict(num_key_value_heads=4, hybrid_full_heads=[[2, 0]]),
    "windows of 8 bits": dict(window_bits=8),
    "windows of 6 and 4 bits": dict(head_dim=16, window_bits=[6, 4], hybrid_block=1, hybrid_window=3),
    "windows of 16 and 2 bits": dict(head_dim=48, window_bits=[16, 2]),
    "a kept head of 6 and 2 bits": dict(head_dim=16, hybrid_full_heads=[[2, 3]], full_attention_bits=[6, 2]),
    "4 bits, far sinks": dict(head_dim=16, hybrid_sink_reach=20, window_bits=4, attn_logit_softcapping=2.0),
    "a kept head, keys less an offset": dict(full_attention_bits=8, key_offsets=True, hybrid_full_heads=[[2, 3]]),
    "biases": dict(attention_bias=True, attention_out_bias=True),
    "rms norms": dict(qk_norm="rms"),
    "norms of Gemma's kind": dict(qk_norm="rms", norm_unit_offset=True, attention_multiplier=0.3),
    "layer norms, partial rotary": dict(family="phimamba", qk_norm="layer", rope_parameters=PARTIAL_ROPE),
    "norms on values": dict(qk_norm="rms", value_norm=True, hybrid_full_heads=[[2, 3]], window_bits=8),
    "gates": dict(attention_gate=True, attention_bias=True),
    "gates, two heads apart kept": dict(attention_gate=True, num_key_value_heads=4, hybrid_full_heads=[[2, 0]]),
    "learned sinks": dict(learned_sinks=True, attention_bias=True),
    "learned sinks, two heads apart kept": dict(learned_sinks=True, num_key_value_heads=4, hybrid_full_heads=[[2, 0]]),
    "learned sinks, far sinks, few bits": dict(learned_sinks=True, hybrid_sink_reach=20, window_bits=8),
    "learned sinks, no state": dict(learned_sinks=True, mixer="none", mixer_decay_bias=False),
    "one norm for all heads": dict(qk_norm="all_heads", hybrid_full_heads=[[0, 1]]),
    "scaled rotary": dict(rope_parameters=dict(LLAMA3_ROPE)),
    "local rotary": dict(layer_rope=["local"], local_rope_parameters=LOCAL_ROPE, hybrid_sink_reach=30),
    "queries by position": dict(rope_parameters=dict(MINISTRAL_ROPE), hybrid_sink_reach=30),
    "no rotary": dict(layer_rope=["none"], hybrid_state_planes=1, hybrid_sink_reach=20),
    "capped scores": dict(attn_logit_softcapping=2.0),
    "capped scores, a head kept": dict(attn_logit_softcapping=2.0, hybrid_full_heads=[[0, 1]]),
    "capped scores, far sinks": dict(attn_logit_softcapping=2.0, hybrid_sink_reach=20),
    "all planes": dict(hybrid_state_planes=None),
    "three planes of four": dict(hybrid_state_planes=3),
    "one plane of two": dict(hybrid_state_planes=1, rope_parameters=PARTIAL_ROPE),
    "no salient tokens": dict(hybrid_salient=0),
    "no sinks": dict(hybrid_sinks=0),
    "no places": dict(hybrid_sinks=0, hybrid_salient=0),
    "more sinks than a block": dict(hybrid_sinks=5),
    "more sinks than the window": dict(hybrid_sinks=11, hybrid_salient=1),
    "more places than tokens": dict(hybrid_salient=200),
    "sinks beyond the teacher's reach": dict(hybrid_sink_reach=20),
    "many sinks beyond reach, kept heads": dict(hybrid_sinks=9, hybrid_sink_reach=20, hybrid_full_heads=[[0, 1]]),
    "blocks of one token": dict(hybrid_block=1, hybrid_window=3),
    "large blocks": dict(hybrid_block=16, hybrid_window=64),
    "blocks of three": dict(hybrid_block=3, hybrid_window=9),
    "one block to a group": dict(hybrid_block=33, hybrid_window=66, hybrid_sinks=1),
    "a window wider than the text": dict(hybrid_window=200),
    "no state": dict(mixer="none", mixer_decay_bias=False),
    "no state, no places": dict(mixer="none", mixer_decay_bias=False, hybrid_sinks=0, hybrid_salient=0),
    "no map of low rank": dict(hybrid_rank=0),
}  # fmt: skip
WIDE = "a window wider than the text"
WAYS = ["at once", "with gradients", "in segments", "gathered", "gathered in segments", "packed"]


@functools.cache
def example(name):
    """A layer, what a model hands it for two rows, and the naive output."""
    case = dict(CASES[name])
    model = make_hybrid(case.pop("family", "llamba"), pattern="beside-only", num_hidden_layers=1, **ONE_LAYER | case)
    layer, seen = model.model.layers[0].mixer, []
    hook = layer.register_forward_hook(lambda layer, given, output: seen.append(given))
    with torch.no_grad():
        model(random_ids(2, LENGTH))
    hook.remove()
    hidden, rotary, inputs = seen[0][:3]
    near = torch.arange(LENGTH)[None].clamp(max=model.config.hybrid_sink_reach)
    sink_rotary = tuple(t[0] for t in model.model.rotary(hidden, near)[model.config.rope_of(0)])
    own = tuple(t[0] for t in rotary)
    expected = torch.stack([naive_hybrid_attention(layer, row, own, sink_rotary) for row in hidden])
    return layer, (hidden, rotary, inputs), expected


def tolerance(name):
    """Rounding in float64; but transformers' eager attention, which alone knows a cap, has a softmax in float32."""
    return 1e-6 if name == "capped scores, a head kept" else 1e-12


def computed(way, layer, given, monkeypatch, gradients=False):
    """The layer's output in one of WAYS."""
    hidden, rotary, inputs = given
    if "segments" in way:
        monkeypatch.setattr(torch_backend, "SEGMENT", 27)
    if "gathered" in way:
        inputs = inputs._replace(start=None)
    if way == "packed":
        inputs = inputs._replace(start=None, seq_idx=torch.zeros_like(inputs.index))
    with torch.set_grad_enabled(gradients or way == "with gradients"):
        return layer(hidden, rotary, inputs)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_the_layer_is_its_equations(name, way, monkeypatch):
    layer, given, expected = example(name)
    torch.testing.assert_close(computed(way, layer, given, monkeypatch), expected, rtol=0, atol=tolerance(name))


@pytest.mark.parametrize("way", ["at once", "packed"])
@pytest.mark.parametrize("name", [name for name in CASES if name != WIDE])
def test_flex_attention_sees_the_same(name, way, monkeypatch, by_flex):
    layer, given, expected = example(name)
    torch.testing.assert_close(computed(way, layer, given, monkeypatch), expected, rtol=0, atol=tolerance(name))


@pytest.mark.parametrize("name", [WIDE, "no places"])
@torch.no_grad()
def test_the_first_window_is_the_teachers_attention(name):
    layer, (hidden, rotary, inputs), _ = example(name)
    teacher = SoftmaxAttention(tiny_config(pattern="attention", hybrid_full_heads=None), 0).double()
    teacher.config._attn_implementation = "sdpa"
    teacher.load_state_dict({key: t for key, t in layer.state_dict().items() if "proj" in key})
    expected, first = teacher(hidden, rotary)[0], min(layer.shape.window, LENGTH)
    output = layer(hidden, rotary, inputs)
    torch.testing.assert_close(output[:, :first], expected[:, :first], rtol=0, atol=1e-13)
    assert first == LENGTH or (output[:, first] - expected[:, first]).abs().min() > 1e-6


def test_without_a_state_there_are_the_teachers_parameters_alone():
    names = {name for name, p in example("no state")[0].named_parameters() if p.requires_grad}
    assert names == {f"{letter}_proj.weight" for letter in "qkvo"}


LEARNED = [
    "two queries to a key head",
    "learned sinks",
    "capped scores, far sinks",
    "layer norms, partial rotary",
    "two apart kept",
]


@functools.cache
def gradients_of_the_equations(name):
    """Weights of a sum of outputs, and its gradients by the parameters, of the naive layer."""
    layer, (hidden, rotary, _), expected = example(name)
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    own = tuple(t[0] for t in rotary)
    near = torch.arange(LENGTH)[None].clamp(max=layer.config.hybrid_sink_reach)
    sink_rotary = tuple(t[0] for t in rotary_embedding(layer.config)(hidden, near))
    naive = naive_hybrid_attention.__wrapped__  # without no_grad
    total = sum((naive(layer, *pair, own, sink_rotary) * w).sum() for *pair, w in zip(hidden, weights, strict=True))
    return weights, torch.autograd.grad(total, trained_parameters(layer))


@pytest.mark.parametrize("way", ["with gradients", "in segments", "gathered"])
@pytest.mark.parametrize("name", LEARNED)
def test_gradients_are_those_of_the_equations(name, way, monkeypatch, window_by):
    layer, given, _ = example(name)
    weights, expected = gradients_of_the_equations(name)
    total = (computed(way, layer, given, monkeypatch, gradients=True) * weights).sum()
    names, parameters = zip(*((name, p) for name, p in layer.named_parameters() if p.requires_grad), strict=True)
    for name, got, wanted in zip(names, torch.autograd.grad(total, parameters), expected, strict=True):
        assert wanted.abs().max() > 1e-6, name
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


def test_gradients_are_differences_of_outputs():
    model = make_hybrid(
        pattern="beside-only", num_hidden_layers=1, **ONE_LAYER, hidden_size=4, head_dim=4, num_attention_heads=2,
        num_key_value_heads=1, hybrid_rank=1, hybrid_salient=1, hybrid_sinks=1,
    )  # fmt: skip
    layer, hidden = model.model.layers[0].mixer, torch.randn(1, 9, 4, dtype=torch.float64, requires_grad=True)
    rotary = model.model.rotary_emb(hidden, torch.arange(9)[None])
    parameters = {name: p for name, p in layer.named_parameters() if p.requires_grad}

    def output(hidden, *values):
        changed = dict(zip(parameters, values, strict=True))
        return functional_call(layer, changed | dict(layer.named_buffers()), (hidden, rotary))

    assert torch.autograd.gradcheck(output, (hidden, *parameters.values()))


@pytest.mark.parametrize("dtype, shift", [(torch.float32, -1e3), (torch.float32, 1e3), (torch.bfloat16, 0.0)])
def test_extreme_masses_have_finite_gradients(dtype, shift, window_by):
    """Of a padded batch, in which some queries see nothing, and one row of which never fills its window."""
    layer, (hidden, rotary, inputs), _ = example("two queries to a key head")
    layer = copy.deepcopy(layer)
    with torch.no_grad():
        layer.mass[:, 0] += shift
    mask = torch.ones_like(inputs.index)
    mask[0, :20], mask[1, 5:] = 0, 0
    inputs = HybridInputs((mask.cumsum(1) - 1).masked_fill(mask == 0, -1))
    real = mask[..., None].bool()
    wide = (layer(hidden, rotary, inputs) * real).detach()
    layer, hidden = layer.to(dtype), hidden.to(dtype).requires_grad_()
    output = layer(hidden, [t.to(dtype) for t in rotary], inputs) * real
    torch.testing.assert_close(output.double(), wide, rtol=0, atol=1e-4 if dtype == torch.float32 else 0.2)
    output.square().sum().backward()
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.requires_grad} | {"input": hidden.grad}
    assert [name for name, gradient in gradients.items() if not gradient.isfinite().all()] == []
    assert shift or [name for name, gradient in gradients.items() if not gradient.any()] == []


@torch.no_grad()
def test_dropout_is_for_training():
    layer, given, expected = example("no places")
    layer = copy.deepcopy(layer)
    layer.config.attention_dropout = 0.5
    torch.testing.assert_close(layer(*given), expected, rtol=0, atol=1e-12)
    noisy = layer.train()(*given)
    assert (noisy - expected).abs().amax((0, 2)).min() > 1e-3


def read(layer, query, state):
    """The log mass and mean v + C q' of a state, from what queries get of it that see nothing else."""
    nothing = torch.zeros_like(query)
    output, features = readout.read(query, nothing, nothing[..., 0], readout.readout(layer.heads(), state))
    gate = features.unflatten(-1, (3, -1))[..., 1, :1] / state.value_mean[..., None, None, :1]
    return gate[..., 0].logit(), output / gate


@torch.no_grad()
def test_a_gaussian_past_is_read_as_softmax_would():
    """The tilted mean, and with half the variance of the scores in c0 the log mass."""
    layer = HybridAttention(tiny_config(pattern="beside-only", hybrid_state_planes=None), 0).double()
    dim, past = 8, 40_000
    mix = torch.randn(2 * dim, 2 * dim, dtype=torch.float64) * 0.3
    keys, values = (torch.randn(2, past, 2 * dim, dtype=torch.float64) @ mix + 0.3).split(dim, dim=-1)
    sums = outer_products(keys, values, torch.ones(past, dtype=torch.bool), layer.shape.slow)
    query = torch.randn(1, 1, 2, 1, 2, 1, dim, dtype=torch.float64)
    log_mass, far = (t[0, 0, :, 0, :, 0] for t in read(layer, query, State.of(sums[None, None, :, None])))
    scores = query[0, 0, :, 0, :, 0] @ keys.mT * layer.scaling  # (key heads, queries, past)
    expected, mean = scores.softmax(-1) @ values, values.mean(1, keepdim=True)
    assert (far - expected).norm() < 0.05 * (expected - mean).norm()
    torch.testing.assert_close(log_mass + scores.var(-1) / 2, scores.logsumexp(-1), rtol=0, atol=0.05)


@torch.no_grad()
def test_the_mass_is_linear_in_its_features():
    model = make_hybrid(pattern="beside-only", rope_parameters=PARTIAL_ROPE, hybrid_state_planes=1)
    layer = model.model.layers[0].mixer
    shape = (1, 2, 2, 3)  # rows, groups, key heads, blocks
    query, sums = (torch.randn(*shape, *more, dtype=torch.float64) for more in ((2, 2, 8), (9, 7)))
    sums[..., -1, 0] = torch.arange(1, 13).view(shape)
    state = State.of(sums)
    features = readout.mass_features(layer.heads(), query, state)
    assert features.shape[-1] == layer.mass.shape[1] == 2 + (1 + 4) + (2 + 4)
    expected = (features * layer.mass.view(2, 1, 2, 1, -1)).sum(-1)
    torch.testing.assert_close(read(layer, query, state)[0], expected, rtol=0, atol=1e-10)


@torch.no_grad()
def test_positions_that_all_move_change_nothing():
    layer, (hidden, rotary, inputs), expected = example("two queries to a key head")
    moved = rotary_embedding(layer.config)(hidden, torch.arange(LENGTH)[None] + 1000)
    torch.testing.assert_close(layer(hidden, moved, inputs), expected, rtol=1e-3, atol=1e-3)  # angles are float32
    other = rotary_embedding(layer.config)(hidden, 2 * torch.arange(LENGTH)[None])
    assert (layer(hidden, other, inputs) - expected).abs().max() > 0.1


@torch.no_grad()
def test_a_new_layer_reads_by_theory_and_changes_nothing_else():
    config = tiny_config(pattern="beside-only", layer_rope=["main", "none"])
    layers = [layer.mixer for layer in LlambaForCausalLM(config).model.layers]
    assert layers[0].mass.tolist() == [[0.0] + [1.0] * (1 + 2) + [0.0] * 4] * 4
    assert layers[1].mass.tolist() == [[0.0] + [1.0] * (1 + 4) + [0.0] * 4] * 2  # nothing turns; two heads kept
    assert not any(layer.up.weight.any() or layer.salience.any() for layer in layers)
    assert all(layer.down.weight.any() for layer in layers)


def test_an_odd_number_of_rotated_dimensions():
    """Of 8 x 0.65 = 5 dimensions transformers makes three angles, so three planes are turned."""
    odd = PARTIAL_ROPE | {"partial_rotary_factor": 0.65}
    model = make_hybrid(pattern="beside-only", rope_parameters=odd)
    assert len(model.model.rotary_emb.inv_freq) == model.config.rotary_planes == 3


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("places", [1, 3, 9])
def test_who_holds_a_place_when_a_block_opens(places, packed):
    """All blocks at once, against one block after the other; saliences that tie, blocks in which nobody competes."""
    rows, blocks, block = 2, 13, 4
    salience = torch.randint(6, (rows, places + blocks * block)).float()
    salience[torch.rand(salience.shape) < 0.3] = -torch.inf
    salience[0, places + 8 : places + 20] = -torch.inf
    first = torch.zeros(rows, 1 + blocks, dtype=torch.long)
    if packed:  # sequences begin with a block
        new = torch.rand(rows, 1 + blocks) < 0.3
        first = torch.where(new, places + torch.arange(1 + blocks) * block, 0).cummax(1).values
    found = salient_before(salience, places, block, blocks, first if packed else None)
    for row in range(rows):
        for n in range(1 + blocks):
            columns = range(first[row, n], places + n * block)
            ranked = sorted(columns, key=lambda j: -salience[row, j].item())  # stable, as the first of two equals wins
            holders = [j for j in ranked if salience[row, j] > -torch.inf][:places]
            assert sorted(found[row, n].tolist()) == sorted(holders + [-1] * (places - len(holders)))


@pytest.mark.parametrize("name", ["two queries to a key head", "no places", "more places than tokens", "large blocks"])
@pytest.mark.parametrize("way", ["at once", "packed"])
def test_flex_attention_skips_no_block_that_a_query_sees(name, way, monkeypatch, by_flex):
    """Of columns; and lists few others."""
    seen, visible = [], flex.visible_blocks
    monkeypatch.setattr(flex, "visible_blocks", lambda *given: seen.append((given, visible(*given))) or seen[-1][1])
    layer, (hidden, rotary, inputs), _ = example(name)
    index = torch.arange(700).expand(2, -1)
    hidden = torch.randn(2, 700, hidden.shape[-1], dtype=hidden.dtype)
    packing = None if way == "at once" else (index >= 330).int()
    own = index if packing is None else index - 330 * packing
    rotary = rotary_embedding(layer.config)(hidden, own)
    with torch.no_grad():
        layer(hidden, rotary, HybridInputs(own, 0 if packing is None else None, packing))
    (block, column, until, _), mask = seen[0]
    slots, columns, size = len(block), until.shape[1], flex.FLEX_BLOCK
    dense = create_mask(mask.mask_mod, 2, 1, slots, columns, device="cpu")
    needed = F.pad(dense, (0, -columns % size, 0, -slots % size)).unflatten(3, (-1, size)).any(-1)
    needed = needed.unflatten(2, (-1, size)).any(3)
    listed = mask.to_dense().bool()
    assert not (needed & ~listed).any()
    blocks_of_window = layer.shape.window // size + 2
    assert listed.sum(-1).max() <= blocks_of_window + layer.shape.places


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(hybrid_window=None), "hybrid_window must be a multiple of hybrid_block"),
        (dict(hybrid_window=0), "hybrid_window"),
        (dict(hybrid_window=7), "hybrid_window must be a multiple of hybrid_block"),
        (dict(hybrid_window=2), "at least two of it"),
        (dict(hybrid_window=[8, 3]), "hybrid_window"),
        (dict(hybrid_window=[8]), "hybrid_window as a list"),
        (dict(hybrid_rank=[8]), "hybrid_rank as a list"),
        (dict(hybrid_rank=-1), "hybrid_rank"),
        (dict(hybrid_block=0), "hybrid_block"),
        (dict(hybrid_sinks=-1), "hybrid_sinks"),
        (dict(hybrid_state_planes=0), "hybrid_state_planes"),
        (dict(mixer="none", mixer_decay_bias=False, layer_types=["linear_attention"] * 2), "one of the mixers"),
        (dict(hybrid_full_heads=[[0]]), "for each of 2 layers"),
        (dict(hybrid_full_heads=[[], [0, 0]]), "different heads"),
        (dict(hybrid_full_heads=[[], [99]]), "below 4"),
        (dict(hybrid_full_heads=[[], [1, 2]]), "all 2 query heads of a key/value head"),
        (dict(hybrid_full_heads=[[], [0, 1, 2, 3]]), "leave a key/value head out"),
        (dict(layer_types=["linear_attention"] * 2, hybrid_full_heads=[[0, 1], []]), "not hybrid"),
        (dict(rope_parameters=PARTIAL_ROPE | {"rope_type": "proportional"}), "one partial_rotary_factor"),
        (dict(layer_rope=["main", "local"], local_rope_parameters=PARTIAL_ROPE), "one partial_rotary_factor"),
        (dict(head_dim=1), "head_dim must be even where a rotary embedding turns all of it, not 1"),
        (dict(sliding_heads={"head_dim": 8}), "sliding_heads needs num_key_value_heads and head_dim"),
        (dict(sliding_heads={"head_dim": 8, "num_key_value_heads": None}), "sliding_heads needs num_key_value_heads"),
        (dict(sliding_heads={"head_dim": 0, "num_key_value_heads": 2}), "head_dim must be a whole number"),
        (dict(sliding_heads=OTHER_HEADS), "attention_multiplier says the one factor"),
        (
            dict(OF_WINDOWS, sliding_heads=OTHER_HEADS, layer_rope=["main", "local"]),
            "layer_rope is local where layer_types has sliding_attention",
        ),
        (
            dict(OF_WINDOWS, sliding_heads={"head_dim": 8, "num_key_value_heads": 3}),
            "num_attention_heads must be a multiple of num_key_value_heads",
        ),
        (
            dict(OF_WINDOWS, sliding_heads={"head_dim": 7, "num_key_value_heads": 2}, window_bits=8),
            "window_bits of less than 16 needs an even head_dim, not 7",
        ),
        (
            dict(OF_WINDOWS, sliding_heads=OTHER_HEADS, layer_types=["sliding_attention", "linear_attention"]),
            "A mixer cannot follow sliding_heads",
        ),
    ],
)
def test_contradictory_configurations_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(pattern="beside-only", **options)
