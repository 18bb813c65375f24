"""Gemma 2: norms before and after mixer and MLP, scaled embeddings, caps on scores and logits, every second layer a
window."""

from .base import TeacherFamily
from .llama import LLAMA

GEMMA2 = TeacherFamily(
    model_type="gemma2",
    title="Gemma 2",
    hybrid="llamba",
    windows=True,
    gguf=True,
    tensors={
        **LLAMA.tensors,
        "model.layers.{i}.post_attention_layernorm.weight": "model.layers.{i}.mixer_out_norm.weight",
        "model.layers.{i}.pre_feedforward_layernorm.weight": "model.layers.{i}.post_attention_layernorm.weight",
        "model.layers.{i}.post_feedforward_layernorm.weight": "model.layers.{i}.mlp_out_norm.weight",
    },
    fields={
        "rms_norm_eps": "rms_norm_eps",
        "hidden_act": "hidden_activation",
        "attention_bias": "attention_bias",
        "attention_out_bias": "attention_bias",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    constants={"norm_placement": "both", "norm_unit_offset": True},
    refused=("use_bidirectional_attention",),
    special=lambda config: {
        "embedding_multiplier": config.hidden_size**0.5,
        "attention_multiplier": config.query_pre_attn_scalar**-0.5,
    },
)
