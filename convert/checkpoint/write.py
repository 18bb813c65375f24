"""Writing of a checkpoint folder.

Weights come first and config.json last, because its presence makes the folder a checkpoint.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import ModelCard
from transformers import PreTrainedConfig

from ..io.reader import Checkpoint
from ..io.rules import Rule
from ..io.writer import Progress, plan_shards, write_and_hash, write_shards
from .code import write_code_and_config
from .pictures import save_pictures
from .tokenizer import SideFiles, write_side_files


@dataclass(frozen=True, kw_only=True)
class Contents:
    """All that a checkpoint folder will hold; nothing of it is computed before the folder is written."""

    rules: list[Rule]
    checkpoint: Checkpoint
    """Checkpoint that the rules read."""
    dtype: torch.dtype
    max_shard_bytes: int
    side_files: SideFiles
    config: PreTrainedConfig
    card: Callable[[], ModelCard]
    """Makes the card, once the configuration is complete."""


def write_contents(
    contents: Contents,
    folder: Path,
    progress: Progress,
    record: Callable[[dict[str, str]], None] | None,
    write_config: Callable[[PreTrainedConfig, Path, torch.dtype], None] = write_code_and_config,
) -> None:
    """Stream the weights into a folder, then add everything else.

    Args:
        progress: called with a step's name, the amount done and the total.
        record: completes the configuration after the weights are written; it is passed the sha256 of each file that
            they were made from. None for a model that is no hybrid of ours, which has neither record nor pictures.
        write_config: writes config.json and the code that it names.
    """
    shards = plan_shards(contents.rules, contents.dtype, contents.max_shard_bytes)
    if record is None:
        write_shards(shards, contents.checkpoint, contents.dtype, folder, progress)
    else:
        record(write_and_hash(shards, contents.checkpoint, contents.dtype, folder, progress))
    write_side_files(contents.side_files, folder)
    contents.card().save(folder / "README.md")
    if record is not None:
        save_pictures(contents.config, folder)
    write_config(contents.config, folder, contents.dtype)
