"""Llamba: RMSNorm, attention or a matrix mixer, RMSNorm, gated MLP, each added to the residual stream."""

import torch
from torch import nn
from transformers.activations import ACT2FN

from .configuration_llamba import LlambaConfig
from .hybrid_model import HybridDecoderLayer, HybridForCausalLM, HybridModel, HybridPreTrainedModel
from .norms import RMSNorm


class LlambaMLP(nn.Module):
    """Gated MLP: down(act(gate) * up)."""

    def __init__(self, config: LlambaConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class LlambaDecoderLayer(HybridDecoderLayer):
    """Sequential pre-norm block."""

    def __init__(self, config: LlambaConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.mlp = LlambaMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, hidden_states: torch.Tensor, **mixer_inputs) -> torch.Tensor:
        """(B, L, hidden) -> (B, L, hidden); the keyword arguments are those of `mix`."""
        mixed = self.mix(self.input_layernorm(hidden_states), **mixer_inputs)
        hidden_states = hidden_states + self.resid_dropout(mixed)
        return hidden_states + self.resid_dropout(self.mlp(self.post_attention_layernorm(hidden_states)))


class LlambaPreTrainedModel(HybridPreTrainedModel):
    """Ties the shared machinery to this family's configuration."""

    config_class = LlambaConfig
    config: LlambaConfig
    _no_split_modules = ["LlambaDecoderLayer"]


class LlambaModel(LlambaPreTrainedModel, HybridModel):
    layer_class, norm_class = LlambaDecoderLayer, RMSNorm


class LlambaForCausalLM(LlambaPreTrainedModel, HybridForCausalLM):
    model_class = LlambaModel


__all__ = ["LlambaForCausalLM", "LlambaModel", "LlambaPreTrainedModel"]
