"""Llamba: attention or a matrix mixer, then a gated MLP or experts, each with RMSNorms and a residual connection.

    h = h + m norm(mix(norm(h)))        h = h + m norm(mlp(norm(h)))

Which of the norms there are (`norm_placement`), the multiplier m and the kind of MLP are fields of the configuration:
Llama has the inner norms, OLMo the outer ones, Gemma both. The experts are transformers' own modules, Qwen3-MoE's or
gpt-oss's in place of the MLP, Gemma 4's beside it.
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.utils.output_capturing import OutputRecorder

from .configuration_llamba import LlambaConfig
from .model.causal_lm import HybridForCausalLM, HybridForSequenceClassification
from .model.hybrid_model import HybridDecoderLayer, HybridModel, HybridPreTrainedModel
from .model.mlp import LlambaMLP
from .model.norms import make_norm


def experts_of(config: LlambaConfig) -> tuple[Callable, Callable]:
    """Functions that make a model's experts and draw their weights, from files that import one family's each."""
    if config.experts_beside_mlp:
        from .model.experts_beside_mlp import initialise, make_experts
    elif config.swiglu_limit is not None:
        from .model.experts_clamped import initialise, make_experts
    else:
        from .model.experts import initialise, make_experts
    return make_experts, initialise


def make_mlp(config: LlambaConfig, layer_idx: int) -> nn.Module:
    """The MLP of a layer, or its experts."""
    if not config.has_experts(layer_idx):
        return LlambaMLP(config, config.intermediate_size)
    make_experts, _ = experts_of(config)
    return make_experts(config)


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
        self.beside_mlp = None
        if config.experts_beside_mlp:
            self.beside_mlp = experts_of(config)[0](config)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)
        self.multiplier = config.residual_multiplier
        # the teacher's buffer: accelerate leaves buffers out where it offloads weights to a disk
        scalar = nn.Parameter(torch.ones(1), requires_grad=False) if config.layer_scalar else None
        self.register_parameter("layer_scalar", scalar)

    def forward(self, hidden_states: torch.Tensor, **mixer_inputs) -> torch.Tensor:
        """(B, L, D) -> (B, L, D); the keyword arguments are those of `mix`."""
        mixed = self.mixer_out_norm(self.mix(self.input_layernorm(hidden_states), **mixer_inputs))
        hidden_states = self._add(hidden_states, mixed)
        branch = self.mlp(self.post_attention_layernorm(hidden_states))
        if self.beside_mlp is not None:
            branch = self.beside_mlp(branch, hidden_states)
        hidden_states = self._add(hidden_states, self.mlp_out_norm(branch))
        return hidden_states if self.layer_scalar is None else hidden_states * self.layer_scalar.detach()

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
        # by the names of their modules, so that no file of transformers with experts is imported
        "router_logits": [OutputRecorder(None, index=0, class_name=name) for name in (".mlp.gate", ".mlp.router")],
    }

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """transformers looks for the experts in this file, but they are imported."""
        return True

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """transformers' own for a model with experts; without them, there is nothing to choose.

        Raises:
            ValueError: the model has no experts.
        """
        if self.config.num_experts is not None:
            return super().get_correct_experts_implementation(requested_experts)
        if requested_experts not in (None, "eager"):
            raise ValueError("This model has no experts; leave experts_implementation out.")
        return "eager"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LlambaDecoderLayer) and module.layer_scalar is not None:
            init.ones_(module.layer_scalar)
        if self.config.num_experts is not None:
            _, initialise = experts_of(self.config)
            initialise(module, self.config.initializer_range)


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
        from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

        config = self.config
        return load_balancing_loss_func(router_logits, config.num_experts, config.num_experts_per_tok, attention_mask)


class LlambaForSequenceClassification(LlambaPreTrainedModel, HybridForSequenceClassification):
    model_class = LlambaModel


__all__ = ["LlambaForCausalLM", "LlambaForSequenceClassification", "LlambaModel", "LlambaPreTrainedModel"]
