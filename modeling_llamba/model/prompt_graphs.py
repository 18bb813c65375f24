"""CUDA graphs of prompts, which stay with a model.

A prompt is padded at its end to the length of a bucket, and counts that lie on the device say how much of each row is
text. The graph of a bucket and a number of rows is recorded at the first such prompt, and stays with the model, as
does its cache. All graphs of prompts share one pool for the rest: as much as the largest of them takes without one.
They go when the model is trained, moved or converted. Prompts that keep a GPU busy for longer than their launches take
run without one.

Shapes: B batch, L length, D model width, V vocabulary.
"""

import itertools
import threading
import weakref

import torch
from torch import nn
from transformers.cache_utils import Cache

from ..hybrid.inputs import HybridInputs
from ..kernels.backend import requested_backend
from .cache import copied_layer, held_by, new_cache, seen_by
from .recorded import CHECKS, Recorded, agree, record, refuse

BUCKETS = (256, 512, 1024, 2048, 4096)
MOST_WORK = 4e12
"""Tokens of a prompt's graph, padding and all rows included, times the model's parameters, at most: with 1B parameters
launches take longer than 4,096 tokens do (docs/results/gpu.md)."""
MOST_GRAPHS = 8
"""Graphs of prompts that a model keeps at most: those of the first sizes that it meets."""
MOST_MOVES = 3
"""Times that a model's weights may move until it goes on without graphs."""


def bucket_of(length: int) -> int | None:
    """Tokens of the bucket for a prompt; None for one that is too long, or shorter than half of its bucket."""
    for bucket in BUCKETS:
        if length <= bucket:
            return bucket if bucket <= 2 * length else None
    return None


class PromptGraph:
    """Prompts of one bucket and number of rows.

    Args:
        model: for causal language modelling. rows: B. bucket: tokens of a prompt, padding included. pool: memory of
            all the model's graphs of prompts.
    """

    def __init__(self, model: nn.Module, rows: int, bucket: int, pool: object):
        self.ids = torch.zeros(rows, bucket, dtype=torch.long, device=model.device)
        self.counts = torch.full((rows, 1), bucket, device=model.device)
        self.pool = pool
        self.recorded: Recorded | None = None

    def compute(self, model: nn.Module) -> tuple[torch.Tensor, Cache]:
        """Logits (B, 1, V) after the last token of each row, and a new cache with what is held afterwards."""
        number = torch.arange(self.ids.shape[1], device=self.ids.device)[None]
        is_text = number < self.counts
        index = torch.where(is_text, number, -1)
        like = model.model.embed_tokens.weight
        cache = new_cache(model.config)
        masks = {
            "full_attention": None,
            "linear_attention": is_text,
            "hybrid": HybridInputs(
                index,
                start=0,
                sink_rotary=model.model.sink_rotary(like, number, number, self.ids.shape[1]),
                end_alike=False,
            ),
        }
        hidden_states = model.model(self.ids, masks, number, cache).last_hidden_state
        last = (self.counts - 1)[..., None].expand(-1, -1, hidden_states.shape[-1])
        return model.logits_of(hidden_states.gather(1, last)), cache

    def fill(self, ids: torch.Tensor, padding: torch.Tensor | None) -> None:
        """Take a prompt (B, L), whose rows begin with so many tokens of padding (B, 1), or with none."""
        length = ids.shape[1]
        self.counts.fill_(length)
        if padding is not None:
            self.counts.sub_(padding)
            columns = torch.arange(length, device=ids.device) + padding
            ids = ids.gather(1, columns.clamp(max=length - 1))
        self.ids[:, :length] = ids

    def run(self, model: nn.Module, cache: Cache, length: int, padding: torch.Tensor | None) -> torch.Tensor:
        """Logits (B, 1, V) of the prompt that was taken, which enters `cache`, too; the first one is recorded."""
        if self.recorded is None:
            logits, held = self.compute(model)
            self._record(model, logits, held)
        else:
            logits, held = self.recorded.run()
        cache.layers[:] = [copied_layer(layer, length, padding) for layer in held.layers]
        return logits.clone()

    def _record(self, model: nn.Module, logits: torch.Tensor, held: Cache) -> None:
        """Record the graph, and compare it with the pass without it: for the prompt, and for another text that is
        shorter by a token."""
        self.recorded = record(model, lambda: self.compute(model), self.pool)
        for check in range(CHECKS):
            if self.recorded is None:
                return
            if check:
                self.ids.copy_(self.ids.roll(1, dims=1))
                self.counts.sub_(1).clamp_(min=1)
                logits, held = self.compute(model)
            found, in_graph = self.recorded.run()
            expected = [logits, *held_by(held), *seen_by(held)]
            if not agree([found, *held_by(in_graph), *seen_by(in_graph)], expected):
                self.recorded = None
                refuse(model, "the graph of a prompt gave other results than the prompt without it.")


class PromptGraphs:
    """The graphs of a model's prompts.

    Args:
        weights: addresses of the parameters that they read, and what else they depend on. moves: how often these have
            changed.
    """

    def __init__(self, weights: tuple, moves: int):
        self.weights = weights
        self.moves = moves
        self.graphs: dict[tuple[int, int], PromptGraph] = {}
        self.lock = threading.Lock()
        self.pool = torch.cuda.graph_pool_handle()
        self.stream: torch.cuda.Stream | None = None

    def of(self, model: nn.Module, rows: int, bucket: int) -> PromptGraph | None:
        """The graph for prompts of so many rows in a bucket; None where there are enough others.

        One that takes another's place would be recorded anew each time, where sizes come in turns.
        """
        if (rows, bucket) not in self.graphs:
            if len(self.graphs) == MOST_GRAPHS:
                return None
            self.graphs[rows, bucket] = PromptGraph(model, rows, bucket, self.pool)
        return self.graphs[rows, bucket]

    def wait(self, device: torch.device) -> None:
        """Have the current stream wait for the one that ran a graph last, since they share memory."""
        stream = torch.cuda.current_stream(device)
        if self.stream is not None and self.stream != stream:
            stream.wait_stream(self.stream)
        self.stream = stream


PROMPTS: "weakref.WeakKeyDictionary[nn.Module, PromptGraphs]" = weakref.WeakKeyDictionary()
"""The graphs of each model's prompts, for as long as the model is there."""


def forget_graphs(model: nn.Module) -> None:
    """Give back the memory of a model's graphs."""
    PROMPTS.pop(model, None)


def graphs_of(model: nn.Module) -> PromptGraphs | None:
    """The graphs of a model's prompts; new ones if its weights lie elsewhere, or something else has changed; None if
    they have moved too often."""
    setting = requested_backend(model.config.backend), model.dtype
    tensors = itertools.chain(model.parameters(), model.buffers())
    weights = *setting, *((t.data_ptr(), t.dtype, t.shape, t.stride()) for t in tensors)
    graphs = PROMPTS.get(model)
    if graphs is not None and graphs.weights == weights:
        return graphs
    moves = 0 if graphs is None else graphs.moves + 1
    if moves > MOST_MOVES:
        refuse(model, "its weights move from call to call.")
        forget_graphs(model)
        return None
    graphs = PROMPTS[model] = PromptGraphs(weights, moves)
    return graphs
