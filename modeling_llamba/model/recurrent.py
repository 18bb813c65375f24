"""Layers that hold a state of constant size in the teacher already: transformers' own modules, unchanged.

Such a module is made from the few fields of its teacher's configuration that it reads (`recurrent`), and its states
lie in the same cache as the keys and values of the other layers.
"""

import torch
from torch import nn
from transformers import AutoConfig
from transformers import initialization as init
from transformers.cache_utils import Cache

from ..compatibility import CACHE_NAME, STATE_CACHE_NAME


def module_class(model_type: str) -> type[nn.Module]:
    """Class of the module with a state in a teacher of this type."""
    # each imported where it is made, since that takes seconds
    match model_type:
        case "qwen3_5_text":
            from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet as found
        case "qwen3_5_moe_text":
            from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet as found
        case "qwen3_next":
            from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet as found
        case "granitemoehybrid":
            from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
                GraniteMoeHybridMambaLayer as found,
            )
        case "olmo_hybrid":
            from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet as found
        case "lfm2":
            from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv as found
        case _:
            raise ValueError(f"recurrent.model_type {model_type!r} is no teacher whose states are known.")
    return found


class RecurrentMixer(nn.Module):
    """The teacher's module, with padding, packed sequences and a cache as a block of a hybrid has them."""

    def __init__(self, config, layer_idx: int):
        super().__init__()
        fields = {"hidden_size": config.hidden_size, "hidden_act": config.hidden_act, "rms_norm_eps": config.norm_eps}
        # it asks for its own type, and a configuration for as many types as layers, some for both kinds
        fields |= {"num_hidden_layers": layer_idx + 2}
        fields |= {"layer_types": ["linear_attention"] * (layer_idx + 1) + ["full_attention"]}
        model_type = config.recurrent["model_type"]
        of_teacher = AutoConfig.for_model(**fields, **config.recurrent)
        self.module = module_class(model_type)(of_teacher, layer_idx)
        self.cache_name = CACHE_NAME if model_type == "lfm2" else STATE_CACHE_NAME

    def forward(
        self,
        hidden_states: torch.Tensor,
        padding_mask: torch.Tensor | None,
        seq_idx: torch.Tensor | None,
        cache: Cache | None,
    ) -> tuple[torch.Tensor, None]:
        """(B, L, D) -> (B, L, D), and None in place of attention's probabilities.

        Args:
            padding_mask: (B, L), 0 at padding. seq_idx: (B, L) ids of packed sequences, which are computed one by one.
        """
        if seq_idx is None:
            return self.module(hidden_states, attention_mask=padding_mask, **{self.cache_name: cache}), None
        rows = []
        for row in range(len(seq_idx)):
            lengths = seq_idx[row].unique_consecutive(return_counts=True)[1].tolist()
            mask = [None] * len(lengths) if padding_mask is None else padding_mask[row : row + 1].split(lengths, dim=1)
            parts = hidden_states[row : row + 1].split(lengths, dim=1)
            outputs = [self.module(part, attention_mask=of_part) for part, of_part in zip(parts, mask, strict=True)]
            rows.append(torch.cat(outputs, dim=1))
        return torch.cat(rows), None

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw the decays, if any, which no Linear holds, as Mamba-2 does."""
        if not hasattr(self.module, "A_log"):
            return
        init.copy_(self.module.A_log, torch.empty_like(self.module.A_log).uniform_(1, 16).log())
        for name in ("dt_bias", "D"):
            if hasattr(self.module, name):
                init.ones_(getattr(self.module, name))
