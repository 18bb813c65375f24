"""What a teacher family is: a table of tensor names and a table of configuration fields."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# Student field <- teacher field of the same name, for every family that has it.
COMMON_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "rope_parameters",
    "attention_dropout",
)


@dataclass(frozen=True, kw_only=True)
class TeacherFamily:
    """One architecture of transformers and where its parts go in the student.

    `tensors` maps a teacher's tensor-name template ("{i}" stands for the layer) to the name in the student with every
    layer kept as attention, to a tuple of names when the teacher fuses them along the rows, or to None when the
    tensor is dropped on purpose. Which of them exist is decided by the configuration, not listed here.
    """

    model_type: str
    student: Literal["llamba", "phimamba"]
    tensors: Mapping[str, str | tuple[str, ...] | None]
    fields: Mapping[str, str] = field(default_factory=dict)
    """Student field <- teacher field, beyond COMMON_FIELDS."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Student fields that are the same for every teacher of the family."""
    special: Callable[[Any], dict[str, Any]] | None = None
    """Student fields that need more than a copy, from the teacher's configuration."""


def same_name(*templates: str) -> dict[str, str]:
    """Templates whose tensors keep their name."""
    return {template: template for template in templates}
