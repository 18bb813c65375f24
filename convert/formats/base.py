"""Description of a foreign format, and the checkpoint that is read in it."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from transformers import PreTrainedConfig

from modeling_llamba.model.config_values import LARGEST_SIZE

from ..io.reader import Checkpoint, TensorInfo
from .table import Table, renamed

ANY = object()
"""Value of an entry that changes nothing, whatever its own value is."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
KINDS = {
    int: "a whole number above 0",
    float: "a number",
    bool: "true or false",
    str: "a string",
    dict: "an object",
    list: "a list",
}


@dataclass(frozen=True)
class Section:
    """A JSON object whose entries are read by kind.

    Every method raises a ValueError that names the file and the place of an entry that is missing or of another kind.
    """

    values: dict[str, Any]
    file: str
    path: str = ""
    """Path of the object in the file, ending in a dot."""

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """An entry, or the default where it is absent or null."""
        if self.values.get(name) is None:
            return default
        return self._checked(name, kind)

    def need(self, name: str, kind: type) -> Any:
        """The value of an entry that must be there."""
        if name not in self.values:
            raise ValueError(f"{self.file} has no {self.path}{name}.")
        return self._checked(name, kind)

    def only(self, understood: Collection[str], harmless: Mapping[str, Any] = MappingProxyType({})) -> "Section":
        """The section itself, if it has no entries but those that are understood.

        Args:
            harmless: entries that change nothing, with the only value they may have besides null; ANY where any does.
        """
        for name, value in self.values.items():
            if name in understood or value is None or (name in harmless and harmless[name] in (ANY, value)):
                continue
            only = ""
            if name in harmless:
                only = f"; only {json.dumps(harmless[name])} is supported"
            shown = json.dumps(value)[:60]
            raise ValueError(f"{self.file}: {self.path}{name} is {shown}, which this project does not know{only}.")
        return self

    def section(self, name: str) -> "Section":
        """An inner object, empty where it is absent or null."""
        return Section(self.get(name, dict, {}), self.file, f"{self.path}{name}.")

    def need_section(self, name: str) -> "Section":
        """An inner object that must be there."""
        return Section(self.need(name, dict), self.file, f"{self.path}{name}.")

    def sections(self, name: str) -> list["Section"]:
        """The objects in a list; none where it is absent or null."""
        values = {f"{name}[{i}]": value for i, value in enumerate(self.get(name, list, []))}
        numbered = Section(values, self.file, self.path)
        return [numbered.need_section(entry) for entry in values]

    def _checked(self, name: str, kind: type) -> Any:
        value = self.values[name]
        fits = {
            int: type(value) is int and 0 < value <= LARGEST_SIZE,
            float: type(value) in (int, float) and -1e30 < value < 1e30,
        }.get(kind, isinstance(value, kind))
        if not fits:
            shown = json.dumps(value)
            if len(shown) > 60:
                shown = f"{shown[:57]}..."
            raise ValueError(f"{self.file}: {self.path}{name} must be {KINDS[kind]}, not {shown}.")
        return value


@dataclass
class ForeignCheckpoint:
    """A checkpoint in a foreign format: its headers and configurations, before any weight is read."""

    name: str
    config: dict[str, Any]
    """The content of config.json; empty where there is none."""
    checkpoint: Checkpoint
    mamba_config: dict[str, Any] | None = None
    """The content of mamba_config.json, which Mamba in the Llama and M1 have."""
    base: PreTrainedConfig | None = None
    """Configuration of the base model, if the user named one."""
    notes: list[str] = field(default_factory=list)
    """Decisions that were taken for the user, to be shown and recorded."""
    overridden: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the hybrid's configuration that the user sets."""

    def note(self, text: str, *fields: str) -> None:
        """Keep a decision about these fields of the configuration, unless the user takes all of it."""
        if not fields or not set(fields) <= set(self.overridden):
            self.notes.append(text)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shapes and types by name."""
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
        """The option that names the base model, with the name the configuration records, if it records one."""
        named = self.config.get("_name_or_path")
        if not named or not isinstance(named, str):
            return "--base"
        return f"--base {named}"

    def shape(self, name: str, dims: int) -> tuple[int, ...]:
        """Shape of a tensor."""
        if name not in self.tensors:
            raise ValueError(f"{self.name} has no tensor {name}; the checkpoint is incomplete.")
        shape = self.tensors[name].shape
        if len(shape) != dims or 0 in shape:
            raise ValueError(f"{self.name}: tensor {name} has shape {shape}, where {dims} dimensions are expected.")
        return shape

    def depth(self, layers: int) -> int:
        """A number of layers, which cannot be more than there are tensors."""
        if layers > len(self.tensors):
            raise ValueError(f"{self.section.file} says {layers} layers, but there are {len(self.tensors)} tensors.")
        return layers

    def token_ids(self) -> dict[str, Any]:
        """Ids of the special tokens: the checkpoint's own, or else the base model's."""
        ids = {name: getattr(self.base, name, None) for name in TOKEN_IDS}
        return ids | {name: self.config[name] for name in TOKEN_IDS if self.config.get(name) is not None}

    def is_tied(self, embedding: str, says_so: bool) -> bool:
        """Return True if the head is the embedding: by the configuration, where the weights do not contradict it."""
        if not says_so or "lm_head.weight" not in self.tensors:
            return says_so
        if self.checkpoint.same_values(embedding, "lm_head.weight"):
            return True
        text = "config.json ties the head to the embedding, but their weights differ: both are kept"
        self.note(text, "tie_word_embeddings")
        return False


@dataclass(frozen=True, kw_only=True)
class Format:
    """A foreign format: how it is recognised, and where our configuration and tensors come from."""

    name: str
    sign: str
    """Sign by which the format is recognised, in words."""
    hybrid: Callable[[ForeignCheckpoint], Literal["llamba", "phimamba"]]
    """Class of hybrid that holds it."""
    recognises: Callable[[ForeignCheckpoint], bool]
    fields: Callable[[ForeignCheckpoint], dict[str, Any]]
    """Fields of the hybrid's configuration that give the same logits."""
    table: Callable[[ForeignCheckpoint, PreTrainedConfig], tuple[Table, dict[str, str]]]
    """Sources of the hybrid's tensors, and the foreign ones that are left out, with the reason."""


def head_and_embedding(source: ForeignCheckpoint, embedding: str, config: PreTrainedConfig) -> tuple[Table, dict]:
    """The rows of `Format.table` for the embedding and the head, and what is left out of them."""
    table: Table = {"model.embed_tokens.weight": renamed(embedding)}
    if config.tie_word_embeddings:
        dropped = {}
        if "lm_head.weight" in source.tensors:
            dropped = {"lm_head.weight": "tied to the embedding"}
        return table, dropped
    table["lm_head.weight"] = renamed("lm_head.weight")
    if config.lm_head_bias:
        table["lm_head.bias"] = renamed("lm_head.bias")
    return table, {}


def rotary_buffers(source: ForeignCheckpoint) -> dict[str, str]:
    """Inverse frequencies that old checkpoints store, to be left out."""
    reason = "not a weight: follows from the configuration"
    return {name: reason for name in source.tensors if name.endswith("rotary_emb.inv_freq")}
