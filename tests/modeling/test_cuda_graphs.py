"""Passes as they are recorded for CUDA graphs, here computed anew at each replay: tests/device has the graphs."""

import pytest
import torch

from modeling_llamba.compatibility import CACHE_NAME, cache_of
from modeling_llamba.model import cuda_graphs, prompt_graphs, recorded
from modeling_llamba.model.cuda_graphs import VARIABLE
from tests.helpers.hybrids import make_hybrid
from tests.helpers.teachers import random_ids

OPTIONS = dict(max_new_tokens=10, do_sample=False, eos_token_id=None, output_logits=True, return_dict_in_generate=True)
MODELS = {
    "few bits": dict(pattern="beside-only", head_dim=16, window_bits=8, full_attention_bits=[6, 4]),
    "wide windows": dict(pattern="beside-only", hybrid_window=[64, 40], hybrid_block=8),
    "of every kind": dict(pattern="every", family="phimamba"),
}


class Again:
    """A pass that is computed at each replay, with its result where it was."""

    count = 0

    def __init__(self, compute, device, pool=None):
        self.compute = compute

    def run(self):
        """Compute it."""
        Again.count += 1
        self.result = self.compute()
        return self.result


@pytest.mark.parametrize("padding", [0, 9])
@pytest.mark.parametrize("name", MODELS)
def test_recorded_passes(monkeypatch, name, padding):
    """Prompts on both sides of a bucket, the tokens after them, and a second turn."""
    monkeypatch.setattr(prompt_graphs, "BUCKETS", (32, 64))
    monkeypatch.setattr(cuda_graphs, "DEVICE", "cpu")
    monkeypatch.setattr(recorded, "Recorded", Again)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(cuda_graphs, "has_room", lambda device, size: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**30))
    model = make_hybrid(**MODELS[name])
    for length in (32, 33):
        found = {}
        ids, more = random_ids(2, length), random_ids(2, 5)
        mask = torch.ones_like(ids)
        mask[1, :padding] = 0
        for graphs in "01":
            monkeypatch.setenv(VARIABLE, graphs)
            Again.count = 0
            first = model.generate(ids, attention_mask=mask, **OPTIONS)
            both = torch.cat([first.sequences, more], dim=1)
            of_both = torch.cat([mask, torch.ones_like(both[:, length:])], dim=1)
            cache = {CACHE_NAME: cache_of(first)}
            second = model.generate(both, attention_mask=of_both, **cache, **OPTIONS)
            found[graphs] = torch.stack([*first.logits, *second.logits])
        assert Again.count == 2 + 2 * 8
        torch.testing.assert_close(found["1"], found["0"])
    assert model not in recorded.REFUSED
