"""gpt-oss: learned sinks in every layer, of which every second attends to a window; biases; experts whose gate and up
are clamped, packed as MXFP4 in what is published (`io/reader.py` unpacks them)."""

from .base import EXPERTS, TeacherFamily, same_name
from .llama import ATTENTION_TENSORS, OTHER_TENSORS

GPT_OSS = TeacherFamily(
    model_type="gpt_oss",
    title="gpt-oss",
    hybrid="llamba",
    windows=True,
    tensors={
        **OTHER_TENSORS,
        **ATTENTION_TENSORS,
        **same_name(
            "model.layers.{i}.self_attn.sinks",
            *(f"model.layers.{{i}}.mlp.router.{kind}" for kind in ("weight", "bias")),
            *(f"{EXPERTS}{part}_proj{kind}" for part in ("gate_up", "down") for kind in ("", "_bias")),
        ),
    },
    unpacked=("mxfp4",),
    fields={
        "rms_norm_eps": "rms_norm_eps",
        "attention_bias": "attention_bias",
        "attention_out_bias": "attention_bias",
        "num_experts": "num_local_experts",
        "num_experts_per_tok": "num_experts_per_tok",
        "moe_intermediate_size": "intermediate_size",
        "swiglu_limit": "swiglu_limit",
        "swiglu_alpha": "swiglu_alpha",
        "router_aux_loss_coef": "router_aux_loss_coef",
    },
    constants={"learned_sinks": True},
)
