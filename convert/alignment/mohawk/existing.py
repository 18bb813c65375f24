"""Run stages of MOHAWK on a hybrid that exists already: `convert-to-hybrid mohawk`.

With `torchrun --nproc-per-node N -m convert.cli mohawk ...`, stages 1 and 2 spread their layers over the processes and
stage 3 is data-parallel.
"""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

from ...checkpoint.folder import check_apart, check_output, staged
from ...options import MohawkOptions
from ...plan import TeacherWeights
from ...teachers.teacher import find_teacher
from ..aligner import calibration_rows
from ..fit import Progress
from ..teacher_model import TeacherModel
from .stages import only_stages
from .train import load_hybrid, record_stages, replace_weights, stored_dtype, train_hybrid, training_rows_needed


def device_of_rank(device: str) -> str:
    """Each process its own GPU."""
    local_rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{local_rank}" if device == "cuda" and local_rank is not None else device


def train_existing(options: MohawkOptions, progress: Progress = lambda what, done, total: None) -> dict[str, Any]:
    """Train a copy of a hybrid and put it in place; what each stage reached.

    Raises:
        ValueError: bad options, or a hybrid and a teacher that do not go together.
        OSError: the disk.
    """
    hybrid, output = Path(options.hybrid).expanduser(), Path(options.output.folder).expanduser().resolve()
    writes = int(os.environ.get("RANK", 0)) == 0
    settings = only_stages(options.alignment, options.chosen_stages, options.stage_tokens)
    settings = dataclasses.replace(settings, device=device_of_rank(settings.device))
    found = find_teacher(options.teacher, options.revision, options.gguf_file, options.trust_remote_code)
    if writes:
        check_output(output, options.output.overwrite)
        check_apart(output, hybrid)
        check_apart(output, found.folder)
    student = load_hybrid(hybrid)
    conversion = dataclasses.replace(options.conversion, alignment=dataclasses.replace(settings, method="mohawk"))
    teacher = TeacherModel(TeacherWeights.of(found), conversion)
    length, held_out = conversion.sequence_length, settings.held_out_sequences
    count = training_rows_needed(settings, length) + held_out
    rows = calibration_rows(found, teacher, conversion, count, at_least=held_out + 1)
    work = Path(settings.work_dir).expanduser() if settings.work_dir else output.with_name(f"{output.name}.work")
    student, report = train_hybrid(student, teacher, rows, settings, work, options.seed, progress)
    if writes:
        with staged(output) as folder:
            shutil.copytree(hybrid, folder, dirs_exist_ok=True)
            replace_weights(student, folder, stored_dtype(hybrid), options.output.max_shard_size)
            record_stages(folder, report)
        if settings.work_dir is None:  # a folder of the user's own stays: it holds the logs, too
            shutil.rmtree(work, ignore_errors=True)
    return report
