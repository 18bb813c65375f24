"""Ministral 3: Llama's tensors, and queries that grow with their position. Of the multimodal ones, the text part."""

from .base import TeacherFamily
from .gemma3 import GEMMA3
from .llama import LLAMA

MINISTRAL3 = TeacherFamily(
    model_type="ministral3",
    title="Ministral 3",
    hybrid="llamba",
    windows=True,
    tensors=LLAMA.tensors,
    in_multimodal=GEMMA3.in_multimodal,
    other_parts=GEMMA3.other_parts,
    fields={"rms_norm_eps": "rms_norm_eps"},
    special=lambda config: {
        # a copy of the configuration's own field, which no embedding reads
        "rope_parameters": {k: v for k, v in config.rope_parameters.items() if k != "max_position_embeddings"}
    },
)
