"""Configuration of Llamba: Llama-like blocks with some attention layers replaced by a matrix mixer."""

from typing import TYPE_CHECKING

from .hybrid_config import HybridConfig

if TYPE_CHECKING:  # never run, but transformers reads it: whoever fetches the configuration can then save all the code
    from .modeling_llamba import LlambaForCausalLM  # noqa: F401


class LlambaConfig(HybridConfig):
    """Fields of `HybridConfig`, plus those of the Llama block.

    Args:
        hidden_act: activation of the gated MLP. rms_norm_eps: epsilon of every RMSNorm. mlp_bias: bias on its
            projections.
    """

    model_type = "llamba"

    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    mlp_bias: bool = False

    @property
    def norm_eps(self) -> float:
        """Epsilon of every norm."""
        return self.rms_norm_eps


__all__ = ["LlambaConfig"]
