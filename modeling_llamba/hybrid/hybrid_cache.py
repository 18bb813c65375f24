"""The cache of one hybrid layer, of constant size but for the keys and values of kept heads.

Shapes: B batch, L length, E block, n whole blocks, C columns of the window, S places, K key/value heads, P head dim.
"""

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, StaticLayer
from transformers.utils import is_torchdynamo_compiling

from ..kernels.backend import backend_for
from ..model.recording import NOT_RECORDED, Recording, Tensors, check_crop
from ..model.static_layers import dynamic_layer, static_layer
from .eviction import BlockShape, Held, NewTokens, advance


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

    def __getstate__(self) -> dict[str, Any]:
        """Save and copy all but what is made of the state anew."""
        return self.__dict__ | {"readout": None}

    def make_room(self, most: int) -> None:
        """Have room for `most` tokens, at addresses that stay."""
        self.kept = static_layer(self.kept, most)
        self.length = self.held.seen.new_full((), self.length)
        self.most = most

    def grow_again(self, length: int) -> None:
        """Hold `length` tokens, and have room for as many as come."""
        self.kept = dynamic_layer(self.kept, length)
        self.length = length
        self.most = None
        self.readout = None  # a graph changes the state without a word

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
        if held is self.held:
            return
        self.readout = None
        if self.most is None or self.held is None:
            self.held = Held(*held)  # of this module, as kernels may have one of theirs, which could not be saved
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
        self.put(tokens, start)
        held, length = self.held, tokens.index.shape[1]
        E, n, S, C = self.shape.block, self.shape.whole_blocks, self.shape.places, self.shape.window
        if start is None:
            return 0, S + C, hidden_columns(held, S, self._columns(tokens)[:, None])
        column = self.shape.column(start)
        first, last = S if start < C else 0, column + length
        # no place is looked at before the window is full, and none is empty once S tokens have left
        all_held = start < C or (start // E - n) * E >= S
        if all_held and length == 1:
            return first, last, None
        own = torch.arange(column, last, device=held.seen.device)[None]
        if not all_held:
            return 0, S + C, hidden_columns(held, S, own.expand(len(held.seen), -1))
        return first, last, torch.arange(first, last, device=held.seen.device) > own[..., None]

    def put(self, tokens: NewTokens, start: int | None) -> None:
        """Write tokens as `write` does."""
        self._record(tokens)
        self._count(tokens)
        shape = self.shape
        if self.held is None:
            self._hold(Held.empty(shape, tokens))
        backend = backend_for(self.held.salience, shape.key_rounding.backend)
        opens = start is not None and start % shape.block == 0 and start >= shape.window
        if tokens.index.shape[1] == 1 and backend.write_one(self.held, tokens, shape):
            if opens or start is None:
                self.readout = None
        elif start is not None:
            if opens:
                self._hold(backend.open_blocks(self.held, shape, self.held.seen, in_all_rows=True))
            held = self.held
            length = tokens.index.shape[1]
            columns = slice(shape.column(start), shape.column(start) + length)
            held.keys[:, :, columns] = tokens.keys
            held.values[:, :, columns] = tokens.values
            held.salience[:, columns] = tokens.salience
            held.seen.add_(length)
        else:
            self._hold(backend.open_blocks(self.held, shape, tokens.index[:, 0]))
            self._scatter(tokens)

    def _columns(self, tokens: NewTokens) -> torch.Tensor:
        """Columns (B,) of a token of each row, whose block is open; of padding, that of the token before."""
        index = tokens.index[:, 0]
        return self.shape.columns(torch.where(index >= 0, index, self.held.seen - 1)).clamp(min=self.shape.places)

    def _scatter(self, tokens: NewTokens) -> None:
        """Write a token of each row, wherever each row is."""
        held = self.held
        real = tokens.index[:, 0] >= 0
        # padding writes back what is there, so that all rows write and no shape depends on them
        column = self._columns(tokens)
        for old, new in zip(held[:2], tokens[:2], strict=True):
            where = column[:, None, None, None].expand(-1, old.shape[1], 1, old.shape[3])
            old.scatter_(2, where, torch.where(real[:, None, None, None], new, old.gather(2, where)))
        where = column[:, None]
        written = torch.where(real[:, None], tokens.salience, held.salience.gather(1, where))
        held.salience.scatter_(1, where, written)
        held.seen.add_(real.long())

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


def hidden_columns(held: Held, places: int, last: torch.Tensor) -> torch.Tensor:
    """Mask (B, L, S + C): True in places that are empty and in the window after the columns `last` (B, L)."""
    number = torch.arange(held.salience.shape[1], device=last.device)
    return torch.where(number < places, (held.salience == -torch.inf)[:, None], number > last[..., None])
