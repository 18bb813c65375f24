"""Llamba: attention or a matrix mixer, then a gated MLP or experts, each with RMSNorms and a residual connection.

    h = h + m norm(mix(norm(h)))        h = h + m norm(mlp(norm(h)))

Which of the norms there are (`norm_placement`), the multiplier m and the kind of MLP are fields of the configuration:
Llama has the inner norms, OLMo the outer ones, Gemma both. The experts are transformers' own modules, Qwen3-MoE's or
gpt-oss's in place of the MLP, Gemma 4's beside it.
"""

import torch
from torch import nn
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts, Gemma4TextRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssMLP, GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeExperts,
    Qwen3MoeSparseMoeBlock,
    Qwen3MoeTopKRouter,
    load_balancing_loss_func,
)
from transformers.utils.output_capturing import OutputRecorder

from .configuration_llamba import LlambaConfig
from .hybrid_model import (
    HybridDecoderLayer,
    HybridForCausalLM,
    HybridForSequenceClassification,
    HybridModel,
    HybridPreTrainedModel,
)
from .norms import RMSNorm


class LlambaMLP(nn.Module):
    """Gated MLP: down(act(gate) * up)."""

    def __init__(self, config: LlambaConfig, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class SharedExpertBlock(Qwen3MoeSparseMoeBlock):
    """A choice of experts, and one for every token beside them."""

    def __init__(self, config: LlambaConfig):
        super().__init__(config)
        self.shared_expert = LlambaMLP(config, config.shared_expert_intermediate_size)
        self.shared_expert_gate = None
        if config.shared_expert_gate:
            self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        shared = self.shared_expert(hidden_states)
        if self.shared_expert_gate is not None:
            shared = torch.sigmoid(self.shared_expert_gate(hidden_states)) * shared
        return super().forward(hidden_states) + shared


class ClampedExpertBlock(GptOssMLP):
    """A choice of experts with biases, whose gate and up are clamped."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states)[0]  # the second are the weights of the chosen ones


class ExpertsBesideMLP(nn.Module):
    """A choice of experts of the same hidden states as the MLP, each with a norm over what it returns."""

    def __init__(self, config: LlambaConfig):
        super().__init__()
        self.router = Gemma4TextRouter(config)
        self.experts = Gemma4TextExperts(config)
        self.mlp_norm, self.input_norm, self.output_norm = (make_norm(config) for _ in range(3))

    def forward(self, of_mlp: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Add what experts return for hidden states (B, L, D), not normed yet, to what the MLP does."""
        tokens = hidden_states.flatten(0, -2)
        _, weights, chosen = self.router(tokens)
        of_experts = self.experts(self.input_norm(tokens), chosen, weights).view_as(hidden_states)
        return self.mlp_norm(of_mlp) + self.output_norm(of_experts)


def make_mlp(config: LlambaConfig, layer_idx: int) -> nn.Module:
    """The MLP of a layer, or its experts."""
    if not config.has_experts(layer_idx):
        return LlambaMLP(config, config.intermediate_size)
    if config.swiglu_limit is not None:
        return ClampedExpertBlock(config)
    if config.shared_expert_intermediate_size is not None:
        return SharedExpertBlock(config)
    return Qwen3MoeSparseMoeBlock(config)


def make_norm(config: LlambaConfig) -> RMSNorm:
    """A norm over the residual stream."""
    return RMSNorm(config.hidden_size, config.rms_norm_eps, unit_offset=config.norm_unit_offset)


def norm_at(place: str, config: LlambaConfig, layer_idx: int) -> nn.Module:
    """The norm "before" or "after" a layer's mixer or MLP, or the identity where the family has none there."""
    if config.norms_of(layer_idx) in (place, "both"):
        return make_norm(config)
    return nn.Identity()


class LlambaDecoderLayer(HybridDecoderLayer):
    """Sequential block."""

    def __init__(self, config: LlambaConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.mlp = make_mlp(config, layer_idx)
        self.input_layernorm = norm_at("before", config, layer_idx)
        self.mixer_out_norm = norm_at("after", config, layer_idx)
        self.post_attention_layernorm = norm_at("before", config, layer_idx)  # Llama's name for the MLP's
        self.mlp_out_norm = norm_at("after", config, layer_idx)
        self.beside_mlp = ExpertsBesideMLP(config) if config.experts_beside_mlp else None
        self.resid_dropout = nn.Dropout(config.resid_pdrop)
        self.multiplier = config.residual_multiplier
        self.register_buffer("layer_scalar", torch.ones(1) if config.layer_scalar else None)

    def forward(self, hidden_states: torch.Tensor, **mixer_inputs) -> torch.Tensor:
        """(B, L, D) -> (B, L, D); the keyword arguments are those of `mix`."""
        mixed = self.mixer_out_norm(self.mix(self.input_layernorm(hidden_states), **mixer_inputs))
        hidden_states = self._add(hidden_states, mixed)
        branch = self.mlp(self.post_attention_layernorm(hidden_states))
        if self.beside_mlp is not None:
            branch = self.beside_mlp(branch, hidden_states)
        hidden_states = self._add(hidden_states, self.mlp_out_norm(branch))
        return hidden_states if self.layer_scalar is None else hidden_states * self.layer_scalar

    def _add(self, hidden_states, branch):
        branch = self.resid_dropout(branch)
        if self.multiplier != 1:
            branch = branch * self.multiplier
        return hidden_states + branch


class LlambaPreTrainedModel(HybridPreTrainedModel):
    """Ties the shared machinery to this family's configuration."""

    config_class = LlambaConfig
    config: LlambaConfig
    _no_split_modules = ["LlambaDecoderLayer"]
    _can_record_outputs = {
        **HybridPreTrainedModel._can_record_outputs,
        "router_logits": [OutputRecorder(router, index=0) for router in (Qwen3MoeTopKRouter, GptOssTopKRouter)],
    }

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """transformers looks for the experts in this file, but they are imported."""
        return True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LlambaDecoderLayer) and module.layer_scalar is not None:
            init.ones_(module.layer_scalar)
        if isinstance(module, Gemma4TextRouter):
            init.ones_(module.scale)
            init.ones_(module.per_expert_scale)
        if isinstance(
            module, Qwen3MoeExperts | Qwen3MoeTopKRouter | GptOssExperts | GptOssTopKRouter | Gemma4TextExperts
        ):
            for parameter in module.parameters():
                init.normal_(parameter, mean=0.0, std=self.config.initializer_range)


class LlambaModel(LlambaPreTrainedModel, HybridModel):
    layer_class, make_norm = LlambaDecoderLayer, staticmethod(make_norm)


class LlambaForCausalLM(LlambaPreTrainedModel, HybridForCausalLM, GenerationMixin):
    model_class = LlambaModel

    def router_loss(
        self, router_logits: tuple[torch.Tensor, ...], attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the loss that spreads tokens over the experts, as Mixtral and Qwen3-MoE are trained with.

        Args:
            router_logits: (B L, experts) for each layer with experts.
        """
        config = self.config
        return load_balancing_loss_func(router_logits, config.num_experts, config.num_experts_per_tok, attention_mask)


class LlambaForSequenceClassification(LlambaPreTrainedModel, HybridForSequenceClassification):
    model_class = LlambaModel


__all__ = ["LlambaForCausalLM", "LlambaForSequenceClassification", "LlambaModel", "LlambaPreTrainedModel"]
