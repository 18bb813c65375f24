"""Import a published hybrid: its own format in, an ordinary Llamba or PhiMamba checkpoint out.

find it -> recognise the format by its tensors -> our configuration and a table of tensors -> stream -> put in place.
"""

import dataclasses
import importlib.metadata
import json
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from huggingface_hub import ModelCard, ModelCardData
from transformers import GenerationConfig, PreTrainedConfig

from ..checkpoint.folder import check_apart, check_output, staged
from ..config import DTYPES, parse_size
from ..pipeline import TOKENIZER_FILES, add_code, add_tokenizer
from ..plan import STUDENTS, human_bytes, layer_letters, output_dtype, tensor_shapes
from ..teachers import get_family
from ..teachers.teacher import Teacher, config_errors, download_model, find_teacher
from ..weights.reader import Checkpoint, open_weights
from ..weights.rules import Rule
from ..weights.writer import hash_files, plan_shards, write_shards
from . import Published, PublishedFormat, check_config_not_quantised, recognise
from .parts import make_rules

CARD = """---
{{ card_data }}
---

# {{ title }}

{{ source }}, {{ format }}, imported by [convert-to-hybrid](https://pypi.org/project/convert-to-hybrid/). The weights
are the original's.

{{ notes }}
"""


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Options of one import."""

    source: str
    """Hub id or local folder."""
    output: str
    revision: str | None = None
    """Branch, tag or commit of a Hub repository."""
    base: str | None = None
    """The model it was made from, for what the checkpoint leaves out: configuration, special tokens, tokenizer."""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of our configuration that are to be otherwise than derived."""
    dtype: str = "auto"
    max_shard_size: str = "5GB"
    overwrite: bool = False

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}.")
        parse_size(self.max_shard_size)


@dataclass(frozen=True)
class ImportPlan:
    """Everything that is decided before a weight is copied."""

    format: PublishedFormat
    config: PreTrainedConfig
    rules: list[Rule]
    dropped: dict[str, str]
    dtype: torch.dtype
    notes: list[str]
    checkpoint: Checkpoint
    folder: Path
    commit: str | None
    base: Teacher | None

    @property
    def parameters(self) -> int:
        """Of the imported model."""
        return sum(math.prod(rule.shape) for rule in self.rules)

    def summary(self) -> dict[str, Any]:
        """The plan as plain data."""
        return {
            "format": self.format.name,
            "student_family": self.config.model_type,
            "mixer": self.config.mixer,
            "layer_types": self.config.layer_types,
            "dtype": str(self.dtype).removeprefix("torch."),
            "parameters": self.parameters,
            "bytes_to_write": self.parameters * self.dtype.itemsize,
            "dropped": self.dropped,
            "notes": self.notes,
        }


def describe(plan: ImportPlan) -> str:
    """The plan in a few lines for the console."""
    s = plan.summary()
    lines = [
        f"{s['format']} -> {s['student_family']} with {s['mixer']}, {s['dtype']}",
        f"layers      {layer_letters(s['layer_types'])}",
        f"parameters  {s['parameters']:,} ({human_bytes(s['bytes_to_write'])})",
        *(f"dropped     {name}: {reason}" for name, reason in s["dropped"].items()),
        *(f"note        {note}" for note in s["notes"]),
    ]
    return "\n".join(lines)


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """`name=value` pairs, values as YAML.

    Raises:
        ValueError: a pair without an equals sign.
    """
    pairs = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--set takes NAME=VALUE, not {setting!r}.")
        try:
            pairs[name.strip().replace("-", "_")] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"--set {name}: {value!r} is not a YAML value.") from error
    return pairs


def plan_import(options: ImportOptions) -> ImportPlan:
    """Recognise the format and decide everything.

    Raises:
        ValueError: not a published format, or an incomplete, quantised or contradictory checkpoint.
    """
    folder, commit = _find(options)
    base = None if options.base is None else find_teacher(options.base, with_weights=False)
    config, mamba_config = read_json(folder / "config.json"), read_json(folder / "mamba_config.json")
    check_config_not_quantised(options.source, config or {})
    checkpoint = open_weights(folder)
    source = Published(options.source, config or {}, checkpoint, mamba_config, None if base is None else base.config)
    published = recognise(source)
    ours = _make_config(published.student(source), published.fields(source), options)
    table, dropped = published.table(source, ours)
    rules = make_rules(table, tensor_shapes(ours), checkpoint.tensors, dropped, published.name)
    dtype = output_dtype(options.dtype, checkpoint.tensors)
    if base is None and not _has_tokenizer(folder):
        source.notes.append(f"no tokenizer: the checkpoint has none and no base model was given ({source.base_flag})")
    return ImportPlan(published, ours, rules, dropped, dtype, source.notes, checkpoint, folder, commit, base)


def _find(options: ImportOptions) -> tuple[Path, str | None]:
    """The folder, and the commit when it came from the Hub."""
    path = Path(options.source).expanduser()
    if path.is_file():
        raise ValueError(f"{options.source} is a file; name the folder that holds config.json and the weights.")
    if path.is_dir():
        if options.revision is not None:
            raise ValueError(f"{options.source} is local; a revision exists on the Hub only.")
        return path, None
    return download_model(options.source, options.revision, None, False, True)[:2]


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None where there is no such file.

    Raises:
        ValueError: it is not JSON, or holds something else.
    """
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object.")
    return values


def _make_config(kind: str, fields: dict[str, Any], options: ImportOptions) -> PreTrainedConfig:
    config_class = STUDENTS[kind][0]
    known = {field.name for field in dataclasses.fields(config_class)}
    unknown = sorted(set(options.settings) - known)
    if unknown:
        raise ValueError(
            f"--set {unknown[0]}: the configuration has no such field; it has {', '.join(sorted(known))}."
        )
    fields = fields | options.settings
    types = ["full_attention" if kind == "linear_attention" else kind for kind in fields["layer_types"]]
    with config_errors(f"{options.source} gives no valid configuration"):
        return config_class(**{"conversion": {"teacher_layer_types": types}} | fields)


def import_checkpoint(
    options: ImportOptions,
    on_plan: Callable[[ImportPlan], None] = lambda plan: None,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> ImportPlan:
    """Import a published hybrid.

    Args:
        on_plan: called once the plan stands. progress: called with the number of bytes of weights just written.

    Raises:
        ValueError: bad options or checkpoint. OSError: the disk.
    """
    output = Path(options.output).expanduser().resolve()
    check_output(output, options.overwrite)
    plan = plan_import(options)
    check_apart(output, plan.folder)
    if plan.base is not None:
        check_apart(output, plan.base.folder)
    on_plan(plan)
    shards = plan_shards(plan.rules, plan.dtype, parse_size(options.max_shard_size))
    with staged(output) as folder, ThreadPoolExecutor(1) as background:
        stop = threading.Event()
        hashes = background.submit(hash_files, plan.checkpoint.files, stop)
        try:
            write_shards(shards, plan.checkpoint, plan.dtype, folder, progress)
        except BaseException:
            stop.set()
            raise
        _add_side_files(plan, options, folder)
        plan.config.conversion |= _provenance(plan, options, hashes.result())
        add_code(plan.config, folder, plan.dtype)
    return plan


def _provenance(plan: ImportPlan, options: ImportOptions, weight_hashes: dict[str, str]) -> dict[str, Any]:
    is_local = os.path.isdir(os.path.expanduser(options.source))
    return {
        "imported_from": Path(options.source).name if is_local else options.source,
        "revision": plan.commit,
        "format": plan.format.name,
        "notes": plan.notes,
        "source_sha256": weight_hashes,
        "versions": {
            "convert-to-hybrid": importlib.metadata.version("convert-to-hybrid"),
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
    }


def _add_side_files(plan: ImportPlan, options: ImportOptions, folder: Path) -> None:
    """Tokenizer and generation settings, from the checkpoint or else from the base model, and the card."""
    family = get_family("phi" if plan.config.model_type == "phimamba" else "llama")
    itself = Teacher(options.source, plan.folder, plan.config, family)
    with_tokenizer = itself if _has_tokenizer(plan.folder) else plan.base
    if with_tokenizer is not None:
        add_tokenizer(with_tokenizer, folder, trust_remote_code=False)
    places = [plan.folder, *([] if plan.base is None or plan.base.gguf_file else [plan.base.folder])]
    found = next((place for place in places if (place / "generation_config.json").is_file()), None)
    if found is None:
        GenerationConfig.from_model_config(plan.config).save_pretrained(folder)
    else:
        (folder / "generation_config.json").write_bytes((found / "generation_config.json").read_bytes())
    card = ModelCardData(library_name="transformers", pipeline_tag="text-generation", tags=["convert-to-hybrid"])
    notes = "\n".join(f"- {note}" for note in plan.notes)
    title, source = Path(options.output).name, Path(options.source).name
    made = ModelCard.from_template(
        card, template_str=CARD, title=title, source=source, format=plan.format.name, notes=notes
    )
    made.save(folder / "README.md")


__all__ = [
    "ImportOptions",
    "ImportPlan",
    "describe",
    "import_checkpoint",
    "parse_settings",
    "plan_import",
    "read_json",
]
