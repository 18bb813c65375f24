"""Qwen3.5 with experts in every layer, one of them for all tokens."""

import dataclasses

from .base import same_name
from .qwen3_5 import QWEN3_5
from .qwen3_moe import EXPERT_TENSORS, QWEN3_MOE

SHARED_EXPERT = same_name(
    *(f"model.layers.{{i}}.mlp.shared_expert.{p}_proj.weight" for p in ("gate", "up", "down")),
    "model.layers.{i}.mlp.shared_expert_gate.weight",
)

QWEN3_5_MOE = dataclasses.replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    title="Qwen3.5-MoE",
    tensors={**QWEN3_5.tensors, **EXPERT_TENSORS, **SHARED_EXPERT},
    stacked=QWEN3_MOE.stacked,
    fields={
        **QWEN3_5.fields,
        "intermediate_size": "moe_intermediate_size",  # that of an MLP, which no layer has
        "num_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_tok",
        "moe_intermediate_size": "moe_intermediate_size",
        "shared_expert_intermediate_size": "shared_expert_intermediate_size",
        "router_aux_loss_coef": "router_aux_loss_coef",
    },
    constants={**QWEN3_5.constants, "norm_topk_prob": True},
)
