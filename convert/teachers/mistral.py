"""Mistral 7B, Zephyr: Llama's tensors, a sliding window in the early releases."""

from .base import TeacherFamily
from .llama import LLAMA

MISTRAL = TeacherFamily(
    model_type="mistral",
    title="Mistral",
    student="llamba",
    gguf=True,
    tensors=LLAMA.tensors,
    fields={"rms_norm_eps": "rms_norm_eps"},
)
