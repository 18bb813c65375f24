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

import torch

Prepare = Callable[..., tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]]


def transformers_scan() -> Prepare:
    """transformers' own chunked scan of Mamba-2, in PyTorch, chunk 64."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    # it says once that it is slow without mamba-ssm, which is what is to be measured
    logging.getLogger("transformers").setLevel(logging.ERROR)

    def prepare(x, log_a, B, C):
        A, dt = -torch.ones(x.shape[2]), -log_a
        return lambda x, dt, B, C: mamba2_chunk_scan(x, dt, A, B, C, chunk_size=64), (x / dt[..., None], dt, B, C)

    return prepare


def fla_naive() -> Prepare:
    """flash-linear-attention's PyTorch reference of the same recurrence, chunk 64."""
    naive = _module("fla", "ops/simple_gla/naive.py")

    def scan(x, log_a, B, C):
        return naive.naive_chunk_simple_gla(C, B, x, log_a, scale=1.0)[0]

    return lambda *tensors: (scan, tensors)


def causal_attention() -> Prepare:
    """Softmax attention of the same shape: more work, and what the scan replaces."""

    def attention(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return lambda x, log_a, B, C: (attention, tuple(t.transpose(1, 2) for t in (C, B, x)))


def _module(package: str, path: str) -> ModuleType:
    """One file of a package, without its __init__, which on a machine without Triton cannot be imported."""
    spec = importlib.machinery.PathFinder.find_spec(package, sys.path)
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
    "transformers": transformers_scan,
    "fla naive": fla_naive,
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
