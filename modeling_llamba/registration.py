"""A family in transformers' auto classes, without its models: they take seconds to import, and a plan needs none."""

import importlib

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)


class _ImportedWhenUsed(type):
    """A class that stands for another of its name and module, which is imported when something of it is asked for."""

    def __getattr__(cls, name: str):
        return getattr(getattr(importlib.import_module(cls.__module__), cls.__name__), name)


KINDS = {
    AutoModel: "Model",
    AutoModelForCausalLM: "ForCausalLM",
    AutoModelForSequenceClassification: "ForSequenceClassification",
}
"""Auto classes, and the end of a family's class name in each."""


def register(config: type[PreTrainedConfig], module: str) -> None:
    """Register a configuration, and the names of its models in `module`."""
    AutoConfig.register(config.model_type, config, exist_ok=True)
    for auto, kind in KINDS.items():
        name = config.__name__.removesuffix("Config") + kind
        stand_in = _ImportedWhenUsed(name, (), {"__module__": module, "config_class": config})
        auto.register(config, stand_in, exist_ok=True)
