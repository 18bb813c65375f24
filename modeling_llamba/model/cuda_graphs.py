"""CUDA graphs of the passes of `generate`: of prompts, and of the tokens after them.

A hybrid launches some 40 kernels a layer for a prompt and 25 for a token, which takes the host longer than the GPU. A
graph launches all of them at once. `generate` on CUDA takes graphs wherever nothing is asked of a pass that a graph
cannot give. HYBRID_CUDA_GRAPHS=0 turns them off.

A prompt is padded at its end to the length of a bucket, and counts that lie on the device say how much of each row is
text. The graph of a bucket and a number of rows is recorded at the first such prompt, and stays with the model, as
does its cache. All graphs of prompts share one pool for the rest: as much as the largest of them takes without one.
They go when the model is trained, moved or converted. Prompts that keep a GPU busy for longer than their launches take
run without one.

For tokens the cache has room for twice what it holds, at addresses that stay, until `generate` ends or the room does.
Their graph is recorded at the second token of each call.

The first passes of each graph of a prompt, and of a model's first graph of tokens, are compared with the same passes
without it, whose results are taken. If they differ, or a pass cannot be recorded, a warning says so, and the model
goes on without graphs. Before PyTorch 2.14 a pass that cannot be recorded may end the process later, so that graphs
are taken there only with HYBRID_CUDA_GRAPHS=1.

Shapes: B batch, L length, D model width, V vocabulary.
"""

import collections
import contextlib
import contextvars
import itertools
import os
import threading
import weakref
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer
from transformers.generation import GenerationConfig, GenerationMode

from ..compatibility import goes_on_after_failed_recordings
from ..hybrid.hybrid_cache import HybridLayer
from ..hybrid.inputs import HybridInputs
from ..kernels.backend import requested_backend
from ..kernels.softmax import hiding
from .cache import MixerLayer, cache_length, copied_layer, grow_again, held_by, make_room, new_cache
from .recorded import REFUSED, Recorded, agree, has_room, record, refuse

DEVICE = "cuda"
"""Kind of device that has graphs."""
VARIABLE = "HYBRID_CUDA_GRAPHS"
"""Environment variable that turns graphs on where it is 1, and off where it is 0."""
BUCKETS = (256, 512, 1024, 2048, 4096)
MOST_WORK = 4e12
"""Tokens of a prompt's graph, padding and all rows included, times the model's parameters, at most: with 1B parameters
launches take longer than 4,096 tokens do (docs/results/gpu.md)."""
MOST_GRAPHS = 8
"""Graphs of prompts that a model keeps at most: those of the first sizes that it meets."""
MOST_MOVES = 3
"""Times that a model's weights may move until it goes on without graphs."""
FEWEST_TOKENS = 8
"""New tokens from which on it is worth recording a graph of them."""
ROOM = 1024
"""Tokens for which a cache gets room at first, beside as many again as it holds."""
CHECKS = 2
"""Passes of a graph that are compared; at the second one, counts on the device must have gone on."""
LAYERS = {"hybrid", "linear_attention", "full_attention"}
"""Kinds of layers whose passes can be recorded."""
FIXED_ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose angles do not depend on the length of a text."""
NOT_RECORDED = {"position_ids", "inputs_embeds", "custom_generate"}
"""Arguments of `generate` with which none of its passes is a graph."""
WATCHED = ("base_layer", "original_module", "_hf_hook", "_is_fsdp_managed_module", "_fsdp_wrapped_module")
"""Attributes of modules whose weights or forward are not their own: of PEFT, Accelerate and FSDP."""
HOOKS = "transformers.utils.output_capturing"
"""Module of the hooks that transformers leaves on a model."""
CHECKED: "weakref.WeakKeyDictionary[nn.Module, collections.Counter]" = weakref.WeakKeyDictionary()
"""Numbers of passes of each model's graphs of tokens that were compared, by rows and whether there is padding."""


def wanted() -> bool:
    """Return True if graphs are wanted, or nothing is said of them, and it is safe to try.

    Raises:
        ValueError: the environment variable is neither 0 nor 1.
    """
    value = os.environ.get(VARIABLE)
    if value not in (None, "0", "1"):
        raise ValueError(f"{VARIABLE} is {value!r}; 1 turns CUDA graphs on, 0 turns them off.")
    return goes_on_after_failed_recordings() if value is None else value == "1"


def bucket_of(length: int) -> int | None:
    """Tokens of the bucket for a prompt; None for one that is too long, or shorter than half of its bucket."""
    for bucket in BUCKETS:
        if length <= bucket:
            return bucket if bucket <= 2 * length else None
    return None


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
        if not goes_on and (length > 1 or self.most - past < FEWEST_TOKENS or not self._fits(model, cache)):
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
        if rows * bucket * sum(t.numel() for t in model.parameters()) > MOST_WORK:
            return None
        graphs = graphs_of(model)
        if graphs is None or not graphs.lock.acquire(blocking=False):  # another thread's prompt is in them
            return None
        try:
            # what is made in inference mode cannot be written outside of it
            with torch.inference_mode(False), torch.no_grad():
                graphs.wait(model.device)
                graph = graphs.of(model, rows, bucket)
                if graph is None:
                    return None
                graph.fill(ids, self.padding)
                return graph.run(model, cache, length, self.padding)
        finally:
            graphs.lock.release()

    def _fits(self, model: nn.Module, cache: Cache) -> bool:
        """True if there is memory for a cache of twice the length, and for two copies to compare it."""
        return has_room(model.device, 6 * sum(t.numel() * t.element_size() for t in held_by(cache)))

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
    if model in REFUSED:
        forget_graphs(model)
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
    if model.device.type != DEVICE or not wanted() or model in REFUSED or model.training:
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
    """True for a module with hooks, which a graph would not call, with adapters, which may be switched, with weights
    that others hold (FSDP), or that is compiled by itself."""
    if any(hasattr(module, name) for name in WATCHED):
        return True
    if "forward" in vars(module) or module._compiled_call_impl is not None:
        return True
    hooks = itertools.chain(module._forward_pre_hooks.values(), module._forward_hooks.values())
    # transformers' own stay after the first call that asks for hidden states, and do nothing in others
    return any(getattr(hook, "__module__", None) != HOOKS for hook in hooks)
