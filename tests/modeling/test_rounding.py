"""Keys and values in few bits: rows of bytes against the rounding written out, and whole models against themselves."""

import pytest
import torch
from transformers import StaticCache

from modeling_llamba.hybrid.naive import _rounded
from modeling_llamba.hybrid.rounding import Rounding
from modeling_llamba.model import attention
from modeling_llamba.model.config_values import CACHE_BITS
from modeling_llamba.model.rotary import rotate_keys, rotate_queries
from tests.helpers.hybrids import make_hybrid, trained_parameters
from tests.helpers.teachers import random_ids

MIXED = dict(
    head_dim=16,
    layer_types=["full_attention", "sliding_attention", "hybrid", "hybrid"],
    num_hidden_layers=4,
    sliding_window=8,
    hybrid_full_heads=[[], [], [], [0, 1]],
    full_attention_bits=[6, 4],
    window_bits=8,
)


@pytest.mark.parametrize("bits", [bits for bits in CACHE_BITS if bits < 16])
@pytest.mark.parametrize("dim", [16, 48, 64, 80])
def test_rows_hold_what_the_rounding_says(bits, dim):
    rounding = Rounding(bits, dim)
    vectors = torch.randn(2, 3, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(bits))
    vectors[0, 0, 3] = 100.0  # an outlier
    vectors[1, 2] = 0.0
    rows = rounding.encode(vectors)
    assert rows.dtype == torch.uint8
    assert rows.shape == (2, 3, rounding.width(torch.float64))
    expected = torch.stack([_rounded(vector, bits) if vector.any() else vector for vector in vectors.flatten(0, 1)])
    torch.testing.assert_close(rounding.decode(rows, torch.float64).flatten(0, 1), expected)
    rotated = rounding.decode(rows, torch.float64, rotated=True)
    torch.testing.assert_close(rounding.rotate(rotated).flatten(0, 1), expected)


def test_more_bits_round_less():
    vectors = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    errors = []
    for bits in (2, 4, 6, 8):
        rounding = Rounding(bits, 64)
        errors.append((rounding.decode(rounding.encode(vectors), torch.float32) - vectors).norm() / vectors.norm())
    assert all(finer < 0.4 * coarser for coarser, finer in zip(errors, errors[1:], strict=False))
    assert errors[-1] < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sixteen_bits_change_nothing(dtype):
    vectors = torch.randn(3, 10).to(dtype)
    rounding = Rounding(16, 10)
    assert rounding.encode(vectors) is vectors
    assert rounding.decode(vectors, dtype) is vectors
    assert rounding.width(dtype) == 10 * dtype.itemsize


@torch.no_grad()
def test_a_prompt_is_its_steps_and_its_chunks():
    model = make_hybrid(**MIXED).double().eval()
    ids = random_ids(2, 45)
    expected = model(ids, use_cache=False).logits
    rounded_less = make_hybrid(**MIXED | dict(full_attention_bits=16, window_bits=16)).double().eval()
    assert (rounded_less(ids, use_cache=False).logits - expected).abs().max() > 1e-3
    for sizes in ([1] * 45, [45], [20, 1, 13, 11]):
        cache, found = None, []
        for part in ids.split(sizes, dim=1):
            output = model(part, cache=cache)
            cache = output.cache
            found.append(output.logits)
        torch.testing.assert_close(torch.cat(found, dim=1), expected)


@pytest.mark.parametrize("index, window, bits", [(0, 40, (6, 4)), (1, 8, (8, 8))], ids=["full", "sliding"])
@torch.no_grad()
def test_softmax_attention_against_each_token_written_out(index, window, bits):
    """Layers that keep all of their attention, in full and in the teacher's own window, in float64."""
    model = make_hybrid(**MIXED)
    layer = model.model.layers[index].self_attn
    calls = []
    layer.register_forward_hook(lambda module, arguments, output: calls.append((*arguments[:2], output[0])))
    model(random_ids(1, 30))
    ((hidden_states, rotary, output),) = calls
    query, key, value = layer.project_heads(hidden_states)
    query, key = rotate_queries(query, rotary)[0], rotate_keys(key, rotary)[0]
    held = [
        torch.stack([torch.stack([_rounded(vector, of) for vector in head]) for head in vectors])
        for vectors, of in zip((key, value[0]), bits, strict=True)
    ]
    expected = []
    for t in range(30):
        seen = range(max(0, t + 1 - window), t + 1)
        heads = []
        for head, q in enumerate(query[:, t]):
            keys, values = (vectors[head // layer.num_key_value_groups, list(seen)] for vectors in held)
            heads.append((layer.scaling * keys @ q).softmax(0) @ values)
        expected.append(layer.o_proj(torch.cat(heads)))
    torch.testing.assert_close(output[0], torch.stack(expected))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_heads_are_taken_out_of_their_rows_in_parts(implementation, monkeypatch):
    """Behind padding; eager attention returns its probabilities, too."""
    model = make_hybrid(**MIXED).float().eval()  # eager attention's masks are none in float64
    model.set_attn_implementation(implementation)
    ids = random_ids(2, 46)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    read = []
    decode = Rounding.decode
    monkeypatch.setattr(Rounding, "decode", lambda *args, **how: read.append(1) or decode(*args, **how))

    def run():
        read.clear()
        cache = model(ids[:, :45], attention_mask=mask[:, :45], use_cache=True).cache
        asked = implementation == "eager"
        out = model(ids[:, 45:], attention_mask=mask, cache=cache, output_attentions=asked)
        return len(read), [out.logits, *(out.attentions or ())]

    calls, whole = run()
    monkeypatch.setattr(attention, "DECODED", 1)
    more_calls, parts = run()
    assert more_calls > calls
    assert len(whole) == len(parts) == (3 if implementation == "eager" else 1)
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("recording", [False, True])
def test_a_static_cache_holds_rows_too(recording):
    """Also where a gradient might be wanted, as in a pass without `torch.no_grad`."""
    model = make_hybrid(**MIXED).double().eval()
    ids = random_ids(1, 40)
    cache = StaticCache(config=model.config, max_cache_len=64)
    with torch.set_grad_enabled(recording):
        expected = model(ids, use_cache=False).logits
        found = [model(part, cache=cache).logits for part in ids.split(20, dim=1)]
    torch.testing.assert_close(torch.cat(found, dim=1), expected)
    assert cache.layers[0].keys.dtype == torch.uint8


def test_gradients_pass_the_rounding():
    model = make_hybrid(**MIXED).double().train()
    ids = random_ids(1, 40)
    with_cache = torch.autograd.grad(model(ids, use_cache=True).logits.square().mean(), trained_parameters(model))
    without = torch.autograd.grad(model(ids, use_cache=False).logits.square().mean(), trained_parameters(model))
    for one, other in zip(with_cache, without, strict=True):
        torch.testing.assert_close(one, other)
    by_name = dict(zip((n for n, p in model.named_parameters() if p.requires_grad), without, strict=True))
    assert all(by_name[f"model.layers.{i}.self_attn.k_proj.weight"].abs().max() > 0 for i in (0, 1))


def test_a_quantised_cache_of_transformers_is_refused():
    with pytest.raises(ValueError, match=r"needs no cache_implementation='quantized'.*full_attention_bits \[6, 4\]"):
        make_hybrid(**MIXED).generate(random_ids(1, 5), cache_implementation="quantized", max_new_tokens=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(window_bits=9), "window_bits must be one of"),
        (dict(full_attention_bits=[8, 8, 8]), "full_attention_bits must be one of"),
        (dict(head_dim=8, window_bits=4), "multiple of 16"),
    ],
)
def test_impossible_bits_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        make_hybrid(**MIXED | fields)
