"""Mistral, Zephyr: Llama's tensors, a sliding window in the early releases. Of the multimodal ones, the text part."""

from .base import TeacherFamily
from .gemma3 import GEMMA3
from .llama import LLAMA

MISTRAL = TeacherFamily(
    model_type="mistral",
    title="Mistral",
    hybrid="llamba",
    windows=True,
    gguf=True,
    tensors=LLAMA.tensors,
    in_multimodal=GEMMA3.in_multimodal,
    other_parts=GEMMA3.other_parts,
    fields={"rms_norm_eps": "rms_norm_eps"},
)
