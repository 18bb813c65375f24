"""Gemma 3: Gemma 2's block with norms on queries and keys instead of caps; five of six layers attend to a window,
with a rotary embedding of their own. Of the multimodal ones, the text part."""

from .base import TeacherFamily, local_rope
from .gemma2 import GEMMA2
from .olmo2 import QK_NORM_TENSORS

GEMMA3 = TeacherFamily(
    model_type="gemma3_text",
    title="Gemma 3",
    hybrid="llamba",
    windows=True,
    gguf=True,
    tensors={**GEMMA2.tensors, **QK_NORM_TENSORS},
    # as published, and as transformers 4.52 to 5 writes them
    in_multimodal={"language_model.": "", "model.language_model.": "model."},
    other_parts=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    fields={name: theirs for name, theirs in GEMMA2.fields.items() if name != "attn_logit_softcapping"},
    constants={**GEMMA2.constants, "qk_norm": "rms"},
    refused=("use_bidirectional_attention", "attn_logit_softcapping"),
    special=lambda config: GEMMA2.special(config) | local_rope(config),
)
