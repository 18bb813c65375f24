"""Qwen3-MoE: Qwen3's attention and a choice of experts in place of the MLP, in all layers or some."""

from .base import EXPERTS, TeacherFamily, same_name, stacked_experts
from .qwen3 import QWEN3

EXPERT_TENSORS = same_name("model.layers.{i}.mlp.gate.weight", f"{EXPERTS}gate_up_proj", f"{EXPERTS}down_proj")


def experts(config) -> dict[str, object]:
    """Number of experts, None where no layer has any, and the layers that have none."""
    layers = range(config.num_hidden_layers)
    dense = [i for i in layers if i in config.mlp_only_layers or (i + 1) % config.decoder_sparse_step]
    return {"num_experts": config.num_experts or None, "mlp_only_layers": dense}


QWEN3_MOE = TeacherFamily(
    model_type="qwen3_moe",
    title="Qwen3-MoE",
    hybrid="llamba",
    windows=True,
    gguf=True,
    tensors={**QWEN3.tensors, **EXPERT_TENSORS},
    stacked=stacked_experts(*(f"{EXPERTS}{{e}}.{p}_proj.weight" for p in ("gate", "up", "down"))),
    fields={
        **QWEN3.fields,
        "num_experts_per_tok": "num_experts_per_tok",
        "moe_intermediate_size": "moe_intermediate_size",
        "norm_topk_prob": "norm_topk_prob",
        "router_aux_loss_coef": "router_aux_loss_coef",
    },
    constants=QWEN3.constants,
    special=experts,
)
