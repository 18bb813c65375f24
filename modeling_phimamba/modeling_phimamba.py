"""PhiMamba: one LayerNorm, then attention or a matrix mixer beside the MLP, both added to the residual stream.

h + mixer(u) + mlp(u) with u = LayerNorm(h), as in Phi (1, 1.5, 2) and Phi-Mamba.
"""

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.activations import ACT2FN

from modeling_llamba.model.causal_lm import HybridForCausalLM, HybridForSequenceClassification
from modeling_llamba.model.hybrid_model import HybridDecoderLayer, HybridModel, HybridPreTrainedModel

from .configuration_phimamba import PhiMambaConfig


class PhiMambaMLP(nn.Module):
    """Two projections with a bias and an activation between them."""

    def __init__(self, config: PhiMambaConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.activation(self.fc1(hidden_states)))


class PhiMambaDecoderLayer(HybridDecoderLayer):
    """Parallel block."""

    def __init__(self, config: PhiMambaConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.mlp = PhiMambaMLP(config)
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, hidden_states: torch.Tensor, **mixer_inputs) -> torch.Tensor:
        """(B, L, D) -> (B, L, D); the keyword arguments are those of `mix`."""
        normed = self.input_layernorm(hidden_states)
        mixed = self.resid_dropout(self.mix(normed, **mixer_inputs))
        return mixed + self.resid_dropout(self.mlp(normed)) + hidden_states


class PhiMambaPreTrainedModel(HybridPreTrainedModel):
    """Ties the shared machinery to this family's configuration."""

    config_class = PhiMambaConfig
    config: PhiMambaConfig
    _no_split_modules = ["PhiMambaDecoderLayer"]


class PhiMambaModel(PhiMambaPreTrainedModel, HybridModel):
    layer_class = PhiMambaDecoderLayer

    @staticmethod
    def make_norm(config: PhiMambaConfig) -> nn.Module:
        """The final norm."""
        return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


class PhiMambaForCausalLM(PhiMambaPreTrainedModel, HybridForCausalLM, GenerationMixin):
    model_class = PhiMambaModel


class PhiMambaForSequenceClassification(PhiMambaPreTrainedModel, HybridForSequenceClassification):
    model_class = PhiMambaModel


__all__ = ["PhiMambaForCausalLM", "PhiMambaForSequenceClassification", "PhiMambaModel", "PhiMambaPreTrainedModel"]
