"""CUDA graphs of the passes of `generate`: of prompts, and of the tokens after them.

A hybrid launches some 40 kernels a layer for a prompt and 25 for a token, which takes the host longer than the GPU. A
graph launches all of them at once. `generate` on CUDA takes graphs wherever nothing is asked of a pass that a graph
cannot give. HYBRID_CUDA_GRAPHS=0 turns them off.

The first passes of each graph of a prompt, and of a model's first graph of tokens, are compared with the same passes
without it. If they differ, or a pass cannot be recorded, a warning says so, and the model goes on without graphs.
Before PyTorch 2.14 a pass that cannot be recorded may end the process later, so that graphs are taken there only with
HYBRID_CUDA_GRAPHS=1.

Shapes: B batch, L length, V vocabulary.
"""

import contextlib
import contextvars
import itertools
import os
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.cache_utils import Cache, DynamicLayer
from transformers.generation import GenerationConfig, GenerationMode

from ..compatibility import goes_on_after_failed_recordings
from ..hybrid.hybrid_cache import HybridLayer
from .cache import MixerLayer, cache_length, held_by
from .prompt_graphs import forget_graphs, graphs_of
from .recorded import REFUSED, has_room, refuse
from .token_graph import TokenGraph

DEVICE = "cuda"
"""Kind of device that has graphs."""
VARIABLE = "HYBRID_CUDA_GRAPHS"
"""Environment variable that turns graphs on where it is 1, and off where it is 0."""
FEWEST_TOKENS = 8
"""New tokens from which on it is worth recording a graph of them."""
ROOM = 1024
"""Tokens for which a cache gets room at first, beside as many again as it holds."""
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


def wanted() -> bool:
    """Return True if graphs are wanted, or nothing is said of them, and it is safe to try.

    Raises:
        ValueError: the environment variable is neither 0 nor 1.
    """
    value = os.environ.get(VARIABLE)
    if value not in (None, "0", "1"):
        raise ValueError(f"{VARIABLE} is {value!r}; 1 turns CUDA graphs on, 0 turns them off.")
    return goes_on_after_failed_recordings() if value is None else value == "1"


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
        if not goes_on:
            if length > 1 or self.most - past < FEWEST_TOKENS:
                return None
            if model in REFUSED or not self._fits(model, cache):
                self.cache = None
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
        if self.cache is None or cache_length(cache):
            return None
        graphs = graphs_of(model)
        if graphs is None or not graphs.lock.acquire(blocking=False):  # another thread's prompt is in them
            return None
        try:
            # what is made in inference mode cannot be written outside of it
            with torch.inference_mode(False), torch.no_grad():
                return graphs.run(model, ids, cache, self.padding)
        except torch.OutOfMemoryError as error:  # padding and comparing take more than the prompt alone
            refuse(model, str(error))
            forget_graphs(model)
            return None
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
