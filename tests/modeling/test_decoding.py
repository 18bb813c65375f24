"""One token at a time: keys that grow in place, and steps that equal the scan."""

import copy

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from modeling_llamba.hybrid.naive import ssd_recurrence
from modeling_llamba.mixers.ssd import ssd_scan, ssd_step
from modeling_llamba.model import attention
from modeling_llamba.model.attention import append_keys
from tests.helpers.hybrids import make_hybrid
from tests.helpers.scans import SHAPES, relative_error, ssd_inputs
from tests.helpers.teachers import random_ids


@pytest.fixture
def little_room(monkeypatch):
    monkeypatch.setattr(attention, "MIN_ROOM", 3)


def tokens(count, batch=2):
    return torch.randn(batch, 3, count, 4), torch.randn(batch, 3, count, 4)


@torch.no_grad()
def test_growing_in_place_holds_what_concatenating_holds(little_room):
    grown, plain = DynamicLayer(), DynamicLayer()
    rooms = set()
    for count in (5, 1, 1, 1, 1, 2, 1, 7, 1):
        new = tokens(count)
        got, expected = append_keys(grown, *new), plain.update(*new)
        assert all(map(torch.equal, got, expected))
        assert grown.get_seq_length() == plain.get_seq_length()
        rooms.add(grown.keys.data_ptr())
    assert len(rooms) < 6, "room for more than one token each time"


CHANGES = {
    "crop": lambda layer: layer.crop(-3),
    "reorder": lambda layer: layer.reorder_cache(torch.tensor([1, 0])),
    "one row twice": lambda layer: layer.reorder_cache(torch.tensor([1, 1])),
    "repeat": lambda layer: layer.batch_repeat_interleave(2),
    "select": lambda layer: layer.batch_select_indices(torch.tensor([1])),
    "first row": lambda layer: layer.batch_select_indices(slice(0, 1)),
    "reset": lambda layer: layer.reset(),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_growing_after_a_change_from_outside(little_room, change):
    grown, plain = DynamicLayer(), DynamicLayer()
    for count in (5, 1, 1):
        new = tokens(count)
        append_keys(grown, *new), plain.update(*new)
    for layer in (grown, plain):
        CHANGES[change](layer)
    batch = len(plain.keys) if plain.is_initialized else 2
    for count in (1, 1, 4):
        new = tokens(count, batch)
        assert all(map(torch.equal, append_keys(grown, *new), plain.update(*new)))


@torch.no_grad()
def test_copies_of_a_cache_do_not_share_their_room(little_room):
    layer = DynamicLayer()
    for count in (5, 1, 1):
        append_keys(layer, *tokens(count))
    other, before = copy.deepcopy(layer), layer.keys.clone()
    append_keys(other, *tokens(1))
    mine = tokens(1)
    append_keys(layer, *mine)
    assert torch.equal(layer.keys, torch.cat([before, mine[0]], 2))
    assert not torch.equal(other.keys, layer.keys)


def test_gradients_pass_through_cached_keys():
    layer = DynamicLayer()
    first, second = (tuple(t.requires_grad_() for t in tokens(n)) for n in (3, 1))
    append_keys(layer, *first)
    keys, _ = append_keys(layer, *second)
    keys.sum().backward()
    assert first[0].grad is not None
    assert second[0].grad is not None


def test_gradients_of_queries_alone_are_right_after_more_tokens():
    """Attention keeps views of the keys for its backward pass; what comes after must not write into them."""
    layer, queries = DynamicLayer(), torch.randn(2, 3, 1, 4, requires_grad=True)
    append_keys(layer, *tokens(3))
    outputs = []
    for _ in range(3):
        keys, values = append_keys(layer, *tokens(1))
        outputs.append(torch.nn.functional.scaled_dot_product_attention(queries, keys, values))
    torch.stack(outputs).sum().backward()
    assert queries.grad.abs().sum() > 0


@pytest.mark.parametrize("pattern", ["hybrid", "beside"])
def test_generation_equals_that_of_a_concatenating_cache(monkeypatch, pattern):
    model, ids = make_hybrid(pattern=pattern), random_ids(2, 9)
    options = dict(max_new_tokens=12, do_sample=False, use_cache=True)
    grown = model.generate(ids, **options)
    beams = model.generate(ids, num_beams=3, **options)

    def concatenate(layer, keys, values):
        return layer.update(keys, values)

    for module in ("model.attention", "hybrid.hybrid_attention"):
        monkeypatch.setattr(f"modeling_llamba.{module}.append_keys", concatenate)
    assert torch.equal(grown, model.generate(ids, **options))
    assert torch.equal(beams, model.generate(ids, num_beams=3, **options))


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_equal_recurrence(shape):
    x, log_a, B, C, state = ssd_inputs(shape)
    y_ref, state_ref = ssd_recurrence(x, log_a, B, C, state)
    running, ys = state.clone(), []
    for t in range(x.shape[1]):
        y, _ = ssd_step(running, x[:, t], log_a[:, t], B[:, t], C[:, t])
        ys.append(y)
    assert relative_error(torch.stack(ys, 1), y_ref) < 1e-6
    assert relative_error(running, state_ref) < 1e-6


@pytest.mark.parametrize("length", [64, 300])
def test_the_strongest_and_the_weakest_decays_side_by_side(length):
    """a from 1e-8 to 1 in one sequence, and heads that hold one or the other throughout."""
    torch.manual_seed(0)
    log_a = torch.empty(1, length, 4).uniform_(-18.42, 0)
    log_a[..., 1], log_a[..., 2] = -1e-8, -18.42
    inputs = [torch.randn(1, length, 4, 16), log_a, torch.randn(1, length, 4, 16), torch.randn(1, length, 4, 16)]
    inputs = [t.requires_grad_() for t in (*inputs, torch.randn(1, 4, 16, 16))]
    outputs, expected = ssd_scan(*inputs), ssd_recurrence(*inputs)
    weights = [torch.randn_like(t) for t in outputs]
    grads, references = (
        torch.autograd.grad(sum((t * w).sum() for t, w in zip(pair, weights, strict=True)), inputs)
        for pair in (outputs, expected)
    )
    for got, reference in zip((*outputs, *grads), (*expected, *references), strict=True):
        assert relative_error(got, reference.double()) < 1e-6


def test_a_packed_sequence_is_not_touched_by_its_neighbours():
    x, log_a, B, C, _ = ssd_inputs("many-chunks", (-1e-3, 0.0))
    seq_idx = (torch.arange(x.shape[1]) >= 70).int().expand(x.shape[:2])
    inputs = [t.clone().requires_grad_() for t in (x, log_a, B, C)]
    y, _ = ssd_scan(*inputs, seq_idx=seq_idx)
    y[:, 70:].sum().backward()
    for t in inputs:  # but for the rounding of what cancels in a sum of decays
        assert t.grad[:, :70].abs().max() < 1e-14 * t.grad.abs().max()
    other = [torch.cat([torch.randn_like(t[:, :70]), t[:, 70:]], 1) for t in (x, B, C)]
    assert torch.equal(ssd_scan(other[0], log_a, *other[1:], seq_idx=seq_idx)[0][:, 70:], y[:, 70:])


def test_a_plain_dynamic_cache_made_by_the_caller_grows_in_place():
    model, ids = make_hybrid(pattern="hybrid"), random_ids(1, 30)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :10], cache=cache)
        places = set()
        for t in range(10, 30):
            logits = model(ids[:, t : t + 1], cache=cache).logits
            places.add(cache.layers[1].keys.data_ptr())
        assert len(places) == 1
        torch.testing.assert_close(logits[:, -1], model(ids).logits[:, -1], rtol=1e-4, atol=1e-4)
