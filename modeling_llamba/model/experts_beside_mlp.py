"""Experts of Gemma 4 beside the MLP: imported only by models that have them."""

import torch
from torch import nn
from transformers import initialization as init
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts, Gemma4TextRouter

from ..configuration_llamba import LlambaConfig
from .norms import make_norm


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


def make_experts(config: LlambaConfig) -> nn.Module:
    """The experts of a layer."""
    return ExpertsBesideMLP(config)


@torch.no_grad()
def initialise(module: nn.Module, std: float) -> None:
    """Draw the experts, and let the router scale nothing."""
    if isinstance(module, Gemma4TextRouter):
        init.ones_(module.scale)
        init.ones_(module.per_expert_scale)
    if isinstance(module, Gemma4TextExperts):
        for parameter in module.parameters():
            init.normal_(parameter, mean=0.0, std=std)
