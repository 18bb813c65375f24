"""Mixtral: Mistral's block with experts, whose weights are those of Qwen3-MoE where it normalises them."""

from .base import EXPERTS, TeacherFamily, same_name, stacked_experts
from .llama import LLAMA

OURS = "model.layers.{i}.mlp."
THEIRS = "model.layers.{i}.block_sparse_moe."

MIXTRAL = TeacherFamily(
    model_type="mixtral",
    title="Mixtral",
    hybrid="llamba",
    windows=True,
    tensors={
        **LLAMA.tensors,
        f"{THEIRS}gate.weight": f"{OURS}gate.weight",
        # as transformers keeps them in memory
        **same_name(f"{OURS}gate.weight", f"{EXPERTS}gate_up_proj", f"{EXPERTS}down_proj"),
    },
    stacked=stacked_experts(*(f"{THEIRS}experts.{{e}}.{w}.weight" for w in ("w1", "w3", "w2"))),
    fields={
        "rms_norm_eps": "rms_norm_eps",
        "num_experts": "num_local_experts",
        "num_experts_per_tok": "num_experts_per_tok",
        "moe_intermediate_size": "intermediate_size",
        "router_aux_loss_coef": "router_aux_loss_coef",
    },
    constants={"norm_topk_prob": True},
    refused=("router_jitter_noise",),
)
