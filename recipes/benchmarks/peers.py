"""Other people's code for the same scan, called so that it does the same work; absent ones are named with the reason.

Every peer takes x (B, L, H, P), log_a (B, L, H), B and C (B, L, H, N) and returns a function and its arguments: what
it wants transposed or divided beforehand is done once, outside of what is timed. The function returns y (B, L, H, P),
or (B, H, L, P).
"""

import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

Prepare = Callable[..., tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]]
# where `make bench` puts what is read, not imported: beside the environment, so that no model finds it
FOLDER = Path(sys.prefix) / "bench-peers"


def transformers_scan(chunk_size: int) -> Prepare:
    """transformers' own chunked scan of Mamba-2, in PyTorch."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    # it says once that it is slow without mamba-ssm, which is what is to be measured
    logging.getLogger("transformers").setLevel(logging.ERROR)

    def prepare(x, log_a, B, C):
        A, dt = -torch.ones(x.shape[2]), -log_a

        def scan(divided, dt, B, C):
            return mamba2_chunk_scan(divided, dt, A, B, C, chunk_size=chunk_size)

        return scan, (x / dt[..., None], dt, B, C)

    return prepare


def fla_naive() -> Prepare:
    """flash-linear-attention's PyTorch reference of the same recurrence, chunk 64."""
    naive = _module("fla", "ops/simple_gla/naive.py")

    def scan(x, log_a, B, C):
        return naive.naive_chunk_simple_gla(C, B, x, log_a, scale=1.0)[0]

    return lambda *tensors: (scan, tensors)


def ssd_minimal() -> Prepare:
    """The listing of the Mamba-2 paper, which mamba-ssm ships, chunk 64."""
    # it imports, for a comparison of its own, a kernel that only CUDA has
    parts = "mamba_ssm ops triton ssd_combined".split()
    absent = {".".join(parts[: i + 1]): ModuleType(part) for i, part in enumerate(parts)}
    absent[".".join(parts)].mamba_chunk_scan_combined = None
    with mock.patch.dict(sys.modules, absent):
        discrete = _module("mamba_ssm", "modules/ssd_minimal.py").ssd_minimal_discrete
    return lambda *tensors: (lambda x, log_a, B, C: discrete(x, log_a, B, C, 64)[0], tensors)


def causal_attention() -> Prepare:
    """Softmax attention of the same shape: more work, and what the scan replaces."""

    def attention(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return lambda x, log_a, B, C: (attention, tuple(t.transpose(1, 2) for t in (C, B, x)))


def _module(package: str, path: str) -> ModuleType:
    """One file of a package, without its __init__, which on a machine without Triton cannot be imported."""
    spec = importlib.machinery.PathFinder.find_spec(package, [*sys.path, str(FOLDER)])
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"no package {package}")
    file = Path(spec.submodule_search_locations[0]) / path
    if not file.is_file():
        raise ImportError(f"this version of {package} has no {path}")
    found = importlib.util.spec_from_file_location(f"peer_{file.stem}", file)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


PEERS: dict[str, Callable[[], Prepare]] = {
    "transformers Q256": lambda: transformers_scan(256),
    "transformers Q64": lambda: transformers_scan(64),
    "fla naive": fla_naive,
    "ssd_minimal": ssd_minimal,
    "causal SDPA": causal_attention,
}


def find_peers() -> tuple[dict[str, Prepare], dict[str, str]]:
    """Those that can be called, and why the others cannot."""
    found, absent = {}, {}
    for name, find in PEERS.items():
        try:
            found[name] = find()
        except ImportError as error:
            absent[name] = str(error)
    return found, absent
