"""Llamba, registered with transformers' auto classes on import."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_llamba import LlambaConfig
from .modeling_llamba import LlambaForCausalLM, LlambaModel

AutoConfig.register("llamba", LlambaConfig, exist_ok=True)
AutoModel.register(LlambaConfig, LlambaModel, exist_ok=True)
AutoModelForCausalLM.register(LlambaConfig, LlambaForCausalLM, exist_ok=True)

__all__ = ["LlambaConfig", "LlambaForCausalLM", "LlambaModel"]
