"""The gated MLP of a Llamba block."""

import torch
from torch import nn
from transformers.activations import ACT2FN

from ..configuration_llamba import LlambaConfig


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
