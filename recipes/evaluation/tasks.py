"""Tasks through lm-eval's own library, for a model and its teacher, and the share of the teacher's score that is left.

The relative score is (s - r) / (t - r) over chance r. Both models read the same documents, so it is a ratio of two
means over paired values, and its standard error is the ratio estimator's (delta method, Cochran 1977, section 6.4):
that of the mean of (s_i - r_i) - R (t_i - r_i), over t - r.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from convert.teachers.teacher import first_line

from .metrics import mean


def task_manager(names: Sequence[str], include_path: str | None) -> Any:
    """Make the loader of lm-eval's tasks, and of those in a folder of YAML files."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError("Tasks need lm-eval: pip install 'convert-to-hybrid[eval]'.") from error
    if include_path is not None:
        own = TaskManager(include_path=include_path, include_defaults=False)
        if set(names) <= set(own.all_subtasks):
            return own  # lm-eval's own are thousands of files, which take seconds to look through
    manager = TaskManager(include_path=include_path)
    missing = sorted(set(names) - set(manager.all_tasks))
    if missing:
        raise ValueError(
            f"There is no task {', '.join(missing)}; `lm-eval ls tasks` lists those there are; --include-path adds "
            "a folder of your own."
        )
    return manager


def run_task(
    manager: Any,
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    limit: int | None = None,
    num_fewshot: int | None = None,
    seed: int = 0,
) -> dict[str, dict[str, Any]]:
    """One model's results on a task or a group of tasks.

    Returns:
        Per task: `chance`, the mean of 1 / choices, None where there are no choices; `chances`, the same per document;
        `metrics`, each with its `value`, whether higher is `better`, and `values` per document, None where the metric
        is not their mean.
    """
    from datasets.exceptions import DatasetsError
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    try:
        loaded = manager.load([name])
        found = simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
            tasks=list(loaded["tasks"].values()),
            task_manager=manager,
            limit=limit,
            num_fewshot=num_fewshot,
            # the standard errors are ours (`relative_score`); lm-eval would draw 100,000 times for its own
            bootstrap_iters=0,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
    except (DatasetsError, ImportError, OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise ValueError(f"The task {name} cannot be run: {first_line(error)}") from error
    return {task: _results_of(loaded["tasks"][task], task, found) for task in found["samples"]}


def _results_of(task: Any, name: str, found: dict[str, Any]) -> dict[str, Any]:
    """One task of what lm-eval returned, in the form that `run_task` returns."""
    samples, better = found["samples"][name], found["higher_is_better"].get(name, {})
    metrics = {}
    for label, value in found["results"][name].items():
        metric, _, which_filter = label.partition(",")
        if not which_filter or metric.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        values = [sample.get(metric) for sample in samples if sample["filter"] == which_filter]
        is_mean = (
            bool(values)
            and all(isinstance(v, (int, float)) for v in values)
            and math.isclose(sum(values) / len(values), value, rel_tol=1e-6, abs_tol=1e-9)
        )
        name = label
        if which_filter == "none":
            name = metric
        metrics[name] = {"value": float(value), "better": better.get(metric) is not False, "values": None}
        if is_mean:
            metrics[name]["values"] = [float(v) for v in values]
    # lm-eval lists a document once for each filter of its answers
    documents = [sample["doc"] for sample in samples if sample["filter"] == samples[0]["filter"]]
    chances = []
    if getattr(task, "OUTPUT_TYPE", None) == "multiple_choice":
        chances = [1 / len(task.doc_to_choice(document)) for document in documents]
    return {
        "documents": len(documents),
        "chance": mean(chances),
        "chances": chances or None,
        "metrics": metrics,
    }


def relative_score(
    model: Sequence[float], teacher: Sequence[float], chances: Sequence[float] | float
) -> tuple[float, float | None] | None:
    """(s - r) / (t - r) of paired scores per document, and its standard error.

    Args:
        model, teacher: a score per document, in the same order. chances: what guessing would score, on each or on all.

    Returns:
        None where the teacher does not score above chance by two standard errors: there is nothing to divide by.
    """
    s, t = (torch.tensor(list(values), dtype=torch.float64) for values in (model, teacher))
    r = torch.as_tensor(chances, dtype=torch.float64).expand_as(s)
    if len(s) < 2:
        return None
    s, t = s - r, t - r
    if t.mean() <= 2 * t.std() / math.sqrt(len(t)) or t.mean() <= 0:
        return None
    ratio = (s.mean() / t.mean()).item()
    error = (s - ratio * t).std().item() / math.sqrt(len(s)) / t.mean().item()
    return ratio, error


def side_by_side(
    model: dict[str, dict[str, Any]], teacher: dict[str, dict[str, Any]] | None, given_chance: dict[str, float]
) -> list[dict[str, Any]]:
    """A row per task and metric; `given_chance` (what guessing would score, by task) overrides the choices'."""
    rows = []
    for task, ours in model.items():
        for metric, mine in ours["metrics"].items():
            other = {"value": None, "values": None}
            if teacher is not None:
                other = teacher[task]["metrics"][metric]
            if task in given_chance:
                chance, source, chances = given_chance[task], "given", given_chance[task]
            elif ours["chances"] and metric.split(",")[0].startswith("acc"):
                chance, source, chances = ours["chance"], "choices", ours["chances"]
            else:
                chance, source, chances = 0.0, "assumed", 0.0
            row = {"task": task, "metric": metric, "documents": ours["documents"], "model": mine["value"]}
            row |= {"teacher": other["value"], "chance": chance, "chance_from": source}
            row |= {"relative": None, "relative_error": None}
            if mine["better"] and mine["values"] is not None and other["values"] is not None:
                found = relative_score(mine["values"], other["values"], chances)
                row["relative"], row["relative_error"] = found or (None, None)
            rows.append(row)
    return rows
