"""GLM-4 (0414): Gemma 2's places of the norms, Phi-3's MLP, biases on queries, keys and values, and a rotary embedding
of half of each head, whose planes are adjacent rows."""

from .base import TeacherFamily
from .llama import ATTENTION_TENSORS, OTHER_TENSORS

BLOCK = "model.layers.{i}."

GLM4 = TeacherFamily(
    model_type="glm4",
    title="GLM-4",
    hybrid="llamba",
    tensors={
        **OTHER_TENSORS,
        **ATTENTION_TENSORS,
        f"{BLOCK}post_self_attn_layernorm.weight": f"{BLOCK}mixer_out_norm.weight",
        f"{BLOCK}post_mlp_layernorm.weight": f"{BLOCK}mlp_out_norm.weight",
        f"{BLOCK}mlp.gate_up_proj.weight": (f"{BLOCK}mlp.gate_proj.weight", f"{BLOCK}mlp.up_proj.weight"),
        f"{BLOCK}mlp.down_proj.weight": f"{BLOCK}mlp.down_proj.weight",
    },
    adjacent_pairs=tuple(f"{BLOCK}self_attn.{p}_proj.{kind}" for p in "qk" for kind in ("weight", "bias")),
    fields={"rms_norm_eps": "rms_norm_eps", "attention_bias": "attention_bias"},
    constants={"norm_placement": "both"},
)
