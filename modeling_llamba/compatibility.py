"""Differences between the versions of transformers and PyTorch that this code runs on; no other file asks for one.

transformers 5.24 renamed a model's cache: `past_key_values`, and `cache_params` of models with a state, are `cache`
there. Here it is `cache` everywhere, and a model takes both names in every version.
"""

import inspect
import re
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.utils import ModelOutput, logging

logger = logging.get_logger(__name__)
TESTED = "5.24.0"
"""Newest version of transformers that this code was tested with."""

DRAFTS_SINCE = "5.18.0"
"""First version whose `generate` takes rejected drafts back from every kind of layer; 5.16 may go on with them."""

RECORDINGS_SINCE = "2.14"
"""First version of PyTorch that surely puts memory and random numbers in order after a CUDA graph that could not be
recorded; before it, the process may end later (pytorch/pytorch#180395)."""

OLD_CACHE_NAME = "past_key_values"
CACHE_NAME = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else OLD_CACHE_NAME
"""Name of a model's cache in transformers' own functions, models and outputs."""
STATE_CACHE_NAME = "cache" if CACHE_NAME == "cache" else "cache_params"
"""Name of the cache in transformers' modules with a state."""


def numbers_of(version: str) -> tuple[int, ...]:
    """The first two numbers of a version: "5.24.0" -> (5, 24)."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def warn_if_newer(version: str = transformers.__version__) -> None:
    """Say once that a version of transformers is newer than the code of this checkpoint knows."""
    if numbers_of(version) > numbers_of(TESTED):
        logger.warning_once(
            f"This hybrid's code was tested with transformers {TESTED} at most, and {version} is installed. If it "
            f"fails, run `convert-to-hybrid update FOLDER` of a newer convert-to-hybrid, or install {TESTED}."
        )


def goes_on_after_failed_recordings(version: str = torch.__version__) -> bool:
    """Return True if this version of PyTorch, built for CUDA, goes on after a graph that could not be recorded."""
    return torch.version.hip is None and numbers_of(version) >= numbers_of(RECORDINGS_SINCE)


def check_drafts(version: str = transformers.__version__) -> None:
    """Check that drafts can be taken back in this version of transformers.

    Raises:
        ValueError: it is too old for that.
    """
    if numbers_of(version) < numbers_of(DRAFTS_SINCE):
        raise ValueError(
            f"transformers {version} does not take all drafts back that a hybrid rejects: install {DRAFTS_SINCE} or "
            "later, or leave out assistant_model and prompt_lookup_num_tokens."
        )


def cache_of(outputs: ModelOutput) -> Cache | None:
    """The cache that a model or `generate` returned."""
    return getattr(outputs, CACHE_NAME)


def one_cache(cache: Cache | None, past_key_values: Cache | None) -> Cache | None:
    """The cache that a caller gave by either name.

    Raises:
        ValueError: both names are used, for different caches.
    """
    if cache is None or cache is past_key_values:
        return past_key_values
    if past_key_values is not None:
        raise ValueError("cache and past_key_values are two names of one argument; pass one of them.")
    return cache


def renamed_cache(arguments: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments in which the cache, given by either name, has the name that transformers uses.

    Raises:
        ValueError: as `one_cache`.
    """
    others = {name: value for name, value in arguments.items() if name not in ("cache", OLD_CACHE_NAME)}
    cache = one_cache(arguments.get("cache"), arguments.get(OLD_CACHE_NAME))
    return others if cache is None else others | {CACHE_NAME: cache}


def forget_tokens(cache: Cache) -> None:
    """Forget all tokens of a cache; before 5.18 `reset` leaves as many zeros."""
    cache.reset()
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer):
            layer.keys = layer.values = None
            layer.is_initialized = False


def with_both_names(name: str, output_class: type[ModelOutput]) -> type[ModelOutput]:
    """A class of outputs whose cache is found as `cache` in older versions, too; newer ones answer to both names."""
    if CACHE_NAME == "cache":
        return output_class
    return dataclass(type(name, (output_class,), {"cache": property(cache_of), "__module__": __name__}))


HybridOutput = with_both_names("HybridOutput", MoeModelOutputWithPast)
HybridCausalLMOutput = with_both_names("HybridCausalLMOutput", MoeCausalLMOutputWithPast)
