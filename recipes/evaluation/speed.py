"""Prefill and decoding of models side by side in one process: seconds, and the bytes of their caches.

Runs alternate between the models, so that whatever else the machine does falls on both; the median counts.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer

from modeling_llamba.compatibility import CACHE_NAME, cache_of
from modeling_llamba.hybrid.hybrid_cache import HybridLayer
from modeling_llamba.model.cache import cache_nbytes

from .real_caches import MakeCache, nbytes_now


def now(device: torch.device) -> float:
    """Seconds on a clock, read once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def fill_cache(cache: Cache, length: int) -> None:
    """Make up keys and values, so that the cache is as after `length` tokens; windows have to be full already.

    What is in it does not change how long a step takes.
    """
    for layer in cache.layers:
        growing = getattr(layer, "kept", layer)  # of a hybrid layer, the kept heads
        if isinstance(growing, DynamicLayer) and growing.is_initialized:
            more = length - growing.keys.shape[2]
            growing.update(*(t[:, :, -1:].expand(-1, -1, more, -1) for t in (growing.keys, growing.values)))
        if isinstance(layer, HybridLayer):
            more = length - layer.length
            assert more % layer.shape.block == 0, "the open block is as full as it was"
            layer.held.seen.add_(more)
            layer.length = length
    if hasattr(cache, "seen_tokens"):
        cache.seen_tokens = length


@torch.no_grad()
def run_once(
    model: nn.Module, ids: torch.Tensor, new_tokens: int, make: MakeCache | None = None
) -> tuple[float, float, int]:
    """Read ids (B, L), then take `new_tokens` steps of one token; seconds of both, bytes of the cache between.

    Args:
        make: makes another cache than the model would.
    """
    started = now(ids.device)
    given = {} if make is None else {CACHE_NAME: make()}
    out = model(ids, use_cache=True, logits_to_keep=1, **given)
    token = out.logits[:, -1:].argmax(-1)
    read = now(ids.device)
    nbytes = cache_nbytes(cache_of(out)) if make is None else nbytes_now(cache_of(out))
    before = now(ids.device)
    for _ in range(new_tokens):
        out = model(token, use_cache=True, **{CACHE_NAME: cache_of(out)})
        token = out.logits[:, -1:].argmax(-1)
    return read - started, now(ids.device) - before, nbytes


@torch.no_grad()
def decoding_rates(models: dict[str, nn.Module], context: int, steps: int = 8, filled: int = 512) -> dict[str, float]:
    """Tokens per second of each model, decoding after `context` tokens, of which all but a few are made up."""
    caches = {}
    seconds = {which: [] for which in models}
    for which, model in models.items():
        ids = torch.arange(filled, device=model.device)[None] % model.config.vocab_size
        caches[which] = cache_of(model(ids, use_cache=True, logits_to_keep=1))
        fill_cache(caches[which], context)
    for _ in range(steps + 1):  # in turns; the first of each does not count
        for which, model in models.items():
            started = now(model.device)
            token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
            model(token, **{CACHE_NAME: caches[which]})
            seconds[which].append(now(model.device) - started)
    return {which: 1 / statistics.median(of_model[1:]) for which, of_model in seconds.items()}


def speed(
    models: dict[str, nn.Module],
    batch: int,
    context: int,
    new_tokens: int,
    repeats: int = 3,
    advance: Callable[[int, int], None] = lambda done, total: None,
    caches: Mapping[str, MakeCache] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """A row per model: medians of `repeats` runs, taken in turns, after one each that does not count.

    Args:
        caches: what makes the caches of those that do not take their own.
    """
    runs: dict[str, list] = {which: [] for which in models}
    for turn in range(repeats + 1):
        for which, model in models.items():
            generator = torch.Generator().manual_seed(turn)
            ids = torch.randint(model.config.vocab_size, (batch, context), generator=generator).to(model.device)
            if model.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(model.device)
            measured = run_once(model, ids, new_tokens, caches.get(which))
            if model.device.type == "cuda":
                measured += (torch.cuda.max_memory_allocated(model.device),)
            if turn:
                runs[which].append(measured)
        advance(turn, repeats)
    return [_row(which, models[which], found, batch, context, new_tokens) for which, found in runs.items()]


def _row(which: str, model: nn.Module, found: list, batch: int, context: int, new_tokens: int) -> dict[str, Any]:
    prefill, decode = (statistics.median(column) for column in list(zip(*found, strict=True))[:2])
    row = {
        "which": which,
        "batch": batch,
        "context": context,
        "prefill_tokens_per_second": batch * context / prefill,
        "decode_tokens_per_second": batch * new_tokens / decode,
        "seconds_per_token": decode / new_tokens,
        "cache_bytes": found[-1][2],
        "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
    }
    if model.device.type == "cuda":
        row["peak_bytes"] = max(run[3] for run in found)  # with the weights of all the models
    return row
