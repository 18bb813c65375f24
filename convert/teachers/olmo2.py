"""OLMo 2: norms after mixer and MLP instead of before, and one RMSNorm over all heads of queries, one over keys'."""

from .base import TeacherFamily, same_name
from .llama import LLAMA

QK_NORM_TENSORS = same_name("model.layers.{i}.self_attn.q_norm.weight", "model.layers.{i}.self_attn.k_norm.weight")

OLMO2 = TeacherFamily(
    model_type="olmo2",
    title="OLMo 2",
    hybrid="llamba",
    tensors={
        **LLAMA.tensors,
        **QK_NORM_TENSORS,
        "model.layers.{i}.post_attention_layernorm.weight": "model.layers.{i}.mixer_out_norm.weight",
        "model.layers.{i}.post_feedforward_layernorm.weight": "model.layers.{i}.mlp_out_norm.weight",
    },
    fields={
        "rms_norm_eps": "rms_norm_eps",
        "attention_bias": "attention_bias",
        "attention_out_bias": "attention_bias",
    },
    constants={"norm_placement": "after", "qk_norm": "all_heads"},
)
