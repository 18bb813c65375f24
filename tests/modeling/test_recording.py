"""Passes taken back leave the cache as if they had never been; accepted ones, as if there had been no others."""

import copy

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from modeling_llamba.hybrid_cache import accept, cache_length, record, recorded_bytes, stop_recording, tensors_of
from modeling_llamba.selective_scan import selective_advance, selective_read
from modeling_llamba.ssd import ssd_advance, ssd_read, ssd_recurrence
from tests.modeling.test_models import CASES, CLOSE
from tests.modeling.test_selective_scan import selective_recurrence
from tests.modeling.test_ssd import SHAPES, random_inputs
from tests.students import make_student
from tests.teachers import TINY, random_ids

EXACT = dict(rtol=1e-10, atol=1e-10)
every_case = pytest.mark.parametrize("family, mixer, pattern", CASES)


def states(cache):
    """Everything that is carried on, but for what lies in places that nobody holds."""
    for layer in cache.layers:
        if (salient := getattr(layer, "salient", None)) is not None:
            held = (salient.index >= 0)[:, None, :, None]
            layer.salient = salient._replace(keys=salient.keys * held, values=salient.values * held)
    return [t for layer in cache.layers for t in tensors_of(layer)]


def prefilled(model, ids):
    return model(ids, use_cache=True).past_key_values


@every_case
@torch.no_grad()
def test_verified_and_replayed_equals_token_by_token(family, mixer, pattern):
    """In one pass or several, then half of it taken back, several rounds in a row."""
    model = make_student(family, mixer, pattern)
    ids, wrong = random_ids(2, 40), random_ids(2, 40, seed=1)
    whole = model(ids, use_cache=False).logits
    cache, plain, length = prefilled(model, ids[:, :9]), prefilled(model, ids[:, :9]), 9
    record(cache)
    for kept, parts in ((3, [5]), (1, [1, 1, 2]), (4, [4]), (2, [1, 3]), (5, [6]), (6, [7])):
        fed = torch.cat([ids[:, length : length + kept], wrong[:, : sum(parts) - kept]], 1)
        logits = torch.cat([model(part, past_key_values=cache).logits for part in fed.split(parts, 1)], 1)
        torch.testing.assert_close(logits[:, :kept], whole[:, length : length + kept], **CLOSE)
        accept(cache, [kept, kept])
        for token in ids[:, length : length + kept].split(1, dim=1):
            model(token, past_key_values=plain)
        length += kept
        assert cache_length(cache) == cache_length(plain) == length
        for got, expected in zip(states(cache), states(plain), strict=True):
            torch.testing.assert_close(got, expected, **CLOSE)
    stop_recording(cache)
    again = model(ids[:, length:], past_key_values=cache).logits
    torch.testing.assert_close(again, whole[:, length:], **CLOSE)


@every_case
@torch.no_grad()
def test_rows_keep_different_numbers_of_tokens(family, mixer, pattern):
    """Rows padded on the left, each at its own pace; padding that no row needs is dropped."""
    model = make_student(family, mixer, pattern)
    rows = [random_ids(1, 40, seed=seed)[0] for seed in range(3)]
    whole = [model(row[None], use_cache=False).logits[0] for row in rows]
    have = [4, 9, 6]
    prompt = torch.stack([torch.nn.functional.pad(row[:n], (9 - n, 0)) for row, n in zip(rows, have, strict=True)])
    mask = (torch.arange(9) >= 9 - torch.tensor(have)[:, None]).long()
    out = model(prompt, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), use_cache=True)
    cache, columns = out.past_key_values, 9
    record(cache)
    for counts in ([5, 1, 3], [0, 5, 2], [4, 1, 1], [5, 0, 5], [5, 5, 5], [3, 2, 4]):
        fed = torch.stack([row[n : n + 5] for row, n in zip(rows, have, strict=True)])
        for row, count in enumerate(counts):
            fed[row, count:] = (fed[row, count:] - 2) % 125 + 3  # wrong from here on
        mask = torch.arange(columns + 5) >= columns - torch.tensor(have)[:, None]
        positions = torch.tensor(have)[:, None] + torch.arange(5)
        logits = model(fed, attention_mask=mask.long(), position_ids=positions, past_key_values=cache).logits
        for row, count in enumerate(counts):
            torch.testing.assert_close(logits[row, :count], whole[row][have[row] : have[row] + count], **CLOSE)
        have = [n + count for n, count in zip(have, counts, strict=True)]
        accept(cache, counts, drop=columns + max(counts) - max(have))
        columns = max(have)
        assert cache_length(cache) == columns


@torch.no_grad()
def test_a_recorded_pass_leaves_states_alone_and_costs_less_than_them():
    model = make_student(pattern="pure", mixer_d_state=8)
    cache = prefilled(model, random_ids(1, 9))
    record(cache)
    before = [t.clone() for t in states(cache)]
    model(random_ids(1, 4, seed=1), past_key_values=cache)
    assert all(torch.equal(a, b) for a, b in zip(states(cache), before, strict=True))
    per_layer = 8 * (4 * (2 * 8 + 2 * 8 + 4) + (4 + 4) * model.model.layers[0].mixer.conv_size)
    assert recorded_bytes(cache) == 2 * per_layer
    accept(cache, [0])
    assert recorded_bytes(cache) == 0 and all(torch.equal(a, b) for a, b in zip(states(cache), before, strict=True))


@torch.no_grad()
def test_sinks_that_were_not_accepted_are_forgotten():
    model = make_student(pattern="beside-only")
    ids, wrong = random_ids(1, 12), random_ids(1, 12, seed=1)
    cache = prefilled(model, ids[:, :1])
    record(cache)
    model(wrong[:, :5], past_key_values=cache)
    accept(cache, [0])
    logits = model(ids[:, 1:], past_key_values=cache).logits
    torch.testing.assert_close(logits, model(ids).logits[:, 1:], **CLOSE)


@torch.no_grad()
def test_a_transformers_own_model_can_be_taken_back_too():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY)).eval().double()
    ids = random_ids(1, 20)
    cache = prefilled(model, ids[:, :8])
    record(cache)
    model(torch.cat([ids[:, 8:10], random_ids(1, 3, seed=1)], 1), past_key_values=cache)
    accept(cache, [2])
    torch.testing.assert_close(model(ids[:, 10:], past_key_values=cache).logits, model(ids).logits[:, 10:], **CLOSE)


def test_caches_that_cannot_record_are_refused():
    model = make_student()
    with pytest.raises(ValueError, match="empty"):
        record(DynamicCache(config=model.config))
    with pytest.raises(ValueError, match="use a dynamic cache"):
        record(StaticCache(config=LlamaConfig(**TINY), max_cache_len=16))
    cache = prefilled(model, random_ids(1, 4))
    record(cache)
    with pytest.raises(AssertionError, match="recorded tokens"):
        accept(cache, [1])


@pytest.mark.parametrize("shape", [name for name in SHAPES if SHAPES[name][1] > 1])
def test_short_chunks_of_the_ssd(shape):
    x, log_a, B, C, state = random_inputs(shape, dtype=torch.float64)
    before = state.clone()
    y, after = ssd_recurrence(x, log_a, B, C, state)
    torch.testing.assert_close(ssd_read(state, x, log_a, B, C), y, **EXACT)
    torch.testing.assert_close(ssd_read(state, x, log_a, B, C[:, -3:]), y[:, -3:], **EXACT)
    assert torch.equal(state, before)
    advanced = ssd_advance(state, x, log_a, B)
    assert advanced is state
    torch.testing.assert_close(state, after, **EXACT)
    nothing = [torch.zeros_like(t) for t in (x, log_a, B)]
    torch.testing.assert_close(ssd_advance(state, *nothing), after, **EXACT)


def test_short_chunks_of_the_selective_scan():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, dt, B, C, state = draw(2, 7, 8), draw(2, 7, 8).exp(), draw(2, 7, 2, 3), draw(2, 7, 2, 3), draw(2, 8, 3)
    A, before = -draw(8, 3).exp(), copy.deepcopy(state)
    y, after = selective_recurrence(x, dt, A, B, C, state)
    torch.testing.assert_close(selective_read(state, x, dt, A, B, C[:, -4:]), y[:, -4:], **EXACT)
    torch.testing.assert_close(selective_advance(state, x, dt, B, A), after, **EXACT)
    assert torch.equal(state, before)
