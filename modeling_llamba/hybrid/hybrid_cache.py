"""Cache of a hybrid, in the layers of transformers' own cache.

`DynamicCache(config=...)` builds a key/value layer for every attention layer and states for every mixer, from
`config.layer_types`. `fit_cache` puts others in their place: `HybridLayer` for hybrid layers, of constant size but for
kept heads, `MixerLayer`, which can be cropped, and `RecurrentLayer` for a teacher's own layers with a state. A cache
counts tokens by looking at an attention layer; for a model of mixers alone `RecurrentCache` keeps the count.

States cannot be cropped as keys can. So transformers announces that a cache will be cropped, in assisted generation
and prompt lookup (`activate_past_recording`), and from then on a layer keeps what it held some tokens ago and what
those tokens fed it (`Recording`): multi-step verification as in Wang et al. 2024, The Mamba in the Llama. A crop
replays the tokens that stay.

Shapes: B batch, L length, E block, n whole blocks, C columns of the window, S places, K key/value heads, P head dim.
"""

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
    StaticSlidingWindowLayer,
)
from transformers.utils import is_torchdynamo_compiling

from ..kernels.cpu_kernels import can_open_on_cpu, open_on_cpu
from ..kernels.hybrid_step_kernel import write_one
from ..model.hybrid_config import RECURRENT
from .eviction import BlockShape, Held, NewTokens, advance, open_block, open_blocks
from .rounding import Rounding

CROPPABLE = 128
"""Tokens by which a cache that records can be cropped at least."""

NOT_RECORDED = "Call activate_past_recording() on the cache before the tokens that may be cropped."

Tensors = tuple[torch.Tensor, ...]


def check_crop(tokens_to_remove: int) -> None:
    """Refuse a length to keep, as older versions of transformers took it.

    Raises:
        ValueError: the number is positive.
    """
    if tokens_to_remove > 0:
        raise ValueError(f"Pass crop the tokens to forget as a negative number, such as crop(-{tokens_to_remove}).")


class Recording:
    """A state some tokens ago, and what these tokens fed it.

    Args:
        base: the state, which is not changed in place.
        axes: where the tokens are counted in each of the tensors of `add`.
        replay: from a state and the tensors of some tokens to the state after them.
    """

    def __init__(self, base, axes: tuple[int, ...], replay: Callable):
        self.base, self.axes, self.replay = base, axes, replay
        self.tokens: Tensors | None = None

    def __len__(self) -> int:
        return 0 if self.tokens is None else self.tokens[0].shape[self.axes[0]]

    def add(self, new: Tensors) -> None:
        """Append tokens; far more than CROPPABLE are not kept."""
        if self.tokens is not None:
            pairs = zip(self.tokens, new, self.axes, strict=True)
            new = tuple(torch.cat([old, added], dim=axis) for old, added, axis in pairs)
        self.tokens = tuple(new)
        # not at every token, since CROPPABLE or more are replayed each time
        if len(self) > 2 * CROPPABLE:
            old = len(self) - CROPPABLE
            self.base = self.replay(self.base, self._columns(0, old))
            self.tokens = self._columns(old, CROPPABLE)

    def crop(self, tokens: int):
        """Forget the last tokens, and return the state after those that remain.

        Raises:
            ValueError: the recording has fewer tokens.
        """
        if tokens > len(self):
            raise ValueError(
                f"The cache cannot be cropped by {tokens} tokens: it recorded {len(self)}, and keeps {CROPPABLE} at "
                "least; draft fewer tokens at a time."
            )
        self.forget(tokens)
        return self.replay(self.base, self.tokens) if len(self) else self.base

    def forget(self, tokens: int) -> None:
        """Forget the inputs of the last tokens alone."""
        if tokens:
            self.tokens = self._columns(0, len(self) - tokens)

    def _columns(self, start: int, length: int) -> Tensors:
        return tuple(t.narrow(axis, start, length) for t, axis in zip(self.tokens, self.axes, strict=True))


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


class HybridLayer(CacheLayerMixin):
    """The cache of a hybrid layer.

    held: window, salient cache and state. kept: all keys and values of the kept heads. length: number of tokens,
    padding included; a tensor where the cache is static, with room for `most` tokens.
    """

    supports_early_init = False

    def __init__(self, shape: BlockShape, most: int | None = None):
        super().__init__()
        self.shape, self.most, self.record_past = shape, most, False
        self.reset()

    def reset(self) -> None:
        self.held: Held | None = None
        self.kept = DynamicLayer() if self.most is None else StaticLayer(self.most)
        self.length: int | torch.Tensor = 0 if self.most is None else torch.tensor(0)
        self.recording: Recording | None = None
        self.readout = None  # what the layer makes of the state, until that changes
        if self.record_past:
            self.activate_past_recording()

    @property
    def is_compileable(self) -> bool:
        """True where `generate` may compile steps on CUDA: with room for all tokens, shapes stay the same."""
        return self.most is not None

    @property
    def is_croppable(self) -> bool:
        """True while a recording is kept, which `crop` needs."""
        return self.recording is not None

    def keep(self, held: Held, tokens: NewTokens) -> None:
        """Take what is held after these tokens."""
        self._record(tokens)
        self._hold(held)
        self._count(tokens)

    def _hold(self, held: Held) -> None:
        """Hold these tensors; in a static cache their contents, where a CUDA graph will look for them."""
        self.readout = None
        if self.most is None or self.held is None:
            self.held = held
            for t in held if self.most is not None and not is_torchdynamo_compiling() else ():
                if t is not None:
                    torch._dynamo.mark_static_address(t)
            return
        for old, new in zip(self.held, held, strict=True):
            if old is not None and old is not new:
                old.copy_(new)

    def write(self, tokens: NewTokens, start: int | None) -> tuple[int, int, torch.Tensor | None]:
        """Write L tokens of one block for each row in place, in a block opened for them if need be.

        Args:
            start: number of the first token, where it is the same in all rows and known; else L = 1.

        Returns:
            The columns first .. last - 1 that the tokens attend to, and which of these (B or 1, L, last - first) bool
            are hidden from which token; None where none is hidden.
        """
        column, held, length = self.put(tokens, start), self.held, tokens.index.shape[1]
        E, n, S, C = self.shape.block, self.shape.whole_blocks, self.shape.places, self.shape.window
        if start is None:
            return 0, S + C, self._hidden(held, column[:, None])
        first, last = S if start < C else 0, column + length
        # no place is looked at before the window is full, and none is empty once S tokens have left
        all_held = start < C or (start // E - n) * E >= S
        if all_held and length == 1:
            return first, last, None
        own = torch.arange(column, last, device=held.seen.device)[None]
        if not all_held:
            return 0, S + C, self._hidden(held, own.expand(len(held.seen), -1))
        return first, last, torch.arange(first, last, device=held.seen.device) > own[..., None]

    def put_one(self, tokens: NewTokens) -> None:
        """Write a token of each row in place by kernels, wherever each row is."""
        self._record(tokens)
        self._count(tokens)
        if self.held is None:
            self._hold(Held.empty(self.shape, tokens))
        self.readout = None
        shape = self.shape
        assert all(t.is_contiguous() for t in self.held), "the kernels write to tensors without gaps"
        write_one(*self.held, *tokens, shape.block, shape.places, *shape.slow, shape.key_rounding.dim)

    def put(self, tokens: NewTokens, start: int | None) -> int | torch.Tensor:
        """Write tokens as `write` does; return the column of the first, (B,) where rows may differ."""
        self._record(tokens)
        self._count(tokens)
        shape = self.shape
        E, n, S, C = shape.block, shape.whole_blocks, shape.places, shape.window
        if self.held is None:
            self._hold(Held.empty(shape, tokens))
        if start is not None:
            if start % E == 0 and start >= C and not self._open_in_place(self.held.seen):
                self._hold(open_block(self.held, shape))
            held = self.held
            column, length = S + start - max(start // E - n, 0) * E, tokens.index.shape[1]
            held.keys[:, :, column : column + length] = tokens.keys
            held.values[:, :, column : column + length] = tokens.values
            held.salience[:, column : column + length] = tokens.salience
            held.seen.add_(length)
            return column
        if not self._open_in_place(tokens.index[:, 0]):
            opened = open_blocks(self.held, shape, tokens.index[:, 0])
            if opened is not self.held:
                self._hold(opened)
        held = self.held
        real = tokens.index[:, 0] >= 0
        # padding writes back what is there, so that all rows write and no shape depends on them
        number = torch.where(real, tokens.index[:, 0], held.seen - 1)
        column = (S + number - (number // E - n).clamp(min=0) * E).clamp(min=S)
        for old, new in zip(held[:2], tokens[:2], strict=True):
            where = column[:, None, None, None].expand(-1, old.shape[1], 1, old.shape[3])
            old.scatter_(2, where, torch.where(real[:, None, None, None], new, old.gather(2, where)))
        where = column[:, None]
        written = torch.where(real[:, None], tokens.salience, held.salience.gather(1, where))
        held.salience.scatter_(1, where, written)
        held.seen.add_(real.long())
        return column

    def _open_in_place(self, next_index: torch.Tensor) -> bool:
        """Open blocks by C where the next tokens (B,) begin one, and return True if C runs here."""
        held = self.held
        if not can_open_on_cpu(held, self.shape.key_rounding.backend):
            return False
        if open_on_cpu(*held[:4], next_index, self.shape):
            self.readout = None
        return True

    def _hidden(self, held: Held, last: torch.Tensor) -> torch.Tensor:
        """Mask (B, L, S + C): True in places that are empty and in the window after the columns `last` (B, L)."""
        number, S = torch.arange(held.salience.shape[1], device=last.device), self.shape.places
        return torch.where(number < S, (held.salience == -torch.inf)[:, None], number > last[..., None])

    def _count(self, tokens: NewTokens) -> None:
        if self.most is not None and self.length.device != tokens.index.device:
            self.length = self.length.to(tokens.index.device)
            if not is_torchdynamo_compiling():
                torch._dynamo.mark_static_address(self.length)
        if self.most is None:
            self.length += tokens.index.shape[1]
        else:
            self.length.add_(tokens.index.shape[1])

    # transformers' protocol

    def activate_past_recording(self) -> None:
        """Keep what `crop` needs from here on."""
        self.record_past = True
        base = None if self.held is None else self.held.copied()
        self.recording = Recording(base, (2, 2, 1, 1), self._replay)  # no lambda, which cannot be saved

    def _replay(self, held: Held | None, recorded: Tensors) -> Held:
        tokens = NewTokens(*recorded)
        return advance(Held.empty(self.shape, tokens) if held is None else held, tokens, self.shape)

    def _record(self, tokens: NewTokens) -> None:
        if self.recording is not None and not self.record_past:
            self.recording = None
        if self.recording is not None:
            self.recording.add(tokens)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, as many as `-tokens_to_remove`.

        Raises:
            ValueError: nothing was recorded, or not so many tokens.
        """
        check_crop(tokens_to_remove)
        if tokens_to_remove == 0:
            return
        if self.recording is None:
            raise ValueError(NOT_RECORDED)
        if self._crop_open_block(-tokens_to_remove):
            return
        held = self.recording.crop(-tokens_to_remove)
        base = self.recording.base
        self.held = held.copied() if held is base and held is not None else held
        self.readout = None
        self.length += tokens_to_remove
        self._crop_kept(tokens_to_remove)

    def _crop_open_block(self, count: int) -> bool:
        """Forget the last tokens where no block was opened for any of them: they are then no longer counted."""
        held, E = self.held, self.shape.block
        if len(self.recording) < count or held is None or self.recording.base is held:
            return False
        for seen in held.seen.tolist():
            opened = (seen - 1) // E * E  # the last token that may have opened a block
            if seen < count or opened >= max(seen - count, self.shape.window):
                return False
        held.seen.sub_(count)
        self.recording.forget(count)
        self.length -= count
        self._crop_kept(-count)
        return True

    def _crop_kept(self, tokens_to_remove: int) -> None:
        if self.kept.is_initialized:  # older versions of transformers fail on a layer that holds nothing
            self.kept.crop(tokens_to_remove)

    def go_back(self, held: Held | None, length: int) -> None:
        """Hold what was held after so many tokens; the caller restores the kept heads' keys."""
        self.held = held
        self.readout = None
        self.length = length
        self.recording = None
        if self.record_past:
            self.activate_past_recording()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the first tokens make the tensors that the layer holds."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Refuse keys without the numbers of their tokens, which the hybrid layer writes by `write` and `put`."""
        raise NotImplementedError("The cache of a hybrid layer is written by the layer itself.")

    def get_seq_length(self) -> int | torch.Tensor:
        """Number of tokens, padding included."""
        return self.length

    def get_max_length(self) -> int:
        """Room for tokens; -1 where there is no limit."""
        return -1 if self.most is None else self.most

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys, and of the first, for the masks of kept heads."""
        return (self.length + query_length, 0) if self.most is None else (self.most, 0)

    def _select_rows(self, rows: torch.Tensor) -> None:
        if self.held is not None:
            self.held, self.readout = self.held.rows(rows), None
        if self.recording is not None:
            self.activate_past_recording()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Take the rows of other beams."""
        self._select_rows(beam_idx)
        self.kept.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some rows."""
        rows = torch.arange(len(self.held.seen), device=self.held.seen.device)[indices] if self.held else indices
        self._select_rows(rows)
        self.kept.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        if self.held is not None:
            rows = torch.arange(len(self.held.seen), device=self.held.seen.device)
            self._select_rows(rows.repeat_interleave(repeats))
        self.kept.batch_repeat_interleave(repeats)

    def tensors(self) -> list[torch.Tensor | None]:
        """Tensors that grow with nothing but the kept heads' keys; counts are left out."""
        return [*(() if self.held is None else self.held[:4]), self.kept.keys, self.kept.values]


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
        LinearAttentionLayer.crop(self, tokens_to_remove)

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
                f"Layer {i} cannot begin with keys of another model or of prefix tuning, as it takes in tokens only; "
                "prompt tuning and LoRA work."
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


def cache_nbytes(cache: Cache) -> int:
    """Bytes held by a cache, not counting what it records."""
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in tensors_of(layer))


def tensors_of(layer) -> list[torch.Tensor]:
    """The tensors a cache layer carries from call to call."""
    if isinstance(layer, HybridLayer):
        found = layer.tensors()
    elif isinstance(layer, LinearAttentionLayer):
        found = [*layer.conv_states.values(), *layer.recurrent_states.values()]
    else:
        found = [layer.keys, layer.values]
    return [t for t in found if t is not None]
