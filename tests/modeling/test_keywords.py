"""Arguments that transformers' models and `generate` take: each is followed, changes nothing, or is refused."""

import inspect

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM, StaticCache
from transformers.cache_utils import StaticIndexedLayer
from transformers.utils import TransformersKwargs

from modeling_llamba.compatibility import CACHE_NAME
from modeling_llamba.model.cache import StaticRows
from modeling_llamba.model.hybrid_model import FOLLOWED, WITHOUT_EFFECT
from tests.helpers.hybrids import FAMILIES, make_hybrid
from tests.helpers.teachers import random_ids
from tests.helpers.versions import KNOWS_WHAT_CAN_BE_CROPPED

GREEDY = dict(do_sample=False, eos_token_id=None)
PATTERNS = ["beside", "pure", "attention"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pattern", PATTERNS)
@torch.no_grad()
def test_a_cache_has_two_names(family, pattern):
    model, ids = make_hybrid(family, pattern=pattern), random_ids(1, 30)
    whole = model(ids).logits[:, 20:]
    made = model.generate(ids, max_new_tokens=5, **GREEDY)
    for name in ("cache", "past_key_values"):
        out = model(ids[:, :20], use_cache=True)
        assert getattr(out, name).get_seq_length() == 20
        torch.testing.assert_close(model(ids[:, 20:], **{name: getattr(out, name)}).logits, whole)
        assert torch.equal(model.generate(ids, max_new_tokens=5, **{name: DynamicCache()}, **GREEDY), made)
        begun = model(ids[:, :20], use_cache=True)
        assert torch.equal(model.generate(ids, max_new_tokens=5, **{name: getattr(begun, name)}, **GREEDY), made)
    two = {"cache": DynamicCache(), "past_key_values": DynamicCache()}
    for call in (model, model.model, model.generate):
        with pytest.raises(ValueError, match="two names of one argument"):
            call(ids, **two)
    assert set(model.config.keys_to_ignore_at_inference) == {"cache", "past_key_values"}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_keyword_is_swallowed(family):
    model, ids = make_hybrid(family, pattern="beside"), random_ids(1, 8)
    known = {*inspect.signature(LlamaForCausalLM.forward).parameters, *TransformersKwargs.__optional_keys__}
    known -= {"self", "kwargs"}
    assert {CACHE_NAME, "is_causal", "cu_seq_lens_q", "logits_to_keep"} <= known  # it is not blind
    forwards = (type(model).forward, type(model.model).forward)
    taken = {name for forward in forwards for name in inspect.signature(forward).parameters}
    left = known - taken - {*FOLLOWED, *WITHOUT_EFFECT}
    assert left == {"is_causal"}
    for name, value in {"is_causal": False, "sliding_window": 4, "token_type_ids": ids, "softcap": 1.0}.items():
        with pytest.raises(ValueError, match=f"does not follow {name}"):
            model(ids, **{name: value})
        with pytest.raises(ValueError, match=f"{name}"):
            model.generate(ids, max_new_tokens=2, **{name: value}, **GREEDY)
    expected = model(ids).logits
    assert torch.equal(model(ids, is_causal=True, token_type_ids=None).logits, expected)
    for name in WITHOUT_EFFECT:
        if name not in ("logits_to_keep", "cu_seq_lens_k"):
            assert torch.equal(model(ids, **{name: 3}).logits, expected)
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        model(ids, cu_seq_lens_k=torch.tensor([0, 4, 8]))


@torch.no_grad()
def test_two_ways_of_saying_one_thing_are_refused():
    model, ids = make_hybrid(), random_ids(1, 8)
    starts, others = torch.tensor([0, 4, 8]), torch.tensor([0, 3, 8])
    for two in (
        dict(seq_idx=torch.tensor([[0] * 4 + [1] * 4]), cu_seqlens=others),
        dict(cu_seqlens=starts, cu_seq_lens_q=others),
    ):
        with pytest.raises(ValueError, match="pass one of them"):
            model(ids, use_cache=False, **two)
    with pytest.raises(ValueError, match="no experts"):
        model(ids, output_router_logits=True)


@pytest.mark.parametrize("pattern", PATTERNS)
@torch.no_grad()
def test_a_mask_of_four_dimensions_is_followed_or_refused(pattern):
    """Of two texts that do not see each other, though their positions go on."""
    model, ids = make_hybrid(pattern=pattern), random_ids(1, 12)
    text = torch.arange(12) // 6
    mask = (text[:, None] == text[None]) & torch.ones(12, 12, dtype=torch.bool).tril()
    if pattern == "attention":
        found = model(ids, attention_mask=mask[None, None]).logits[:, 6:]
        alone = model(ids[:, 6:], position_ids=torch.arange(6, 12)[None]).logits
        torch.testing.assert_close(found, alone)
        return
    with pytest.raises(ValueError, match="mask of 4 dimensions"):
        model(ids, attention_mask=mask[None, None])
    with pytest.raises(ValueError, match="has no mask for"):
        model(ids, attention_mask={"full_attention": mask[None, None]})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pattern", PATTERNS)
@torch.no_grad()
def test_generation_from_embeddings(family, pattern):
    model, ids = make_hybrid(family, pattern=pattern), random_ids(2, 9)
    embedded = model.get_input_embeddings()(ids)
    made = model.generate(inputs_embeds=embedded, max_new_tokens=6, **GREEDY)
    assert torch.equal(made, model.generate(ids, max_new_tokens=6, **GREEDY)[:, 9:])


def test_an_early_exit_leaves_the_model_whole():
    model, ids = make_hybrid(pattern="beside"), random_ids(1, 9)
    expected = model.generate(ids, max_new_tokens=5, **GREEDY)
    with pytest.raises(ValueError, match="assistant_early_exit"):
        model.generate(ids, max_new_tokens=5, assistant_early_exit=2, **GREEDY)
    assert torch.equal(model.generate(ids, max_new_tokens=5, **GREEDY), expected)


def test_checkpointed_layers_fill_no_cache_twice():
    model, ids = make_hybrid(pattern="beside").train(), random_ids(1, 9)
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="twice"):
        model(ids, cache=DynamicCache(), labels=ids)
    assert model(ids, labels=ids).loss.requires_grad


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("pattern", PATTERNS)
@torch.no_grad()
def test_a_crop_in_the_wrong_direction_changes_nothing(pattern, count):
    if pattern == "attention" and not KNOWS_WHAT_CAN_BE_CROPPED:
        pytest.skip("before 5.17 a positive number is how many tokens stay in transformers' own layers")
    model, ids = make_hybrid(pattern=pattern), random_ids(1, 20)
    cache = model.new_cache()
    cache.activate_past_recording()
    model(ids[:, :15], cache=cache)
    with pytest.raises((ValueError, RuntimeError), match="negative"):
        cache.crop(count)
    torch.testing.assert_close(model(ids[:, 15:], cache=cache).logits, model(ids).logits[:, 15:])


FEW_BITS = dict(
    layer_types=["hybrid", "full_attention", "sliding_attention"], num_hidden_layers=3,
    hybrid_full_heads=[[2, 3], [], []],
    hybrid_window=6, window_bits=8, full_attention_bits=[6, 4], head_dim=16, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip


@torch.no_grad()
def test_static_rows_of_few_bits_that_are_made_early():
    """By a prompt in chunks, and by hand."""
    model, ids = make_hybrid(**FEW_BITS), random_ids(1, 40)
    options = dict(max_new_tokens=6, cache_implementation="static", disable_compile=True, **GREEDY)
    expected = model.generate(ids, max_new_tokens=6, **GREEDY)
    assert torch.equal(model.generate(ids, **options), expected)
    assert torch.equal(model.generate(ids, prefill_chunk_size=16, **options), expected)
    cache = StaticCache(config=model.config, max_cache_len=60)
    heads = model.config.num_key_value_heads
    cache.early_initialization(1, heads, model.config.head_dim, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(model(ids, cache=cache).logits, model(ids).logits)
    assert any(isinstance(layer, StaticRows) for layer in cache.layers)


@torch.no_grad()
def test_static_caches_of_other_models_are_refused():
    """One that holds keys already, and one whose layer for attention is of another kind."""
    model, other = make_hybrid(**FEW_BITS), make_hybrid(**FEW_BITS | dict(window_bits=16, full_attention_bits=16))
    cache = StaticCache(config=other.config, max_cache_len=60)
    other(random_ids(1, 8), cache=cache)
    with pytest.raises(ValueError, match="holds keys of another model"):
        model(random_ids(1, 8), cache=cache)
    cache = StaticCache(config=model.config, max_cache_len=60)
    cache.layers[1] = StaticIndexedLayer(max_cache_len=60)
    with pytest.raises(ValueError, match="has a StaticIndexedLayer for attention"):
        model(random_ids(1, 8), cache=cache)


def test_a_way_to_run_experts_is_refused_where_there_are_none(tmp_path):
    make_hybrid().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no experts"):
        AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="grouped_mm")


def test_a_norms_epsilon_can_be_set():
    for family in FAMILIES:
        config = make_hybrid(family).config
        config.norm_eps = 0.25
        assert 0.25 in (getattr(config, "rms_norm_eps", None), getattr(config, "layer_norm_eps", None))
