"""What a hybrid carries from one call to the next: transformers' own cache, plus a length.

Identical in modeling_phimamba and modeling_llamba; edit the former, run `make fix-copies`.

`DynamicCache(config=...)` builds a key/value layer for every attention layer and a conv state plus a recurrent
state for every mixer, from `config.layer_types`. It counts tokens by looking at an attention layer, so a model
without one has no length at all: `RecurrentCache` keeps the count itself. A hybrid layer keeps its mixer's states, a
window and sinks: `WindowLayer`, which takes the place of what `DynamicCache` and `StaticCache` put there.
"""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, LinearAttentionLayer

from .window_attention import Tokens


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
        self.full = DynamicLayer()
        self.seen_tokens = 0

    def keep(self, context: Tokens, sinks: Tokens, new_tokens: int) -> None:
        """Remember the end of `context`, at least the last `new_tokens` columns of which are new, and the sinks."""
        start = max(context.index.shape[1] - self.window + 1, 0)
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
        states = [*self.conv_states.values(), *self.recurrent_states.values(), *(self.leaving or ())]
        states += [t for tokens in (self.recent, self.first) if tokens is not None for t in tokens[:2]]
        states += [self.full.keys, self.full.values]
        return sum(t.numel() * t.element_size() for t in states if isinstance(t, torch.Tensor))

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
    """Give hybrid layers their own kind of cache layer, in place.

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


def new_cache(config) -> DynamicCache:
    """An empty cache for the layers of `config`."""
    holds_keys = any(layer_type != "linear_attention" for layer_type in config.layer_types)
    cache = DynamicCache(config=config) if holds_keys else RecurrentCache(config)
    fit_cache(cache, config)
    return cache
