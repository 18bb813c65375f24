"""Llamba, registered with transformers' auto classes on import."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_llamba import LlambaConfig
from .modeling_llamba import LlambaForCausalLM, LlambaModel

AutoConfig.register("llamba", LlambaConfig, exist_ok=True)
AutoModel.register(LlambaConfig, LlambaModel, exist_ok=True)
AutoModelForCausalLM.register(LlambaConfig, LlambaForCausalLM, exist_ok=True)
LlambaConfig.register_for_auto_class()
LlambaModel.register_for_auto_class("AutoModel")
LlambaForCausalLM.register_for_auto_class("AutoModelForCausalLM")

__all__ = ["LlambaConfig", "LlambaForCausalLM", "LlambaModel"]
