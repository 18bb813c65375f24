"""The teachers this project converts, by the `model_type` of their configuration."""

from .base import TeacherFamily
from .llama import LLAMA
from .mistral import MISTRAL
from .phi import PHI
from .phi3 import PHI3
from .qwen2 import QWEN2
from .qwen3 import QWEN3

FAMILIES = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, PHI)}


def get_family(model_type: str) -> TeacherFamily:
    """The family of a teacher."""
    if model_type not in FAMILIES:
        raise ValueError(
            f"Architecture {model_type!r} is not supported. Supported teachers: {', '.join(sorted(FAMILIES))}. "
            "Adding one is a table: see CONTRIBUTING.md."
        )
    return FAMILIES[model_type]
