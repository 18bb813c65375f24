"""What every published format is described by."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import PreTrainedConfig

from ..weights.reader import Checkpoint, TensorInfo
from .parts import Table, moved
from .section import Section

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass
class Published:
    """A published checkpoint: its headers and side files, no weights read."""

    name: str
    config: dict[str, Any]
    """config.json; empty where there is none."""
    checkpoint: Checkpoint
    mamba_config: dict[str, Any] | None = None
    """mamba_config.json, of Mamba in the Llama and M1."""
    base: PreTrainedConfig | None = None
    """Configuration of the base model that was named."""
    notes: list[str] = field(default_factory=list)
    """What was decided for the user, for the record."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Names and shapes."""
        return self.checkpoint.tensors

    @property
    def section(self) -> Section:
        """config.json, to be read with checks."""
        return Section(self.config, f"{self.name.rstrip('/')}/config.json")

    @property
    def mamba_section(self) -> Section:
        """mamba_config.json, to be read with checks."""
        return Section(self.mamba_config or {}, f"{self.name.rstrip('/')}/mamba_config.json")

    @property
    def base_flag(self) -> str:
        """The flag that would name the base model, with the name that the configuration gives, if it does."""
        named = self.config.get("_name_or_path")
        return f"--base {named}" if named and isinstance(named, str) else "--base"

    def shape(self, name: str, dims: int) -> tuple[int, ...]:
        """Of a tensor.

        Raises:
            ValueError: it is not there, or has not that many dimensions.
        """
        if name not in self.tensors:
            raise ValueError(f"{self.name} has no tensor {name}; the checkpoint is incomplete.")
        shape = self.tensors[name].shape
        if len(shape) != dims or 0 in shape:
            raise ValueError(f"{self.name}: tensor {name} has shape {shape}, where {dims} dimensions are expected.")
        return shape

    def token_ids(self) -> dict[str, Any]:
        """Of the special tokens: the checkpoint's own, else the base model's, else none."""
        own = {name: self.config.get(name) for name in TOKEN_IDS}
        return {name: getattr(self.base, name, None) if value is None else value for name, value in own.items()}

    def is_tied(self, embedding: str, says_so: bool) -> bool:
        """Whether the head is the embedding: the configuration says so, and the weights do not contradict it."""
        if not says_so or "lm_head.weight" not in self.tensors:
            return says_so
        if self.shape(embedding, 2) == self.shape("lm_head.weight", 2):
            blocks = (self.checkpoint.blocks(name) for name in (embedding, "lm_head.weight"))
            if all(a.equal(b) for a, b in zip(*blocks, strict=True)):
                return True
        self.notes.append("config.json ties the head to the embedding, but their weights differ: both are kept")
        return False


@dataclass(frozen=True, kw_only=True)
class PublishedFormat:
    """One format."""

    name: str
    sign: str
    """What it is recognised by, in words."""
    student: Callable[[Published], Literal["llamba", "phimamba"]]
    recognises: Callable[[Published], bool]
    fields: Callable[[Published], dict[str, Any]]
    """Fields of the configuration of ours that gives the same logits."""
    table: Callable[[Published, PreTrainedConfig], tuple[Table, dict[str, str]]]
    """Where our tensors come from, and which of theirs are left out, and why."""


def head_and_embedding(source: Published, embedding: str, config: PreTrainedConfig) -> tuple[Table, dict[str, str]]:
    """The rows of the table for the two ends of the model."""
    table: Table = {"model.embed_tokens.weight": moved(embedding)}
    if config.tie_word_embeddings:
        dropped = {"lm_head.weight": "tied to the embedding"} if "lm_head.weight" in source.tensors else {}
        return table, dropped
    table["lm_head.weight"] = moved("lm_head.weight")
    if config.lm_head_bias:
        table["lm_head.bias"] = moved("lm_head.bias")
    return table, {}


def rotary_buffers(source: Published) -> dict[str, str]:
    """Inverse frequencies that old checkpoints store."""
    return {
        name: "not a weight: follows from the configuration"
        for name in source.tensors
        if name.endswith("rotary_emb.inv_freq")
    }
