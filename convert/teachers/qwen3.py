"""Qwen3: Llama's tensors and an RMSNorm per head on queries and keys."""

from .base import TeacherFamily, same_name
from .llama import LLAMA

QWEN3 = TeacherFamily(
    model_type="qwen3",
    title="Qwen3",
    hybrid="llamba",
    windows=True,
    gguf=True,
    tensors={
        **LLAMA.tensors,
        **same_name("model.layers.{i}.self_attn.q_norm.weight", "model.layers.{i}.self_attn.k_norm.weight"),
    },
    fields={
        "rms_norm_eps": "rms_norm_eps",
        "attention_bias": "attention_bias",
        "attention_out_bias": "attention_bias",
    },
    constants={"qk_norm": "rms"},
)
