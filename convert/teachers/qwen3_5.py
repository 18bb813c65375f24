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
    "A_log", "dt_bias", "conv1d.weight", "in_proj_qkv.weight", "in_proj_z.weight", "in_proj_b.weight",
    "in_proj_a.weight", "norm.weight", "out_proj.weight",
)  # fmt: skip
TEXT_TENSORS = {
    **QWEN3.tensors,
    **QUERIES_AND_GATES,
    **{f"{BLOCK}linear_attn.{name}": f"{BLOCK}recurrent.module.{name}" for name in DELTA_NET},
}


def in_multimodal(name: str) -> str:
    """The name that a tensor of the text part has in a multimodal checkpoint."""
    return f"model.language_model.{name.removeprefix('model.')}"


def one_rope(config) -> dict[str, object]:
    """Text alone has the same position in all three parts of the rotary embedding, which then is an ordinary one."""
    rope = config.rope_parameters
    return {"rope_parameters": {name: rope[name] for name in rope if not name.startswith("mrope_")}}


QWEN3_5 = TeacherFamily(
    model_type="qwen3_5_text",
    title="Qwen3.5 (text)",
    student="llamba",
    tensors={**{in_multimodal(theirs): ours for theirs, ours in TEXT_TENSORS.items()}, **TEXT_TENSORS},
    by_head=(*QUERIES_AND_GATES, *map(in_multimodal, QUERIES_AND_GATES)),
    other_parts=("model.visual.", "mtp."),
    fields=QWEN3.fields,
    constants={**QWEN3.constants, "norm_unit_offset": True, "attention_gate": True},
    recurrent=(
        "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
        "linear_num_value_heads",
    ),
    special=one_rope,
)  # fmt: skip
