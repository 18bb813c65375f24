"""Layers of a cache that have room for all tokens to come, at addresses that stay, as a graph needs them.

Shapes: B batch, L length, K key/value heads, P head dim.
"""

import torch
from transformers.cache_utils import DynamicLayer, StaticLayer, StaticSlidingWindowLayer
from transformers.utils import is_torchdynamo_compiling

from ..hybrid.rounding import Rounding


class StaticRows(StaticLayer):
    """A static layer that holds keys and values in few bits, also if it is made before its first key.

    transformers does that (`StaticCache.early_initialization`) with keys of the model's own type.
    """

    roundings: tuple[Rounding, Rounding]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make room for rows of bytes, given rows or vectors (B, K, L, P)."""
        rows = []
        for rounding, t in zip(self.roundings, (key_states, value_states), strict=True):
            if rounding.rounds and t.is_floating_point():
                t = t.new_zeros(*t.shape[:-1], rounding.width(t.dtype), dtype=torch.uint8)
            rows.append(t)
        super().lazy_initialization(*rows)

    @classmethod
    def fit(cls, layer: StaticLayer, roundings: tuple[Rounding, Rounding]) -> None:
        """Let a layer of transformers hold rows, in place.

        Raises:
            ValueError: it holds keys of another model, or is made for another kind of layer.
        """
        if type(layer) not in (StaticLayer, StaticSlidingWindowLayer):
            raise ValueError(f"The cache has a {type(layer).__name__} for attention; pass one made for this model.")
        layer.__class__ = StaticSlidingRows if isinstance(layer, StaticSlidingWindowLayer) else cls
        layer.roundings = roundings
        if layer.is_initialized:
            if not is_torchdynamo_compiling() and int(layer.get_seq_length()):
                raise ValueError("The cache holds keys of another model; pass an empty one, or none.")
            layer.lazy_initialization(layer.keys[:, :, :0], layer.values[:, :, :0])


class StaticSlidingRows(StaticRows, StaticSlidingWindowLayer):
    """A static layer of sliding attention that holds keys and values in few bits."""


def static_layer(layer: DynamicLayer, most: int) -> StaticLayer:
    """A layer with room for `most` tokens, which holds what a growing one holds."""
    static = StaticLayer(most)
    if layer.is_initialized:
        static.update(layer.keys, layer.values)
    return static


def dynamic_layer(layer: StaticLayer, length: int) -> DynamicLayer:
    """A layer that grows, which holds the first `length` tokens of a static one."""
    dynamic = DynamicLayer()
    if layer.is_initialized:
        dynamic.update(layer.keys[:, :, :length], layer.values[:, :, :length])
    return dynamic
