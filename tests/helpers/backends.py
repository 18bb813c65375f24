"""A backend that computes on this machine's CPU, in place of the one that is found there."""

import modeling_llamba.kernels.backend as door
from modeling_llamba.kernels.torch_backend import TorchBackend


def use_backend(monkeypatch, backend: TorchBackend) -> None:
    """Let a backend compute what lies on the CPU, or has no memory at all, until the test ends."""
    monkeypatch.setitem(door.FOUND, "torch", TorchBackend())
    for kind in ("cpu", "meta"):
        monkeypatch.setitem(door.FOUND, kind, backend)
