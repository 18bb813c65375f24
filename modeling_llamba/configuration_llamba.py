"""Configuration of Llamba: Llama-like blocks with some attention layers replaced by a matrix mixer."""

import math
from typing import TYPE_CHECKING

from .model.hybrid_config import HybridConfig

if TYPE_CHECKING:  # never run, but transformers reads it: whoever fetches the configuration can then save all the code
    from .modeling_llamba import LlambaForCausalLM  # noqa: F401


NORM_PLACEMENTS = ("before", "after", "both")


class LlambaConfig(HybridConfig):
    """Fields of `HybridConfig`, plus those of the Llama block.

    Args:
        hidden_act: activation of the gated MLP. rms_norm_eps: epsilon of every RMSNorm. mlp_bias: bias on its
            projections.
        norm_placement: RMSNorms "before" mixer and MLP (Llama), "after" them (OLMo) or "both" (Gemma); a list, with an
            entry for every layer, where they differ.
        residual_multiplier: factor on what mixer and MLP add to the residual stream.
        layer_scalar: each block multiplies what it returns by a number of its own, which is not trained.
        num_experts: experts of each MLP; None is a single gated MLP. num_experts_per_tok: number of experts that
            compute each token.
        moe_intermediate_size: width of an expert. norm_topk_prob: the weights of the chosen experts sum up to 1.
        mlp_only_layers: layers that have a single MLP nevertheless.
        shared_expert_intermediate_size: width of an expert for every token; None is none. shared_expert_gate: it has a
            gate of its own.
        swiglu_limit, swiglu_alpha: experts are gpt-oss's, with biases, up + 1 in place of up, gate and up clamped to
            this limit, and this factor within the gate's sigmoid. None: Qwen3-MoE's.
        experts_beside_mlp: experts are Gemma 4's, which every MLP has beside itself, with norms of their own.
        output_router_logits, router_aux_loss_coef: with experts, return the routers' logits and add the loss that
            spreads tokens over the experts, times this factor, to the loss of `labels`; False and 0.001 by default.
    """

    model_type = "llamba"
    attribute_map = {"norm_eps": "rms_norm_eps"}

    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    mlp_bias: bool = False
    norm_placement: str | list[str] = "before"
    residual_multiplier: float | int = 1.0
    layer_scalar: bool = False
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = False
    mlp_only_layers: list[int] | None = None
    shared_expert_intermediate_size: int | None = None
    shared_expert_gate: bool = True
    swiglu_limit: float | int | None = None
    swiglu_alpha: float | int | None = None
    experts_beside_mlp: bool = False

    def __post_init__(self, **kwargs):
        self.num_experts = self.num_experts or None
        if self.num_experts is not None and not self.experts_beside_mlp:  # which are not balanced by a loss
            # TRL takes any model that has these fields for one with experts
            kwargs = {"output_router_logits": False, "router_aux_loss_coef": 0.001} | kwargs
        super().__post_init__(**kwargs)

    def has_experts(self, layer: int) -> bool:
        """Return True if a layer's MLP is a choice of experts."""
        if self.num_experts is None or self.experts_beside_mlp:
            return False
        return layer not in (self.mlp_only_layers or ())

    @property
    def num_local_experts(self) -> int | None:
        """Name under which gpt-oss's experts read `num_experts`."""
        return self.num_experts

    @property
    def top_k_experts(self) -> int | None:
        """Name under which Gemma 4's router reads `num_experts_per_tok`."""
        return self.num_experts_per_tok

    @property
    def hidden_activation(self) -> str:
        """Name under which Gemma 4's experts read `hidden_act`."""
        return self.hidden_act

    def norms_of(self, layer: int) -> str:
        """Place of a layer's norms: "before" mixer and MLP, "after" them, or "both"."""
        return self.norm_placement[layer] if isinstance(self.norm_placement, list) else self.norm_placement

    def validate_hybrid(self) -> None:
        """Refuse contradictory fields, those of the block too."""
        super().validate_hybrid()
        places = self.norm_placement if isinstance(self.norm_placement, list) else [self.norm_placement]
        if not set(places) <= set(NORM_PLACEMENTS) or len(places) not in (1, self.num_hidden_layers):
            raise ValueError(
                f"norm_placement must be one of {NORM_PLACEMENTS}, or a list of these with an entry for every layer, "
                f"not {self.norm_placement!r}."
            )
        if not 0 < self.residual_multiplier < math.inf:
            raise ValueError(f"residual_multiplier must be a finite number above 0, not {self.residual_multiplier!r}.")
        if self.experts_beside_mlp and self.num_experts is None:
            raise ValueError("experts_beside_mlp needs num_experts beside it.")
        if self.num_experts is not None:
            for name in ("num_experts_per_tok", "moe_intermediate_size"):
                if not getattr(self, name):
                    raise ValueError(f"num_experts needs {name} beside it.")
            if (self.swiglu_limit is None) != (self.swiglu_alpha is None):
                raise ValueError("swiglu_limit and swiglu_alpha are given together, or not at all.")
            if self.swiglu_limit is not None and self.intermediate_size != self.moe_intermediate_size:
                raise ValueError("With swiglu_limit, intermediate_size is that of the experts, moe_intermediate_size.")
            if self.num_experts_per_tok > self.num_experts:
                raise ValueError(
                    f"num_experts_per_tok {self.num_experts_per_tok} is more than there are: {self.num_experts}."
                )


__all__ = ["LlambaConfig"]
