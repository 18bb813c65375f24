"""PhiMamba, in transformers' auto classes: the configuration from import on, the models once they are asked for."""

from transformers import AutoConfig

from .configuration_phimamba import PhiMambaConfig

AutoConfig.register("phimamba", PhiMambaConfig, exist_ok=True)

__all__ = ["PhiMambaConfig", "PhiMambaForCausalLM", "PhiMambaModel"]


def __getattr__(name: str):
    """transformers' own models take seconds to import, and a plan needs a configuration only."""
    if name not in ("PhiMambaForCausalLM", "PhiMambaModel"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transformers import AutoModel, AutoModelForCausalLM

    from .modeling_phimamba import PhiMambaForCausalLM, PhiMambaModel

    AutoModel.register(PhiMambaConfig, PhiMambaModel, exist_ok=True)
    AutoModelForCausalLM.register(PhiMambaConfig, PhiMambaForCausalLM, exist_ok=True)
    return {"PhiMambaForCausalLM": PhiMambaForCausalLM, "PhiMambaModel": PhiMambaModel}[name]
