"""Both families as a Hugging Face user meets them: caches, padding, packing, generation."""

import pytest
import torch
from transformers import DynamicCache

from modeling_llamba.compatibility import cache_of
from modeling_llamba.model.cache import RecurrentCache
from tests.helpers.hybrids import FAMILIES, MIXERS, PATTERNS, make_hybrid
from tests.helpers.padding import left_padded
from tests.helpers.teachers import random_ids

CLOSE = dict(rtol=1e-4, atol=5e-5)  # the rotary angles are float32; a leak shows at 1e-2
# every mixer alone and with attention; a family is another block around the same mixers, so the two take turns
CASES = [
    ("llamba", "discrete_mamba2", "pure"),
    ("phimamba", "discrete_mamba2", "hybrid"),
    ("phimamba", "mamba2", "pure"),
    ("llamba", "mamba2", "hybrid"),
    ("llamba", "mamba1", "pure"),
    ("phimamba", "mamba1", "hybrid"),
]
CASES += [("llamba", "discrete_mamba2", pattern) for pattern in ("window", "attention-first", "attention")]
CASES += [
    ("llamba", "discrete_mamba2", "beside"),
    ("phimamba", "mamba2", "beside-only"),
    ("llamba", "mamba1", "beside-only"),
    ("llamba", "none", "beside-only"),
]
CASES += [("llamba", "discrete_mamba2", "shared"), ("phimamba", "mamba2", "shared")]
CASES += [("llamba", "discrete_mamba2", "gemma"), ("llamba", "mamba2", "experts")]
every_case = pytest.mark.parametrize("family, mixer, pattern", CASES)


@every_case
@torch.no_grad()
def test_prefill_chunks_and_single_tokens_agree(family, mixer, pattern):
    model = make_hybrid(family, mixer, pattern)
    ids = random_ids(2, 40)
    whole = model(ids, use_cache=False).logits
    out, parts = None, []
    for part in ids.split([17, 3, 1, 1, 13, 1, 4], dim=1):
        out = model(part, cache=None if out is None else out.cache, use_cache=True)
        parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, **CLOSE)
    steps, cache = [], None
    for token in ids.split(1, dim=1):
        out = model(token, cache=cache, use_cache=True)
        cache = out.cache
        steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole, **CLOSE)


@every_case
@torch.no_grad()
def test_left_padding_does_not_change_logits(family, mixer, pattern):
    model = make_hybrid(family, mixer, pattern)
    ids = random_ids(2, 23)
    padded, mask = left_padded(ids, 6)
    whole = model(ids).logits
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, 6:], whole, **CLOSE)
    steps, cache = [], None  # padding arrives one token at a time, too
    for t in range(padded.shape[1]):
        out = model(padded[:, t : t + 1], attention_mask=mask[:, : t + 1], cache=cache, use_cache=True)
        cache = out.cache
        steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, 1)[:, 6:], whole, **CLOSE)
    # padding inside the second of two prefill chunks would otherwise leak through the state
    first = model(padded[:, :4], attention_mask=mask[:, :4], use_cache=True)
    second = model(padded[:, 4:], attention_mask=mask, cache=first.cache)
    torch.testing.assert_close(second.logits[:, 2:], whole, **CLOSE)


@torch.no_grad()
def test_capped_scores_padded_and_token_by_token():
    """In float32, since transformers' eager attention, which alone knows a cap here, has no float64 for padding."""
    model = make_hybrid(pattern="gemma", attn_logit_softcapping=2.0, dtype=torch.float32)
    ids, cache, steps = random_ids(2, 23), None, []
    padded, mask = left_padded(ids, 6)
    whole = model(ids).logits
    assert not torch.allclose(whole, make_hybrid(pattern="gemma", dtype=torch.float32)(ids).logits, atol=1e-2)
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, 6:], whole, rtol=1e-3, atol=1e-4)
    for t in range(padded.shape[1]):
        out = model(padded[:, t : t + 1], attention_mask=mask[:, : t + 1], cache=cache, use_cache=True)
        cache = out.cache
        steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, 1)[:, 6:], whole, rtol=1e-3, atol=1e-4)


@every_case
@torch.no_grad()
def test_packed_sequences_do_not_leak(family, mixer, pattern):
    model = make_hybrid(family, mixer, pattern)
    lengths = [11, 1, 20, 5]
    ids = random_ids(1, sum(lengths))
    alone = torch.cat([model(part).logits for part in ids.split(lengths, dim=1)], dim=1)
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    seq_idx = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    cu_seqlens = torch.tensor([0, 11, 12, 32, 37], dtype=torch.int32)
    for name, packing in {
        "position_ids": dict(position_ids=position_ids),
        "with a full mask": dict(position_ids=position_ids, attention_mask=torch.ones_like(ids)),
        "seq_idx": dict(seq_idx=seq_idx),
        "seq_idx with positions that do not restart": dict(seq_idx=seq_idx, position_ids=torch.arange(37)[None]),
        "cu_seqlens": dict(cu_seqlens=cu_seqlens),
        "flattening collator": dict(position_ids=position_ids, cu_seq_lens_q=cu_seqlens, seq_idx=seq_idx),
    }.items():
        torch.testing.assert_close(model(ids, **packing).logits, alone, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


@every_case
@torch.no_grad()
def test_packed_and_padded_rows_do_not_leak(family, mixer, pattern):
    """A row of two sequences and right padding beside a row of one, told by restarting positions or by ids."""
    model = make_hybrid(family, mixer, pattern)
    first, second, other = random_ids(1, 9), random_ids(1, 7, seed=1), random_ids(1, 20, seed=2)
    ids = torch.cat([torch.cat([first, second, torch.zeros(1, 4, dtype=torch.long)], 1), other])
    mask = torch.ones_like(ids)
    mask[0, 16:] = 0
    positions = torch.stack([torch.cat([torch.arange(9), torch.arange(7), torch.ones(4).long()]), torch.arange(20)])
    seq_idx = torch.stack([torch.cat([torch.zeros(9), torch.ones(11)]), torch.zeros(20)]).long()
    for packing in (dict(position_ids=positions), dict(seq_idx=seq_idx)):
        logits = model(ids, attention_mask=mask, **packing).logits
        torch.testing.assert_close(logits[:1, :9], model(first).logits, **CLOSE)
        torch.testing.assert_close(logits[:1, 9:16], model(second).logits, **CLOSE)
        torch.testing.assert_close(logits[1:], model(other).logits, **CLOSE)


def test_packing_with_a_cache_is_refused():
    model = make_hybrid()
    cache = model(random_ids(1, 4), use_cache=True).cache
    with pytest.raises(ValueError, match="no single state"):
        model(random_ids(1, 8), seq_idx=torch.arange(8)[None] // 4, cache=cache)


def test_packing_that_does_not_fit_the_batch_is_refused():
    with pytest.raises(ValueError, match="cu_seqlens packs one row"):
        make_hybrid()(random_ids(2, 8), cu_seqlens=torch.tensor([0, 4, 8]))


@every_case
def test_right_padding_in_training(family, mixer, pattern):
    """Loss and gradients of a right-padded batch are those of its rows alone."""
    model = make_hybrid(family, mixer, pattern)
    short, long = random_ids(1, 9), random_ids(1, 21, seed=1)
    ids = torch.zeros(2, 21, dtype=torch.long)
    ids[0, :9], ids[1] = short, long
    mask = (torch.arange(21) < torch.tensor([[9], [21]])).long()
    loss = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    loss.backward()
    together = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    alone = (model(short, labels=short).loss * 8 + model(long, labels=long).loss * 20) / 28
    alone.backward()
    torch.testing.assert_close(loss, alone, **CLOSE)
    assert len(together) > 10
    parameters = dict(model.named_parameters())
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, parameters[name].grad, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


@every_case
@torch.no_grad()
def test_batched_generation_equals_one_at_a_time(family, mixer, pattern):
    model = make_hybrid(family, mixer, pattern)
    prompts = [random_ids(1, n, seed=n) for n in (3, 8, 14)]
    width = 14
    ids = torch.cat([left_padded(p, width - p.shape[1])[0] for p in prompts])
    mask = torch.cat([left_padded(p, width - p.shape[1])[1] for p in prompts])
    options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None)
    together = model.generate(ids, attention_mask=mask, **options)[:, width:]
    for row, prompt in zip(together, prompts, strict=True):
        assert torch.equal(model.generate(prompt, **options)[0, prompt.shape[1] :], row)
    # and equal to the loop without any cache
    ids = prompts[1]
    for _ in range(12):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(ids[0, 8:], together[1])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "mixer, pattern",
    [("discrete_mamba2", p) for p in ("pure", "hybrid", "beside")] + [("none", "beside-only")],
)
@torch.no_grad()
def test_beam_search_and_sampling(family, mixer, pattern):
    model = make_hybrid(family, mixer, pattern)
    ids = random_ids(2, 9)
    options = dict(max_new_tokens=8, eos_token_id=None, num_beams=3, do_sample=False)
    with_cache = model.generate(ids, **options)
    assert torch.equal(with_cache, model.generate(ids, use_cache=False, **options))
    torch.manual_seed(1)
    sampled = model.generate(ids[:1], max_new_tokens=8, eos_token_id=None, do_sample=True, num_return_sequences=3)
    assert sampled.shape == (3, 17)
    assert len({tuple(row.tolist()) for row in sampled}) > 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pattern", ["pure", "hybrid", "window", "beside"])
@torch.no_grad()
def test_static_cache_generates_the_same(family, pattern):
    model = make_hybrid(family, pattern=pattern)
    ids = random_ids(2, 9)
    options = dict(max_new_tokens=8, eos_token_id=None, do_sample=False)
    static = model.generate(ids, cache_implementation="static", disable_compile=True, **options)
    assert torch.equal(static, model.generate(ids, **options))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pattern", ["pure", "hybrid", "attention", "beside"])
@torch.no_grad()
def test_generation_continues_from_a_returned_cache(family, pattern):
    model = make_hybrid(family, pattern=pattern)
    ids = random_ids(1, 10)
    options = dict(max_new_tokens=5, eos_token_id=None, do_sample=False)
    first = model.generate(ids, return_dict_in_generate=True, **options)
    options["attention_mask"] = torch.ones_like(first.sequences)  # or a token that is also the padding would be hidden
    second = model.generate(first.sequences, cache=cache_of(first), **options)
    options["attention_mask"] = torch.ones_like(ids)
    assert torch.equal(second, model.generate(ids, **options | {"max_new_tokens": 10}))


@torch.no_grad()
def test_caches_are_transformers_own():
    hybrid, pure = make_hybrid(), make_hybrid(pattern="pure")
    ids = random_ids(2, 7)
    cache = hybrid(ids, use_cache=True).cache
    assert type(cache) is DynamicCache
    assert cache.get_seq_length() == 7
    cache = pure(ids, use_cache=True).cache
    assert isinstance(cache, RecurrentCache | DynamicCache)
    assert cache.get_seq_length() == 7
    plain = DynamicCache(config=pure.config)
    first = pure(ids, cache=plain, use_cache=True)
    second = pure(ids, cache=plain, use_cache=True)
    expected = pure(torch.cat([ids, ids], 1)).logits
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), expected, **CLOSE)
    text = torch.cat([ids, ids, ids], 1)
    options = dict(max_new_tokens=2, do_sample=False, eos_token_id=None)
    assert torch.equal(pure.generate(text, cache=plain, **options), pure.generate(text, **options))


@torch.no_grad()
def test_positions_count_on_through_a_cache():
    """Trap: restarting positions at 0 with a cache moves every rotary embedding."""
    for pattern in ("pure", "hybrid", "beside"):
        model = make_hybrid(pattern=pattern)
        ids = random_ids(1, 20)
        out = model(ids[:, :12], use_cache=True)
        implied = model(ids[:, 12:], cache=out.cache).logits
        out = model(ids[:, :12], use_cache=True)
        told = model(ids[:, 12:], cache=out.cache, position_ids=torch.arange(12, 20)[None]).logits
        torch.testing.assert_close(implied, told)


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_state_stays_float32_in_half_precision(mixer, dtype):
    model = make_hybrid(mixer=mixer).to(dtype)
    ids = random_ids(1, 30)
    out = model(ids[:, :20], use_cache=True)
    for token in ids[:, 20:].split(1, dim=1):
        out = model(token, cache=out.cache)
    assert out.logits.dtype == dtype
    assert out.logits.isfinite().all()
    assert out.cache.layers[0].recurrent_states[0].dtype == torch.float32


@every_case
@torch.no_grad()
def test_eager_and_sdpa_agree_and_report(family, mixer, pattern):
    model = make_hybrid(family, mixer, pattern)
    ids = random_ids(2, 15)
    sdpa = model(ids).logits
    model.set_attn_implementation("eager")
    num_attention = sum(kind.endswith(("full_attention", "sliding_attention")) for kind in PATTERNS[pattern])
    out = model(ids, output_hidden_states=True, output_attentions=num_attention > 0)
    torch.testing.assert_close(out.logits, sdpa, **CLOSE)
    assert len(out.hidden_states) == 1 + len(PATTERNS[pattern])
    assert out.hidden_states[0].shape == (2, 15, 32)
    assert len(out.attentions or ()) == num_attention
    for probabilities in out.attentions or ():
        torch.testing.assert_close(probabilities.sum(-1).float(), torch.ones(2, 4, 15))


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_embeds_and_logits_to_keep(family):
    model = make_hybrid(family)
    ids = random_ids(2, 9)
    whole = model(ids).logits
    torch.testing.assert_close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, whole)
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, whole[:, -2:])
    with pytest.raises(ValueError, match="exactly one"):
        model(ids, inputs_embeds=model.get_input_embeddings()(ids))
    with pytest.raises(ValueError, match="exactly one"):
        model()
