"""Llama 1 to 3.2, TinyLlama, SmolLM2 and everything else saved as LlamaForCausalLM."""

from .base import TeacherFamily, same_name

ATTENTION_TENSORS = same_name(
    *(f"model.layers.{{i}}.self_attn.{p}_proj.{kind}" for p in "qkvo" for kind in ("weight", "bias"))
)
MLP_TENSORS = same_name(
    *(f"model.layers.{{i}}.mlp.{p}_proj.{kind}" for p in ("gate", "up", "down") for kind in ("weight", "bias"))
)
OTHER_TENSORS = same_name(
    "model.embed_tokens.weight",
    "model.layers.{i}.input_layernorm.weight",
    "model.layers.{i}.post_attention_layernorm.weight",
    "model.norm.weight",
    "lm_head.weight",
)
# Old checkpoints store the inverse frequencies, which the configuration determines.
ROTARY_BUFFERS = {"model.layers.{i}.self_attn.rotary_emb.inv_freq": None}

LLAMA = TeacherFamily(
    model_type="llama",
    title="Llama",
    hybrid="llamba",
    gguf=True,
    tensors={**OTHER_TENSORS, **ATTENTION_TENSORS, **MLP_TENSORS, **ROTARY_BUFFERS},
    fields={
        "rms_norm_eps": "rms_norm_eps",
        "attention_bias": "attention_bias",
        "attention_out_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
    },
)
