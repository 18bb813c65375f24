"""What a hybrid carries from one call to the next: transformers' own cache, plus a length.

Identical in modeling_phimamba and modeling_llamba; edit the former, run `make fix-copies`.

`DynamicCache(config=...)` builds a key/value layer for every attention layer and a conv state plus a recurrent
state for every mixer, from `config.layer_types`. It counts tokens by looking at an attention layer, so a model
without one has no length at all: `RecurrentCache` keeps the count itself.
"""

from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache


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


def new_cache(config) -> DynamicCache:
    """An empty cache for the layers of `config`."""
    holds_keys = any(layer_type != "linear_attention" for layer_type in config.layer_types)
    return DynamicCache(config=config) if holds_keys else RecurrentCache(config)
