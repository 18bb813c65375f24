"""SmolLM3: Llama's block, without a rotary embedding in every fourth layer."""

from .base import TeacherFamily
from .llama import LLAMA

SMOLLM3 = TeacherFamily(
    model_type="smollm3",
    title="SmolLM3",
    hybrid="llamba",
    windows=True,
    tensors=LLAMA.tensors,
    fields={
        "rms_norm_eps": "rms_norm_eps",
        "attention_bias": "attention_bias",
        "attention_out_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
    },
    special=lambda config: {
        "layer_rope": [
            "main" if has_rope else "none" for has_rope in config.no_rope_layers[: config.num_hidden_layers]
        ]
    },
)
