"""Whatever the order in which tokens arrive, and whatever stands between them, a hybrid says the same of each."""

import copy

import pytest
import torch
from transformers import DynamicCache

import modeling_llamba.model.recording as recording
from convert.layout.cache import cache_bytes
from modeling_llamba.compatibility import cache_of
from modeling_llamba.hybrid.hybrid_cache import HybridLayer
from modeling_llamba.model.cache import cache_length, cache_nbytes, fit_cache, new_cache
from tests.helpers.hybrids import MIXERS, make_hybrid, tiny_config, trained_parameters
from tests.helpers.teachers import random_ids
from tests.helpers.versions import KNOWS_WHAT_CAN_BE_CROPPED, recorded_windows

LENGTH = 40
EXACT = dict(rtol=0, atol=1e-11)
VARIANTS = {
    "salient tokens, planes, a kept head": {},
    "no places": dict(hybrid_sinks=0, hybrid_salient=0, hybrid_full_heads=None),
    "more places than a window": dict(hybrid_sinks=5, hybrid_salient=9, hybrid_full_heads=None),
    "larger blocks": dict(hybrid_block=5, hybrid_window=15),
    "far sinks": dict(hybrid_sinks=3, hybrid_sink_reach=12),
    "no state": dict(mixer="none"),
    "few bits": dict(head_dim=16, full_attention_bits=[6, 4], window_bits=8),
    "no rotary, and a local one": dict(
        layer_rope=["none", "local"], local_rope_parameters={"rope_type": "default", "rope_theta": 100.0}
    ),
}
MIXERS_ALONE = {mixer: dict(mixer=mixer, pattern="pure") for mixer in MIXERS}
every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_hybrid = pytest.mark.parametrize("variant", VARIANTS | MIXERS_ALONE)


def student(variant):
    return make_hybrid(**{"pattern": "beside-only", **(VARIANTS | MIXERS_ALONE)[variant]})


def in_parts(model, parts, cache=None, **options):
    """Logits of tokens that arrive in these parts; `options` hold what belongs to all of them."""
    cache, logits, end = model.new_cache() if cache is None else cache, [], 0
    for part in parts:
        begin, end = end, end + part.shape[1]
        of_part = {name: t[:, :end] if name == "attention_mask" else t[:, begin:end] for name, t in options.items()}
        logits.append(model(part, cache=cache, **of_part).logits)
    return torch.cat(logits, dim=1)


@every_variant
@torch.no_grad()
def test_two_parts_cut_anywhere(variant):
    model, ids = student(variant), random_ids(2, LENGTH)
    whole = model(ids, use_cache=False).logits
    for cut in range(1, LENGTH, 3):
        torch.testing.assert_close(in_parts(model, ids.split([cut, LENGTH - cut], dim=1)), whole, **EXACT)


@every_variant
@pytest.mark.parametrize("sizes", [[1] * LENGTH, [3] * 13 + [1], [7, 1, 1, 2, 9, 1, 1, 1, 1, 1, 11, 1, 3]])
@torch.no_grad()
def test_steps_and_parts(variant, sizes):
    model, ids = student(variant), random_ids(2, LENGTH)
    whole = model(ids, use_cache=False).logits
    torch.testing.assert_close(in_parts(model, ids.split(sizes, dim=1)), whole, **EXACT)


def test_steps_with_gradients():
    """One token then goes the way of a prompt; its gradient reaches what the tokens before it left."""
    model, ids = student("salient tokens, planes, a kept head"), random_ids(2, LENGTH)
    whole, steps = model(ids, use_cache=False).logits, in_parts(model, ids.split(1, dim=1))
    torch.testing.assert_close(steps, whole, **EXACT)
    weights = torch.randn_like(whole)
    assert_same_gradients(model, gradients(model, steps, weights), gradients(model, whole, weights))


def padded_rows():
    """Rows that are padded on the left, on the right, and within; a mask, positions, and the tokens of each row."""
    real = torch.ones(4, LENGTH, dtype=torch.bool)
    real[0, :9], real[1, 33:] = False, False
    real[2, torch.tensor([0, 1, 2, 8, 14, 15, 16, 17, 23, 30, 31, 32, 39])] = False
    real[3, :37] = False
    ids = random_ids(4, LENGTH)
    rows = [row[which] for row, which in zip(ids, real, strict=True)]
    positions = (real.long().cumsum(1) - 1).clamp(min=0)
    return ids.masked_fill(~real, 0), real, dict(attention_mask=real.long(), position_ids=positions), rows


@every_hybrid
@pytest.mark.parametrize("sizes", [[LENGTH], [1] * LENGTH, [5] * 8, [7, 1, 1, 2, 9, 1, 1, 1, 1, 1, 11, 1, 3]])
@torch.no_grad()
def test_padding_anywhere(variant, sizes):
    model, (ids, real, told, rows) = student(variant), padded_rows()
    alone = torch.cat([model(row[None]).logits[0] for row in rows])
    logits = in_parts(model, ids.split(sizes, dim=1), **told)
    torch.testing.assert_close(logits[real], alone, **EXACT)


@pytest.mark.parametrize("mixer", MIXERS)
@torch.no_grad()
def test_padding_within_what_is_taken_back(mixer):
    """Rows of a cache that records, with padding in what is kept and in what is dropped."""
    model, (ids, real, told, rows) = student(mixer), padded_rows()
    alone = torch.zeros(*ids.shape, model.config.vocab_size, dtype=torch.float64)
    alone[real] = torch.cat([model(row[None]).logits[0] for row in rows])
    cache = model.new_cache()

    def read(begin, end):
        mask, positions = told["attention_mask"][:, :end], told["position_ids"][:, begin:end]
        logits = model(ids[:, begin:end], cache=cache, attention_mask=mask, position_ids=positions).logits
        kept = real[:, begin:end]
        torch.testing.assert_close(logits[kept], alone[:, begin:end][kept], **EXACT)

    read(0, 13)
    for layer in cache.layers:
        layer.activate_past_recording()
    for begin, end, dropped in ((13, 19, 4), (15, 31, 3), (28, 34, 0), (34, 38, 2), (36, LENGTH, 0)):
        read(begin, end)
        cache.crop(-dropped)


def gradients(model, logits, weights):
    return torch.autograd.grad((logits * weights).sum(), trained_parameters(model))


def assert_same_gradients(model, together, alone):
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    for name, got, wanted in zip(names, together, alone, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


@every_hybrid
def test_padding_in_training(variant):
    model, (ids, real, told, rows) = student(variant), padded_rows()
    together, alone = model(ids, **told).logits[real], torch.cat([model(row[None]).logits[0] for row in rows])
    torch.testing.assert_close(together, alone, **EXACT)
    weights = torch.randn_like(alone)
    assert_same_gradients(model, gradients(model, together, weights), gradients(model, alone, weights))


LENGTHS = [17, 1, 9, 2, 13]
PACKINGS = ["seq_idx", "positions", "cu_seqlens", "padded", "padded, by positions"]


def packed(how):
    """Sequences, the ids in which they are packed, which of these are no padding, and arguments that say so."""
    rows = [random_ids(1, length, seed=length) for length in LENGTHS]
    ids, positions = torch.cat(rows, dim=1), torch.cat([torch.arange(length) for length in LENGTHS])[None]
    seq_idx = torch.repeat_interleave(torch.arange(5), torch.tensor(LENGTHS))[None]
    real = torch.ones_like(ids)
    if how.startswith("padded"):  # two rows, with padding before, between and behind the sequences
        places = [*range(2, 19), 21, *range(22, 31), 33, 34, *range(39, 52)]
        packing = [torch.zeros(1, 66, dtype=torch.long).index_copy(1, torch.tensor(places), t)
                   for t in (ids, positions, seq_idx, real)]  # fmt: skip
        ids, positions, seq_idx, real = (t.view(2, 33) for t in packing)
    told = {
        "seq_idx": dict(seq_idx=seq_idx),
        "positions": dict(position_ids=positions),
        "cu_seqlens": dict(cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0)),
        "padded": dict(seq_idx=seq_idx, position_ids=positions, attention_mask=real),
        "padded, by positions": dict(position_ids=positions, attention_mask=real),
    }
    return rows, ids, real.bool(), told[how]


def check_packed(variant, how):
    model, (rows, ids, real, told) = student(variant), packed(how)
    together, alone = model(ids, **told).logits[real], torch.cat([model(row).logits[0] for row in rows])
    torch.testing.assert_close(together, alone, **EXACT)
    weights = torch.randn_like(alone)
    assert_same_gradients(model, gradients(model, together, weights), gradients(model, alone, weights))


@every_variant
@pytest.mark.parametrize("how", PACKINGS)
def test_packed_sequences(variant, how):
    check_packed(variant, how)


@pytest.mark.parametrize("variant", ["salient tokens, planes, a kept head", "no places", "far sinks"])
def test_packed_sequences_by_flex_attention(variant, by_flex):
    check_packed(variant, "padded")


CHANGES = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 2])), [2, 0, 2]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([3, 1])), [3, 1]),
    "select by a mask": (lambda cache: cache.batch_select_indices(torch.tensor([True, False, True, False])), [0, 2]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2, 3, 3]),
}


@every_variant
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_rows_change_places(variant, change):
    model, (ids, real, told, _) = student(variant), padded_rows()
    cache, (act, rows) = model.new_cache(), CHANGES[change]
    expected = in_parts(model, ids.split([25, 15], dim=1), **told)[rows, 25:]
    begin = {name: t[:, :25] for name, t in told.items()}
    model(ids[:, :25], cache=cache, **begin)
    act(cache)
    logits = []
    for t in range(25, LENGTH):
        mask, positions = told["attention_mask"][rows, : t + 1], told["position_ids"][rows, t, None]
        of_step = dict(attention_mask=mask, position_ids=positions, cache=cache)
        logits.append(model(ids[rows, t, None], **of_step).logits)
    later = real[rows, 25:]
    torch.testing.assert_close(torch.cat(logits, dim=1)[later], expected[later], **EXACT)


@torch.no_grad()
def test_a_copy_of_a_cache_goes_its_own_way():
    model, ids = student("salient tokens, planes, a kept head"), random_ids(1, LENGTH)
    cache = model.new_cache()
    model(ids[:, :20], cache=cache)
    other = copy.deepcopy(cache)
    in_parts(model, random_ids(1, 20, seed=1).split(1, dim=1), other)
    later = in_parts(model, ids[:, 20:].split(1, dim=1), cache)
    torch.testing.assert_close(later, model(ids).logits[:, 20:], **EXACT)


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_bytes_are_those_of_the_plan(variant, dtype):
    """From the first token on the same, but for the keys of kept heads; as convert/layout counts them."""
    teacher = {"teacher_layer_types": ["full_attention"] * 2}
    model = make_hybrid(pattern="beside-only", dtype=dtype, conversion=teacher, **VARIANTS[variant])
    cache, ids, sizes = model.new_cache(), random_ids(1, 60), []
    for part in ids.split([12] + [1] * 48, dim=1):
        model(part, cache=cache)
        sizes.append(cache_nbytes(cache))
        assert sizes[-1] == cache_bytes(model.config, cache.get_seq_length(), dtype)[1]
    if model.config.hybrid_full_heads is None:
        assert len(set(sizes)) == 1
        for t in (t for layer in cache.layers for t in layer.tensors() if t is not None):
            assert t.untyped_storage().nbytes() == t.nbytes, "a view of more"
    states = [layer.held.state for layer in cache.layers if layer.held.state is not None]
    assert len(states) == (0 if variant == "no state" else 2)
    assert all(state.dtype == torch.float32 for state in states)


@pytest.mark.parametrize("padding", [0, 3])
@torch.no_grad()
def test_the_first_window_is_the_teachers(padding):
    """And with it the logits, as long as no layer's window is full."""
    hybrid, teacher = make_hybrid(pattern="beside-only", hybrid_window=[16, 14]), make_hybrid(pattern="attention")
    weights = {name.replace("mixer.", "self_attn."): t for name, t in hybrid.state_dict().items()}
    teacher.load_state_dict(weights, strict=False)
    ids, mask = random_ids(2, 30), torch.ones(2, 30, dtype=torch.long)
    mask[:, :padding] = 0
    told = dict(attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    expected = teacher(ids, **told).logits[:, padding:]
    for sizes in ([30], [1] * 30, [5] * 6):
        logits = in_parts(hybrid, ids.split(sizes, dim=1), **told)[:, padding:]
        torch.testing.assert_close(logits[:, :14], expected[:, :14], **EXACT)
    assert (logits[:, 20:] - expected[:, 20:]).abs().amax(-1).min() > 1e-3


@every_variant
@torch.no_grad()
def test_a_static_cache_generates_the_same(variant):
    """Of a padded batch, and beyond the sinks' reach."""
    model, ids = student(variant), random_ids(3, 11)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    options = dict(attention_mask=mask, max_new_tokens=25, eos_token_id=None, do_sample=False)
    plain = model.generate(ids, output_logits=True, return_dict_in_generate=True, **options)
    static = model.generate(
        ids, cache_implementation="static", disable_compile=True, output_logits=True, return_dict_in_generate=True,
        **options,
    )  # fmt: skip
    assert torch.equal(static.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(static.logits), torch.stack(plain.logits), rtol=0, atol=1e-5)
    assert all(layer.is_compileable and type(layer) is HybridLayer for layer in cache_of(static).layers)
    cache = cache_of(static)
    cache.reset()
    again = model.generate(ids, cache=cache, disable_compile=True, **options)
    assert torch.equal(again, plain.sequences)


# Taking tokens back

CROPPED = {
    **{name: ("beside-only", options) for name, options in VARIANTS.items()},
    **{mixer: ("pure", dict(mixer=mixer)) for mixer in MIXERS},
    "beside attention and a mixer": ("beside", {}),
    "beside a sliding window": ("gemma", {}),
    "shared states": ("shared", {}),
}
MARKS = {"beside a sliding window": recorded_windows}
every_cropped = pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in CROPPED])


def recording_student(name):
    pattern, options = CROPPED[name]
    model = make_hybrid(pattern=pattern, **options)
    cache = model.new_cache()
    cache.activate_past_recording()
    return model, cache


@every_cropped
@pytest.mark.parametrize("unrecorded", [0, 11])
@torch.no_grad()
def test_any_number_of_tokens_is_taken_back(name, unrecorded, monkeypatch):
    """After a prompt far longer than what is kept, and after steps; and again, after other tokens."""
    monkeypatch.setattr(recording, "CROPPABLE", 9)
    model, _ = recording_student(name)
    ids, wrong = random_ids(2, LENGTH), random_ids(2, LENGTH, seed=1)
    whole = model(ids, use_cache=False).logits
    for crop in (0, 1, 5, 9):
        cache, length = model.new_cache(), 28 - crop
        prompt = torch.cat([ids[:, :length], wrong[:, :crop]], dim=1)
        if unrecorded:
            in_parts(model, prompt[:, :unrecorded].split(7, dim=1), cache)
        cache.activate_past_recording()
        in_parts(model, prompt[:, unrecorded:].split([1, 1, 13, 13 - unrecorded], dim=1), cache)
        for steps in (0, 3, 1):
            cache.crop(-crop)
            assert cache_length(cache) == length
            crop = steps
            new = [ids[:, length : length + 1], *(wrong[:, t : t + 1] for t in range(steps))]
            logits = in_parts(model, new, cache)
            torch.testing.assert_close(logits[:, 0], whole[:, length], **EXACT)
            length += 1
        cache.crop(-crop)
        logits = in_parts(model, ids[:, length:].split([1, 1, LENGTH - length - 2], dim=1), cache)
        torch.testing.assert_close(logits, whole[:, length:], **EXACT)


@every_cropped
@torch.no_grad()
def test_one_crop_after_another(name):
    """States of mixers go back to the last crop at most, as transformers then drops inputs of their convolutions."""
    model, cache = recording_student(name)
    ids, wrong = random_ids(2, 20), random_ids(2, 5, seed=1)
    model(torch.cat([ids[:, :12], wrong], dim=1), cache=cache)
    cache.crop(-3)
    if {"linear_attention", "sliding_attention"} & set(model.config.layer_types):
        with pytest.raises((ValueError, RuntimeError)):
            cache.crop(-2)
        return
    cache.crop(-2)
    logits = model(ids[:, 12:], cache=cache).logits
    torch.testing.assert_close(logits, model(ids).logits[:, 12:], **EXACT)


@every_cropped
@torch.no_grad()
def test_everything_is_taken_back(name):
    model, cache = recording_student(name)
    ids = random_ids(1, 12)
    model(random_ids(1, 7, seed=1), cache=cache)
    cache.crop(-7)
    assert cache_length(cache) == 0
    logits = in_parts(model, ids.split([1, 1, 6, 4], dim=1), cache)
    torch.testing.assert_close(logits, model(ids).logits, **EXACT)


@pytest.mark.parametrize("name", ["salient tokens, planes, a kept head", "mamba2"])
@torch.no_grad()
def test_as_many_tokens_as_promised_are_taken_back(name):
    model, cache = recording_student(name)
    promised = recording.CROPPABLE
    ids = random_ids(1, 3 * promised)
    in_parts(model, ids.split([2 * promised, promised], dim=1), cache)
    cache.crop(-promised)
    logits = model(ids[:, 2 * promised :], cache=cache).logits
    torch.testing.assert_close(logits, model(ids).logits[:, 2 * promised :], **EXACT)


@every_cropped
@torch.no_grad()
def test_a_crop_after_rows_changed_places(name):
    """What came before the change is no longer there to be cropped; what came after it is."""
    model, cache = recording_student(name)
    ids, wrong = random_ids(2, 20), random_ids(2, 20, seed=1)
    model(ids[:, :12], cache=cache)
    cache.reorder_cache(torch.tensor([1, 1]))
    with pytest.raises(ValueError, match="crop"):
        cache.crop(-1)
    model(wrong[:, :3], cache=cache)
    cache.crop(-3)
    logits = model(ids[[1, 1], 12:], cache=cache).logits
    torch.testing.assert_close(logits, model(ids[[1, 1]]).logits[:, 12:], **EXACT)


@every_cropped
@torch.no_grad()
def test_tokens_that_were_not_recorded_are_not_taken_back(name):
    pattern, options = CROPPED[name]
    model, ids = make_hybrid(pattern=pattern, **options), random_ids(1, 12)
    cache = model(ids, use_cache=True).cache
    if KNOWS_WHAT_CAN_BE_CROPPED:
        assert not cache.is_croppable
    with pytest.raises(ValueError, match="activate_past_recording"):
        cache.crop(-1)
    cache.activate_past_recording()
    model(ids[:, :2], cache=cache)
    with pytest.raises(ValueError, match="cannot be cropped by 3 tokens: it recorded 2"):
        cache.crop(-3)


@torch.no_grad()
def test_a_cache_made_before_recording_records_when_it_is_fitted():
    """transformers makes the cache, asks it to record, and only then hands it to the model."""
    model, ids = make_hybrid(pattern="beside"), random_ids(1, 20)
    plain = DynamicCache(config=model.config)
    plain.activate_past_recording()
    fit_cache(plain, model.config)
    model(torch.cat([ids[:, :10], random_ids(1, 5, seed=1)], dim=1), cache=plain)
    plain.crop(-5)
    logits = model(ids[:, 10:], cache=plain).logits
    torch.testing.assert_close(logits, model(ids).logits[:, 10:], **EXACT)


# Caches from elsewhere


def test_caches_of_other_models_are_refused():
    model = make_hybrid(pattern="beside-only")
    with pytest.raises(ValueError, match="cache made for them"):
        model(random_ids(1, 4), cache=new_cache(tiny_config(pattern="beside")))
    other = make_hybrid(pattern="attention")
    begun = other(random_ids(1, 4), use_cache=True).cache
    with pytest.raises(ValueError, match="another model's cache"):
        model(random_ids(1, 1), cache=begun)
    ids = random_ids(1, 9)
    for fresh in (DynamicCache(config=model.config), new_cache(model.config)):
        torch.testing.assert_close(model(ids, cache=fresh).logits, model(ids).logits)
