"""A placement that keeps within so many bytes of cache.

Every layer gets a window with sinks and salient tokens, and a state beside it; the key/value heads that serve recall
most see every token. Heads take HEADS_SHARE of what the states leave, and the windows take the rest, of one width
here; `layer_costs` then gives each layer its own. What the user has fixed (window, heads, layers, no state) stays as
it is, and the others take what is left. Layers that see a window in the teacher already stay as they are where that
is cheap.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from ..options import ConversionOptions, parse_size
from ..plan import TeacherWeights, hybrid_config
from ..weights.writer import human_bytes, output_dtype
from .cache import attention_bytes, cache_bytes
from .placement import Attention, Hybrid, Layer, Placement, everywhere
from .presets import attention_layers, counted_heads, kept_heads, query_heads

KVHead = tuple[int, int]
"""Layer and key/value head."""
HEADS_SHARE = 0.7
"""Share of the budget, states apart, that is spent on heads which see every token."""


@dataclass(frozen=True)
class Budget:
    """Bytes for one sequence at the context length of the options, and what the user has decided already."""

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
    def nbytes(self) -> int:
        """The cache that a sequence may take."""
        return asked_bytes(self.weights, self.options)

    @cached_property
    def given_heads(self) -> tuple[KVHead, ...]:
        """Key/value heads that the user names, those of named layers included."""
        (layers, kv_heads), placement = self.shape, self.options.placement
        named = () if placement.attention_layers is None else attention_layers(layers, placement.attention_layers)
        given = {(layer, kv) for layer in named for kv in range(kv_heads)}
        if placement.attention_heads is not None:
            heads = kept_heads(placement.attention_heads, layers, kv_heads * self.shared) or {}
            if hidden := sorted(heads.keys() & set(self.windows)):
                raise ValueError(
                    f"attention_heads names heads of layer {hidden[0]}, which sees a sliding window only; leave "
                    f"out those of layers {', '.join(map(str, hidden))}."
                )
            given |= {(layer, head // self.shared) for layer, of_layer in heads.items() for head in of_layer}
        return tuple(sorted(given))

    @cached_property
    def asked_heads(self) -> int | None:
        """How many key/value heads the user wants beside those named; None where the budget decides."""
        asked = self.options.placement.attention_heads
        if asked is None:
            return None
        if kept_heads(asked, self.shape[0], self.shape[1] * self.shared) is not None:
            return 0
        return counted_heads(asked, self.shape[0] * self.shape[1])

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """Layers of the teacher that see a window themselves; none of their heads can see more."""
        kinds = self.weights.config.layer_types
        return tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")

    @cached_property
    def kept_windows(self) -> tuple[int, ...]:
        """These layers, if they stay as they are: where nothing is said of the cache, where a state is larger, or half
        of the budget holds them all."""
        if not self.windows or self.options.placement.cache is None or self.options.read == "normalised":
            return self.windows
        context = self.options.placement.context
        own = attention_bytes(self._config, "sliding_attention", context, self._dtype)
        state = cache_bytes(self._config, context, self._dtype)[1] / self.shape[0]
        return self.windows if own <= state or own * len(self.windows) <= self.nbytes / 2 else ()

    @property
    def longest_window(self) -> int:
        """The widest window that leaves half of a calibration sequence to fit a mixer on; without a mixer, any."""
        context = self.options.placement.context
        if self.windows and not self.kept_windows:
            context = min(context, self.weights.config.sliding_window)
        if self.options.mixer.kind == "none":
            return context
        return min(context, max(1, self.options.sequence_length // 2 - self.options.placement.sinks))

    def placement(self, ranked: list[KVHead]) -> Placement:
        """The largest placement within the budget.

        Args:
            ranked: key/value heads that are not given, the one to keep first in front.
        """
        fixed, count = self.options.placement.window, self.asked_heads
        ranked = [pair for pair in ranked if pair[0] not in self.windows]
        if fixed is None and count is None and self.nbytes >= asked_bytes(self.weights, self.options, whole=True):
            return everywhere(Attention(), self.shape[0])
        if count is None:
            count = self._most(lambda n: self._bytes(ranked[:n], fixed or 1), self._heads_budget(), len(ranked))
        kept = ranked[:count]
        window = fixed or self._most(lambda width: self._bytes(kept, max(width, 1)), self.nbytes, self.longest_window)
        if window < 1 or self._bytes(kept, window) > self.nbytes:
            least = self._bytes(ranked[: self.asked_heads or 0], fixed or 1)
            raise ValueError(
                f"{human_bytes(self.nbytes)} of cache at {self.options.placement.context} tokens is too little: what "
                f"was asked for takes {human_bytes(least)} at least; give more, or fix less (window, heads, layers, "
                "mixer)."
            )
        if self.asked_heads is None and fixed is None and window == self.longest_window:
            # the window is as wide as it may be: heads take what is left
            count = self._most(lambda n: self._bytes(ranked[:n], window), self.nbytes, len(ranked))
        return self._placed(ranked[:count], window)

    def _heads_budget(self) -> float:
        if self.options.placement.window is not None:
            return self.nbytes
        without = self._bytes([], 1)
        return without + HEADS_SHARE * (self.nbytes - without)

    def _placed(self, kept: list[KVHead], window: int) -> Placement:
        heads = (*self.given_heads, *kept)
        whole = [layer for layer in range(self.shape[0]) if sum(of == layer for of, _ in heads) == self.shape[1]]
        base = everywhere(hybrid_layer(self.options, window), self.shape[0])
        return base.with_full_heads(query_heads(list(heads), self.shared)).keeping({*whole, *self.kept_windows})

    def _bytes(self, kept: list[KVHead], window: int) -> int:
        placement = self._placed(kept, window)
        if not placement.replaced_layers:
            return asked_bytes(self.weights, self.options, whole=True)
        for name, value in placement.config_fields(self.weights.config.layer_types).items():
            setattr(self._config, name, value)
        return cache_bytes(self._config, self.options.placement.context, self._dtype)[1]

    @cached_property
    def _config(self):
        placement = everywhere(hybrid_layer(self.options, 1), self.shape[0])
        if self.options.read == "normalised":
            placement = placement.keeping(self.windows)
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


def hybrid_layer(options: ConversionOptions, window: int) -> Hybrid:
    """A layer with a window of this width, heads with full attention apart."""
    state = options.mixer.kind != "none"
    return Hybrid(window, options.placement.sinks, state=state, read=options.read, salient=options.salient)


def asked_bytes(weights: TeacherWeights, options: ConversionOptions, whole: bool = False) -> int:
    """Bytes of cache that the option `cache` allows one sequence, or (`whole`) that the teacher takes.

    The default is a share of what the teacher's layers take that see everything; its own windows stay beside that.
    """
    asked = 1.0 if whole else options.cache
    assert asked is not None, "nothing was said about the cache"
    if isinstance(asked, str):
        return parse_size(asked)
    dtype = output_dtype(options.output.dtype, weights.checkpoint.tensors)
    config = hybrid_config(weights, everywhere(Attention(), weights.config.num_hidden_layers), options)
    context, own = options.placement.context, 0
    if options.placement.cache is None and "full_attention" in config.layer_types:
        own = config.layer_types.count("sliding_attention")
        own = own and own * attention_bytes(config, "sliding_attention", context, dtype)
    return int(own + asked * (cache_bytes(config, context, dtype)[0] - own))


def num_layers_within(weights: TeacherWeights, options: ConversionOptions, replacement: Layer) -> int:
    """The largest number of attention layers that keeps within the cache budget."""
    kinds, dtype = weights.config.layer_types, output_dtype(options.output.dtype, weights.checkpoint.tensors)
    budget = asked_bytes(weights, options)
    # the layers that keep most are counted, so that whichever are chosen, the budget holds
    order = sorted(range(len(kinds)), key=lambda i: kinds[i])
    for count in range(len(kinds), -1, -1):
        placement = everywhere(replacement, len(kinds)).keeping(order[:count])
        nbytes = cache_bytes(hybrid_config(weights, placement, options), options.placement.context, dtype)[1]
        if nbytes <= budget:
            return count
    raise ValueError(
        f"{human_bytes(budget)} of cache is too little: the mixers' states alone take {human_bytes(nbytes)}; give "
        "more or a smaller d_state."
    )
