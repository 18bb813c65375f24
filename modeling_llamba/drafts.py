"""Where drafted tokens come from: a smaller model, the model's own first layers, or the text so far.

Shapes: B batch, L length, K drafted tokens, V vocabulary.
"""

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer

from .recording import accept, cache_nbytes, record, recorded_bytes

SELF_SHARE = 3


class Drafted(NamedTuple):
    """tokens (B, K), the first counts[row] of which are drafted; probabilities (B, K, V) they were drawn with.

    Without probabilities they were not drawn: each was certain to be drafted.
    """

    tokens: torch.Tensor
    counts: list[int]
    probabilities: torch.Tensor | None = None


class Text:
    """The rows so far, as `generate` would have them, with room behind.

    tokens: (B, capacity). starts and ends: of each row, where its padding ends and its text so far does. active: rows
    that are not finished.
    """

    def __init__(self, prompt: torch.Tensor, mask: torch.Tensor | None, capacity: int):
        rows, columns = prompt.shape
        self.tokens = torch.nn.functional.pad(prompt, (0, capacity - columns))
        self.starts = [0] * rows if mask is None else (columns - mask.long().sum(1)).tolist()
        self.ends = [columns] * rows
        self.active = [True] * rows

    def length(self, row: int) -> int:
        """Tokens of a row, padding apart."""
        return self.ends[row] - self.starts[row]

    def last(self, count: int) -> torch.Tensor:
        """The last tokens of each row, (B, count); a row that ended earlier may be shorter, and begins with zeros."""
        rows = []
        for row, end in zip(self.tokens, self.ends, strict=True):
            found = row[max(end - count, 0) : end]
            rows.append(torch.nn.functional.pad(found, (count - len(found), 0)))
        return torch.stack(rows)

    def write(self, tokens: torch.Tensor, offset: int = 0) -> None:
        """Put (B, n) tokens behind each row's text without counting them to it."""
        for row, new in enumerate(tokens):
            start = self.ends[row] + offset
            self.tokens[row, start : start + len(new)] = new


class Track:
    """A model on the rows of a text: its cache, the tokens of each row that it holds, and those fed on approval."""

    def __init__(self, model: PreTrainedModel, cache: Cache):
        self.model, self.cache = model, cache
        self.lengths: list[int] = []
        self.columns = self.ahead = self.extra_bytes = 0

    def prefill(self, text: Text, chunk_size: int | None = None, behind: int = 0) -> torch.Tensor:
        """Feed the text but for its last `behind` tokens, then begin to record; the logits (B, V) that follow."""
        self.lengths = [text.length(row) - behind for row in range(len(text.ends))]
        self.columns = max(self.lengths)
        ids = torch.zeros(len(self.lengths), self.columns, dtype=torch.long)
        for row, (start, length) in enumerate(zip(text.starts, self.lengths, strict=True)):
            ids[row, self.columns - length :] = text.tokens[row, start : start + length]
        index = torch.arange(self.columns) - self.columns + torch.tensor(self.lengths)[:, None]
        ids, index = ids.to(self.model.device), index.to(self.model.device)
        size, logits = chunk_size or self.columns, None
        for start in range(0, self.columns, size):
            stop = min(start + size, self.columns)
            logits = self.model(
                input_ids=ids[:, start:stop],
                attention_mask=None if min(self.lengths) == self.columns else (index[:, :stop] >= 0).long(),
                position_ids=index[:, start:stop].clamp(min=0),
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
        record(self.cache)
        return logits.to(text.tokens.device)

    def feed(self, ids: torch.Tensor, active: Sequence[bool]) -> torch.Tensor:
        """Logits (B, L, V) of further tokens (B, L), which `accept` will judge; rows not active are padding."""
        device, length = self.model.device, ids.shape[1]
        total = self.columns + self.ahead + length
        mask = None
        if not all(active) or min(self.lengths) < self.columns:
            mask = torch.ones(len(active), total, dtype=torch.long)
            for row, (real, unfinished) in enumerate(zip(self.lengths, active, strict=True)):
                mask[row, : self.columns - real] = 0
                mask[row, self.columns :] = int(unfinished)
            mask = mask.to(device)
        positions = torch.tensor(self.lengths)[:, None] + self.ahead + torch.arange(length)
        logits = self.model(
            input_ids=ids.to(device),
            attention_mask=mask,
            position_ids=positions.to(device),
            past_key_values=self.cache,
            use_cache=True,
        ).logits
        self.ahead += length
        self.extra_bytes = max(self.extra_bytes, recorded_bytes(self.cache))
        return logits.to(ids.device)

    def accept(self, counts: Sequence[int], active: Sequence[bool]) -> None:
        """Keep the first counts[row] tokens fed since the last call."""
        lengths = [n + count for n, count in zip(self.lengths, counts, strict=True)]
        columns = max(n for n, unfinished in zip(lengths, active, strict=True) if unfinished or not any(active))
        accept(self.cache, counts, drop=self.columns + max(counts) - columns)
        self.lengths, self.columns, self.ahead = [min(n, columns) for n in lengths], columns, 0


class PromptLookup:
    """What followed the last tokens where they occurred before (Saxena 2023, prompt lookup decoding)."""

    def __init__(self, longest_match: int = 3):
        self.longest_match = longest_match

    def propose(self, text: Text, count: int, choose: Callable) -> Drafted:
        """Up to `count` tokens a row; none where the text does not repeat itself."""
        found = []
        for row, (start, end) in enumerate(zip(text.starts, text.ends, strict=True)):
            found.append(self._lookup(text.tokens[row, start:end], count) if text.active[row] else [])
        width = max(map(len, found))
        tokens = torch.zeros(len(found), width, dtype=torch.long, device=text.tokens.device)
        for row, continuation in enumerate(found):
            tokens[row, : len(continuation)] = torch.as_tensor(continuation)
        return Drafted(tokens, [len(continuation) for continuation in found])

    def _lookup(self, tokens: torch.Tensor, count: int) -> torch.Tensor | list:
        """The continuation of the latest earlier occurrence of the longest possible match."""
        for size in range(min(self.longest_match, len(tokens) - 1), 0, -1):
            same = (tokens[:-1].unfold(0, size, 1) == tokens[-size:]).all(1).nonzero()
            if len(same):
                after = int(same[-1]) + size
                return tokens[after : after + count]
        return []

    def accept(self, text: Text) -> None:
        """Nothing to do."""

    def extra_bytes(self) -> int:
        """None."""
        return 0


class ModelDraft:
    """A language model that decodes ahead, with a cache of its own that goes back with the target's."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.track: Track | None = None

    def propose(self, text: Text, count: int, choose: Callable) -> Drafted:
        """`count` tokens a row; `choose` turns logits (B, V) into tokens (B,) and probabilities (B, V) or None."""
        if self.track is None:
            self.track = Track(self.model, empty_cache(self.model))
            self.track.prefill(text, behind=1)
        unseen = {text.length(row) - self.track.lengths[row] for row, active in enumerate(text.active) if active}
        assert len(unseen) == 1, f"rows are {unseen} tokens behind"
        ids, tokens, probabilities = text.last(unseen.pop()), [], []
        for step in range(count):
            token, probability = choose(self.track.feed(ids, text.active)[:, -1:], step)
            ids = token[:, None]
            text.write(ids, step)
            tokens.append(token)
            probabilities.append(probability)
        drawn = None if probabilities[0] is None else torch.stack(probabilities, 1)
        return Drafted(torch.stack(tokens, 1), [count] * len(text.ends), drawn)

    def accept(self, text: Text) -> None:
        """Go on behind the text as it is now; every row is left the same number of tokens behind."""
        if self.track is None or not self.track.ahead or not any(text.active):
            return
        rows = [row for row, active in enumerate(text.active) if active]
        seen = {row: min(text.length(row) - 1, self.track.lengths[row] + self.track.ahead) for row in rows}
        behind = max(text.length(row) - seen[row] for row in rows)
        counts = [0] * len(text.ends)
        for row in rows:
            counts[row] = text.length(row) - behind - self.track.lengths[row]
        self.track.accept(counts, text.active)

    def extra_bytes(self) -> int:
        """Of its cache."""
        return 0 if self.track is None else cache_nbytes(self.track.cache) + self.track.extra_bytes


def empty_cache(model: PreTrainedModel) -> Cache:
    """A cache that can record.

    Raises:
        ValueError: the model is recurrent in a way that is not this project's.
    """
    if hasattr(model, "new_cache"):
        return model.new_cache()
    cache = DynamicCache(config=model.config)
    if any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers):
        raise ValueError(
            f"{type(model).__name__} is recurrent and cannot take tokens back; use a Transformer, or a hybrid of "
            "convert-to-hybrid."
        )
    return cache


def first_layers(model: PreTrainedModel, layers: int | None = None) -> PreTrainedModel:
    """The model's first layers (a third by default) under its own final norm and head; shares every weight with it.

    Raises:
        ValueError: there are not so many layers, or not fewer than all.
    """
    if not hasattr(getattr(model, "model", None), "layers"):
        raise ValueError(
            f"{type(model).__name__} does not keep its layers where draft='self' looks; name another draft."
        )
    total = len(model.model.layers)
    layers = max(total // SELF_SHARE, 1) if layers is None else layers
    if not 0 < layers < total:
        raise ValueError(f"A draft of the model's own first layers takes 1 to {total - 1} of them, not {layers}.")
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    for name in ("layer_types", "hybrid_full_heads"):
        if getattr(config, name, None) is not None:
            setattr(config, name, getattr(config, name)[:layers])
    with torch.device("meta"):
        draft = type(model)(config)
    for name, module in model.model.named_children():
        setattr(draft.model, name, nn.ModuleList(module[:layers]) if name == "layers" else module)
    draft.lm_head = model.lm_head
    return draft.train(model.training)
