"""Read what this project's commands leave behind: which files a run has, what they hold, what is wrong with them.

A run is a folder. Its kind is seen from its files, so that any mixture of conversions, scores, ladders, evaluations
and benchmarks can be named in one command. Nothing here loads a model.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HYBRIDS = ("llamba", "phimamba")
DEPTH = 2  # folders below the one named, where it holds no result itself


class RunError(ValueError):
    """A run that cannot be shown; the message says which file is at fault."""


@dataclass(frozen=True)
class Kind:
    """A file some command writes.

    Args:
        holds: whether parsed data is of this kind; several kinds share a file name.
    """

    name: str
    file: str
    command: str
    holds: Callable[[Any], bool]


@dataclass
class Part:
    """One such file, read."""

    kind: Kind
    path: Path
    data: Any


@dataclass
class Run:
    """A folder with at least one of them."""

    folder: Path
    name: str
    parts: dict[str, Part] = field(default_factory=dict)

    def get(self, kind: str) -> Any:
        """The data of a part, or None."""
        return self.parts[kind].data if kind in self.parts else None


def _with_keys(*keys: str) -> Callable[[Any], bool]:
    return lambda data: isinstance(data, dict) and all(key in data for key in keys)


def _records_with(*keys: str) -> Callable[[Any], bool]:
    return lambda data: isinstance(data, list) and bool(data) and all(_with_keys(*keys)(record) for record in data)


def _is_scores(data: Any) -> bool:
    """Those of `layer_scores`, a ladder's, which has them without a name around, or a work folder's, by rounds."""
    scores = data.get("scores", data) if isinstance(data, dict) else {}
    return (
        isinstance(scores, dict)
        and bool(scores)
        and all(re.fullmatch(r"([\d,]*\|)?\d+", k) and _with_keys("kl", "recall")(v) for k, v in scores.items())
    )


KINDS = (
    Kind("hybrid", "config.json", "convert-to-hybrid MODEL OUT",
         lambda d: isinstance(d, dict) and d.get("model_type") in HYBRIDS),
    Kind("alignment", "alignment.json", "convert-to-hybrid MODEL OUT --align closed-form",
         lambda d: isinstance(d, dict) and bool({"tokens", "stages", "held_out_error"} & set(d))),
    Kind("training", "training.json", "python -m recipes.sft", _records_with("stage", "log")),
    Kind("evaluation", "evaluation.json", "python -m recipes.evaluate MODEL", _with_keys("model")),
    Kind("layer_scores", "scores.json", "python -m recipes.layer_scores DIR", _is_scores),
    Kind("head_scores", "heads.json", "python -m recipes.head_scores DIR", _with_keys("scores", "kept", "ranked")),
    Kind("ladder", "results.jsonl", "python -m recipes.alignment_ladder DIR", _records_with("row", "attention", "kl")),
    Kind("window_ladder", "results.jsonl", "python -m recipes.window_ladder DIR",
         _records_with("row", "bytes", "layers", "kl")),
    Kind("pipeline", "results.json", "make pipeline", _with_keys("steps", "pulled")),
    Kind("bench", "results.json", "make bench",
         lambda d: isinstance(d, dict) and bool({"targets", "conversion", "scan"} & set(d))),
    Kind("bench_alignment", "alignment.json", "make bench", _with_keys("one_layer")),
    Kind("approximation", "approximation.json", "python -m recipes.matrix_approximation --output DIR",
         _with_keys("distance", "norm", "matrices")),
    Kind("swap", "swap.json", "python -m recipes.mixer_swap --output DIR", _with_keys("rows", "layers")),
    Kind("matrices", "matrices.json", "python -m recipes.mixer_matrices STUDENT... --output DIR",
         _with_keys("stages", "layers", "heads", "pixels")),
)  # fmt: skip
LOG = Kind("logs", "trainer_state.json", "a trainer's checkpoints", lambda data: True)
COMMANDS = {kind.name: kind.command for kind in KINDS}


def read_json(path: Path) -> Any:
    """A JSON or JSON-lines file.

    Raises:
        RunError: it is broken.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        return json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RunError(f"{path} is not valid JSON ({error}); write it again or leave the run out.") from error


def read_folder(folder: Path) -> dict[str, Part]:
    """The parts a folder holds by itself, and the logs below it.

    Raises:
        RunError: a file is broken.
    """
    parts = {}
    for name in dict.fromkeys(kind.file for kind in KINDS):
        path = folder / name
        if path.is_file():
            data = read_json(path)
            for kind in KINDS:
                if kind.file == name and kind.holds(data):
                    parts[kind.name] = Part(kind, path, data)
    try:
        logs = read_logs(folder)
    except (AttributeError, TypeError) as error:
        raise RunError(f"The logs in {folder} are not as this project writes them: {error}") from error
    if logs:
        parts["logs"] = Part(LOG, folder, logs)
    return parts


def read_logs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Name to records of step, loss and, where known, tokens: of stages of MOHAWK and of the Trainer's checkpoints."""
    logs = {}
    for pattern in ("*-rank0.jsonl", "stages/*-rank0.jsonl"):
        for path in sorted(folder.glob(pattern)):
            logs[path.name.removesuffix("-rank0.jsonl")] = [
                record | {"loss": sum(record["loss"].values()) / len(record["loss"])}
                for record in read_json(path)
                if isinstance(record, dict) and isinstance(record.get("loss"), dict) and record["loss"]
            ]
    newest: dict[Path, Path] = {}
    for pattern in ("", "checkpoint-*/", "*/*/checkpoint-*/", "stages/*/*/checkpoint-*/", "work/*/*/checkpoint-*/"):
        for path in folder.glob(f"{pattern}trainer_state.json"):
            kept = newest.get(path.parent.parent)
            newest[path.parent.parent] = path if kept is None else max(path, kept, key=_step)
    for path in sorted(newest.values()):
        history = read_json(path).get("log_history", [])
        records = [record for record in history if isinstance(record, dict) and "loss" in record and "step" in record]
        above = [part for part in path.relative_to(folder).parts[:-2] if not re.fullmatch(r"[0-9a-f]{16}", part)]
        name = next((part for part in reversed(above) if part not in ("work", "stages")), folder.name)
        logs[name] = records
    return {name: records for name, records in logs.items() if records}


def _step(path: Path) -> int:
    number = path.parent.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def read_runs(paths: list[Path]) -> tuple[list[Run], list[Path]]:
    """The runs in and below the folders named, and what was left out below them as nothing to report.

    Raises:
        ValueError: a path is not there, no folder, empty, or of no known kind; a file in it is broken.
    """
    runs: list[Run] = []
    left_out: list[Path] = []
    for path in dict.fromkeys(paths):
        if not path.exists():
            raise ValueError(f"{path} does not exist; give the folder of a run.")
        if not path.is_dir():
            raise ValueError(f"{path} is a file; give the folder it lies in.")
        if not any(path.iterdir()):
            raise ValueError(f"{path} is empty; give the folder of a run that has written results.")
        found, ignored = _below(path, DEPTH)
        if not found:
            files = ", ".join(dict.fromkeys(kind.file for kind in KINDS))
            raise ValueError(f"{path} is a run of no known kind: none of {files} is there as our commands write it.")
        runs += [run for run in found if run.folder.resolve() not in {known.folder.resolve() for known in runs}]
        left_out += ignored
    for run in runs:
        run.name = _name(run.folder, [other.folder for other in runs if other is not run])
    return runs, left_out


def _below(folder: Path, depth: int) -> tuple[list[Run], list[Path]]:
    parts = read_folder(folder)
    found = [Run(folder, folder.name, parts)] if parts else []
    if (parts and "pipeline" not in parts) or not depth:  # a pipeline's models are runs, too
        return found, [] if parts else [folder]
    ignored: list[Path] = []
    for child in sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")):
        if child.suffix == ".work" and child.with_suffix("").is_dir():
            continue  # what a finished run kept for another one
        more, less = _below(child, depth - 1)
        found += more
        ignored += less
    return found, ignored if found else [folder]


def _name(folder: Path, others: list[Path]) -> str:
    """As much of the path's end as tells it from the others."""
    parts = folder.resolve().parts
    for count in range(1, len(parts)):
        tail = parts[-count:]
        if all(other.resolve().parts[-count:] != tail for other in others):
            return "/".join(tail)
    return str(folder)


def parts_of(runs: list[Run], kind: str) -> list[tuple[Run, Any]]:
    """The runs that have a part of a kind, with its data."""
    return [(run, run.parts[kind].data) for run in runs if kind in run.parts]
