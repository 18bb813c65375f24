"""LFM2: short convolutions in most layers, which stay as they are, and Qwen3's attention in the others, under names of
its own."""

from .base import TeacherFamily, same_name

BLOCK = "model.layers.{i}."


def mlp_width(config) -> dict[str, object]:
    """The width of the MLP, which is not the one in the configuration where that says to adjust it."""
    width = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        width = int(2 * width / 3)
        if config.block_ffn_dim_multiplier is not None:
            width = int(config.block_ffn_dim_multiplier * width)
            width = -(-width // config.block_multiple_of) * config.block_multiple_of
    return {"intermediate_size": width}


LFM2 = TeacherFamily(
    model_type="lfm2",
    title="LFM2",
    hybrid="llamba",
    tensors={
        **same_name("model.embed_tokens.weight", "lm_head.weight"),
        "model.embedding_norm.weight": "model.norm.weight",
        f"{BLOCK}operator_norm.weight": f"{BLOCK}input_layernorm.weight",
        f"{BLOCK}ffn_norm.weight": f"{BLOCK}post_attention_layernorm.weight",
        **same_name(*(f"{BLOCK}self_attn.{p}_proj.weight" for p in "qkv")),
        f"{BLOCK}self_attn.out_proj.weight": f"{BLOCK}self_attn.o_proj.weight",
        **{f"{BLOCK}self_attn.{p}_layernorm.weight": f"{BLOCK}self_attn.{p}_norm.weight" for p in "qk"},
        **{
            f"{BLOCK}feed_forward.{theirs}.weight": f"{BLOCK}mlp.{ours}_proj.weight"
            for theirs, ours in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
        },
        **{
            f"{BLOCK}conv.{part}.{kind}": f"{BLOCK}recurrent.module.{part}.{kind}"
            for part in ("conv", "in_proj", "out_proj")
            for kind in ("weight", "bias")
        },
    },
    fields={"rms_norm_eps": "norm_eps"},
    constants={"hidden_act": "silu", "attention_dropout": 0.0, "qk_norm": "rms"},
    recurrent=("conv_bias", "conv_L_cache"),
    special=mlp_width,
)
