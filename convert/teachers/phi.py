"""Phi-1, Phi-1.5 and Phi-2: parallel block, LayerNorm, partial rotary embedding, biases everywhere."""

from .base import TeacherFamily, same_name

PHI = TeacherFamily(
    model_type="phi",
    title="Phi-1, Phi-1.5, Phi-2",
    hybrid="phimamba",
    tensors={
        **same_name(
            "model.embed_tokens.weight",
            "lm_head.weight",
            "lm_head.bias",
            *(f"model.layers.{{i}}.input_layernorm.{kind}" for kind in ("weight", "bias")),
            *(f"model.layers.{{i}}.self_attn.{p}_proj.{kind}" for p in "qkv" for kind in ("weight", "bias")),
            *(f"model.layers.{{i}}.mlp.{p}.{kind}" for p in ("fc1", "fc2") for kind in ("weight", "bias")),
        ),
        **{
            f"model.layers.{{i}}.self_attn.{p}_layernorm.{kind}": f"model.layers.{{i}}.self_attn.{p}_norm.{kind}"
            for p in "qk"
            for kind in ("weight", "bias")
        },
        **{
            f"model.layers.{{i}}.self_attn.dense.{k}": f"model.layers.{{i}}.self_attn.o_proj.{k}"
            for k in ("weight", "bias")
        },
        **{f"model.final_layernorm.{kind}": f"model.norm.{kind}" for kind in ("weight", "bias")},
        "model.layers.{i}.self_attn.rotary_emb.inv_freq": None,
    },
    fields={"layer_norm_eps": "layer_norm_eps", "resid_pdrop": "resid_pdrop", "embd_pdrop": "embd_pdrop"},
    special=lambda config: {"qk_norm": "layer" if config.qk_layernorm else None},
)
