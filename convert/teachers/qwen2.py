"""Qwen2 and Qwen2.5: Llama's tensors, and biases on q, k and v but not on o."""

from .base import TeacherFamily
from .llama import LLAMA

QWEN2 = TeacherFamily(
    model_type="qwen2",
    title="Qwen2",
    hybrid="llamba",
    windows=True,
    gguf=True,
    tensors=LLAMA.tensors,
    fields={"rms_norm_eps": "rms_norm_eps"},
    constants={"attention_bias": True},
)
