"""python -m convert.mohawk HYBRID OUT --teacher MODEL --stage 2: one stage, or several, on an existing hybrid.

With `torchrun --nproc-per-node N -m convert.mohawk ...`, stages 1 and 2 spread their layers over the processes and
stage 3 is data-parallel.
"""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from .cli import console, one_line_errors, progress_bars, set_verbosity

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)


@app.command(no_args_is_help=True)
def mohawk_command(
    hybrid: Annotated[str, typer.Argument(metavar="HYBRID", help="Folder of a hybrid made by convert-to-hybrid.")],
    output: Annotated[str, typer.Argument(metavar="OUT", help="Folder to write.")],
    teacher: Annotated[str, typer.Option(help="The teacher it was made from: Hub id, folder or GGUF file.")],
    stage: Annotated[
        list[int], typer.Option(help="1, 2 or 3; repeat it for several. All with tokens by default.")
    ] = (),
    tokens: Annotated[int | None, typer.Option(help="Training tokens of every stage named, over the file's.")] = None,
    align_config: Annotated[str | None, typer.Option(help="YAML file with the stages' settings.")] = None,
    dataset: Annotated[str, typer.Option(help="Text, as for --calibration-dataset.")] = "default",
    column: Annotated[str, typer.Option(help="Column that holds the text.")] = "text",
    split: Annotated[str, typer.Option(help="Split of a Hub data set.")] = "train",
    work_dir: Annotated[
        str | None, typer.Option(help="Folder of checkpoints and logs (default: OUT.work, removed at the end).")
    ] = None,
    subset: Annotated[str | None, typer.Option(help="Configuration of a Hub data set.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the teacher.")] = None,
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file inside the teacher's folder or repository.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code from the teacher's repository.")
    ] = False,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of the order of the text.")] = 0,
    max_shard_size: Annotated[str, typer.Option(help="Largest weights file.")] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT, once all is well.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Errors only.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Tracebacks and library messages.")] = False,
) -> None:
    """Run stages of MOHAWK on an existing hybrid; report what each changed."""
    set_verbosity(verbose, quiet)
    with one_line_errors(verbose):
        from .config import make_config

        options = make_config(
            model=teacher, output=output, revision=revision, gguf_file=gguf_file, trust_remote_code=trust_remote_code,
            calibration_dataset=dataset, calibration_column=column, calibration_split=split,
            calibration_config=subset, device=device_of_rank(device), seed=seed, max_shard_size=max_shard_size,
            overwrite=overwrite, align_config=align_config,
        )  # fmt: skip
        with progress_bars(quiet) as (_, _, on_progress):
            report = train_existing(Path(hybrid), options, tuple(stage), tokens, work_dir, on_progress)
        if not quiet:
            for name, figures in report.items():
                shown = {key: value for key, value in figures.items() if key not in ("layers", "settings")}
                console.print(f"[green]{name}[/] {json.dumps(shown)}", highlight=False)


def device_of_rank(device: str) -> str:
    """Each process its own GPU."""
    local_rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{local_rank}" if device == "cuda" and local_rank is not None else device


def train_existing(hybrid: Path, options, stages: tuple[int, ...], tokens: int | None, work_dir: str | None, progress):
    """Train a copy of the hybrid and put it in place; what each stage reached.

    Raises:
        ValueError: bad options, or a hybrid and a teacher that do not go together.
    """
    from .alignment.aligner import calibration_rows
    from .alignment.mohawk.stages import only_stages
    from .alignment.mohawk.train import (
        load_hybrid,
        record_stages,
        replace_weights,
        stored_dtype,
        train_hybrid,
        training_rows_needed,
    )
    from .alignment.settings import read_alignment_file
    from .alignment.teacher_model import TeacherModel
    from .checkpoint.folder import check_apart, check_output, staged
    from .teachers.teacher import find_teacher

    output, writes = Path(options.output).expanduser().resolve(), int(os.environ.get("RANK", 0)) == 0
    settings = only_stages(read_alignment_file(options.align_config), stages, tokens)
    found = find_teacher(options.model, options.revision, options.gguf_file, options.trust_remote_code)
    if writes:
        check_output(output, options.overwrite)
        check_apart(output, hybrid)
        check_apart(output, found.folder)
    student = load_hybrid(hybrid)
    of_student = {"mixer": student.config.mixer, "out_bias": student.config.mixer_out_bias}
    if student.config.mixer == "none":
        of_student = {"mixer": "none", "window": student.config.hybrid_window}
    options = dataclasses.replace(options, **of_student)
    teacher = TeacherModel(found, options, found.open_weights(), options.device)
    count = training_rows_needed(settings) + settings.held_out_sequences
    rows = calibration_rows(found, teacher, options, settings.sequence_length, count, settings.held_out_sequences + 1)
    work = Path(work_dir).expanduser() if work_dir else output.with_name(f"{output.name}.work")
    student, report = train_hybrid(student, teacher, rows, settings, work, options.seed, progress)
    if writes:
        with staged(output) as folder:
            shutil.copytree(hybrid, folder, dirs_exist_ok=True)
            replace_weights(student, folder, stored_dtype(hybrid), options.max_shard_size)
            record_stages(folder, report)
        if work_dir is None:  # a folder of the user's own stays: it holds the logs, too
            shutil.rmtree(work, ignore_errors=True)
    return report


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
