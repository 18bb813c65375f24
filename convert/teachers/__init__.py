"""The teachers this project converts, by the `model_type` of their configuration."""

from .base import TeacherFamily
from .gemma2 import GEMMA2
from .gemma3 import GEMMA3
from .gemma4 import GEMMA4
from .glm4 import GLM4
from .gpt_oss import GPT_OSS
from .granite import GRANITE
from .granitemoehybrid import GRANITE_MOE_HYBRID
from .lfm2 import LFM2
from .llama import LLAMA
from .ministral3 import MINISTRAL3
from .mistral import MISTRAL
from .mixtral import MIXTRAL
from .olmo2 import OLMO2
from .olmo3 import OLMO3
from .olmo_hybrid import OLMO_HYBRID
from .phi import PHI
from .phi3 import PHI3
from .qwen2 import QWEN2
from .qwen3 import QWEN3
from .qwen3_5 import QWEN3_5
from .qwen3_5_moe import QWEN3_5_MOE
from .qwen3_moe import QWEN3_MOE
from .qwen3_next import QWEN3_NEXT
from .smollm3 import SMOLLM3

FAMILIES = {
    family.model_type: family
    for family in (
        LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, PHI, GEMMA2, GEMMA3, GEMMA4, OLMO2, OLMO3, SMOLLM3, GRANITE, MIXTRAL,
        QWEN3_MOE, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, LFM2, GRANITE_MOE_HYBRID, OLMO_HYBRID, MINISTRAL3, GLM4,
        GPT_OSS,
    )
}  # fmt: skip
MULTIMODAL = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""`model_type` of a multimodal model, of which only the text part is converted -> `model_type` of its text part, for
configurations that do not state it."""


def get_family(model_type: str, text_type: str | None = None) -> TeacherFamily:
    """The family of a teacher, or of the text part of a multimodal one, whose `model_type` may be given beside it."""
    if model_type in MULTIMODAL:
        model_type = text_type or MULTIMODAL[model_type]
    if model_type in {family.hybrid for family in FAMILIES.values()}:
        raise ValueError(
            "This model is a hybrid already; convert its teacher, or train the hybrid (convert-to-hybrid mohawk)."
        )
    if model_type not in FAMILIES:
        raise ValueError(
            f"Architecture {model_type!r} is not supported. Supported teachers: {', '.join(sorted(FAMILIES))}. "
            "Adding one is a table: see CONTRIBUTING.md."
        )
    return FAMILIES[model_type]
