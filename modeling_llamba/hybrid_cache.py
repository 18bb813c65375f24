"""What a hybrid carries from one call to the next: transformers' own cache, plus a length.

`DynamicCache(config=...)` builds a key/value layer for every attention layer and a conv state plus a recurrent
state for every mixer, from `config.layer_types`. It counts tokens by looking at an attention layer, so a model
without one has no length at all: `RecurrentCache` keeps the count itself. A hybrid layer keeps its mixer's states, a
window and sinks: `WindowLayer`, which takes the place of what `DynamicCache` and `StaticCache` put there.
"""

from collections.abc import Sequence

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from .window_attention import Tokens

NEVER = torch.iinfo(torch.long).max


def has_attention_layer(cache: Cache) -> bool:
    """Whether some layer of the cache stores keys and therefore knows how many tokens it has seen."""
    return any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)


def cache_length(cache: Cache | None) -> int:
    """Number of tokens seen, for any mix of layers."""
    if cache is None:
        return 0
    if not cache.layers or has_attention_layer(cache):
        return cache.get_seq_length()
    return getattr(cache, "seen_tokens", 0) if cache.has_previous_state() else 0


def note_length(cache: Cache | None, length: int) -> None:
    """Note that the cache now holds `length` tokens; needed where no attention layer counts them."""
    if cache is not None and cache.layers and not has_attention_layer(cache):
        cache.seen_tokens = length


def ending_at(t: torch.Tensor, ends: Sequence[int], size: int, axis: int) -> torch.Tensor:
    """Of each row of t the `size` columns before column ends[row]; the first stands in for those there are not."""
    if len(set(ends)) == 1 and ends[0] >= size:
        return t.narrow(axis, ends[0] - size, size)
    columns = (torch.tensor(ends)[:, None] - size + torch.arange(size)).clamp(min=0).to(t.device)
    shape = [1] * t.ndim
    shape[0], shape[axis] = columns.shape
    wanted = [*t.shape]
    wanted[axis] = size
    return t.gather(axis, columns.view(shape).expand(wanted))


def crop_rows(layer: DynamicLayer, tokens: int, counts: Sequence[int], length: int) -> None:
    """Keep the first counts[row] of the last `tokens` columns; of all that is then left, the last `length`."""
    if not layer.is_initialized:
        return
    size = length
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = length
        size = min(length, layer.sliding_window - 1)
    ends = [layer.keys.shape[-2] - tokens + count for count in counts]
    layer.keys, layer.values = (ending_at(t, ends, size, axis=2) for t in (layer.keys, layer.values))


class RecurrentCache(DynamicCache):
    """The cache of a model without attention layers."""

    def __init__(self, config):
        super().__init__(config=config)
        self.seen_tokens = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen so far."""
        return self.seen_tokens

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.seen_tokens = 0


class WindowLayer(LinearAttentionLayer, CacheLayerMixin):
    """What a hybrid layer carries, of constant size but for the heads with full attention.

    recent: the last W - 1 columns. first: the S sinks. leaving: what has not left the window for the mixer's state.
    full: all keys and values of the heads with full attention. Besides, the mixer's conv and recurrent states.
    """

    is_compileable = False  # its tensors begin absent
    is_croppable = False
    supports_early_init = False

    def __init__(self, window: int):
        LinearAttentionLayer.__init__(self)
        CacheLayerMixin.__init__(self)
        self.window = window
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        LinearAttentionLayer.reset(self)
        self.recent: Tokens | None = None
        self.first: Tokens | None = None
        self.leaving: tuple[torch.Tensor, ...] | None = None
        self.recorded = None  # see recording.py
        self.full = DynamicLayer()
        self.seen_tokens = 0

    def keep(self, context: Tokens, sinks: Tokens, new_tokens: int) -> None:
        """Remember the end of `context`, at least the last `new_tokens` columns of which are new, and the sinks."""
        start = 0 if self.recorded is not None else max(context.index.shape[1] - self.window + 1, 0)
        # copies: a view would hold on to the whole prompt
        keys, values = (t[:, :, start:].clone() for t in (context.keys, context.values))
        self.recent = Tokens(keys, values, context.index[:, start:].clone())
        self.first = sinks
        self.seen_tokens += new_tokens

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Not used: keys go through `keep`, which knows which token is which."""
        raise NotImplementedError("The cache of a hybrid layer is written by the layer itself.")

    def get_seq_length(self) -> int:
        """Tokens seen so far, padding included."""
        return self.seen_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of the heads with full attention."""
        return self.seen_tokens + query_length, 0

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.numel() * t.element_size() for t in self.tensors() if t is not None)

    def tensors(self) -> list[torch.Tensor | None]:
        """All that is carried from call to call, indices apart."""
        states = [*self.conv_states.values(), *self.recurrent_states.values(), *(self.leaving or ())]
        states += [t for tokens in (self.recent, self.first) if tokens is not None for t in tokens[:2]]
        return [*states, self.full.keys, self.full.values]

    def accept(self, tokens: int, counts: Sequence[int], length: int) -> None:
        """As `crop_rows`, of window and sinks; a sink that was not accepted is no sink. See recording.py."""
        crop_rows(self.full, tokens, counts, length)
        self.seen_tokens = length
        index = self.recent.index
        columns = index.shape[1]
        ends = torch.tensor([columns - tokens + count for count in counts], device=index.device)[:, None]
        rejected = (torch.arange(columns, device=index.device) >= ends) & (index >= 0)
        beyond = index.masked_fill(~rejected, NEVER).amin(1, keepdim=True)
        self.first = self.first._replace(index=self.first.index.masked_fill(self.first.index >= beyond, -1))
        size, last = min(columns - tokens + max(counts), self.window - 1), ends[:, 0].tolist()
        absent = torch.arange(size, device=index.device) < size - ends
        keys, values = (ending_at(t, last, size, axis=2).clone() for t in self.recent[:2])
        self.recent = Tokens(keys, values, ending_at(index, last, size, axis=1).masked_fill(absent, -1))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Follow the beams."""
        self._apply(lambda t: t.index_select(0, beam_idx.to(t.device)))
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        self.full.reorder_cache(beam_idx)

    def offload(self) -> None:
        """Move to the CPU."""
        self._apply(lambda t: t.to("cpu", non_blocking=True))
        LinearAttentionLayer.offload(self)
        self.full.offload()

    def prefetch(self) -> None:
        """Move back."""
        if self.device is not None:
            self._apply(lambda t: t.to(self.device, non_blocking=True))
        LinearAttentionLayer.prefetch(self)
        self.full.prefetch()

    def _apply(self, change) -> None:
        if self.recent is not None:
            self.recent, self.first = (Tokens(*map(change, tokens)) for tokens in (self.recent, self.first))
        if self.leaving is not None:
            self.leaving = tuple(map(change, self.leaving))


def fit_cache(cache: Cache | None, config) -> None:
    """Give hybrid layers their own kind of cache layer, and the others beside them growing keys, in place.

    Raises:
        ValueError: the cache was begun by another model, or has no layers made for this one.
    """
    if cache is None or "hybrid" not in config.layer_types:
        return
    if len(cache.layers) != config.num_hidden_layers:
        raise ValueError(
            "This model's layers need a cache made for them: pass the past_key_values that the model itself returned, "
            "DynamicCache(config=model.config), or none."
        )
    for i, kind in enumerate(config.layer_types):
        layer = cache.layers[i]
        if kind == "hybrid" and not isinstance(layer, WindowLayer):
            if getattr(layer, "is_initialized", False):
                raise ValueError(f"Layer {i} of the cache holds the keys of another model.")
            cache.layers[i] = WindowLayer(config.hybrid_window)
        elif isinstance(layer, StaticLayer) and not layer.is_initialized:
            # masks are made once for all layers and the heads with full attention, whose keys grow
            sliding = isinstance(layer, StaticSlidingWindowLayer)
            cache.layers[i] = DynamicSlidingWindowLayer(config.sliding_window) if sliding else DynamicLayer()


def new_cache(config) -> DynamicCache:
    """An empty cache for the layers of `config`."""
    holds_keys = any(layer_type != "linear_attention" for layer_type in config.layer_types)
    cache = DynamicCache(config=config) if holds_keys else RecurrentCache(config)
    fit_cache(cache, config)
    return cache
