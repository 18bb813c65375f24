"""Llamba in transformers' auto classes; its models are imported once they are asked for."""

import importlib

from .configuration_llamba import LlambaConfig
from .registration import register

__all__ = ["LlambaConfig", "LlambaForCausalLM", "LlambaForSequenceClassification", "LlambaModel"]

register(LlambaConfig, f"{__name__}.modeling_llamba")


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.modeling_llamba"), name)
