"""What a teacher family is: a table of tensor names and a table of configuration fields."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# fields that a hybrid's configuration takes over from every teacher's under the same name
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
    """An architecture of transformers, and where its tensors and configuration fields go in the hybrid."""

    model_type: str
    student: Literal["llamba", "phimamba"]
    """The class of hybrid it becomes."""
    tensors: Mapping[str, str | tuple[str, ...] | None]
    """Template of a teacher's tensor name ("{i}" is the layer) -> its name in a hybrid that keeps all its attention, a
    tuple of names where the teacher fuses them along the rows, or None for what is dropped on purpose. Which of them
    a teacher has follows from its configuration."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Field of the hybrid -> field of the teacher, beyond COMMON_FIELDS."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the hybrid that are the same for every teacher of the family."""
    special: Callable[[Any], dict[str, Any]] | None = None
    """Computes the fields of the hybrid that are more than copies from the teacher's configuration."""


def same_name(*templates: str) -> dict[str, str]:
    """A table of templates whose tensors keep their names."""
    return {template: template for template in templates}
