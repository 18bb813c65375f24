"""Experts of gpt-oss in place of the MLP: imported only by models that have them."""

import torch
from torch import nn
from transformers import initialization as init
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssMLP, GptOssTopKRouter

from ..configuration_llamba import LlambaConfig


class ClampedExpertBlock(GptOssMLP):
    """A choice of experts with biases, whose gate and up are clamped."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states)[0]  # the second are the weights of the chosen ones


def make_experts(config: LlambaConfig) -> nn.Module:
    """The experts of a layer."""
    return ClampedExpertBlock(config)


@torch.no_grad()
def initialise(module: nn.Module, std: float) -> None:
    """Draw the weights of experts and routers, which no Linear holds."""
    if isinstance(module, GptOssExperts | GptOssTopKRouter):
        for parameter in module.parameters():
            init.normal_(parameter, mean=0.0, std=std)
