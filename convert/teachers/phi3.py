"""Phi-3, Phi-3.5 and Phi-4-mini: Llama's block with q, k, v and gate, up fused into one matrix each."""

from .base import TeacherFamily
from .llama import OTHER_TENSORS, ROTARY_BUFFERS

PHI3 = TeacherFamily(
    model_type="phi3",
    title="Phi-3, Phi-4-mini",
    hybrid="llamba",
    windows=True,
    gguf=True,
    tensors={
        **OTHER_TENSORS,
        **ROTARY_BUFFERS,
        "model.layers.{i}.self_attn.qkv_proj.weight": tuple(
            f"model.layers.{{i}}.self_attn.{p}_proj.weight" for p in "qkv"
        ),
        "model.layers.{i}.self_attn.o_proj.weight": "model.layers.{i}.self_attn.o_proj.weight",
        "model.layers.{i}.mlp.gate_up_proj.weight": (
            "model.layers.{i}.mlp.gate_proj.weight",
            "model.layers.{i}.mlp.up_proj.weight",
        ),
        "model.layers.{i}.mlp.down_proj.weight": "model.layers.{i}.mlp.down_proj.weight",
    },
    # embd_pdrop is in Phi-3's configuration but its forward does not use it
    fields={"rms_norm_eps": "rms_norm_eps", "resid_pdrop": "resid_pdrop"},
)
