"""Configuration of PhiMamba: Phi's parallel block with some attention layers replaced by a matrix mixer."""

from typing import TYPE_CHECKING

from modeling_llamba.model.hybrid_config import HybridConfig

if TYPE_CHECKING:  # never run, but transformers reads it: whoever fetches the configuration can then save all the code
    from .modeling_phimamba import PhiMambaForCausalLM  # noqa: F401


class PhiMambaConfig(HybridConfig):
    """Fields of `HybridConfig`, plus those of the Phi block.

    Args:
        hidden_act: activation of the MLP. layer_norm_eps: epsilon of every LayerNorm.
    """

    model_type = "phimamba"
    attribute_map = {"norm_eps": "layer_norm_eps"}

    hidden_act: str = "gelu_new"
    layer_norm_eps: float = 1e-5
    lm_head_bias: bool = True
    attention_bias: bool = True
    attention_out_bias: bool = True


__all__ = ["PhiMambaConfig"]
