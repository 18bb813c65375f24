"""PhiMamba in transformers' auto classes; its models are imported once they are asked for."""

import importlib

from modeling_llamba.registration import register

from .configuration_phimamba import PhiMambaConfig

__all__ = ["PhiMambaConfig", "PhiMambaForCausalLM", "PhiMambaForSequenceClassification", "PhiMambaModel"]

register(PhiMambaConfig, f"{__name__}.modeling_phimamba")


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.modeling_phimamba"), name)
