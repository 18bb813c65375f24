"""OLMo Hybrid: Gated DeltaNet in three of four layers, which stay as they are, with norms before mixer and MLP, and in
the fourth OLMo 2's block, as published without a rotary embedding."""

from .base import TeacherFamily
from .olmo2 import OLMO2
from .qwen3_5 import BLOCK, DELTA_NET

PARTS = ("A_log", "dt_bias", *(f"{p}_proj.weight" for p in "qkvabgo"), "o_norm.weight")


def norms_and_rope(config) -> dict[str, object]:
    """The places of the norms, which differ by layer, and no rotary embedding where the teacher has none."""
    places = ["before" if kind == "linear_attention" else "after" for kind in config.layer_types]
    if (config.rope_parameters or {}).get("rope_theta") is not None:
        return {"norm_placement": places}
    unused = {"rope_type": "default", "rope_theta": 1e4}
    return {"norm_placement": places, "rope_parameters": unused, "layer_rope": ["none"] * config.num_hidden_layers}


OLMO_HYBRID = TeacherFamily(
    model_type="olmo_hybrid",
    title="OLMo Hybrid",
    hybrid="llamba",
    tensors={
        **OLMO2.tensors,
        f"{BLOCK}attention_layer_norm.weight": f"{BLOCK}input_layernorm.weight",
        # after the mixer beside attention, before the MLP beside a state; transformers writes the second name for both
        **{
            f"{BLOCK}{name}.weight": (f"{BLOCK}mixer_out_norm.weight", f"{BLOCK}post_attention_layernorm.weight")
            for name in ("post_attention_layernorm", "feedforward_layer_norm")
        },
        **{f"{BLOCK}linear_attn.{name}": f"{BLOCK}recurrent.module.{name}" for name in PARTS},
    },
    joined={f"{BLOCK}recurrent.module.conv1d.weight": tuple(f"{BLOCK}linear_attn.{p}_conv1d.weight" for p in "qkv")},
    fields=OLMO2.fields,
    constants={"qk_norm": "all_heads"},
    recurrent=(*DELTA_NET, "linear_allow_neg_eigval"),
    special=norms_and_rope,
)
