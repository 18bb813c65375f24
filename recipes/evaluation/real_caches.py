"""Caches of few bits that transformers itself has, held by the teacher as a user's would be.

`generate` reads a prompt whole and rounds its keys and values at its end. So a context is read with exact attention,
and the tokens behind it attend to what the cache then holds. Tokens are judged right after contexts alone, as with
eviction. Bytes are those of the tensors that a cache holds, with keys and values in bfloat16.

Shapes: B batch, L length, K key/value heads, P head dim.
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, QuantizedCache
from transformers.cache_utils import Cache

from .metrics import Reader
from .other_caches import LayerShape

REAL_CACHES = {
    "transformers fp8": {"backend": "fp8"},
    "transformers quanto int4": {"backend": "quanto", "nbits": 4},
    "transformers quanto int2": {"backend": "quanto", "nbits": 2},
    # by the other axis, as its documentation advises
    "transformers hqq int4": {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1},
}
"""Arguments of `QuantizedCache`; groups have 64 numbers, its default."""
PACKAGES = {"quanto": "optimum.quanto", "hqq": "hqq"}
MEASURED = 512, 1024
"""Numbers of tokens at which bytes are measured; they grow by the same number with each token."""
MakeCache = Callable[[], Cache]


def check_packages() -> None:
    """Raise ValueError where a package is missing that one of the caches needs."""
    for module in PACKAGES.values():
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # of the package around it
            found = None
        if found is None:
            raise ValueError(f"--real needs {module}: pip install '.[rivals]'.")


def make_cache(config: PreTrainedConfig, name: str) -> Cache:
    """An empty cache of the name in `REAL_CACHES`.

    Raises:
        ValueError: transformers has none for this model, such as one with sliding windows.
    """
    try:
        return QuantizedCache(config=config, **REAL_CACHES[name])
    except ValueError as error:
        raise ValueError(f"{error} Leave out --real.") from error


def read_held(own: Reader, make: MakeCache, ends: Sequence[int]) -> Reader:
    """A reader of single texts (1, L) whose contexts, which end at `ends`, are held in a cache."""

    def states(ids: torch.Tensor) -> torch.Tensor:
        places = [*ends, ids.shape[1]]
        parts = [own.states(ids[:, : places[0]])]
        for start, stop in zip(places, places[1:], strict=False):
            if start < stop:
                cache = make()
                own.states(ids[:, :start], cache)
                parts.append(own.states(ids[:, start:stop], cache))
        return torch.cat(parts, 1)

    return Reader(states, own.head)


def held_bytes(make: MakeCache, shapes: Sequence[LayerShape]) -> Callable[[int], int]:
    """Bytes that a cache of one sequence holds, as a function of its number of tokens."""
    found = []
    for tokens in MEASURED:
        cache = make()
        generator = torch.Generator().manual_seed(0)
        for layer, shape in enumerate(shapes):
            key, value = (
                torch.randn(1, shape.heads, tokens, dim, generator=generator).to(torch.bfloat16)
                for dim in (shape.key_dim, shape.value_dim)
            )
            cache.update(key, value, layer)
        found.append(nbytes_now(cache))
    a_token = (found[1] - found[0]) // (MEASURED[1] - MEASURED[0])
    return lambda length: found[0] + (length - MEASURED[0]) * a_token


def nbytes_now(cache: Cache) -> int:
    """Bytes of all tensors that a cache holds, rounded or not."""
    tensors = (t for layer in cache.layers for held in vars(layer).values() for t in _tensors(held))
    return sum(t.untyped_storage().nbytes() for t in tensors)


def _tensors(held: Any) -> Iterator[torch.Tensor]:
    """The plain tensors in nested containers and in tensors that are made of others."""
    if isinstance(held, torch.Tensor):
        names = held.__tensor_flatten__()[0] if hasattr(held, "__tensor_flatten__") else ()
        if not names:
            yield held
        for name in names:
            yield from _tensors(getattr(held, name))
    elif isinstance(held, dict):
        yield from _tensors(list(held.values()))
    elif isinstance(held, list | tuple):
        for inner in held:
            yield from _tensors(inner)
