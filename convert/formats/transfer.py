"""Common steps of import and export: options, a plan, and writing it as a checkpoint in a new format."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedConfig

from ..checkpoint.code import KERNELS, NEEDED, versions
from ..checkpoint.pictures import CACHE, LAYERS
from ..checkpoint.tokenizer import (
    Licence,
    SideFiles,
    has_tokenizer,
    read_licence,
    read_side_files,
)
from ..checkpoint.write import Contents, write_contents
from ..errors import during
from ..hybrids.shapes import layer_letters
from ..io.folder import OutputFolder, check_apart
from ..io.reader import Checkpoint
from ..io.rules import Rule
from ..io.writer import Progress, human_bytes
from ..options import ExportOptions, ImportOptions, parse_size
from ..teachers.teacher import Teacher, cached_repository, download_model

CARD = """---
{{ card_data }}
---

# {{ title }}

{{ description }}

{{ notes }}
{{ pictures }}
"""

TransferOptions = ImportOptions | ExportOptions


@dataclass(frozen=True, kw_only=True)
class TransferPlan:
    """The plan of an import or export, made before any weight is copied."""

    source: Teacher
    """The hybrid that is read; its configuration is one of ours."""
    from_format: str
    to_format: str
    config: PreTrainedConfig
    """The configuration that is written."""
    rules: list[Rule]
    dtype: torch.dtype
    checkpoint: Checkpoint
    description: str
    """Description in the model card."""
    notes: list[str]
    dropped: dict[str, str]
    """Tensors that are left out, and why."""
    base: Teacher | None = None
    """The model that supplies a tokenizer and generation settings where the source has none."""
    provenance: dict[str, Any] | None = None
    """Record of the source in the written configuration; None for none."""

    def record(self, hashes: dict[str, str]) -> None:
        """Complete the configuration with the sha256 of each file that was read."""
        self.config.conversion |= self.provenance | {"source_sha256": hashes, "versions": versions()}


def describe(plan: TransferPlan) -> str:
    """The plan in a few lines for the console."""
    parameters = sum(math.prod(rule.shape) for rule in plan.rules)
    lines = [
        f"{plan.from_format} -> {plan.to_format}, {str(plan.dtype).removeprefix('torch.')}",
        f"layers      {layer_letters(plan.source.config.layer_types)}",
        f"parameters  {parameters:,} ({human_bytes(parameters * plan.dtype.itemsize)})",
        *(f"dropped     {name}: {reason}" for name, reason in plan.dropped.items()),
        *(f"note        {note}" for note in plan.notes),
    ]
    return "\n".join(lines)


def find_checkpoint(options: TransferOptions) -> tuple[Path, str | None]:
    """The folder of the checkpoint, and the commit when it came from the Hub."""
    path = Path(options.model).expanduser()
    if path.is_file():
        raise ValueError(f"{options.model} is a file; name the folder that holds config.json and the weights.")
    if path.is_dir():
        if options.revision is not None:
            raise ValueError(f"{options.model} is local; a revision exists on the Hub only.")
        return path, (cached_repository(path) or (None, None))[1]
    return download_model(options.model, options.revision, None, options.trust_remote_code, True)[:2]


def transfer(
    options: TransferOptions,
    make_plan: Callable[[Any], TransferPlan],
    write_config: Callable[[PreTrainedConfig, Path, torch.dtype], None],
    on_plan: Callable[[TransferPlan], None],
    progress: Progress,
) -> TransferPlan:
    """Plan, then write weights, tokenizer, generation settings, card and configuration.

    Args:
        write_config: writes config.json, last of all files, and the code it refers to.
        on_plan: called once the plan is made, before anything is written.
        progress: called with a step's name, the amount done and the total.

    Raises:
        ValueError: bad options or checkpoint. OSError: the disk.
    """
    output = Path(os.path.realpath(Path(options.output.folder).expanduser()))
    with OutputFolder(output, options.output.overwrite) as owner:
        with during(f"reading {options.model}"):
            plan = make_plan(options)
        models = [plan.source, plan.base]
        if plan.base is None:
            models = [plan.source]
        for model in models:
            check_apart(output, model.folder)
        with_tokenizer = [model for model in models if model.gguf_file or has_tokenizer(model.folder)]
        giver = (with_tokenizer or models)[0]
        trusted = options.trust_remote_code
        with_settings = [m for m in models if not m.gguf_file and (m.folder / "generation_config.json").is_file()]
        settings_from = (with_settings or models)[0]
        side_files, notes = read_side_files(giver, trusted, plan.config.model_type, settings_from)
        plan.notes.extend(notes)
        licence = next((found for model in models if (found := read_licence(model, plan.checkpoint))), {})
        on_plan(plan)
        with during(f"writing {output}"), owner.staged() as folder:
            contents = _contents(plan, side_files, licence, options)
            record = plan.record if plan.provenance is not None else None
            write_contents(contents, folder, progress, record, write_config)
    return plan


def _contents(plan: TransferPlan, side_files: SideFiles, licence: Licence, options: TransferOptions) -> Contents:
    return Contents(
        rules=plan.rules,
        checkpoint=plan.checkpoint,
        dtype=plan.dtype,
        max_shard_bytes=parse_size(options.output.max_shard_size),
        side_files=side_files,
        config=plan.config,
        card=lambda: _card(plan, Path(options.output.folder).name, licence),
    )


def _card(plan: TransferPlan, title: str, licence: Licence) -> ModelCard:
    data = ModelCardData(
        library_name="transformers", pipeline_tag="text-generation", tags=["convert-to-hybrid"], **licence
    )
    notes = "\n".join(f"- {note}" for note in plan.notes)
    pictures = needed = ""
    if plan.provenance is not None:
        needed = f" It loads with `{NEEDED}`.\n\n{KERNELS}"
        pictures = f"![layers and heads]({LAYERS})\n![cache against length]({CACHE})"
    return ModelCard.from_template(
        data, template_str=CARD, title=title, description=plan.description + needed, notes=notes, pictures=pictures
    )
