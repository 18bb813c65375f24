"""PhiMamba, registered with transformers' auto classes on import."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_phimamba import PhiMambaConfig
from .modeling_phimamba import PhiMambaForCausalLM, PhiMambaModel

AutoConfig.register("phimamba", PhiMambaConfig, exist_ok=True)
AutoModel.register(PhiMambaConfig, PhiMambaModel, exist_ok=True)
AutoModelForCausalLM.register(PhiMambaConfig, PhiMambaForCausalLM, exist_ok=True)

__all__ = ["PhiMambaConfig", "PhiMambaForCausalLM", "PhiMambaModel"]
