"""Tensors that calls share, and graphs do not."""

import torch

from modeling_llamba.kernels.operators import remembered


def test_a_graph_has_tensors_of_its_own(monkeypatch):
    make = remembered(lambda count: torch.arange(count))
    shared = make(3)
    assert make(3) is shared
    with monkeypatch.context() as recording:
        recording.setattr(torch.cuda, "is_initialized", lambda: True)
        recording.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        own = make(3)
        assert own is not shared
        assert torch.equal(own, shared)
        assert make(3) is not own
    assert make(3) is shared
