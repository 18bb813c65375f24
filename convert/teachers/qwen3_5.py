"""Qwen3.5: Gated DeltaNet in three of four layers, which stay as they are, and in the fourth Qwen3's attention with a
gate on what its heads return. Of the multimodal ones, the text part."""

from .base import TeacherFamily
from .qwen3 import QWEN3

BLOCK = "model.layers.{i}."
QUERIES_AND_GATES = {
    f"{BLOCK}self_attn.q_proj.{kind}": tuple(f"{BLOCK}self_attn.{part}_proj.{kind}" for part in ("q", "gate"))
    for kind in ("weight", "bias")
}
DELTA_NET = (
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
    "linear_num_value_heads",
)  # fmt: skip
"""Fields that make a Gated DeltaNet."""


def delta_net_tensors(*projections: str) -> dict[str, str]:
    """The table of a Gated DeltaNet whose inputs have these projections."""
    inputs = (f"{name}.weight" for name in projections)
    names = ("A_log", "dt_bias", "conv1d.weight", *inputs, "norm.weight", "out_proj.weight")
    return {f"{BLOCK}linear_attn.{name}": f"{BLOCK}recurrent.module.{name}" for name in names}


def one_rope(config) -> dict[str, object]:
    """Text alone has the same position in all three parts of the rotary embedding, which then is an ordinary one."""
    rope = config.rope_parameters
    return {"rope_parameters": {name: rope[name] for name in rope if not name.startswith("mrope_")}}


QWEN3_5 = TeacherFamily(
    model_type="qwen3_5_text",
    title="Qwen3.5",
    hybrid="llamba",
    tensors={
        **QWEN3.tensors,
        **QUERIES_AND_GATES,
        **delta_net_tensors("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    },
    by_head=tuple(QUERIES_AND_GATES),
    in_multimodal={"model.language_model.": "model."},
    other_parts=("model.visual.", "mtp."),
    fields=QWEN3.fields,
    constants={**QWEN3.constants, "norm_unit_offset": True, "attention_gate": True},
    recurrent=DELTA_NET,
    special=one_rope,
)
