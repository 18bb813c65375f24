"""Gemma 4 31B and 26B-A4B: Gemma 3's block with norms on values and a factor on what each block returns. Heads of full
attention are wider and fewer than those of windows, their keys are values, too, and a part of each is turned. The
second has experts beside each MLP. Of the multimodal ones, the text part."""

from typing import Any

from .base import TeacherFamily, local_rope, same_name
from .gemma3 import GEMMA3

BLOCK = "model.layers.{i}."
EXPERTS = {
    f"{BLOCK}post_feedforward_layernorm_1.weight": f"{BLOCK}beside_mlp.mlp_norm.weight",
    f"{BLOCK}pre_feedforward_layernorm_2.weight": f"{BLOCK}beside_mlp.input_norm.weight",
    f"{BLOCK}post_feedforward_layernorm_2.weight": f"{BLOCK}beside_mlp.output_norm.weight",
    **{
        f"{BLOCK}{part}": f"{BLOCK}beside_mlp.{part}"
        for part in (
            "router.proj.weight", "router.scale", "router.per_expert_scale", "experts.gate_up_proj",
            "experts.down_proj",
        )
    },
}  # fmt: skip
NOT_FOLLOWED = {
    "num_kv_shared_layers": "its last layers attend to keys and values of earlier ones",
    "hidden_size_per_layer_input": "each of its blocks adds an embedding of its own",
}
"""Fields of the teacher -> what a hybrid cannot follow where they are not 0: Gemma 4 E2B and E4B."""


def special(config: Any) -> dict[str, Any]:
    """The heads of each type of layer, their rotary embeddings, and the experts."""
    for name, what in NOT_FOLLOWED.items():
        if getattr(config, name):
            raise ValueError(f"{what} ({name} {getattr(config, name)}), which a hybrid cannot follow")
    fields = local_rope(config) | {"embedding_multiplier": config.hidden_size**0.5}
    fields["rope_parameters"] = of_first_rows(fields["rope_parameters"], config.per_layer_config["full_attention"])
    if "sliding_attention" in config.layer_types:
        heads = config.per_layer_config["sliding_attention"]
        fields["sliding_heads"] = {name: getattr(heads, name) for name in ("num_key_value_heads", "head_dim")}
    if config.enable_moe_block:
        names = {"num_experts": "num_experts", "num_experts_per_tok": "top_k_experts"}
        fields |= {"experts_beside_mlp": True, "moe_intermediate_size": config.moe_intermediate_size}
        fields |= {ours: getattr(config, theirs) for ours, theirs in names.items()}
    return fields


def of_first_rows(rope: dict[str, Any], config: Any) -> dict[str, Any]:
    """Parameters by which the first rows of a head are turned as the teacher's RoPE, "proportional", turns these.

    It counts frequencies over a whole head, of which it turns the fastest planes alone.
    """
    if rope["rope_type"] != "proportional":
        return rope
    share = 2 * int(rope.get("partial_rotary_factor", 1.0) * config.head_dim // 2) / config.head_dim
    return {
        "rope_type": "linear",
        "factor": rope.get("factor", 1.0),
        "rope_theta": rope["rope_theta"] ** share,
        "partial_rotary_factor": share,
    }


def values_from_keys(config: Any) -> dict[str, str]:
    """Projections of values -> those of keys, which take their place."""
    if not config.attention_k_eq_v:
        return {}
    layers = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    names = [f"model.layers.{i}.self_attn.{{}}_proj.{kind}" for i in layers for kind in ("weight", "bias")]
    return {name.format("v"): name.format("k") for name in names}


GEMMA4 = TeacherFamily(
    model_type="gemma4_text",
    title="Gemma 4 (31B, 26B-A4B)",
    hybrid="llamba",
    windows=True,
    tensors={**GEMMA3.tensors, **EXPERTS, **same_name(f"{BLOCK}layer_scalar")},
    in_multimodal={"model.language_model.": "model."},
    other_parts=("model.vision_tower.", "model.embed_vision."),
    distant_pairs=(
        *(f"{BLOCK}self_attn.{p}_proj.{kind}" for p in "qk" for kind in ("weight", "bias")),
        *(f"{BLOCK}self_attn.{p}_norm.weight" for p in "qk"),
    ),
    copied=values_from_keys,
    fields=GEMMA3.fields,
    constants={
        "norm_placement": "both",
        "qk_norm": "rms",
        "value_norm": True,
        "attention_multiplier": 1.0,
        "layer_scalar": True,
    },
    special=special,
)
