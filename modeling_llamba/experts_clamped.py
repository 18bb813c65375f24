"""Experts of gpt-oss in place of the MLP: imported only by models that have them."""

import torch
from transformers import initialization as init
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP


class ClampedExpertBlock(GptOssMLP):
    """A choice of experts with biases, whose gate and up are clamped."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states)[0]  # the second are the weights of the chosen ones

    @torch.no_grad()
    def initialise(self, std: float) -> None:
        """Draw the weights that no Linear holds."""
        for parameter in (*self.experts.parameters(), *self.router.parameters()):
            init.normal_(parameter, mean=0.0, std=std)
