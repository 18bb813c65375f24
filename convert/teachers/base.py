"""Teacher families: a table of tensor names and a table of configuration fields."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

EXPERTS = "model.layers.{i}.mlp.experts."

# fields that a hybrid's configuration takes over from every teacher's under the same name; `fields` may say another
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
    title: str
    """Common name of these models."""
    hybrid: Literal["llamba", "phimamba"]
    """The class of hybrid it becomes."""
    windows: bool = False
    """True if its layers can have a sliding window; where not, transformers ignores the field `sliding_window`."""
    gguf: bool = False
    """True if the tests convert a GGUF file of it; others are refused."""
    tensors: Mapping[str, str | tuple[str, ...] | None]
    """Template of a teacher's tensor name ("{i}" is the layer) -> its name in a hybrid that keeps all its attention, a
    tuple of names where the teacher fuses them along the rows, or None for what is dropped on purpose. Which of them
    a teacher has follows from its configuration."""
    by_head: tuple[str, ...] = ()
    """Templates of fused tensors whose parts alternate head by head instead of following each other (queries and gates
    of Qwen3.5)."""
    adjacent_pairs: tuple[str, ...] = ()
    """Templates of the tensors of queries and keys in which the two rows that a rotary embedding turns together are
    neighbours (GPT-J's order). They are reordered, since in a hybrid the two lie half of the rotated rows apart
    (GPT-NeoX's order)."""
    distant_pairs: tuple[str, ...] = ()
    """Templates of those tensors in which the two rows lie half a head apart although only a part of the rows is
    rotated, in layers whose `layer_rope` is "main"."""
    copied: Callable[[Any], Mapping[str, str]] = lambda config: {}
    """Returns the tensors that the teacher lacks because it reads another in their place: name -> name of the other,
    both as in the hybrid."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Field of the hybrid -> field of the teacher, beyond COMMON_FIELDS."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the hybrid that are the same for every teacher of the family."""
    in_multimodal: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of the names of the text part's tensors in multimodal checkpoints -> those in `tensors`."""
    other_parts: tuple[str, ...] = ()
    """Beginnings of the names of tensors that belong to no text model, and are dropped."""
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Template of a tensor of the hybrid that stacks all experts -> templates of the teacher's tensors of one expert
    ("{e}"), in order."""
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Template of a tensor of the hybrid -> templates of the teacher's tensors that are stacked in it, in order."""
    unpacked: tuple[str, ...] = ()
    """Methods of quantisation whose weights are read as whole numbers."""
    recurrent: tuple[str, ...] = ()
    """Fields of the teacher from which its module with a state is made (modeling_llamba/model/recurrent.py)."""
    refused: tuple[str, ...] = ()
    """Fields of the teacher that a hybrid cannot follow: all of them have to be absent, false or 0."""
    special: Callable[[Any], dict[str, Any]] | None = None
    """Computes the fields of the hybrid that are more than copies from the teacher's configuration."""

    def text_name(self, name: str) -> str:
        """The name in `tensors` of a checkpoint's tensor."""
        for theirs, ours in self.in_multimodal.items():
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return name


def stacked_experts(gate: str, up: str, down: str) -> dict[str, tuple[str, ...]]:
    """`TeacherFamily.stacked` for experts whose three matrices have these templates in the teacher."""
    return {f"{EXPERTS}gate_up_proj": (gate, up), f"{EXPERTS}down_proj": (down,)}


def local_rope(config: Any) -> dict[str, Any]:
    """The fields for a teacher whose layers with a window have a rotary embedding of their own."""
    ropes = config.rope_parameters
    kinds = ["local" if kind == "sliding_attention" else "main" for kind in config.layer_types]
    local = dict(ropes["sliding_attention"]) if "local" in kinds else None
    return {"rope_parameters": dict(ropes["full_attention"]), "local_rope_parameters": local, "layer_rope": kinds}


def same_name(*templates: str) -> dict[str, str]:
    """A table of templates whose tensors keep their names."""
    return {template: template for template in templates}
