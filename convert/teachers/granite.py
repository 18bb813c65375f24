"""Granite 3: Llama's tensors, and multipliers on embeddings, scores, residual branches and logits."""

from .base import TeacherFamily
from .llama import LLAMA

GRANITE = TeacherFamily(
    model_type="granite",
    title="Granite 3",
    hybrid="llamba",
    tensors=LLAMA.tensors,
    fields={
        name: name
        for name in (
            "rms_norm_eps", "attention_bias", "mlp_bias", "embedding_multiplier", "attention_multiplier",
            "residual_multiplier", "logits_scaling",
        )
    }
    | {"attention_out_bias": "attention_bias"},
)  # fmt: skip
