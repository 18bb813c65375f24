"""A placement that keeps within so many bytes of cache.

Every layer with full attention gets a window with sinks and salient tokens, and a state; the key/value heads that
serve recall most keep full attention. Heads take HEADS_SHARE of what the states leave, and the windows take the rest,
of one width here; `layer_costs` then gives each layer its own. What the user has fixed (window, heads, layers, no
state) stays as it is, and the others take what is left. Layers that have a window in the teacher stay as they are.
"""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import PreTrainedConfig

from ..options import ConversionOptions, parse_size
from ..plan import TeacherWeights, hybrid_config
from ..weights.writer import human_bytes, output_dtype
from .cache import attention_bytes, cache_bytes
from .placement import Attention, Heads, Hybrid, Layer, Mixer, Placement, everywhere
from .presets import attention_layers, counted_heads, kept_heads, query_heads

KVHead = tuple[int, int]
"""Layer and key/value head."""
HEADS_SHARE = 0.7
"""Share of the budget, states apart, that is spent on kept heads."""
BLOCK = 16
"""Tokens by which windows move, where they allow it."""


@dataclass(frozen=True)
class Budget:
    """Bytes for one sequence at the context length of the options, and what the user has decided already.

    Made once for a conversion. Where no cache was asked for it has no `nbytes`, and the rest still counts.
    """

    weights: TeacherWeights
    options: ConversionOptions

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and key/value heads per layer."""
        return self.weights.config.num_hidden_layers, self.weights.config.num_key_value_heads

    @property
    def shared(self) -> int:
        """Query heads per key/value head."""
        return self.weights.config.num_attention_heads // self.weights.config.num_key_value_heads

    @cached_property
    def whole(self) -> int:
        """Bytes of cache that a sequence takes in the teacher."""
        return cache_bytes(self._teacher_config, self.options.placement.context, self._dtype)[0]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of cache that a sequence may take.

        The default is a share of what the teacher's layers take that see everything; its own windows stay beside that.
        """
        asked = self.options.cache
        assert asked is not None, "nothing was said about the cache"
        if isinstance(asked, str):
            return parse_size(asked)
        own = 0
        if self.options.placement.cache is None and 0 < len(self.windows) < self.shape[0]:
            context = self.options.placement.context
            own = len(self.windows) * attention_bytes(self._teacher_config, "sliding_attention", context, self._dtype)
        return int(own + asked * (self.whole - own))

    def layers_within(self, replacement: Layer, free: list[int]) -> int:
        """The largest number of the layers `free` that may keep their attention, as all others do."""
        kinds = self.weights.config.layer_types
        others = set(range(len(kinds))).difference(free)
        # the layers that keep most are counted, so that whichever are chosen, the budget holds
        order = sorted(free, key=lambda i: kinds[i])
        for count in range(len(free), -1, -1):
            placement = everywhere(replacement, len(kinds)).keeping({*others, *order[:count]})
            nbytes = self._bytes_of(placement)
            if nbytes <= self.nbytes:
                return count
        held = "the mixers' states alone take" if isinstance(replacement, Mixer) else "windows alone take"
        less = "a smaller d_state" if isinstance(replacement, Mixer) else "a narrower window"
        raise ValueError(
            f"{human_bytes(self.nbytes)} of cache is too little: {held} {human_bytes(nbytes)}; give more or {less}."
        )

    @cached_property
    def given_heads(self) -> tuple[KVHead, ...]:
        """Key/value heads that the user names, those of named layers included."""
        (layers, kv_heads), placement = self.shape, self.options.placement
        named = () if placement.attention_layers is None else attention_layers(layers, placement.attention_layers)
        given = {(layer, kv) for layer in named for kv in range(kv_heads)}
        if placement.attention_heads is not None:
            heads = kept_heads(placement.attention_heads, layers, kv_heads * self.shared) or {}
            refuse_heads_of(self.windows, heads)
            given |= {(layer, head // self.shared) for layer, of_layer in heads.items() for head in of_layer}
        return tuple(sorted(given))

    @cached_property
    def asked_heads(self) -> int | None:
        """Number of key/value heads that the user asks for beside those named; None where the budget decides."""
        asked = self.options.placement.attention_heads
        if asked is None:
            return None
        if kept_heads(asked, self.shape[0], self.shape[1] * self.shared) is not None:
            return 0
        return counted_heads(asked, self.shape[0] * self.shape[1])

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """Layers that have a window in the teacher, which they keep."""
        return self.weights.windows(self.options.placement.context)

    @cached_property
    def longest_window(self) -> int:
        """The widest window that leaves half of a calibration sequence to fit a state on; without a state, any."""
        context, length = self.options.placement.context, self.options.sequence_length
        if self.options.mixer.kind != "none":
            held = self.options.placement.sinks + self.options.salient
            context = min(context, length // 2, length - held - 1)
        return max(context // self.block, 2) * self.block

    @cached_property
    def block(self) -> int:
        """Tokens by which windows move: an eighth of the widest window at most."""
        placement = self.options.placement
        if placement.block is not None or placement.window is not None:
            return placement.block or block_of(placement.window)
        longest = min(placement.context, self.options.sequence_length // 2)
        return min(BLOCK, 2 ** max(longest // 8, 1).bit_length() // 2)

    def placement(self, ranked: list[KVHead]) -> Placement:
        """The largest placement within the budget.

        Args:
            ranked: key/value heads that are not given, the one to keep first in front.
        """
        fixed, count = self.options.placement.window, self.asked_heads
        ranked = [pair for pair in ranked if pair[0] not in self.windows]
        if fixed is None and count is None and self.nbytes >= self.whole:
            return everywhere(Attention(), self.shape[0])
        narrowest = 2 * self.block
        if count is None:
            count = self._most(
                lambda n: self._bytes(ranked[:n], fixed or narrowest), self._heads_budget(), len(ranked)
            )
        kept, window = ranked[:count], fixed
        if window is None:
            most = self.longest_window // self.block
            window = self.block * self._most(lambda n: self._bytes(kept, self.block * max(n, 2)), self.nbytes, most)
        if window < narrowest or self._bytes(kept, window) > self.nbytes:
            least = self._bytes(ranked[: self.asked_heads or 0], fixed or narrowest)
            raise ValueError(
                f"{human_bytes(self.nbytes)} of cache at {self.options.placement.context} tokens is too little: what "
                f"was asked for takes {human_bytes(least)} at least; give more, or fix less (window, heads, layers, "
                "mixer)."
            )
        if self.asked_heads is None and fixed is None and window == self.longest_window:
            # the window is as wide as it may be: heads take what is left
            count = self._most(lambda n: self._bytes(ranked[:n], window), self.nbytes, len(ranked))
        return self._placed(ranked[:count], window)

    def windowed_heads(self, placement: Placement) -> dict[int, int]:
        """Key/value heads that have a window, by layer."""
        kept = placement.full_heads
        return {layer: self.shape[1] - len(kept.get(layer, ())) // self.shared for layer in placement.windows}

    def columns(self, placement: Placement) -> int:
        """Columns that all windows may have together, each counted once for every key/value head."""
        heads = self.windowed_heads(placement)
        narrow = dict.fromkeys(placement.windows, 2 * self.block)
        bytes_of = self._bytes_of(placement.with_windows(narrow))
        # a column holds a key and a value for each head, and one salience, counted as if for a layer of one head
        per_column = 2 * self.weights.config.head_dim * self._dtype.itemsize + 4
        return 2 * self.block * sum(heads.values()) + max(self.nbytes - bytes_of, 0) // per_column

    def _heads_budget(self) -> float:
        if self.options.placement.window is not None:
            return self.nbytes
        without = self._bytes([], 2 * self.block)
        return without + HEADS_SHARE * (self.nbytes - without)

    def _placed(self, kept: list[KVHead], window: int) -> Placement:
        heads = (*self.given_heads, *kept)
        whole = [layer for layer in range(self.shape[0]) if sum(of == layer for of, _ in heads) == self.shape[1]]
        layer = dataclasses.replace(hybrid_layer(self.options, window), block=self.block)
        base = everywhere(layer, self.shape[0])
        return base.with_full_heads(query_heads(list(heads), self.shared)).keeping({*whole, *self.windows})

    def _bytes(self, kept: list[KVHead], window: int) -> int:
        return self._bytes_of(self._placed(kept, window))

    def _bytes_of(self, placement: Placement) -> int:
        if not placement.replaced_layers:
            return self.whole
        return cache_bytes(self._config(placement), self.options.placement.context, self._dtype)[1]

    @cached_property
    def _teacher_config(self) -> PreTrainedConfig:
        return self._config(everywhere(Attention(), self.shape[0]))

    def _config(self, placement: Placement) -> PreTrainedConfig:
        return hybrid_config(self.weights, placement, self.options)

    @cached_property
    def _dtype(self) -> torch.dtype:
        return output_dtype(self.options.output.dtype, self.weights.checkpoint.tensors)

    @staticmethod
    def _most(nbytes, limit: float, highest: int) -> int:
        """The largest number up to `highest` whose bytes, which grow with it, keep within the limit."""
        low, high = 0, highest
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if nbytes(middle) <= limit else (low, middle - 1)
        return low


def refuse_heads_of(windows: Collection[int], heads: Heads) -> None:
    """Refuse heads that are to see everything in layers which have a window in the teacher, and so keep it."""
    if hidden := sorted(heads.keys() & set(windows)):
        raise ValueError(
            f"attention_heads names heads of layer {hidden[0]}, which has a sliding window in the teacher; leave out "
            f"those of {'layers' if len(hidden) > 1 else 'layer'} {', '.join(map(str, hidden))}."
        )


def hybrid_layer(options: ConversionOptions, window: int) -> Hybrid:
    """A layer with a window of this width, kept heads apart."""
    block, sinks = options.placement.block or block_of(window), options.placement.sinks
    return Hybrid(window, block, sinks, state=options.mixer.kind != "none", salient=options.salient)


def block_of(window: int) -> int:
    """The largest power of two, up to BLOCK, of which a window is a multiple of at least two; or 1."""
    block = BLOCK
    while block > 1 and (window % block or window < 2 * block):
        block //= 2
    return block
