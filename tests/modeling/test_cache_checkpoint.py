"""A cache that is taken back, copied or saved goes on as if what it read since had never been."""

import copy
import io

import pytest
import torch
from transformers import StaticCache

from modeling_llamba.hybrid.cache_checkpoint import CacheCheckpoint
from modeling_llamba.model.cache import cache_length
from tests.helpers.hybrids import MIXERS, make_hybrid
from tests.helpers.reading import read
from tests.helpers.teachers import make_teacher, random_ids
from tests.helpers.versions import TAKES_DRAFTS_BACK

EXACT = dict(rtol=0, atol=1e-11)
PATTERNS = ("beside", "beside-only", "pure", "window", "gemma", "every")
every_pattern = pytest.mark.parametrize("pattern", PATTERNS)


def assert_goes_on(model, cache, before, seed):
    """The cache, which holds `before`, goes on with other tokens."""
    new = random_ids(len(before), 12, seed=seed)
    expected = model(torch.cat([before, new], dim=1), use_cache=False).logits[:, before.shape[1] :]
    torch.testing.assert_close(read(model, new, cache)[0], expected, **EXACT)


def assert_comes_back(model):
    before = random_ids(2, 21)
    _, cache = read(model, before)
    checkpoint = CacheCheckpoint(cache)
    for seed in (1, 2, 3):  # as often as is wanted
        assert_goes_on(model, cache, before, seed)
        checkpoint.restore(cache)
        assert cache_length(cache) == 21
    assert_goes_on(model, cache, before, 4)


@every_pattern
@torch.no_grad()
def test_what_was_read_since_leaves_no_trace(pattern):
    assert_comes_back(make_hybrid(pattern=pattern))


@pytest.mark.parametrize(
    "options", [*(dict(pattern="pure", mixer=m) for m in MIXERS), dict(pattern="experts")], ids=str
)
@torch.no_grad()
def test_mixers_and_experts(options):
    assert_comes_back(make_hybrid(**options))


@pytest.mark.parametrize("bits", [8, [6, 4]])
@torch.no_grad()
def test_few_bits(bits):
    assert_comes_back(make_hybrid(pattern="beside-only", head_dim=16, full_attention_bits=bits, window_bits=8))


@torch.no_grad()
def test_a_transformer():
    """As `chat` talks with teachers, too."""
    assert_comes_back(make_teacher("llama-gqa").double())


@pytest.mark.parametrize("name", ["qwen3-5", "lfm2"])
@torch.no_grad()
def test_a_teachers_own_states(name):
    """They are kept in float32 whatever the weights, so that only the same passes give the same numbers."""
    model = make_teacher(name)
    before, new = random_ids(2, 21), random_ids(2, 12, seed=1)
    _, cache = read(model, before)
    checkpoint = CacheCheckpoint(cache)
    first, _ = read(model, new, cache)
    read(model, random_ids(2, 5, seed=2), cache)
    checkpoint.restore(cache)
    assert torch.equal(read(model, new, cache)[0], first)


@every_pattern
@torch.no_grad()
def test_older_checkpoints_after_newer_ones(pattern):
    model = make_hybrid(pattern=pattern)
    ids = random_ids(1, 30)
    checkpoints, cache = [], None
    for length in (10, 20, 30):
        _, cache = read(model, ids[:, length - 10 : length], cache)
        checkpoints.append(CacheCheckpoint(cache))
    for length, checkpoint in zip((30, 20, 10), reversed(checkpoints), strict=True):
        checkpoint.restore(cache)
        assert cache_length(cache) == length
    assert_goes_on(model, cache, ids[:, :10], 1)


@pytest.mark.parametrize("pattern", ["beside", "attention-first"])
@torch.no_grad()
def test_a_cache_that_went_another_way_is_refused(pattern):
    """Also where the keys of a first layer, which know their own token alone, are the same."""
    model = make_hybrid(pattern=pattern)
    ids = random_ids(1, 20)
    _, cache = read(model, ids[:, :10])
    first = CacheCheckpoint(cache)
    _, cache = read(model, ids[:, 10:], cache)
    second = CacheCheckpoint(cache)
    first.restore(cache)
    with pytest.raises(ValueError, match="rolled back since"):
        second.restore(cache)
    other = random_ids(1, 14, seed=5)
    other[:, 9] = ids[:, 19]
    read(model, other, cache)
    with pytest.raises(ValueError, match="rolled back since"):
        second.restore(cache)


@torch.no_grad()
def test_a_cache_that_records_can_be_cropped_after_it_came_back():
    model = make_hybrid(pattern="beside")
    ids = random_ids(1, 20)
    _, cache = read(model, ids)
    cache.activate_past_recording()
    checkpoint = CacheCheckpoint(cache)
    read(model, random_ids(1, 10, seed=1), cache)
    checkpoint.restore(cache)
    read(model, random_ids(1, 3, seed=2), cache)
    cache.crop(-3)
    assert_goes_on(model, cache, ids, 3)


@torch.no_grad()
def test_a_checkpoint_takes_as_much_after_any_number_of_tokens():
    model = make_hybrid(pattern="beside")
    sizes = {CacheCheckpoint(model(random_ids(1, n), use_cache=True).cache).nbytes() for n in (30, 300)}
    assert len(sizes) == 1


@torch.no_grad()
def test_a_static_cache_is_refused():
    model = make_hybrid(pattern="beside")
    cache = StaticCache(config=model.config, max_cache_len=32)
    model(random_ids(1, 4), cache=cache)
    with pytest.raises(ValueError, match="copy.deepcopy"):
        CacheCheckpoint(cache)


@every_pattern
@pytest.mark.parametrize("recording", [False, True])
@torch.no_grad()
def test_a_copy_stands_for_itself(pattern, recording):
    if recording and pattern in ("window", "gemma") and not TAKES_DRAFTS_BACK:
        pytest.skip("before 5.18 a sliding window that records returns more keys than its mask has")
    model = make_hybrid(pattern=pattern)
    before = random_ids(2, 21)
    _, cache = read(model, before)
    if recording:
        cache.activate_past_recording()
    copied = copy.deepcopy(cache)
    assert_goes_on(model, cache, before, 1)
    assert_goes_on(model, copied, before, 2)


@every_pattern
@pytest.mark.parametrize("bits", [16, 8])
@torch.no_grad()
def test_a_cache_is_saved_and_loaded(pattern, bits):
    model = make_hybrid(pattern=pattern, full_attention_bits=bits, window_bits=bits)
    before = random_ids(2, 21)
    file = io.BytesIO()
    torch.save(read(model, before)[1], file)
    file.seek(0)
    assert_goes_on(model, torch.load(file, weights_only=False), before, 1)
