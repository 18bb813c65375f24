"""Llamba, in transformers' auto classes: the configuration from import on, the models once they are asked for."""

from transformers import AutoConfig

from .configuration_llamba import LlambaConfig

AutoConfig.register("llamba", LlambaConfig, exist_ok=True)

__all__ = ["LlambaConfig", "LlambaForCausalLM", "LlambaModel"]


def __getattr__(name: str):
    """transformers' own models take seconds to import, and a plan needs a configuration only."""
    if name not in ("LlambaForCausalLM", "LlambaModel"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transformers import AutoModel, AutoModelForCausalLM

    from .modeling_llamba import LlambaForCausalLM, LlambaModel

    AutoModel.register(LlambaConfig, LlambaModel, exist_ok=True)
    AutoModelForCausalLM.register(LlambaConfig, LlambaForCausalLM, exist_ok=True)
    return {"LlambaForCausalLM": LlambaForCausalLM, "LlambaModel": LlambaModel}[name]
