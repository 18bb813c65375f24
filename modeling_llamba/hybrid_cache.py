"""What a hybrid carries from one call to the next, and how passes over it are taken back.

`DynamicCache(config=...)` builds a key/value layer for every attention layer and a conv state plus a recurrent
state for every mixer, from `config.layer_types`. It counts tokens by looking at an attention layer, so a model
without one has no length at all: `RecurrentCache` keeps the count itself. A hybrid layer keeps its mixer's states, a
window and sinks: `WindowLayer`, which takes the place of what `DynamicCache` and `StaticCache` put there.

A recurrent state cannot be cropped. So that a draft can be verified without a copy of the state for each token, a
cache can record: its states stay where they were at the checkpoint, the last token known to be right, and the layers
note what the passes since then fed them: a mixer its x, B and decay and the inputs of its short convolution, attention
its keys and values, as ever. `accept` then moves the checkpoint: each row replays as many tokens into its state as
were right, and the rest is dropped: multi-step verification as in Wang et al. 2024, The Mamba in the Llama. A recorded
token takes P + N + 1 numbers per head; a state is P N of them.

    record(cache)
    logits = model(drafted, past_key_values=cache).logits      # one pass, or several
    accept(cache, [3, 1])                                      # row 0 keeps three tokens, row 1 one

Rows that keep different numbers of tokens are set flush right, so that the cache is always that of a batch padded on
the left.

Shapes: B batch, R tokens recorded, P head dim, N state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
from transformers.utils import is_torchdynamo_compiling

from .normalised_read_kernel import can_run
from .salient_tokens import compete
from .ssd import requested_backend
from .window_attention import Ring, Tokens, leaving_window, with_past

NEVER = torch.iinfo(torch.long).max
# what can be taken back, besides layers that have an `accept` of their own as `WindowLayer` has
CROPPED = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer)


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


def certain_length(cache: Cache) -> tuple[int, int]:
    """A number of tokens that a static cache of hybrid layers has certainly seen, and how many it has room for."""
    layer = next(layer for layer in cache.layers if isinstance(layer, WindowLayer))
    return layer.least, layer.most


def note_length(cache: Cache | None, length: int) -> None:
    """Note that the cache now holds `length` tokens; needed where no attention layer counts them."""
    if cache is not None and cache.layers and not has_attention_layer(cache):
        cache.seen_tokens = length


def ending_at(t: torch.Tensor, ends: Sequence[int], size: int, axis: int) -> torch.Tensor:
    """Gather the `size` columns before column ends[row] of each row, padding with the first column."""
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
        return self.seen_tokens

    def reset(self) -> None:
        super().reset()
        self.seen_tokens = 0


class WindowLayer(LinearAttentionLayer, CacheLayerMixin):
    """The cache of a hybrid layer, of constant size except for heads with full attention.

    recent: the last W - 1 columns. first: the S sinks. salient: the tokens that hold a place, where there are places.
    ring: all three as a kernel for one token keeps them; the three then are None, until `in_order`.
    seen_tokens: how many tokens; a tensor where the cache is static, with room for `most` tokens, which CUDA graphs
    find where it was. least: how many there certainly are.
    since: columns that came after `salient` and the states, while recording. leaving: what has not left the window for
    the mixer's state.
    full: all keys and values of the heads with full attention. Besides, the mixer's conv and recurrent states, or the
    state of the normalised read.
    """

    is_croppable = False
    supports_early_init = False

    def __init__(self, window: int, most: int | None = None):
        LinearAttentionLayer.__init__(self)
        CacheLayerMixin.__init__(self)
        self.window, self.most = window, most
        self.reset()

    @property
    def is_compileable(self) -> bool:
        """Whether the steps of `generate` are compiled on CUDA; otherwise shapes change from step to step."""
        return self.most is not None

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        self.recent: Tokens | None = None
        self.first: Tokens | None = None
        self.salient: Tokens | None = None
        self.ring: Ring | None = None
        self.former: Ring | None = None
        self.since = 0
        self.leaving: tuple[torch.Tensor, ...] | None = None
        self.recorded = None  # a `Recorded` while passes can be taken back
        self.full = DynamicLayer() if self.most is None else StaticLayer(self.most)
        self.seen_tokens: int | torch.Tensor = 0 if self.most is None else torch.tensor(0)
        self.least = 0

    def keep(self, context: Tokens, sinks: Tokens, new_tokens: int, salient: Tokens | None) -> None:
        """Remember the end of `context`, at least the last `new_tokens` columns of which are new, sinks and places."""
        if self.recorded is not None:
            start, self.since = 0, self.since + new_tokens
        else:
            start, self.salient = max(context.index.shape[1] - self.window + 1, 0), salient
        keys, values = (t[:, :, start:] for t in context[:2])
        others = (None if t is None else t[:, start:] for t in context[2:])
        recent = Tokens(keys, values, *others)
        if start > 1:  # a view would hold on to the whole prompt
            recent = Tokens(*(None if t is None else t.clone() for t in recent))
        self.recent = recent
        self.first = sinks
        self.count(new_tokens, sinks.index.device)

    def count(self, new_tokens: int, device: torch.device) -> None:
        """Note that so many more tokens have been seen."""
        if self.most is None:
            self.seen_tokens += new_tokens
        else:
            if self.seen_tokens.device != device or not self.least:
                self.seen_tokens = _stays(self.seen_tokens.to(device))
            self.seen_tokens.add_(new_tokens)
        if not is_torchdynamo_compiling():  # a number that changes would be a reason to compile anew
            self.least += new_tokens

    def in_ring(self) -> Ring:
        """The window as a kernel for one token keeps it, from here on."""
        if self.ring is None:
            self.ring = Ring.of(self.recent, self.first, self.salient, self.window)
            self.recent = self.first = self.salient = None
            if self.former is not None:
                for t, new in zip(self.former, self.ring, strict=True):
                    t.copy_(new)
                self.ring, self.former = self.former, None
            for t in self.ring if self.most is not None else ():
                _stays(t)
        return self.ring

    def in_order(self) -> None:
        """Have the window, sinks and places in the order of the text again."""
        if self.ring is not None:
            self.recent, self.first, self.salient = self.ring.in_order()
            self.ring, self.former = None, self.ring if self.most is not None else None

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs) -> torch.Tensor:
        """transformers' own, which leaves it to a convolution to say that there is a state, and where."""
        self.device, self.has_previous_state[state_idx] = recurrent_states.device, True
        return LinearAttentionLayer.update_recurrent_state(self, recurrent_states, state_idx, **kwargs)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Not used: keys go through `keep`, which knows which token is which."""
        raise NotImplementedError("The cache of a hybrid layer is written by the layer itself.")

    def get_seq_length(self) -> int:
        return self.seen_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys, and of the first, for the masks of heads with full attention."""
        return self.seen_tokens + query_length if self.most is None else self.most, 0

    def tensors(self) -> list[torch.Tensor | None]:
        """All tensors carried from call to call, except token indices."""
        states = [*self.conv_states.values(), *self.recurrent_states.values(), *(self.leaving or ())]
        held = [tokens for tokens in (self.recent, self.first, self.salient) if tokens is not None]
        states += [t for tokens in held for t in (*tokens[:2], tokens.salience)]
        return [*states, *(self.ring or ())[:3], self.full.keys, self.full.values]

    def accept(self, tokens: int, counts: Sequence[int], length: int) -> None:
        """Like `crop_rows`, for window and sinks; sinks that were not accepted are forgotten."""
        self.in_order()
        crop_rows(self.full, tokens, counts, length)
        self.seen_tokens, self.since = length, 0
        index = self.recent.index
        columns = index.shape[1]
        if self.salient is not None and tokens:
            self._take_places(tokens, counts)
        ends = torch.tensor([columns - tokens + count for count in counts], device=index.device)[:, None]
        rejected = (torch.arange(columns, device=index.device) >= ends) & (index >= 0)
        beyond = index.masked_fill(~rejected, NEVER).amin(1, keepdim=True)
        self.first = self.first._replace(index=self.first.index.masked_fill(self.first.index >= beyond, -1))
        size, last = min(columns - tokens + max(counts), self.window - 1), ends[:, 0].tolist()
        absent = torch.arange(size, device=index.device) < size - ends
        keys, values = (ending_at(t, last, size, axis=2).clone() for t in self.recent[:2])
        salience = self.recent.salience
        if salience is not None:
            salience = ending_at(salience, last, size, axis=1).masked_fill(absent, -torch.inf)
        self.recent = Tokens(keys, values, ending_at(index, last, size, axis=1).masked_fill(absent, -1), salience)

    def _take_places(self, tokens: int, counts: Sequence[int]) -> None:
        """Let the tokens compete that left the window after the accepted ones of the last `tokens` columns."""
        places, columns = self.salient.index.shape[1], with_past(self.recent, self.salient)
        entering = leaving_window(columns.index, places, self.window, tokens)
        dropped = torch.arange(tokens) >= torch.tensor(counts)[:, None]
        takes_none = columns.salience.gather(1, entering.clamp(min=0)) == -torch.inf
        entering = entering.masked_fill(dropped.to(entering.device) | takes_none, -1)
        held = torch.arange(places, device=entering.device).expand(len(entering), -1)
        held = held.masked_fill(self.salient.index < 0, -1)
        self.salient = columns.at(compete(held, entering, columns.salience).held)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        def reordered(t):
            return t.index_select(0, beam_idx.to(t.device))

        self.in_order()
        for name in ("recent", "first", "salient"):
            if (tokens := getattr(self, name)) is not None:
                setattr(self, name, Tokens(*(None if t is None else reordered(t) for t in tokens)))
        if self.leaving is not None:
            self.leaving = tuple(map(reordered, self.leaving))
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        self.full.reorder_cache(beam_idx)


def fit_cache(cache: Cache | None, config, padded: bool = False) -> None:
    """Give hybrid layers their own kind of cache layer, and the others beside them growing keys, in place.

    A static cache stays one for tokens that are not padded, where a kernel keeps it in place.

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
    stays = not padded and stays_in_place(config)
    for i, kind in enumerate(config.layer_types):
        layer = cache.layers[i]
        if kind == "hybrid" and not isinstance(layer, WindowLayer):
            if getattr(layer, "is_initialized", False):
                raise ValueError(f"Layer {i} of the cache holds the keys of another model.")
            most = layer.max_cache_len if stays and isinstance(layer, StaticLayer) else None
            cache.layers[i] = WindowLayer(config.window_of(i), most)
        elif isinstance(layer, StaticLayer) and not layer.is_initialized and not stays:
            # masks are made once for all layers and the heads with full attention, whose keys then grow
            sliding = isinstance(layer, StaticSlidingWindowLayer)
            cache.layers[i] = DynamicSlidingWindowLayer(config.sliding_window) if sliding else DynamicLayer()


def stays_in_place(config) -> bool:
    """Whether a static cache can be one for the hybrid layers: if a kernel sees to single tokens, in place."""
    if config.hybrid_read != "normalised" or requested_backend(config.mixer_backend) == "torch":
        return False
    least = min(config.window_of(i) for i, kind in enumerate(config.layer_types) if kind == "hybrid")
    return can_run(torch.cuda.is_available(), torch.float32, config.num_attention_heads, least)


def _stays(t: torch.Tensor) -> torch.Tensor:
    """The tensor, marked as one that a CUDA graph may find where it is."""
    if not is_torchdynamo_compiling():
        torch._dynamo.mark_static_address(t)
    return t


def new_cache(config) -> DynamicCache:
    """An empty cache for the layers of `config`."""
    holds_keys = any(layer_type != "linear_attention" for layer_type in config.layer_types)
    cache = DynamicCache(config=config) if holds_keys else RecurrentCache(config)
    fit_cache(cache, config)
    return cache


def conv_state(cache: Cache, layer_idx: int) -> torch.Tensor | None:
    """The inputs that a layer's short convolution remembers, or None before the first token.

    As `get_conv_state` of transformers' caches, which there is from 5.20 on.
    """
    layer = cache.layers[layer_idx]
    return layer.conv_states[0] if layer.has_previous_state[0] else None


def recurrent_state(cache: Cache, layer_idx: int) -> torch.Tensor | None:
    """A layer's recurrent state, or None before the first token; transformers' own getter is as young."""
    layer = cache.layers[layer_idx]
    return layer.recurrent_states[0] if layer.has_previous_state[0] else None


@dataclass
class Recorded:
    """What a mixer was fed since the checkpoint.

    conv: (B, channels, kernel + R) inputs of the short convolution. inputs: what `advance` replays, (B, delay + R, .),
    all zero where nothing shall happen. advance: state and inputs to the state after them, perhaps in place.
    """

    conv: torch.Tensor | None = None
    inputs: tuple[torch.Tensor, ...] | None = None
    advance: Callable[..., torch.Tensor] | None = None

    def add(self, new: tuple[torch.Tensor, ...], before: tuple[torch.Tensor, ...] | None = None):
        """Append inputs, after `before` if they are the first; returns all recorded, (B, delay + R, ...) each."""
        old = self.inputs if self.inputs is not None else before
        self.inputs = new if old is None else tuple(torch.cat(pair, dim=1) for pair in zip(old, new, strict=True))
        return self.inputs


def recorded_by(cache: Cache | None, layer_idx: int) -> Recorded | None:
    """The record of a layer's mixer, or None if no cache is recording."""
    return None if cache is None else getattr(cache.layers[layer_idx], "recorded", None)


def record(cache: Cache) -> None:
    """Make the passes from here on reversible, until `stop_recording`.

    Raises:
        ValueError: the cache is empty, or some layer of it is of a kind that cannot be taken back.
    """
    for layer in cache.layers:
        if type(layer) not in CROPPED and (not hasattr(layer, "accept") or layer.most is not None):
            raise ValueError(f"A cache with a {type(layer).__name__} cannot take passes back; use a dynamic cache.")
    if not cache_length(cache):
        raise ValueError("The cache is empty; run the model over the prompt before recording.")
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            layer.recorded = Recorded()
        elif isinstance(layer, DynamicSlidingWindowLayer):
            layer.record_past = True
    cache.checkpoint = cache_length(cache)


@torch.no_grad()
def accept(cache: Cache, counts: Sequence[int], drop: int = 0) -> None:
    """Keep the first counts[row] of the tokens recorded, forget the others, and go on recording from there.

    Args:
        counts: one per row, each at most the number of tokens recorded. The cache grows by the largest; rows with
            fewer have that much more padding on their left.
        drop: this many columns on the left, which hold padding only, are dropped.
    """
    tokens = cache_length(cache) - cache.checkpoint
    assert 0 <= min(counts) and max(counts) <= tokens, f"{list(counts)} of {tokens} recorded tokens"
    length = cache.checkpoint + max(counts) - drop
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            _replay(layer, counts)
        if hasattr(layer, "accept"):
            layer.accept(tokens, counts, length)
        elif isinstance(layer, DynamicLayer):
            crop_rows(layer, tokens, counts, length)
    note_length(cache, length)
    cache.checkpoint = length


def stop_recording(cache: Cache) -> None:
    """Passes are final again; what was recorded and not accepted is forgotten."""
    rows = next(len(t) for layer in cache.layers for t in tensors_of(layer))
    accept(cache, [0] * rows)
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            layer.recorded = None
        elif isinstance(layer, DynamicSlidingWindowLayer):
            layer.record_past = False


def recorded_bytes(cache: Cache) -> int:
    """Bytes the mixers hold, beyond their states, so that passes can be taken back."""
    records = [r for layer in cache.layers if (r := getattr(layer, "recorded", None)) is not None]
    tensors = [t for r in records for t in (r.conv, *(r.inputs or ())) if t is not None]
    return sum(t.numel() * t.element_size() for t in tensors)


def cache_nbytes(cache: Cache) -> int:
    """Bytes held by a cache, not counting what it records."""
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in tensors_of(layer))


def tensors_of(layer) -> list[torch.Tensor]:
    """The tensors a cache layer carries from call to call."""
    if hasattr(layer, "accept"):
        found = layer.tensors()
    elif isinstance(layer, LinearAttentionLayer):
        found = [*layer.conv_states.values(), *layer.recurrent_states.values()]
    else:
        found = [layer.keys, layer.values]
    return [t for t in found if t is not None]


def _replay(layer: LinearAttentionLayer, counts: Sequence[int]) -> None:
    """Advance the recurrent state by the accepted inputs, and the conv state and what waits for the state with it."""
    noted, layer.recorded = layer.recorded, Recorded()
    if noted.inputs is None:
        return
    if noted.conv is not None:
        kernel = layer.conv_states[0].shape[-1]
        layer.conv_states[0].copy_(ending_at(noted.conv, [kernel + count for count in counts], kernel, axis=2))
    if max(counts):
        inputs = [t[:, : max(counts)] for t in noted.inputs]
        if min(counts) < max(counts):
            kept = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
            inputs = [t * kept.to(t).view(*kept.shape, *[1] * (t.ndim - 2)) for t in inputs]
        state = layer.recurrent_states[0]
        advanced = noted.advance(state, *inputs)
        if advanced is not state:
            state.copy_(advanced)
    leaving = getattr(layer, "leaving", None)
    if leaving is not None:
        delay = leaving[0].shape[1]
        layer.leaving = tuple(ending_at(t, [delay + n for n in counts], delay, axis=1).clone() for t in noted.inputs)
