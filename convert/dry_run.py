"""First steps of a conversion, which are all of a dry run: open the teacher, and plan from the weights' headers.

This module does not import transformers' models, which takes seconds; only code that computes scores or writes the
hybrid does (pipeline.py).
"""

import dataclasses

from .checkpoint.tokenizer import SideFiles, read_side_files
from .errors import during
from .fit.memory_estimate import alignment_bytes
from .layout.placement import Decision
from .options import ConversionOptions
from .plan import Plan, make_plan
from .resolve import Resolved, resolve
from .scores.budget import Budget, follow_windows
from .scores.decide import decide_placement
from .teachers.teacher import find_teacher
from .teachers.weights import TeacherWeights


def plan_conversion(options: ConversionOptions) -> Plan:
    """Plan what `run` would do, from the files beside the weights and from the weights' headers.

    Weights are read only from local files, and only a stored head and the embedding that it is tied to. Layers and
    heads that only scores can choose are placed evenly; their numbers and bytes are right if the bits of full
    attention turn out to be those shown.
    """
    with during(f"reading {options.model}"):
        weights, _ = open_teacher(options, with_weights=False)
    plan, _ = first_plan(Budget(weights, resolve_all(options, weights)))
    return plan


def open_teacher(options: ConversionOptions, with_weights: bool = True) -> tuple[TeacherWeights, SideFiles]:
    """Find the teacher, map its tensors to the hybrid's, and read its tokenizer and generation settings.

    `with_weights=False` leaves safetensors on the Hub.
    """
    trusted = options.trust_remote_code
    weights = TeacherWeights.of(
        find_teacher(options.model, options.revision, options.gguf_file, trusted, with_weights)
    )
    side_files, notes = read_side_files(weights.teacher, trusted, weights.config.model_type)
    return dataclasses.replace(weights, notes=notes), side_files


def resolve_all(options: ConversionOptions, weights: TeacherWeights) -> Resolved:
    """Return every decision that options and teacher allow: also those that take the sizes of a placement.

    Raises:
        ValueError: as `resolve` and `follow_windows`.
    """
    return follow_windows(weights, resolve(options, weights))


def first_plan(budget: Budget) -> tuple[Plan, Decision]:
    """Plan without scores, and estimate the memory of the alignment.

    Raises:
        ValueError: no placement fits into the budget, or --export-ready was given and no architecture can hold the
            hybrid.
    """
    decision = decide_placement(budget)
    plan = make_plan(budget.weights, decision, budget.resolved)
    if budget.resolved.export_ready:
        from .formats.export import check_exportable

        check_exportable(plan.config)
    return dataclasses.replace(plan, alignment_bytes=alignment_bytes(plan)), decision
