"""A conversion, from the teacher's name to a folder that `from_pretrained` loads.

open the teacher -> resolve the options -> decide a placement -> plan -> fit -> write -> publish

Resolved: every value that follows from the options and the teacher, with the reason for it (resolve.py).
Placement: what each layer holds, a window, kept heads, a mixer or its attention (layout/placement.py).
Decision: a placement, and its parts that scores, measured on the text, have still to choose (layout/placement.py).
Plan: a placement with the hybrid's configuration, a rule for each tensor, and the cost of the fit (plan.py).

A dry run performs the first four steps. The functions for them that both share are in dry_run.py, which must not
import transformers' models.
"""

import dataclasses
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoint.card import make_card
from .checkpoint.code import versions
from .checkpoint.hub import prepare_repository, upload
from .checkpoint.tokenizer import Licence, SideFiles, read_licence
from .checkpoint.write import Contents, write_contents
from .dry_run import first_plan, open_teacher, resolve_all
from .errors import during
from .fit.aligner import Aligner, Alignment
from .fit.processes import OVER, Team, joined
from .io.folder import OutputFolder, check_apart
from .io.writer import Progress
from .layout.placement import Decision
from .options import ConversionOptions, make_options, parse_size
from .plan import Plan, dropped_in_words, make_plan
from .resolve import Resolved
from .scores.budget import Budget
from .scores.decide import decide_placement
from .teachers.weights import TeacherWeights
from .train.mohawk.stages import check_stages
from .train.mohawk.train import train_written

LOWER_FOR_FITS = "alignment.tokens or alignment.sequence_length, or for memory of the host alignment.activation_memory"
"""Names of the options to lower if a fit runs out of memory."""


def convert(model: str | None = None, output: str | os.PathLike | None = None, /, **options: Any) -> Plan:
    """Convert a teacher to a hybrid in one call.

    Args:
        model: Hub id, local folder or GGUF file.
        output: folder to write.
        options: what the command line offers, by the same names, `config` included, and the sections of a YAML file.

    Raises:
        ValueError: bad options, teacher or weights.
        OSError: the disk.

    Example:
        >>> convert("HuggingFaceTB/SmolLM2-135M-Instruct", "hybrid", attention_layers=0.25)  # doctest: +SKIP
    """
    return run(make_options(model, output, **options))


def run(
    options: ConversionOptions,
    on_plan: Callable[[Plan], None] = lambda plan: None,
    progress: Progress = lambda what, done, total: None,
) -> Plan:
    """Carry out a conversion.

    Args:
        on_plan: called with the plan before anything that takes long, and again after scores have changed it.
        progress: called with a step's name, the amount done and the total.

    Raises:
        ValueError: bad options, teacher or weights.
        OSError: the disk.
    """
    with joined() as team:
        if team.rank > 0:
            return _work_for_first(options, team)
        plan = _run(options, on_plan, progress, team)
        team.announce(OVER, plan.placement)
        return plan


def _work_for_first(options: ConversionOptions, team: Team) -> Plan:
    """Run one of the other processes: fit the layers that the first one assigns; it alone decides and writes."""
    weights, _ = open_teacher(options)
    resolved = resolve_all(options, weights)
    placement = Aligner(weights, resolved, team=team).work_for_first()
    return make_plan(weights, Decision(placement), resolved)


def _run(options: ConversionOptions, on_plan: Callable[[Plan], None], progress: Progress, team: Team) -> Plan:
    """Carry out a conversion in the first process, a function for each step."""
    # links are followed once, so that the folder that is compared and locked is the one that is written
    output = Path(os.path.realpath(Path(options.output.folder).expanduser()))
    watch = Stopwatch()
    with OutputFolder(output, options.output.overwrite, options.alignment.work_dir) as owner:
        opened = _open(options, output, team)
        watch.ended("opening")
        aligner = None
        if opened.resolved.alignment.method != "none":
            aligner = Aligner(opened.weights, opened.resolved, progress, owner.make_work(), team)
        with during(f"planning and fitting {output}", lower=LOWER_FOR_FITS):
            plan = _plan(opened, aligner, on_plan)
            watch.ended("placement")
            plan, alignment = _fit(plan, aligner)
            watch.ended("alignment")
        with during(f"writing {output}"), owner.staged() as folder:
            write(plan, alignment, opened.side_files, opened.licence, folder, progress, watch)
            if alignment is not None and plan.resolved.alignment.method == "mohawk":
                train_written(aligner, folder, owner.work / "stages", plan.dtype)
                watch.ended("training")
                record_seconds(watch.seconds, folder)
        if aligner is not None:
            aligner.finished()
    if opened.repository is not None:
        upload(output, opened.repository)
    return plan


@dataclass(frozen=True)
class Opened:
    """Teacher and resolved options of a run, and everything else that is read before any decision."""

    weights: TeacherWeights
    resolved: Resolved
    side_files: SideFiles
    licence: Licence
    repository: str | None
    """Full name of the Hub repository to publish to."""


def _open(options: ConversionOptions, output: Path, team: Team) -> Opened:
    """Open the teacher and resolve the options; refuse what can be refused before the fit, which takes minutes."""
    with during(f"reading {options.model}"):
        weights, side_files = open_teacher(options)
    resolved = resolve_all(options, weights)
    check_apart(output, weights.teacher.folder)
    licence = read_licence(weights.teacher, weights.checkpoint)
    repository = None
    if resolved.output.push_to_hub is not None:
        repository = prepare_repository(resolved.output.push_to_hub, resolved.output.private)
    if resolved.alignment.method == "mohawk":
        check_stages(resolved.alignment, resolved.mixer["mixer"], resolved.has_windows)
        if team.size > 1:
            raise ValueError(
                "A conversion's own stages train in one process. Convert without them (--align closed-form), then "
                "train the hybrid with torchrun and `convert-to-hybrid mohawk`."
            )
    return Opened(weights, resolved, side_files, licence, repository)


def _plan(opened: Opened, aligner: Aligner | None, on_plan: Callable[[Plan], None]) -> Plan:
    """Plan without scores, so that impossible options are refused at once; then with scores if a choice needs them."""
    budget = Budget(opened.weights, opened.resolved)
    plan, decision = first_plan(budget)
    on_plan(plan)
    if aligner is not None and plan.placement.replaced_layers:
        aligner.read_text()  # before scores are computed, which may take minutes
    if decision.needs_scores:
        plan = _planned_again(plan, decide_placement(budget, aligner))
        on_plan(plan)
    return plan


def _fit(plan: Plan, aligner: Aligner | None) -> tuple[Plan, Alignment | None]:
    """Fit replaced layers and offsets of keys, if there are any; return the plan with the ranks that were chosen."""
    if aligner is None or not (plan.placement.replaced_layers or plan.config.key_offsets):
        return plan, None
    alignment = aligner.align(plan)
    if alignment.placement != plan.placement:
        plan = _planned_again(plan, Decision(alignment.placement))
    return plan, alignment


def _planned_again(plan: Plan, decision: Decision) -> Plan:
    """Make the plan of another placement; the estimated cost is still that of the first."""
    again = make_plan(plan.weights, decision, plan.resolved)
    return dataclasses.replace(again, alignment_bytes=plan.alignment_bytes)


class Stopwatch:
    """Seconds of each stage of a run, from the end of the one before it."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def ended(self, stage: str) -> None:
        """Note that a stage has ended."""
        now = time.perf_counter()
        self.seconds[stage] = round(now - self._last, 1)
        self._last = now


def write(
    plan: Plan,
    alignment: Alignment | None,
    side_files: SideFiles,
    licence: Licence,
    folder: Path,
    progress: Progress,
    watch: Stopwatch,
) -> None:
    """Write the hybrid into a folder, with the report of its fit."""
    output = plan.resolved.output
    rules = plan.rules
    if alignment is not None:
        rules = alignment.rules(plan)
        (folder / "alignment.json").write_text(json.dumps(alignment.report, indent=2) + "\n")

    def record(hashes: dict[str, str]) -> None:
        watch.ended("writing")
        plan.config.conversion |= provenance(plan, alignment)
        plan.config.conversion |= {"teacher_sha256": hashes, "seconds": watch.seconds}

    contents = Contents(
        rules=rules,
        checkpoint=plan.weights.checkpoint,
        dtype=plan.dtype,
        max_shard_bytes=parse_size(output.max_shard_size),
        side_files=side_files,
        config=plan.config,
        card=lambda: make_card(plan, output.push_to_hub or Path(output.folder).name, licence),
    )
    write_contents(contents, folder, progress, record)


def record_seconds(seconds: dict[str, float], folder: Path) -> None:
    """Write the seconds of each stage into the configuration of a hybrid that was trained after it was written."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["conversion"]["seconds"] = seconds
    path.write_text(json.dumps(config, indent=2) + "\n")


def provenance(plan: Plan, alignment: Alignment | None) -> dict[str, Any]:
    """Record a hybrid's origin for its configuration, without paths of this machine."""
    align = "none"
    calibration = {}
    if alignment is not None:
        align = plan.resolved.alignment.method
        calibration = {k: alignment.report[k] for k in ("text", "tokens")}
    return {
        "teacher": plan.teacher.public_name,
        "teacher_revision": plan.teacher.revision,
        "teacher_model_type": plan.teacher.family.model_type,
        "align": align,
        "calibration": calibration,
        "options": plan.resolved.said,
        "notes": [*plan.notes, *(f"dropped {text}" for text in dropped_in_words(plan))] or None,
        "versions": versions(),
    }
