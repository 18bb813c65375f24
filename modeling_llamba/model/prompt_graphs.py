"""CUDA graphs of prompts, which stay with a model.

A prompt is padded at its end to the length of a bucket, and counts that lie on the device say how much of each row is
text. One that is longer than all buckets is read in chunks, each of which begins with what the graph of the one before
holds. The graph of a bucket, a number of rows and a first token is recorded at the first such prompt, and stays with
the model, as does its cache. All graphs of prompts share one pool for the rest: as much as the largest of them takes
without one. They go when the model is trained, moved or converted. Prompts that keep a GPU busy for longer than their
launches take run without one.

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
from ..kernels.softmax import hiding
from .cache import copied_layer, held_by, new_cache, seen_by
from .recorded import Recorded, agree, record, refuse
from .token_graph import CHECKED

BUCKETS = (256, 512, 1024, 2048, 4096)
MOST_WORK = 4e12
"""Tokens of a prompt's graph, padding and all rows included, times the model's parameters, at most: with 1B parameters
launches take longer than 4,096 tokens do (docs/results/gpu.md)."""
MOST_GRAPHS = 8
"""Graphs that a model keeps at most: those of the first sizes of prompts that it meets."""
MOST_CHUNKS = 4
"""Chunks of a prompt at most; a GPU is busy with longer ones, and each chunk's graph has a cache of all before it."""
MOST_MOVES = 3
"""Times that a model's weights may move until it goes on without graphs."""


def chunks_of(length: int) -> list[tuple[int, int]]:
    """The first token and the bucket of each chunk of a prompt, all but the last of which are full; none for a prompt
    that is shorter than half of its bucket, or has too many chunks."""
    most = BUCKETS[-1]
    starts = range(0, length, most)
    if len(starts) > MOST_CHUNKS:
        return []
    last = next(bucket for bucket in BUCKETS if length - starts[-1] <= bucket)
    if last > 2 * length:
        return []
    return [*((start, most) for start in starts[:-1]), (starts[-1], last)]


class PromptGraph:
    """A chunk of prompts, of one bucket and number of rows.

    Args:
        model: for causal language modelling. rows: B. start: tokens before the chunk. bucket: tokens, padding
            included. pool: memory of all the model's graphs of prompts. before: the chunk before this one, or None.
    """

    def __init__(
        self, model: nn.Module, rows: int, start: int, bucket: int, pool: object, before: "PromptGraph | None"
    ):
        self.ids = torch.zeros(rows, bucket, dtype=torch.long, device=model.device)
        self.counts = torch.full((rows, 1), bucket, device=model.device)
        self.pool = pool
        self.before = before
        self.start = start
        self.recorded: Recorded | None = None

    def compute(self, model: nn.Module) -> tuple[torch.Tensor, Cache]:
        """Logits (B, 1, V) after the last token of each row, and a new cache with what is held afterwards."""
        number = torch.arange(self.ids.shape[1], device=self.ids.device)[None]
        is_text = number < self.counts
        position = self.start + number
        end = self.start + self.ids.shape[1]
        like = model.model.embed_tokens.weight
        cache, mask = new_cache(model.config), None
        if self.before is not None:
            _, held = self.before.recorded.result
            cache.layers[:] = [copied_layer(layer, self.start, None) for layer in held.layers]
            if _masks_attention(model.config):
                columns = torch.arange(end, device=self.ids.device)
                mask = hiding(columns > position[..., None], like.dtype)[:, None]
        masks = {
            "full_attention": mask,
            "linear_attention": is_text,
            "hybrid": HybridInputs(
                torch.where(is_text, position, -1),
                start=self.start,
                sink_rotary=model.model.sink_rotary(like, position, position, end),
                causal_mask=mask,
                end_alike=False,
            ),
        }
        hidden_states = model.model(self.ids, masks, position, cache).last_hidden_state
        last = (self.counts - 1)[..., None].expand(-1, -1, hidden_states.shape[-1])
        return model.logits_of(hidden_states.gather(1, last)), cache

    def fill(self, ids: torch.Tensor, padding: torch.Tensor | None) -> None:
        """Take a chunk (B, L), whose rows begin with so many tokens of padding (B, 1), or with none."""
        length = ids.shape[1]
        self.counts.fill_(length)
        if padding is not None:
            self.counts.sub_(padding)
            columns = torch.arange(length, device=ids.device) + padding
            ids = ids.gather(1, columns.clamp(max=length - 1))
        self.ids[:, :length] = ids

    def run(self, model: nn.Module) -> tuple[torch.Tensor, Cache] | None:
        """Run the chunk that was taken: the results of `compute`, until the next run; None without a graph."""
        if self.recorded is None:
            self._record(model)
        else:
            self.recorded.run()
        return None if self.recorded is None else self.recorded.result

    def _record(self, model: nn.Module) -> None:
        """Record the graph, and compare it with the pass without it: for another text, which is shorter by a token,
        and for the chunk."""
        recorded = None
        another = self.ids.roll(1, dims=1), (self.counts - 1).clamp(min=1)
        for ids, counts in (another, (self.ids.clone(), self.counts.clone())):
            self.ids.copy_(ids)
            self.counts.copy_(counts)
            logits, held = self.compute(model)
            recorded = recorded or record(model, lambda: self.compute(model), self.pool)
            if recorded is None:
                return
            found, in_graph = recorded.run()
            expected = [logits, *held_by(held), *seen_by(held)]
            if not agree([found, *held_by(in_graph), *seen_by(in_graph)], expected):
                refuse(model, "the graph of a prompt gave other results than the prompt without it.")
                return
        self.recorded = recorded


def _masks_attention(config) -> bool:
    """True if some attention looks at a mask: that of whole layers, or of kept heads."""
    return "full_attention" in config.layer_types or any(config.hybrid_full_heads or ())


class PromptGraphs:
    """The graphs of a model's prompts.

    Args:
        weights: addresses of the parameters that they read, and what else they depend on. moves: how often these have
            changed.
    """

    def __init__(self, weights: tuple, moves: int):
        self.weights = weights
        self.moves = moves
        self.graphs: dict[tuple[int, int, int], PromptGraph] = {}
        self.lock = threading.Lock()
        self.pool = torch.cuda.graph_pool_handle()
        self.stream: torch.cuda.Stream | None = None

    def run(
        self, model: nn.Module, ids: torch.Tensor, cache: Cache, padding: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Logits (B, 1, V) of a prompt (B, L), which enters `cache`, too; None where it has no graphs.

        Args:
            padding: (B, 1), tokens of padding that rows begin with, or None.
        """
        rows, length = ids.shape
        keys = [(rows, start, bucket) for start, bucket in chunks_of(length)]
        # none takes the place of another, which would be recorded anew each time where sizes come in turns
        if not keys or len(self.graphs.keys() | keys) > MOST_GRAPHS:
            return None
        work = rows * max(bucket for _, _, bucket in keys) * sum(t.numel() for t in model.parameters())
        # a row whose text ends within a chunk that is not the last has nothing in the next one
        if work > MOST_WORK or (padding is not None and len(keys) > 1):
            return None
        self._wait(model.device)
        graph = None
        for key in keys:
            if key not in self.graphs:
                self.graphs[key] = PromptGraph(model, *key, self.pool, graph)
            graph = self.graphs[key]
            graph.fill(ids[:, graph.start : graph.start + graph.ids.shape[1]], padding)
            found = graph.run(model)
            if found is None:
                return None
        logits, held = found
        cache.layers[:] = [copied_layer(layer, length, padding) for layer in held.layers]
        return logits.clone()

    def _wait(self, device: torch.device) -> None:
        """Have the current stream wait for the one that ran a graph last, since they share memory."""
        stream = torch.cuda.current_stream(device)
        if self.stream is not None and self.stream != stream:
            stream.wait_stream(self.stream)
        self.stream = stream


PROMPTS: "weakref.WeakKeyDictionary[nn.Module, PromptGraphs]" = weakref.WeakKeyDictionary()
"""The graphs of each model's prompts, for as long as the model is there."""


def forget_graphs(model: nn.Module) -> None:
    """Give back the memory of a model's graphs, and compare later ones anew."""
    PROMPTS.pop(model, None)
    CHECKED.pop(model, None)


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
    forget_graphs(model)
    if moves > MOST_MOVES:
        refuse(model, "its weights move from call to call.")
        return None
    graphs = PROMPTS[model] = PromptGraphs(weights, moves)
    return graphs
