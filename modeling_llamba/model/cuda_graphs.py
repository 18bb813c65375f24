"""CUDA graphs of the passes of `generate`: of prompts, and of the tokens after them.

A hybrid launches some 40 kernels a layer for a prompt and 25 for a token, which takes the host longer than the GPU. A
graph launches all of them at once. With HYBRID_CUDA_GRAPHS=1, `generate` on CUDA takes graphs wherever nothing is
asked of a pass that a graph cannot give. It is not the default, since no GPU has run it yet.

A prompt is padded at its end to the length of a bucket, and counts that lie on the device say how much of each row is
text. The graph of a bucket and a number of rows is recorded at the first such prompt, and stays with the model, as
does its cache. All graphs of prompts share one pool for the rest: as much as the largest of them takes without one.

For tokens the cache has room for twice what it holds, at addresses that stay, until `generate` ends or the room does.
Their graph is recorded at the second token of each call.

Each graph of a prompt, and a model's first graph of tokens, is compared with the same pass without it. If they differ,
or a pass cannot be recorded, a warning says so, and the model goes on without graphs.

Shapes: B batch, L length, D model width, V vocabulary.
"""

import contextlib
import contextvars
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer
from transformers.generation import GenerationConfig, GenerationMode
from transformers.utils import logging

from ..hybrid.hybrid_cache import HybridLayer
from ..hybrid.inputs import HybridInputs
from ..kernels.backend import requested_backend
from ..kernels.softmax import hiding
from .cache import MixerLayer, cache_length, copied_layer, grow_again, held_by, make_room, new_cache

logger = logging.get_logger(__name__)
DEVICE = "cuda"
"""Kind of device that has graphs."""
VARIABLE = "HYBRID_CUDA_GRAPHS"
"""Environment variable that turns graphs on where it is 1."""
BUCKETS = (256, 512, 1024, 2048, 4096)
MOST_GRAPHS = 8
"""Graphs of prompts that a model keeps at most."""
FEWEST_TOKENS = 8
"""New tokens from which on it is worth recording a graph of them."""
ROOM = 1024
"""Tokens for which a cache gets room at first, beside as many again as it holds."""
TOLERANCE = 0.05
"""Relative difference between two runs of a pass: products may be summed in another order, which bfloat16 shows."""
LAYERS = {"hybrid", "linear_attention", "full_attention"}
"""Kinds of layers whose passes can be recorded."""
FIXED_ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose angles do not depend on the length of a text."""
NOT_RECORDED = {"position_ids", "inputs_embeds", "custom_generate"}
"""Arguments of `generate` with which none of its passes is a graph."""
HOOKS = "transformers.utils.output_capturing"
"""Module of the hooks that transformers leaves on a model."""
REFUSED: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Models that go on without graphs."""
CHECKED: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Models whose graph of tokens gave what the pass without it gives."""
STREAMS: dict[torch.device, torch.cuda.Stream] = {}
"""The stream of each device on which graphs are recorded. PyTorch's own is of the device that recorded first."""
RECORDING = threading.Lock()
"""Held while a graph is recorded, of which a process can have one at a time."""


def bucket_of(length: int) -> int | None:
    """Tokens of the bucket for a prompt; None for one that is too long, or shorter than half of its bucket."""
    for bucket in BUCKETS:
        if length <= bucket:
            return bucket if bucket <= 2 * length else None
    return None


class Recorded:
    """A pass that runs as one graph, with the same addresses each time.

    Args:
        compute: the pass, which reads and writes tensors at addresses that stay. pool: memory that it shares with
            other graphs, whose results are no longer needed when this one runs.
    """

    def __init__(self, compute: Callable[[], torch.Tensor], device: torch.device, pool: object | None = None):
        self.graph = torch.cuda.CUDAGraph()
        stream = STREAMS.setdefault(device, torch.cuda.Stream(device))
        mode = "thread_local"  # what other threads do with the device does not matter
        before = torch.cuda.current_stream(device)
        try:
            with torch.cuda.device(device), torch.cuda.graph(self.graph, pool, stream, capture_error_mode=mode):
                self.result = compute()
        except RuntimeError:
            torch.cuda.set_stream(before)  # PyTorch stays on the other one after an error
            raise

    def run(self) -> torch.Tensor:
        """Run the pass, and return the tensor in which its result lies until the next run."""
        self.graph.replay()
        return self.result


def record(model: nn.Module, compute: Callable[[], torch.Tensor], pool: object | None = None) -> Recorded | None:
    """A recorded pass; None where it cannot be recorded, which ends graphs for the model."""
    try:
        with RECORDING:
            return Recorded(compute, model.device, pool)
    except RuntimeError as error:
        refuse(model, str(error))
        return None


def refuse(model: nn.Module, why: str) -> None:
    """Let a model go on without graphs, and say so."""
    REFUSED.add(model)
    PROMPTS.pop(model, None)
    logger.warning(f"`generate` goes on without CUDA graphs, which is slower: {why}")


def agree(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Return True if tensors are equal up to the order of sums; rows of bytes may differ in a hundredth of these."""
    same = []
    for a, b in zip(found, expected, strict=True):
        if b.is_floating_point():
            same.append((a.isfinite() == b.isfinite()).all())
            a, b = (torch.nan_to_num(t.float(), posinf=0.0, neginf=0.0) for t in (a, b))
            same.append((a - b).norm() <= TOLERANCE * b.norm() + 1e-6)
        else:
            same.append((a != b).sum() <= (b.numel() // 100 if b.dtype == torch.uint8 else 0))
    return bool(torch.stack(same).all())


def seen_by(cache: Cache) -> list[torch.Tensor]:
    """Numbers of tokens that each row has had, in the hybrid layers of a cache."""
    return [layer.held.seen for layer in cache.layers if isinstance(layer, HybridLayer)]


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
        self.cache: Cache | None = None

    def compute(self, model: nn.Module) -> torch.Tensor:
        """Logits (B, 1, V) after the last token of each row; what is held afterwards is in a new `cache`."""
        number = torch.arange(self.ids.shape[1], device=self.ids.device)[None]
        is_text = number < self.counts
        index = torch.where(is_text, number, -1)
        like = model.model.embed_tokens.weight
        self.cache = new_cache(model.config)
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
        hidden_states = model.model(self.ids, masks, number, self.cache).last_hidden_state
        last = (self.counts - 1)[..., None].expand(-1, -1, hidden_states.shape[-1])
        return model.logits_of(hidden_states.gather(1, last))

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
        if self.recorded is not None:
            logits = self.recorded.run().clone()
            self._give(self.cache, cache, length, padding)
            return logits
        logits = self.compute(model).clone()
        expected = self.cache
        recorded = record(model, lambda: self.compute(model), self.pool)
        if recorded is not None:
            found = [recorded.run(), *held_by(self.cache), *seen_by(self.cache)]
            if agree(found, [logits, *held_by(expected), *seen_by(expected)]):
                self.recorded = recorded
            else:
                refuse(model, "the graph of a prompt gave other results than the prompt without it.")
        self._give(expected, cache, length, padding)
        return logits

    def _give(self, held: Cache, cache: Cache, length: int, padding: torch.Tensor | None) -> None:
        cache.layers[:] = [copied_layer(layer, length, padding) for layer in held.layers]


class PromptGraphs:
    """The graphs of a model's prompts, the latest last.

    Args:
        weights: addresses of the parameters that they read, and what else they depend on.
    """

    def __init__(self, weights: tuple):
        self.weights = weights
        self.graphs: dict[tuple[int, int], PromptGraph] = {}
        self.lock = threading.Lock()
        self.pool = torch.cuda.graph_pool_handle()

    def of(self, model: nn.Module, rows: int, bucket: int) -> PromptGraph:
        """The graph for prompts of so many rows in a bucket."""
        graph = self.graphs.pop((rows, bucket), None) or PromptGraph(model, rows, bucket, self.pool)
        if len(self.graphs) == MOST_GRAPHS:
            del self.graphs[next(iter(self.graphs))]
        self.graphs[rows, bucket] = graph
        return graph


PROMPTS: "weakref.WeakKeyDictionary[nn.Module, PromptGraphs]" = weakref.WeakKeyDictionary()
"""The graphs of each model's prompts, for as long as the model is there."""


def graphs_of(model: nn.Module) -> PromptGraphs:
    """The graphs of a model's prompts; new ones if its weights lie elsewhere, or something else has changed."""
    setting = requested_backend(model.config.backend), model.dtype
    tensors = itertools.chain(model.parameters(), model.buffers())
    weights = *setting, *((t.data_ptr(), t.dtype, t.shape, t.stride()) for t in tensors)
    graphs = PROMPTS.get(model)
    if graphs is None or graphs.weights != weights:
        graphs = PROMPTS[model] = PromptGraphs(weights)
    return graphs


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
        self.padding = torch.zeros_like(self.ids) if padding is None else padding
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
        elif self.model not in CHECKED:
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
        CHECKED.add(self.model)
        if not agree(found, [logits, *state]):
            self.recorded = None
            refuse(self.model, "the graph of a token gave other results than the token without it.")
        return logits

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


class Passes:
    """The passes of one call of `generate`, which may be graphs.

    cache: of that call. Passes with another cache are not of this call. most: tokens that it may hold in the end.
    """

    def __init__(self):
        self.cache: Cache | None = None
        self.most = 0
        self.begun = False
        self.padding: torch.Tensor | None = None
        self.tokens: TokenGraph | None = None

    def run(
        self, model: nn.Module, ids: torch.Tensor, attention_mask: torch.Tensor | None, cache: Cache
    ) -> torch.Tensor | None:
        """See `run_as_graph`."""
        rows, length = ids.shape
        goes_on = takes_token(cache, length)
        if goes_on and self.tokens.length < self.tokens.most:
            return self.tokens.run(ids)
        if goes_on:
            self.close()
        if not self.begun:
            self._look_at(attention_mask)
            return self._prompt(model, ids, cache)
        past = cache_length(cache)
        # once tokens come without a mask, as `takes_token` has it, no other pass can take them
        if not goes_on and (length > 1 or self.most - past < FEWEST_TOKENS):
            return None
        most = 2 * past + ROOM
        if self.most > past:  # as it is not with learned prompts, which `generate` does not count
            most = min(self.most, most)
        self.tokens = TokenGraph(model, cache, past, most, rows, self.padding)
        return self.tokens.run(ids)

    def _look_at(self, mask: torch.Tensor | None) -> None:
        """Find the padding that rows begin with; take no passes with padding elsewhere, or rows of nothing else."""
        self.begun = True
        if mask is None:
            return
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
            self.cache = None
            return
        real = mask.bool()
        in_front = (real[:, 1:] >= real[:, :-1]).all() & real[:, -1].all()
        is_in_front, is_padded = torch.stack([in_front, ~real.all()]).tolist()
        if not is_in_front:
            self.cache = None
        elif is_padded:
            self.padding = (~real).sum(1, keepdim=True)

    def _prompt(self, model: nn.Module, ids: torch.Tensor, cache: Cache) -> torch.Tensor | None:
        rows, length = ids.shape
        bucket = bucket_of(length)
        if self.cache is None or bucket is None or cache_length(cache):
            return None
        graphs = graphs_of(model)
        if not graphs.lock.acquire(blocking=False):  # another thread's prompt is in them
            return None
        try:
            # what is made in inference mode cannot be written outside of it
            with torch.inference_mode(False), torch.no_grad():
                graph = graphs.of(model, rows, bucket)
                graph.fill(ids, self.padding)
                return graph.run(model, cache, length, self.padding)
        finally:
            graphs.lock.release()

    def close(self) -> None:
        """Let the cache grow again."""
        if self.tokens is not None:
            self.tokens.close()
            self.tokens = None


PASSES: contextvars.ContextVar[Passes | None] = contextvars.ContextVar("PASSES", default=None)
"""The passes of the call of `generate` in this thread."""


@contextlib.contextmanager
def passes_of_a_call() -> Iterator[None]:
    """Have passes that `take_passes` takes run as graphs, for as long as the context lasts."""
    passes = Passes()
    before = PASSES.set(passes)
    try:
        yield
    finally:
        PASSES.reset(before)
        passes.close()


def take_passes(model: nn.Module, options: GenerationConfig, mode: GenerationMode, cache: object) -> None:
    """Let the passes of a call of `generate` with this cache be graphs, if they can be."""
    passes = PASSES.get()
    if passes is not None and _allows(model, options, mode) and _grows(cache):
        passes.cache = cache
        passes.most = options.max_length or 0


def takes_token(cache: Cache | None, length: int | None) -> bool:
    """Return True if a pass of one token with this cache runs as a graph, which needs only that token."""
    passes = PASSES.get()
    return passes is not None and passes.tokens is not None and cache is passes.tokens.cache and length == 1


def run_as_graph(
    model: nn.Module, ids: torch.Tensor | None, attention_mask: torch.Tensor | None, cache: Cache | None
) -> torch.Tensor | None:
    """Logits (B, 1, V) of a pass of `generate`; None if it is left to the model.

    Args:
        ids: (B, L). attention_mask: (B, past + L), 0 at padding.
    """
    passes = PASSES.get()
    if passes is None or cache is None or cache is not passes.cache or ids is None:
        return None
    return passes.run(model, ids, attention_mask, cache)


def _grows(cache: object) -> bool:
    """True for a cache of layers that grow, or hold a state, and record nothing."""
    # where nothing grows, as with mixers alone, transformers makes other masks and compiles tokens by itself
    if not isinstance(cache, Cache) or cache.offloading or cache.is_compileable:
        return False
    if any(type(layer) not in (HybridLayer, MixerLayer, DynamicLayer) for layer in cache.layers):
        return False
    return not any(getattr(layer, "record_past", False) or getattr(layer, "most", None) for layer in cache.layers)


def _allows(model: nn.Module, options: GenerationConfig, mode: GenerationMode) -> bool:
    """True if a graph can give all that is asked of a model's passes."""
    config = model.config
    if model.device.type != DEVICE or os.environ.get(VARIABLE) != "1" or model in REFUSED or model.training:
        return False
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE) or options.is_assistant:
        return False
    if options.cache_implementation is not None or options.prefill_chunk_size is not None or not options.use_cache:
        return False
    if options.output_attentions or options.output_hidden_states:
        return False
    if set(config.layer_types) - LAYERS or config._attn_implementation != "sdpa" or config.output_hidden_states:
        return False
    ropes = (rope for rope in (config.rope_parameters, config.local_rope_parameters) if rope is not None)
    if any(rope["rope_type"] not in FIXED_ROTARY for rope in ropes) or getattr(config, "num_experts", None):
        return False
    places = getattr(model, "hf_device_map", None) or {}
    if len({*places.values()}) > 1 or torch.is_autocast_enabled(DEVICE):
        return False
    if any(is_traceable_wrapper_subclass(parameter) for parameter in model.parameters()):
        return False
    return not any(_is_watched(module) for module in model.modules())


def _is_watched(module: nn.Module) -> bool:
    """True for a module with hooks, which a graph would not call, or with adapters, which may be switched."""
    if any(hasattr(module, name) for name in ("base_layer", "original_module", "_hf_hook")):
        return True
    if "forward" in vars(module):
        return True
    hooks = itertools.chain(module._forward_pre_hooks.values(), module._forward_hooks.values())
    # transformers' own stay after the first call that asks for hidden states, and do nothing in others
    return any(getattr(hook, "__module__", None) != HOOKS for hook in hooks)
