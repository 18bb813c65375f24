"""PhiMamba, registered with transformers' auto classes on import."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_phimamba import PhiMambaConfig
from .modeling_phimamba import PhiMambaForCausalLM, PhiMambaModel

AutoConfig.register("phimamba", PhiMambaConfig, exist_ok=True)
AutoModel.register(PhiMambaConfig, PhiMambaModel, exist_ok=True)
AutoModelForCausalLM.register(PhiMambaConfig, PhiMambaForCausalLM, exist_ok=True)
PhiMambaConfig.register_for_auto_class()
PhiMambaModel.register_for_auto_class("AutoModel")
PhiMambaForCausalLM.register_for_auto_class("AutoModelForCausalLM")

__all__ = ["PhiMambaConfig", "PhiMambaForCausalLM", "PhiMambaModel"]
