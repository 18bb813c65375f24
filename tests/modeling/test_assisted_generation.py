"""transformers' own speculative decoding: whoever drafts, greedy text is that of plain decoding."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import modeling_llamba.model.recording as recording
from modeling_llamba.compatibility import cache_of
from tests.helpers.hybrids import make_hybrid
from tests.helpers.teachers import TINY, random_ids
from tests.helpers.versions import drafts

MODELS = {
    "hybrid": lambda: make_hybrid(pattern="beside-only"),
    "hybrid with mixers and attention": lambda: make_hybrid(pattern="beside"),
    "hybrid with a sliding window": lambda: make_hybrid(pattern="gemma"),
    "hybrid without a state": lambda: make_hybrid(mixer="none", pattern="beside-only"),
    "phimamba": lambda: make_hybrid("phimamba", "mamba2", "beside-only", hybrid_sink_reach=12),
    "discrete_mamba2": lambda: make_hybrid(pattern="pure"),
    "mamba2": lambda: make_hybrid("phimamba", "mamba2", "pure"),
    "mamba1": lambda: make_hybrid(mixer="mamba1", pattern="pure"),
    "mamba1 and attention": lambda: make_hybrid("phimamba", "mamba1", "hybrid"),
}
NEW = 24
pytestmark = drafts


def teacher():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TINY)).eval().double()


def near(model, noise=0.12):
    """A model that agrees for some tokens, not for all."""
    draft, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.mul_(1 + noise * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return draft


def generated(model, ids, **options):
    """The text, and how many tokens went through the model in each pass."""
    passes = []
    hook = model.register_forward_pre_hook(
        lambda model, args, given: passes.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    fixed = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, attention_mask=torch.ones_like(ids))
    text = model.generate(ids, **fixed | options)
    hook.remove()
    return text, passes


@pytest.mark.parametrize("length", [1, 30])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_prompt_lookup(name, length):
    """In a prompt that repeats itself; what is looked up is seldom what follows."""
    model, ids = MODELS[name](), random_ids(1, 6).repeat(1, 5)[:, :length]
    plain, _ = generated(model, ids)
    text, passes = generated(model, ids, prompt_lookup_num_tokens=5)
    assert torch.equal(text, plain)
    assert max(passes[1:]) > 2, "the cache never held a draft"


def drafted(model, draft, ids, count):
    draft.generation_config.num_assistant_tokens = count
    draft.generation_config.assistant_confidence_threshold = 0
    plain, _ = generated(model, ids)
    text, passes = generated(model, ids, assistant_model=draft)
    assert torch.equal(text, plain)
    return len(passes)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_an_assistant_of_the_same_kind(name):
    model = MODELS[name]()
    passes = drafted(model, near(model), random_ids(1, 7), 3)
    assert NEW / (1 + 3) < passes < NEW, "all or no drafts were taken"


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_drafts_for_a_transformer(name):
    """Nearly all of them wrong, after a prompt of one token: the draft's cache is emptied, too."""
    drafted(teacher(), MODELS[name](), random_ids(1, 1), 4)


@torch.no_grad()
def test_drafts_of_a_transformer():
    drafted(MODELS["hybrid"](), teacher(), random_ids(1, 7), 4)


@pytest.mark.parametrize("name", ["hybrid", "discrete_mamba2"])
@torch.no_grad()
def test_the_returned_cache_goes_on(name):
    model, ids = MODELS[name](), random_ids(1, 9)
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None)
    out = model.generate(ids, assistant_model=near(model), return_dict_in_generate=True, **options)
    assert cache_of(out).get_seq_length() == out.sequences.shape[1] - 1
    logits = model(out.sequences[:, -1:], cache=cache_of(out)).logits
    torch.testing.assert_close(logits[:, -1], model(out.sequences).logits[:, -1], rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["hybrid", "discrete_mamba2"])
@torch.no_grad()
def test_more_drafts_than_are_kept_are_refused(name, monkeypatch):
    monkeypatch.setattr(recording, "CROPPABLE", 4)
    model, ids = MODELS[name](), random_ids(1, 6).repeat(1, 5)
    with pytest.raises(ValueError, match="draft fewer tokens at a time"):
        generated(model, ids, prompt_lookup_num_tokens=12)
