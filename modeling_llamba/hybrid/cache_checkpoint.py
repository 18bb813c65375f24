"""A cache as it was some tokens ago, to which it can be taken back.

    checkpoint = CacheCheckpoint(cache)     # or model.cache_checkpoint(cache)
    ...                                     # the model reads and generates, and the cache goes on
    checkpoint.restore(cache)               # as if it had not

Windows, salient caches and states have a constant size and are copied. Keys and values that grow with the text, those
of attention layers and kept heads, are not: going back cuts them to their former length. So the size of a checkpoint
does not depend on the number of tokens, and it is good for a cache that has gone on from it. A copy that stands for
itself is `copy.deepcopy(cache)`, a file `torch.save(cache, path)`.
"""

import copy
import uuid
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

WENT_BACK = (
    "This checkpoint belongs to another cache, or to a part of this one that was rolled back since. Restore older "
    "checkpoints last, or keep copy.deepcopy(cache)."
)


class CacheCheckpoint:
    """The cache of any model of transformers after the tokens so far.

    Raises:
        ValueError: the cache is static.
    """

    def __init__(self, cache: Cache):
        if any(getattr(layer, "most", None) is not None for layer in cache.layers):
            raise ValueError("A static cache has no checkpoints: keep copy.deepcopy(cache).")
        self.layers = [_saved(layer) for layer in cache.layers]
        self.seen_tokens = getattr(cache, "seen_tokens", None)
        self.name = uuid.uuid4().hex
        # the last key of a layer shows that the cache has gone on from here, but for the first layer's, which depends
        # on its own token alone: so the cache also lists the checkpoints that it has passed
        cache.checkpoints = [*getattr(cache, "checkpoints", ()), self.name]

    def restore(self, cache: Cache) -> None:
        """Take back the cache, which has gone on from the checkpoint; as often as is wanted.

        Raises:
            ValueError: this cache has not gone on from the checkpoint.
        """
        pairs = list(zip(self.layers, cache.layers, strict=True))
        passed = getattr(cache, "checkpoints", [])
        if self.name not in passed or not all(saved.precedes(layer) for saved, layer in pairs):
            raise ValueError(WENT_BACK)
        cache.checkpoints = passed[: passed.index(self.name) + 1]
        cache.layers = [saved.back(layer) for saved, layer in pairs]
        if self.seen_tokens is not None:
            cache.seen_tokens = self.seen_tokens

    def nbytes(self) -> int:
        """Bytes that the checkpoint takes."""
        return sum(t.numel() * t.element_size() for saved in self.layers for t in saved.tensors())


class _Grown:
    """Length of a layer of keys and values that only grow, and its last key and value, which identify it later."""

    def __init__(self, layer: DynamicLayer):
        self.length = layer.get_seq_length()
        self.last = None
        if self.length:
            self.last = tuple(t[..., -1, :].clone() for t in (layer.keys, layer.values))

    def precedes(self, layer: DynamicLayer) -> bool:
        """True if the layer begins with the keys and values that it had at the checkpoint."""
        if not isinstance(layer, DynamicLayer) or layer.get_seq_length() < self.length:
            return False
        if self.last is None:
            return True
        found = (t[..., self.length - 1, :] for t in (layer.keys, layer.values))
        return all(torch.equal(old, new) for old, new in zip(self.last, found, strict=True))

    def back(self, layer: DynamicLayer) -> DynamicLayer:
        """Cut the layer to its former length."""
        if self.length == 0:
            layer.reset()
        else:
            layer.crop(self.length - layer.get_seq_length())
        return layer

    def tensors(self) -> list[torch.Tensor]:
        """Tensors of the layer that the checkpoint holds."""
        return [] if self.last is None else list(self.last)


class _Held:
    """Window, salient cache and state of a hybrid layer; kept heads only grow."""

    def __init__(self, layer: Any):
        self.held = None if layer.held is None else layer.held.copied()
        self.length = layer.length
        self.kept = _Grown(layer.kept)

    def precedes(self, layer: Any) -> bool:
        """True if the layer can have gone on from the checkpoint."""
        return _is_hybrid(layer) and self.kept.precedes(layer.kept)

    def back(self, layer: Any) -> Any:
        """Give the layer copies of its window, salient cache and state at the checkpoint."""
        layer.go_back(None if self.held is None else self.held.copied(), self.length)
        self.kept.back(layer.kept)
        return layer

    def tensors(self) -> list[torch.Tensor]:
        """Tensors of the layer that the checkpoint holds."""
        return [*(t for t in self.held or () if t is not None), *self.kept.tensors()]


class _Copied:
    """Copy of a cache layer of any other kind, such as a sliding window or the state of a mixer."""

    def __init__(self, layer: Any):
        self.layer = _copy_of(layer)

    def precedes(self, layer: Any) -> bool:
        """True if the layer is of the same kind."""
        return type(layer) is type(self.layer)

    def back(self, layer: Any) -> Any:
        """Return another copy of the layer, to stand in its place."""
        return _copy_of(self.layer)

    def tensors(self) -> list[torch.Tensor]:
        """Tensors of the layer that the checkpoint holds."""
        return [t for value in vars(self.layer).values() for t in _tensors_in(value)]


def _is_hybrid(layer: Any) -> bool:
    # by what it has: a checkpoint's own code brings a class of its own
    return hasattr(layer, "held") and hasattr(layer, "kept")


def _saved(layer: Any) -> _Grown | _Held | _Copied:
    if _is_hybrid(layer):
        return _Held(layer)
    return _Grown(layer) if type(layer) is DynamicLayer else _Copied(layer)


def _copy_of(layer: Any) -> Any:
    """A copy that shares no memory; of a view its own numbers alone, which `copy.deepcopy` does not leave behind."""
    copied = copy.copy(layer)
    for name, value in vars(layer).items():
        setattr(copied, name, _cloned(value))
    return copied


def _cloned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _cloned(of_key) for key, of_key in value.items()}
    return copy.deepcopy(value)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for of_key in value.values() for t in _tensors_in(of_key)] if isinstance(value, dict) else []
