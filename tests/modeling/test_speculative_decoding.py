"""Speculative decoding against plain decoding: the same tokens, or the same distribution."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM, StoppingCriteria
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from modeling_llamba.speculative_decoding import (
    Drafted,
    PromptLookup,
    SpeculativeOutput,
    Text,
    judge,
    speculative_decoding,
)
from tests.modeling.test_models import CASES
from tests.students import FAMILIES, MIXERS, make_student
from tests.teachers import TINY, random_ids

LENGTH = 18


def near(model, noise=0.1):
    """A model that often, not always, agrees."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.mul_(1 + noise * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return draft


def padded_batch(lengths=(4, 9, 6)):
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = random_ids(1, length, seed=row)[0]
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return dict(input_ids=ids, attention_mask=mask)


def both(model, inputs, draft, count=3, **options):
    """Plain and speculative output of `generate`, the latter with its statistics."""
    options = dict(max_new_tokens=LENGTH, do_sample=False, eos_token_id=None) | options
    plain = model.generate(**inputs, **options)
    out = model.generate(
        **inputs,
        **options,
        return_dict_in_generate=True,
        custom_generate=speculative_decoding,
        draft=draft,
        num_draft_tokens=count,
    )
    return plain, out


@pytest.mark.parametrize("family, mixer, pattern", CASES)
def test_greedy_output_is_plain_decodings(family, mixer, pattern):
    """A left-padded batch whose rows accept at different pace."""
    model = make_student(family, mixer, pattern)
    plain, out = both(model, padded_batch(), near(model))
    assert torch.equal(out.sequences, plain)
    known = out.statistics
    assert 0 < known.accepted < known.drafted and known.tokens == 3 * (LENGTH - 1) > known.row_passes


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("kind", ["prompt-lookup", "transformer", "other-family", "same"])
def test_every_draft_and_length(kind, count):
    model = make_student("llamba", "discrete_mamba2", "beside")
    torch.manual_seed(3)
    drafts = {
        "transformer": lambda: LlamaForCausalLM(LlamaConfig(**TINY)).eval(),
        "other-family": lambda: make_student("phimamba", "mamba1", "hybrid"),
        "same": lambda: model,
    }
    draft = drafts[kind]() if kind in drafts else kind
    plain, out = both(model, padded_batch(), draft, count, max_new_tokens=20)
    assert torch.equal(out.sequences, plain)
    if kind == "same":
        assert out.statistics.accepted > 0.9 * out.statistics.drafted  # all but what lies beyond the last token
        assert out.statistics.passes == -(-19 // (count + 1))
    single = dict(input_ids=random_ids(1, 1))
    plain, out = both(model, single, draft, count, max_new_tokens=10)
    assert torch.equal(out.sequences, plain)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mixer", MIXERS)
def test_the_returned_cache_goes_on_where_plain_decodings_does(family, mixer):
    model = make_student(family, mixer, "hybrid")
    ids = random_ids(1, 7)
    _, out = both(model, dict(input_ids=ids), near(model))
    more = model(out.sequences[:, -1:], past_key_values=out.past_key_values).logits[:, -1]
    torch.testing.assert_close(more, model(out.sequences).logits[:, -1], rtol=1e-4, atol=1e-5)


def test_rows_end_where_plain_decoding_ends_them():
    """At an end-of-text token, each row at its own place, padding behind."""
    model = make_student(pattern="beside")
    inputs = padded_batch()
    free = model.generate(**inputs, max_new_tokens=LENGTH, do_sample=False, eos_token_id=None)[:, 9:]
    ends = [free[0, 4].item(), free[1, 9].item()]
    plain, out = both(model, inputs, near(model), eos_token_id=ends, pad_token_id=0)
    assert torch.equal(out.sequences, plain) and (plain[:, -1] == 0).any()
    for count in (1, 8):
        assert torch.equal(both(model, inputs, near(model), count, eos_token_id=ends)[1].sequences, plain)


def test_the_last_tokens_of_rows_of_different_length():
    text = Text(torch.arange(1, 9).view(1, 8).repeat(2, 1), None, 8)
    text.ends = [3, 8]
    assert text.last(2).tolist() == [[2, 3], [7, 8]]


class EndsAfter(StoppingCriteria):
    """Stops a row at the first of its new tokens that is below `bound`."""

    def __init__(self, bound, prompt):
        self.bound, self.prompt, self.seen = bound, prompt, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.shape)
        return (input_ids[:, -1] < self.bound) & (input_ids.shape[1] > self.prompt)


@pytest.mark.parametrize("eos", [None, 127])
def test_stopping_criteria(eos):
    model = make_student(pattern="hybrid")
    for bound in (8, 30, 60):
        criterion = EndsAfter(bound, 9)
        plain, out = both(model, padded_batch(), near(model), stopping_criteria=[criterion], eos_token_id=eos)
        assert torch.equal(out.sequences, plain)


class PaddedRowsEnd(StoppingCriteria):
    """Stops padded rows at once."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, 0] == 0


@pytest.mark.parametrize("noise", [0.05, 0.1, 0.2])
def test_a_stopped_row_that_has_to_go_on_does_not_overrun(noise):
    """Without an end-of-text token all rows go on to the last one's end, some of them faster than it."""
    model = make_student(pattern="hybrid")
    inputs = padded_batch((4, 9, 6, 5, 3, 2))
    options = dict(stopping_criteria=[PaddedRowsEnd()], max_new_tokens=30)
    plain, out = both(model, inputs, near(model, noise), 2, **options)
    assert torch.equal(out.sequences, plain) and plain.shape[1] == 39


@pytest.mark.parametrize(
    "options",
    [
        dict(repetition_penalty=1.8),
        dict(no_repeat_ngram_size=2, min_new_tokens=12, eos_token_id=[5, 6, 7]),
        dict(bad_words_ids=[[9], [11, 12]], suppress_tokens=[30]),
        dict(max_length=20, max_new_tokens=None),
        dict(prefill_chunk_size=4),
    ],
)
def test_logits_processors_and_lengths(options):
    model = make_student(pattern="hybrid")
    plain, out = both(model, padded_batch(), near(model), **options)
    assert torch.equal(out.sequences, plain)
    plain, out = both(model, padded_batch(), "prompt-lookup", **options)
    assert torch.equal(out.sequences, plain)


def chi_square(counts, probabilities):
    """The statistic and a bound it exceeds once in about 10,000 times (Wilson and Hilferty's approximation)."""
    expected = counts.sum() * probabilities
    counts, expected = counts[expected > 5], expected[expected > 5]
    freedom = len(expected) - 1
    spread = 2 / (9 * freedom)
    return ((counts - expected) ** 2 / expected).sum().item(), freedom * (1 - spread + 3.72 * spread**0.5) ** 3


@pytest.mark.parametrize("drawn", [True, False])
def test_judged_tokens_follow_the_targets_distribution(drawn):
    """The joint distribution of the first two tokens, whatever the draft."""
    generator = torch.Generator().manual_seed(0)
    rows, vocabulary = 60_000, 5
    first = torch.randn(vocabulary, generator=generator)
    after = torch.randn(vocabulary, vocabulary, generator=generator)
    q = torch.randn(2, vocabulary, generator=generator).softmax(-1)
    torch.manual_seed(0)
    if drawn:
        tokens = torch.stack([torch.multinomial(q[i], rows, replacement=True) for i in range(2)], 1)
        drafted = Drafted(tokens, [2] * rows, q.expand(rows, 2, -1))
    else:
        drafted = Drafted(torch.tensor([[3, 1]]).expand(rows, 2), [2, 1] * (rows // 2))
    tokens = drafted.tokens
    scores = torch.stack([first.expand(rows, -1), after[tokens[:, 0]], after[tokens[:, 1]]], 1)
    counts, behind = judge(scores, drafted, sample=True)
    counts = torch.tensor(counts)
    got_first = torch.where(counts > 0, tokens[:, 0], behind)
    statistic, bound = chi_square(torch.bincount(got_first, minlength=vocabulary), first.softmax(-1))
    assert statistic < bound
    for token in range(vocabulary):
        chosen = (counts > 0) & (got_first == token)
        if chosen.any():
            second = torch.where(counts > 1, tokens[:, 1], behind)[chosen]
            statistic, bound = chi_square(torch.bincount(second, minlength=vocabulary), after[token].softmax(-1))
            assert statistic < bound
    # the test would see a wrong rule: taking every drafted token
    assert chi_square(torch.bincount(tokens[:, 0], minlength=vocabulary), first.softmax(-1))[0] > 100


@pytest.mark.parametrize("kind", ["model", "prompt-lookup"])
@torch.no_grad()
def test_sampling_follows_the_targets_distribution(kind):
    """Three tokens of a whole model with temperature and top-k, over rows drawn at once."""
    model = make_student(pattern="hybrid", vocab_size=6, dtype=torch.float32, pad_token_id=None)
    ids, rows, temperature = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2]]), 6000, 1.5
    torch.manual_seed(0)
    out = model.generate(
        ids.expand(rows, -1),
        max_new_tokens=3,
        do_sample=True,
        temperature=temperature,
        top_k=4,
        eos_token_id=None,
        return_dict_in_generate=True,
        custom_generate=speculative_decoding,
        draft=near(model, 0.5) if kind == "model" else kind,
        num_draft_tokens=2,
    )
    assert 0 < out.statistics.accepted < out.statistics.drafted

    def probabilities(prefix):
        logits = model(prefix).logits[:, -1] / temperature
        return logits.masked_fill(logits < logits.topk(4).values[:, -1:], float("-inf")).softmax(-1)

    p1 = probabilities(ids)[0]
    p2 = probabilities(torch.cat([ids.expand(6, -1), torch.arange(6)[:, None]], 1))
    pairs = torch.cat([ids.expand(36, -1), torch.cartesian_prod(torch.arange(6), torch.arange(6))], 1)
    joint = (p1[:, None, None] * p2[:, :, None] * probabilities(pairs).view(6, 6, 6)).flatten()
    new = out.sequences[:, 9:]
    counts = torch.bincount(new[:, 0] * 36 + new[:, 1] * 6 + new[:, 2], minlength=216)
    assert counts[joint == 0].sum() == 0
    statistic, bound = chi_square(counts, joint)
    assert statistic < bound


def test_streaming_hands_over_every_token_once():
    class Collector:
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.ended = True

    model, streamer = make_student(), Collector()
    options = dict(custom_generate=speculative_decoding, draft="prompt-lookup", token_streamer=streamer)
    ids = model.generate(random_ids(1, 5), max_new_tokens=12, do_sample=False, **options)
    assert streamer.tokens == ids[0].tolist() and streamer.ended


def test_it_can_be_called_by_the_models_own_name():
    model = make_student("phimamba", "mamba2", "beside-only")
    out = model.generate(
        random_ids(1, 5),
        max_new_tokens=12,
        return_dict_in_generate=True,
        custom_generate=model.speculative_decoding,
        draft=model,
        num_draft_tokens=2,
    )
    assert type(out) is SpeculativeOutput and out.statistics.summary()["acceptance_rate"] > 0.9


def test_two_folders_with_code_of_their_own_decode_speculatively(tmp_path):
    """Whose classes are neither each other's nor the installed ones."""
    models = []
    for family, mixer in (("llamba", "discrete_mamba2"), ("phimamba", "mamba2")):
        folder = tmp_path / family
        make_student(family, mixer, "beside", dtype=torch.float32).save_pretrained(folder)
        own = get_class_from_dynamic_module(f"modeling_{family}.{FAMILIES[family][1].__name__}", folder)
        models.append(own.from_pretrained(folder, dtype=torch.float64))
        assert type(models[-1]).__module__.startswith("transformers_modules")
    target, draft = models
    ids = torch.tensor([[0, 5, 6, 7], [9, 8, 7, 6]])
    options = dict(attention_mask=(ids > 0).long(), max_new_tokens=14, do_sample=False, eos_token_id=None)
    plain = target.generate(ids, **options)
    for source in (draft, "prompt-lookup"):
        drafted = target.generate(ids, **options, custom_generate=target.speculative_decoding, draft=source)
        assert torch.equal(drafted, plain)


def test_a_transformer_can_be_the_target_of_a_hybrid():
    torch.manual_seed(0)
    teacher = LlamaForCausalLM(LlamaConfig(**TINY)).eval().double()
    plain, out = both(teacher, padded_batch(), make_student())
    assert torch.equal(out.sequences, plain)


def test_prompt_lookup_takes_the_latest_longest_match():
    text = Text(torch.tensor([[1, 2, 3, 9, 2, 3, 7, 8, 2, 3], [5, 6, 7, 8, 9, 1, 2, 3, 4, 11]]), None, 16)
    drafted = PromptLookup().propose(text, 4, None)
    assert drafted.counts == [4, 0] and drafted.tokens[0].tolist() == [7, 8, 2, 3]
    assert PromptLookup().propose(text, 1, None).tokens[0].tolist() == [7]


def test_extra_bytes_are_those_of_the_record_and_the_drafts_cache():
    model = make_student()
    _, alone = both(model, dict(input_ids=random_ids(1, 5)), "prompt-lookup", 4)
    _, with_draft = both(model, dict(input_ids=random_ids(1, 5)), near(model), 4)
    assert 0 < alone.statistics.extra_bytes < with_draft.statistics.extra_bytes


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(num_draft_tokens=0), "at least 1"),
        (dict(num_draft_tokens=True), "at least 1"),
        (dict(num_draft_tokens="many"), "at least 1"),
        (dict(draft="itself"), "a model or 'prompt-lookup'"),
        (dict(num_beams=2), "no beams"),
        (dict(output_scores=True), "output_scores"),
        (dict(guidance_scale=2.0), "ClassifierFreeGuidance"),
        (dict(input_ids=torch.zeros(1, 0, dtype=torch.long)), "empty"),
        (dict(attention_mask=torch.tensor([[1, 1, 1, 1, 0]])), "on the left"),
        (dict(cache_implementation="static"), "use a dynamic cache"),
    ],
)
def test_bad_requests(options, message):
    model = make_student()
    options = dict(input_ids=random_ids(1, 5), max_new_tokens=4, draft="prompt-lookup", num_draft_tokens=2) | options
    with pytest.raises(ValueError, match=message):
        model.generate(**options, custom_generate=speculative_decoding)


def test_drafts_that_cannot_serve_are_refused():
    model, ids = make_student(), random_ids(1, 5)
    options = dict(max_new_tokens=4, custom_generate=speculative_decoding)
    with pytest.raises(ValueError, match="vocabulary of 96 tokens, the target of 128"):
        model.generate(ids, draft=make_student(vocab_size=96), **options)
    foreign = MambaForCausalLM(MambaConfig(vocab_size=128, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ValueError, match="recurrent and cannot take tokens back"):
        model.generate(ids, draft=foreign, num_draft_tokens=2, **options)
