"""Run the stages of MOHAWK on a hybrid in a folder and put the trained weights in place of its own.

A conversion does so at its end; `convert-to-hybrid mohawk` does so with a hybrid that exists already. With `torchrun
--nproc-per-node N -m convert.cli mohawk ...`, stages 1 and 2 spread their layers over the processes and stage 3 is
data-parallel.
"""

import contextlib
import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedConfig

from ...checkpoint.card import ALIGNMENT_NOTES, KL_ROW, NO_FIGURES, renewed
from ...checkpoint.load import check_whole
from ...fit.aligner import Aligner
from ...fit.teacher_model import TeacherModel
from ...fit.text import CalibrationRows, calibration_rows
from ...hybrids.shapes import HYBRIDS, model_class
from ...io.folder import MARKER, OutputFolder, check_apart
from ...io.rules import Rule
from ...io.writer import Progress, plan_shards, write_shards
from ...options import AlignmentOptions, MohawkOptions, default_sequence_length, evicted_tokens, parse_size
from ...teachers.teacher import find_teacher
from ...teachers.weights import TeacherWeights
from .stages import STAGES, Stages, only_stages


def load_hybrid(folder: Path) -> nn.Module:
    """A hybrid this project wrote, in float32; the code is the project's own, not the folder's."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json, so it is no hybrid.")
    model_type = json.loads(path.read_text()).get("model_type")
    if model_type not in HYBRIDS:
        raise ValueError(f"{folder} holds a {model_type} model, not a hybrid; make one with convert-to-hybrid first.")
    try:
        loading = model_class(model_type).from_pretrained
        hybrid, found = loading(folder, dtype=torch.float32, output_loading_info=True)
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise ValueError(f"{folder} does not load: {' '.join(str(error).split())}") from error
    check_whole(folder, found)
    return hybrid


def stored_dtype(folder: Path) -> torch.dtype:
    """The type of a hybrid's weights on disk."""
    return getattr(torch, json.loads((folder / "config.json").read_text())["dtype"])


def replace_weights(student: nn.Module, folder: Path, dtype: torch.dtype, max_shard_size: int | str) -> None:
    """Write the student's weights into `folder`, in place of those there."""
    # shards of another number have other names, and would stay beside the new ones
    for old in (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")):
        old.unlink()
    rules = []
    for name, tensor in student.state_dict().items():
        if name == "lm_head.weight" and student.config.tie_word_embeddings:
            continue
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} is not finite after training; lower the learning rate.")
        tensor = tensor.detach().cpu()
        rules.append(Rule(name, tuple(tensor.shape), "derived", (), lambda checkpoint, tensor=tensor: iter([tensor])))
    write_shards(plan_shards(rules, dtype, parse_size(max_shard_size)), None, dtype, folder)


def training_rows_needed(settings: AlignmentOptions, sequence_length: int) -> int:
    """Number of sequences that the longest of the stages reads."""
    return max(-(-getattr(settings, name).tokens // sequence_length) for name in STAGES.values())


def train_hybrid(
    student: nn.Module,
    teacher: TeacherModel,
    text: CalibrationRows,
    settings: AlignmentOptions,
    work: Path,
    seed: int = 0,
    progress: Progress = lambda what, done, total: None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Train a hybrid on text, whose last rows are held out.

    Args:
        work: folder for checkpoints and logs.

    Returns:
        The trained hybrid and what each stage reached.
    """
    rows = text.ids
    held = settings.held_out_sequences
    stages = Stages(
        teacher, student.to(teacher.device), rows[:-held], rows[-held:], settings, work, seed, progress, text.begin
    )
    report = stages.run()
    for name, figures in report.items():
        figures["settings"] = dataclasses.asdict(getattr(settings, name))
        figures["distinct_tokens"] = rows[:-held].numel()
    return stages.student, report


def record_stages(folder: Path, report: dict[str, Any]) -> None:
    """Add what the stages reached to the hybrid's `alignment.json`; its configuration and card say that they ran."""
    path = folder / "alignment.json"
    config_path = folder / "config.json"
    known = {}
    if path.is_file():
        known = json.loads(path.read_text())
    known["stages"] = [*known.get("stages", []), report]
    path.write_text(json.dumps(known, indent=2) + "\n")
    config = json.loads(config_path.read_text())
    config["conversion"] = (config.get("conversion") or {}) | {"align": "mohawk"}
    card = folder / "README.md"
    if card.is_file():
        reached = [figures["held_out_kl_after"] for figures in report.values() if "held_out_kl_after" in figures]
        measured = {}
        if reached:
            measured = {KL_ROW: f"{reached[-1]:.3f} on held-out text"}
        card.write_text(renewed(card.read_text(), NO_FIGURES | measured, ALIGNMENT_NOTES["mohawk"]))
    config_path.write_text(json.dumps(config, indent=2) + "\n")


def train_written(aligner: Aligner, folder: Path, work: Path, dtype: torch.dtype) -> None:
    """Run the stages of a conversion on the hybrid in `folder`, and put the trained weights in place of its own.

    Args:
        work: folder for checkpoints and logs. dtype: the type of the weights that are written.
    """
    resolved = aligner.resolved
    fitted_on = len(aligner.ids)
    count = fitted_on + training_rows_needed(resolved.alignment, resolved.sequence_length)
    rows = aligner.rows(count, at_least=fitted_on)
    student, report = train_hybrid(
        load_hybrid(folder), aligner.model, rows, resolved.alignment, work, resolved.seed, aligner.progress
    )
    replace_weights(student, folder, dtype, resolved.output.max_shard_size)
    record_stages(folder, report)


def with_sequence_length(settings: AlignmentOptions, config: PreTrainedConfig) -> AlignmentOptions:
    """Choose the length of the training sequences where none is given; refuse one in which no window loses a token."""
    windows = [config.window_of(i) for i, kind in enumerate(config.layer_types) if kind == "hybrid"]
    widest = max(windows, default=0)
    kept = config.hybrid_sinks + config.hybrid_salient
    length = settings.sequence_length
    if length is None:
        length = default_sequence_length(bool(windows), widest + kept)
    if windows and evicted_tokens(length, widest, kept, config.hybrid_block) <= 0:
        raise ValueError(
            f"alignment.sequence_length {length} leaves nothing beyond the windows of this hybrid, "
            f"which hold {widest + kept} tokens; make it longer."
        )
    return dataclasses.replace(settings, sequence_length=length)


def train_existing(options: MohawkOptions, progress: Progress = lambda what, done, total: None) -> dict[str, Any]:
    """Train a copy of a hybrid and put it in place; what each stage reached.

    Raises:
        ValueError: bad options, or a hybrid and a teacher that do not go together.
        OSError: the disk.
    """
    hybrid = Path(options.hybrid).expanduser()
    output = Path(options.output.folder).expanduser().resolve()
    # every process trains, one writes
    writes = int(os.environ.get("RANK", 0)) == 0
    settings = only_stages(options.alignment, options.chosen_stages, options.stage_tokens)
    local_rank = os.environ.get("LOCAL_RANK")
    if settings.device == "cuda" and local_rank is not None:  # each process has its own GPU
        settings = dataclasses.replace(settings, device=f"cuda:{local_rank}")
    found = find_teacher(options.teacher, options.revision, options.gguf_file, options.trust_remote_code)
    owner = OutputFolder(output, options.output.overwrite, settings.work_dir)
    with owner if writes else contextlib.nullcontext():
        if writes:
            check_apart(output, hybrid)
            check_apart(output, found.folder)
            owner.make_work()
        student = load_hybrid(hybrid)
        settings = with_sequence_length(settings, student.config)
        asked = options.output.dtype
        if asked == "auto":
            dtype = stored_dtype(hybrid)
        else:
            dtype = getattr(torch, asked)
        teacher = TeacherModel(TeacherWeights.of(found), settings.device)
        held_out = settings.held_out_sequences
        count = training_rows_needed(settings, settings.sequence_length) + held_out
        trusted = options.trust_remote_code
        rows = calibration_rows(found, teacher, settings, count, held_out + 1, options.seed, trusted)
        student, report = train_hybrid(student, teacher, rows, settings, owner.work, options.seed, progress)
        if writes:
            with owner.staged() as folder:
                shutil.copytree(hybrid, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MARKER))
                replace_weights(student, folder, dtype, options.output.max_shard_size)
                record_stages(folder, report)
    return report
