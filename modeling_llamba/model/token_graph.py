"""The CUDA graph of the tokens of one call of `generate`.

It is recorded at the second token. The cache has room for twice what it holds, at addresses that stay, until
`generate` ends or the room does.

Shapes: B batch, V vocabulary.
"""

import collections
import weakref

import torch
from torch import nn
from transformers.cache_utils import Cache, StaticLayer

from ..hybrid.hybrid_cache import HybridLayer
from ..hybrid.inputs import HybridInputs
from ..kernels.softmax import hiding
from .cache import grow_again, held_by, make_room, seen_by
from .recorded import REFUSED, Recorded, agree, record, refuse

CHECKS = 2
"""Passes of a graph that are compared; at the second one, counts on the device must have gone on."""
CHECKED: "weakref.WeakKeyDictionary[nn.Module, collections.Counter]" = weakref.WeakKeyDictionary()
"""Numbers of passes of each model's graphs of tokens that were compared, by rows and whether there is padding."""


class TokenGraph:
    """Tokens of one call of `generate`, one of each row at a time.

    Args:
        cache: with `length` tokens; it gets room for `most`. padding: (B, 1), tokens of padding that rows begin with,
            or None.
    """

    def __init__(
        self, model: nn.Module, cache: Cache, length: int, most: int, rows: int, padding: torch.Tensor | None
    ):
        self.model = model
        self.cache = cache
        self.length = length
        self.most = most
        self.ids = torch.zeros(rows, 1, dtype=torch.long, device=model.device)
        self.column = torch.full((1, 1), length, device=model.device)
        self.padded = padding is not None
        self.padding = padding if self.padded else torch.zeros_like(self.ids)
        self.index = self.column - self.padding
        self.recorded: Recorded | None = None
        self.runs = 0
        make_room(cache, most)

    def compute(self) -> torch.Tensor:
        """Logits (B, 1, V) of a token of each row, which enters the cache."""
        columns = torch.arange(self.most, device=self.ids.device)[None]
        hidden = (columns > self.column) | (columns < self.padding)
        mask = hiding(hidden, self.model.dtype)[:, None, None]
        index = self.index.clone()
        far = self.model.model.sink_rotary(self.model.model.embed_tokens.weight, index, index, self.most)
        masks = {
            "full_attention": mask,
            "linear_attention": None,
            "hybrid": HybridInputs(index, sink_rotary=far, causal_mask=mask),
        }
        hidden_states = self.model.model(self.ids, masks, index, self.cache).last_hidden_state
        self.column.add_(1)
        self.index.add_(1)
        return self.model.logits_of(hidden_states)

    def run(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits (B, 1, V) of the next token (B, 1) of each row."""
        self.ids.copy_(ids)
        if self.runs == 1 and self.model not in REFUSED:
            self.recorded = record(self.model, self.compute)
        if self.recorded is None:  # the first token, too, at which kernels are compiled
            logits = self.compute()
        elif self._checks()[self._kind()] < CHECKS:
            logits = self._checked()
        else:
            logits = self.recorded.run().clone()
        self.runs += 1
        self.length += 1
        return logits

    def _checked(self) -> torch.Tensor:
        """Run the graph, and then the pass without it from the same state; the results are those of the latter."""
        state = [*held_by(self.cache), *self._counts()]
        before = [t.clone() for t in state]
        found = [self.recorded.run().clone(), *(t.clone() for t in state)]
        for t, value in zip(state, before, strict=True):
            t.copy_(value)
        logits = self.compute()
        self._checks()[self._kind()] += 1
        if not agree(found, [logits, *state]):
            self.recorded = None
            refuse(self.model, "the graph of a token gave other results than the token without it.")
        return logits

    def _checks(self) -> collections.Counter:
        return CHECKED.setdefault(self.model, collections.Counter())

    def _kind(self) -> tuple[int, bool]:
        return len(self.ids), self.padded

    def _counts(self) -> list[torch.Tensor]:
        """Numbers of tokens that lie on the device."""
        found = [self.column, self.index, *seen_by(self.cache)]
        for layer in self.cache.layers:
            if isinstance(layer, HybridLayer):
                found.append(layer.length)
                layer = layer.kept
            if isinstance(layer, StaticLayer) and layer.is_initialized:
                found.append(layer.cumulative_length)
        return found

    def close(self) -> None:
        """Let the cache grow again."""
        with torch.no_grad():
            grow_again(self.cache, self.length)
