"""Experts in place of the MLP, as in Qwen3-MoE: imported only by models that have them."""

import torch
from torch import nn
from transformers import initialization as init
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeExperts,
    Qwen3MoeSparseMoeBlock,
    Qwen3MoeTopKRouter,
)

from ..configuration_llamba import LlambaConfig
from .mlp import LlambaMLP


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


def make_experts(config: LlambaConfig) -> nn.Module:
    """The experts of a layer."""
    if config.shared_expert_intermediate_size is not None:
        return SharedExpertBlock(config)
    return Qwen3MoeSparseMoeBlock(config)


@torch.no_grad()
def initialise(module: nn.Module, std: float) -> None:
    """Draw the weights of experts and routers, which no Linear holds."""
    if isinstance(module, Qwen3MoeExperts | Qwen3MoeTopKRouter):
        for parameter in module.parameters():
            init.normal_(parameter, mean=0.0, std=std)
