"""Experts in place of the MLP, as in Qwen3-MoE: imported only by models that have them."""

import torch
from torch import nn
from transformers import initialization as init
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from .configuration_llamba import LlambaConfig
from .mlp import LlambaMLP


class ExpertBlock(Qwen3MoeSparseMoeBlock):
    """A choice of experts."""

    @torch.no_grad()
    def initialise(self, std: float) -> None:
        """Draw the weights that no Linear holds."""
        for parameter in (*self.experts.parameters(), *self.gate.parameters()):
            init.normal_(parameter, mean=0.0, std=std)


class SharedExpertBlock(ExpertBlock):
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
