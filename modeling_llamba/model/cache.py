"""Cache of a hybrid, in the layers of transformers' own cache.

`DynamicCache(config=...)` builds a key/value layer for every attention layer and states for every mixer, from
`config.layer_types`. `fit_cache` puts others in their place: `HybridLayer` for hybrid layers, of constant size but for
kept heads, `MixerLayer`, which can be cropped, and `RecurrentLayer` for a teacher's own layers with a state. A cache
counts tokens by looking at an attention layer; for a model of mixers alone `RecurrentCache` keeps the count.

States cannot be cropped as keys can. So transformers announces that a cache will be cropped, in assisted generation
and prompt lookup (`activate_past_recording`), and from then on a layer keeps a `Recording`.

Shapes: B batch, L length, K key/value heads, P head dim, I inner width.
"""

import copy
from collections.abc import Callable

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    LinearAttentionLayer,
    StaticCache,
    StaticLayer,
)

from ..hybrid.eviction import BlockShape
from ..hybrid.hybrid_cache import HybridLayer
from ..hybrid.rounding import Rounding
from .config_values import RECURRENT
from .recording import NOT_RECORDED, Recording, Tensors, check_crop
from .static_layers import StaticRows, dynamic_layer, static_layer


class RecurrentLayer(LinearAttentionLayer):
    """transformers' layer for a state, with a choice of rows; that of a teacher's own module cannot be cropped."""

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some rows."""
        for states in (self.conv_states, self.recurrent_states):
            states.update({i: state if state is None else state[indices] for i, state in states.items()})

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        if self.conv_states[0] is not None:
            rows = torch.arange(len(self.conv_states[0]), device=self.conv_states[0].device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to forget tokens, of which transformers' own would leave the recurrent state.

        Raises:
            ValueError: there is a token to forget.
        """
        check_crop(tokens_to_remove)
        if tokens_to_remove:
            raise ValueError("The state of a teacher's own layer cannot be cropped; begin with a new cache.")


class MixerLayer(RecurrentLayer):
    """transformers' layer for a mixer, whose recurrent state can be cropped, too, while it records.

    A mixer hands over what it fed its state by `record`.
    """

    recording: Recording | None = None

    @property
    def is_croppable(self) -> bool:
        """True while a recording is kept, which `crop` needs."""
        return self.record_past

    def activate_past_recording(self) -> None:
        """Keep what `crop` needs from here on."""
        super().activate_past_recording()
        self.recording = None

    def record(self, state: torch.Tensor | None, inputs: Tensors, replay: Callable) -> None:
        """Note the inputs (B, L, ...) of some tokens, before which the state was `state` (None: zero)."""
        if self.recording is None:
            self.recording = Recording(None if state is None else state.clone(), (1,) * len(inputs), replay)
        self.recording.add(inputs)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, as many as `-tokens_to_remove`, of those since the last crop.

        Raises:
            ValueError: nothing was recorded since, or not so many tokens.
        """
        check_crop(tokens_to_remove)
        if self.conv_states[0] is None or not (tokens_to_remove or self.record_past):
            return
        if tokens_to_remove:
            if self.recording is None or not self.record_past:
                raise ValueError(NOT_RECORDED)
            state = self.recording.crop(-tokens_to_remove)
            if state is None:  # as before the first token
                self.has_previous_state[0] = self.is_conv_states_initialized[0] = False
                state = torch.zeros_like(self.recurrent_states[0])
            self.recurrent_states[0].copy_(state)
        self.recording = None  # as transformers now drops inputs of the convolution that another crop would need
        inputs = self.conv_states[0]
        inputs = inputs[..., : inputs.shape[-1] + tokens_to_remove]
        order = is_token(inputs).byte().argsort(dim=1, stable=True)  # padding first, so that it is what is dropped
        self.conv_states[0] = inputs.gather(-1, order[:, None].expand_as(inputs))
        LinearAttentionLayer.crop(self, 0)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Take the rows of other beams."""
        super().reorder_cache(beam_idx)
        self.recording = None

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some rows."""
        self.recording = None
        super().batch_select_indices(indices)

    def reset(self) -> None:
        super().reset()
        self.recording = None


class RecurrentCache(DynamicCache):
    """A cache that counts tokens itself where no layer of it does."""

    seen_tokens = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens, padding included."""
        return super().get_seq_length(layer_idx) if has_attention_layer(self) else self.seen_tokens

    @property
    def is_linear(self) -> list[bool]:
        """False where no layer counts tokens: `generate` would read the tokens of a cache of such layers again."""
        return super().is_linear if has_attention_layer(self) else [False] * len(self.layers)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, as many as `-tokens_to_remove`."""
        check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)
        self.seen_tokens += tokens_to_remove

    def reset(self) -> None:
        super().reset()
        self.seen_tokens = 0


def has_attention_layer(cache: Cache) -> bool:
    """Return True if some layer of the cache stores keys and therefore counts its tokens."""
    return any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)


def cache_length(cache: Cache | None) -> int | torch.Tensor:
    """Number of tokens in a cache, for any mix of layers."""
    if cache is None:
        return 0
    if not cache.layers or has_attention_layer(cache):
        return cache.get_seq_length()
    return getattr(cache, "seen_tokens", 0) if cache.has_previous_state() else 0


def note_length(cache: Cache | None, length: int) -> None:
    """Note that the cache now holds `length` tokens; needed where no attention layer counts them."""
    if cache is not None and cache.layers and not has_attention_layer(cache):
        cache.seen_tokens = length


def fit_cache(cache: Cache | None, config) -> None:
    """Give hybrid layers and mixers their own kind of cache layer, in place.

    Raises:
        ValueError: the cache was begun by another model, has no layers made for this one, or is of another kind.
    """
    if cache is None:
        return
    if not isinstance(getattr(cache, "layers", None), list):
        raise ValueError(f"A hybrid's cache must be a DynamicCache or a StaticCache, not {type(cache).__name__}.")
    if isinstance(cache, StaticCache):
        _fit_static_rows(cache, config)
    own = {"hybrid": HybridLayer, "linear_attention": MixerLayer, RECURRENT: RecurrentLayer}
    replaced = own.keys() & set(config.layer_types)
    fits = len(cache.layers) == config.num_hidden_layers
    if not replaced or (fits and isinstance(cache.layers[0], HybridLayer | RecurrentLayer)):
        return
    if type(cache) is DynamicCache and not has_attention_layer(cache):  # which counts no tokens, or has no layers yet
        cache.__class__, cache.layers = RecurrentCache, cache.layers or DynamicCache(config=config).layers
    if len(cache.layers) != config.num_hidden_layers:
        raise ValueError(
            "This model's layers need a cache made for them: pass the cache that the model itself returned, "
            "DynamicCache(config=model.config), or none."
        )
    for i, kind in enumerate(config.layer_types):
        layer = cache.layers[i]
        if kind not in replaced or isinstance(layer, HybridLayer | RecurrentLayer):
            continue
        if getattr(layer, "is_initialized", False):
            raise ValueError(
                f"Layer {i} cannot start from keys computed elsewhere (another model's cache, prefix tuning); prompt "
                "tuning and LoRA work."
            )
        if kind == "hybrid":
            most = layer.max_cache_len if isinstance(layer, StaticLayer) else None
            cache.layers[i] = HybridLayer(BlockShape.of(config, i), most)
        elif type(layer) is LinearAttentionLayer and not any(layer.has_previous_state.values()):
            cache.layers[i] = own[kind]()
        if getattr(layer, "record_past", False):
            cache.layers[i].activate_past_recording()


def _fit_static_rows(cache: StaticCache, config) -> None:
    """Let the layers of a static cache hold rows of bytes where attention has few bits."""
    for i, kind in enumerate(config.layer_types[: len(cache.layers)]):
        if kind in ("full_attention", "sliding_attention") and not isinstance(cache.layers[i], StaticRows):
            roundings = Rounding.of_attention(config, i)
            if any(rounding.rounds for rounding in roundings):
                StaticRows.fit(cache.layers[i], roundings)


def new_cache(config) -> DynamicCache:
    """An empty cache for the layers of `config`."""
    cache = DynamicCache(config=config)
    fit_cache(cache, config)
    return cache


def is_token(inputs: torch.Tensor) -> torch.Tensor:
    """Return where inputs of a short convolution (B, I, L) are a token's, not padding or before the first: (B, L)."""
    return inputs.bool().any(dim=1)


def conv_state(cache: Cache, layer_idx: int) -> torch.Tensor | None:
    """The last inputs of a layer's short convolution, or None before the first token."""
    layer = cache.layers[layer_idx]
    return layer.conv_states[0] if layer.has_previous_state[0] else None


def recurrent_state(cache: Cache, layer_idx: int) -> torch.Tensor | None:
    """A layer's recurrent state, or None before the first token."""
    layer = cache.layers[layer_idx]
    return layer.recurrent_states[0] if layer.has_previous_state[0] else None


def record(cache: Cache | None, layer_idx: int, state: torch.Tensor | None, inputs: Tensors, replay: Callable) -> bool:
    """Note what a mixer feeds its state, if the cache is recording; return True if so."""
    layer = None if cache is None else cache.layers[layer_idx]
    if not getattr(layer, "record_past", False):
        return False
    if isinstance(layer, MixerLayer):
        layer.record(state, inputs, replay)
    return True


def make_room(cache: DynamicCache, most: int) -> None:
    """Give the layers of a cache room for `most` tokens, at addresses that stay, in place."""
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, HybridLayer):
            layer.make_room(most)
        elif isinstance(layer, DynamicLayer):
            cache.layers[i] = static_layer(layer, most)


def grow_again(cache: DynamicCache, length: int) -> None:
    """Let the layers of a cache of `length` tokens, which `make_room` gave room, grow again."""
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, HybridLayer):
            layer.grow_again(length)
        elif isinstance(layer, StaticLayer):
            cache.layers[i] = dynamic_layer(layer, length)


def copied_layer(layer, length: int, padding: torch.Tensor | None):
    """A copy of a layer, with `length` tokens of those that it holds.

    Args:
        padding: (B, 1), columns that stay free before the first token of each row, or None.
    """
    copied = copy.copy(layer)
    if isinstance(layer, HybridLayer):
        copied.held = layer.held.copied()
        copied.kept = copied_layer(layer.kept, length, padding)
        copied.length = length
        copied.readout = None
    elif isinstance(layer, LinearAttentionLayer):
        for name, value in vars(layer).items():
            if isinstance(value, dict):
                own = {i: t.clone() if isinstance(t, torch.Tensor) else t for i, t in value.items()}
                setattr(copied, name, own)
    elif layer.is_initialized:
        copied.keys, copied.values = (_moved(t, length, padding) for t in (layer.keys, layer.values))
    return copied


def _moved(t: torch.Tensor, length: int, padding: torch.Tensor | None) -> torch.Tensor:
    """The first columns of keys or values (B, K, L, P), moved behind so much padding."""
    if padding is None:
        return t[:, :, :length].clone()
    columns = (torch.arange(length, device=t.device) - padding).clamp(min=0)
    return t.gather(2, columns[:, None, :, None].expand(-1, t.shape[1], -1, t.shape[3]))


def cache_nbytes(cache: Cache) -> int:
    """Bytes held by a cache, not counting what it records."""
    return sum(t.numel() * t.element_size() for t in held_by(cache))


def held_by(cache: Cache) -> list[torch.Tensor]:
    """The tensors that a cache carries from call to call."""
    return [t for layer in cache.layers for t in tensors_of(layer)]


def seen_by(cache: Cache) -> list[torch.Tensor]:
    """Numbers of tokens that each row has had, in the hybrid layers of a cache."""
    return [layer.held.seen for layer in cache.layers if isinstance(layer, HybridLayer)]


def tensors_of(layer) -> list[torch.Tensor]:
    """The tensors a cache layer carries from call to call."""
    if isinstance(layer, HybridLayer):
        found = layer.tensors()
    elif isinstance(layer, LinearAttentionLayer):
        found = [*layer.conv_states.values(), *layer.recurrent_states.values()]
    else:
        found = [layer.keys, layer.values]
    return [t for t in found if t is not None]
