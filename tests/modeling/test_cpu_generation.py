"""Caches that functions in C wrote, in float32, through all that generation does: as in float64 without C."""

import copy
import io

import pytest
import torch
from transformers import StaticCache

from modeling_llamba.kernels.c.c_library import library
from tests.helpers.hybrids import make_hybrid
from tests.helpers.reading import read
from tests.helpers.teachers import random_ids

ROWS, BEFORE, AFTER = 3, 27, 14


def other_rows(model, before, after):
    cache = read(model, before)[1]
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    return read(model, after, cache)[0]


def cropped(model, before, after):
    cache = model.new_cache()
    cache.activate_past_recording()
    read(model, torch.cat([before, after.flip(1)[:, :5]], dim=1), cache)
    cache.crop(-5)
    return read(model, after, cache)[0]


def restored(model, before, after):
    cache = read(model, before)[1]
    checkpoint = model.cache_checkpoint(cache)
    read(model, after.flip(1), cache)
    checkpoint.restore(cache)
    return read(model, after, cache)[0]


def copied(model, before, after):
    cache = read(model, before)[1]
    copy_of_it = copy.deepcopy(cache)
    read(model, after.flip(1), cache)
    return read(model, after, copy_of_it)[0]


def saved(model, before, after):
    file = io.BytesIO()
    torch.save(read(model, before)[1], file)
    file.seek(0)
    return read(model, after, torch.load(file, weights_only=False))[0]


def static(model, before, after):
    cache = StaticCache(config=model.config, max_cache_len=BEFORE + AFTER)
    return read(model, after, read(model, before, cache)[1])[0]


@pytest.mark.parametrize("do", [other_rows, cropped, restored, copied, saved, static])
@pytest.mark.parametrize("bits", [16, 8, [6, 4]], ids=str)
@pytest.mark.parametrize("pattern", ["beside", "beside-only"])
@torch.no_grad()
def test_a_cache_that_c_wrote(pattern, bits, do, monkeypatch):
    if library() is None:
        pytest.skip("no compiler")
    called = set()

    def counted(name):
        function = getattr(library(), name)
        return lambda *inputs: called.add(name) or function(*inputs)

    for name in ("mix_one", "open_rows"):
        monkeypatch.setattr(library(), name, counted(name))
    few_bits = dict(window_bits=bits, full_attention_bits=bits)
    exact = make_hybrid(pattern=pattern, head_dim=16, mixer_d_state=16, **few_bits)
    before = random_ids(ROWS, BEFORE)
    after = random_ids(ROWS, AFTER, seed=1)
    expected = do(exact, before, after)
    assert not called
    found = do(copy.deepcopy(exact).float(), before, after)
    assert called == {"mix_one", "open_rows"}
    # in few bits a number that differs in its last digit may be rounded to the next code
    assert (found - expected).norm() < (1e-5 if bits == 16 else 2e-2) * expected.norm()
