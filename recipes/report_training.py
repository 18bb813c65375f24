"""The section on training: loss and KL against tokens, from training records, alignment stages and trainers' logs."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from .report_data import Run, parts_of
from .report_drawing import Line, number
from .report_figures import lines_figure
from .report_page import Picture, Section, Table, slug
from .report_sections import source

STAGE_NAMES = {
    "matrix_orientation": "stage 1, matrix orientation",
    "hidden_state_alignment": "stage 2, hidden states",
    "distillation": "stage 3, distillation",
}


UNITS = {"KL": "KL to the teacher, nats per token", "loss": "loss", "layers": "loss, mean over layers"}
TITLES = {"KL": "KL", "loss": "Loss", "layers": "Loss of the layers"}
CURVES_A_PICTURE = 6


@dataclass
class Curve:
    """What a line counts, against what, and where it comes from."""

    what: str
    axis: str
    line: Line
    source: str


def training_section(runs: list[Run]) -> Section:
    """Loss and KL against tokens, of every run that trained."""
    section = Section("training", "Training", "Loss and KL to the teacher against the tokens that were trained on.")
    curves = [*recorded(runs), *logged(runs), *stage_three(runs)]
    for what, axis in sorted({(curve.what, curve.axis) for curve in curves}):
        here = [curve for curve in curves if (curve.what, curve.axis) == (what, axis)]
        for page, first in enumerate(range(0, len(here), CURVES_A_PICTURE)):
            section.pictures.append(_picture(what, axis, here[first : first + CURVES_A_PICTURE], page))
    return section


def _picture(what: str, axis: str, curves: list[Curve], page: int) -> Picture:
    lines = [curve.line for curve in curves]
    ends = "; ".join(f"{line.name} {number(line.y[0])} → {number(line.y[-1])}" for line in lines)
    rows = [
        [line.name, number(line.x[-1]), str(len(line.x)), *map(number, (line.y[0], line.y[-1], min(line.y)))]
        for line in lines
    ]
    return Picture(
        slug("training", what, axis, page or ""), f"{TITLES[what]} against {axis}",
        lines_figure(lines, axis, UNITS[what], from_zero=True), f"{UNITS[what]} against {axis}: {ends}.",
        f"From the first to the last record: {ends}.", " — ".join(dict.fromkeys(curve.source for curve in curves)),
        Table(["run", f"last {axis}", "records", "first", "last", "least"], rows),
    )  # fmt: skip


def recorded(runs: list[Run]) -> list[Curve]:
    """Of training.json; a stage that a later model has inherited is shown once."""
    curves, known = [], []
    for run, stages in parts_of(runs, "training"):
        for i, stage in enumerate(stages):
            if stage["log"] in known:
                continue
            known.append(stage["log"])
            name = f"{run.name}, {stage['stage']}" + (f" {i + 1}" if len(stages) > 1 else "")
            for key, what, note in (
                ("loss", "loss", ""), ("eval_loss", "loss", ", held out"), ("kl", "KL", ""),
                ("eval_kl", "KL", ", held out"),
            ):  # fmt: skip
                curves += _curve(what, f"{name}{note}", stage["log"], key, source(run, "training"))
    return curves


def logged(runs: list[Run]) -> list[Curve]:
    """Of the logs that MOHAWK's stages and trainers leave in work folders."""
    curves = []
    for run, logs in parts_of(runs, "logs"):
        where = f"{run.folder} · {run.parts['logs'].kind.command}"
        tokens_a_step = ladder_tokens_a_step(run.folder, logs)
        for name, records in logs.items():
            if name in STAGE_NAMES:
                layerwise = name != "distillation"
                curves += _curve(
                    "layers" if layerwise else "KL", f"{run.name}, {STAGE_NAMES[name]}", records, "loss", where
                )
            elif tokens_a_step:
                counted = [record | {"tokens": record["step"] * tokens_a_step} for record in records]
                told = re.sub(r" (0\.\d+)$", lambda found: f", {100 * float(found[1]):g} %", name)
                curves += _curve("KL", told, counted, "loss", where)
            else:
                curves += _curve("loss", name, records, "loss", where)
    return curves


def stage_three(runs: list[Run]) -> list[Curve]:
    """Held-out KL before and after MOHAWK's stage 3."""
    curves = []
    for run, data in parts_of(runs, "alignment"):
        for stages in data.get("stages") or []:
            if figures := stages.get("distillation"):
                ends = [figures["held_out_kl_before"], figures["held_out_kl_after"]]
                line = Line(f"{run.name}, stage 3, held out", [0, figures["tokens"]], ends)
                curves.append(Curve("KL", "tokens", line, source(run, "alignment")))
    return curves


def _curve(what: str, name: str, log: list[dict], key: str, where: str) -> list[Curve]:
    """One curve of a log, or none where it has fewer than two points; tokens are those counted so far."""
    count = next((k for k in ("num_tokens", "tokens") if any(k in record for record in log)), None)
    seen, points = 0.0, []
    for record in log:
        seen = record.get(count, seen) if count else record.get("step", seen)
        if isinstance(record.get(key), int | float) and math.isfinite(record[key]):
            points.append((seen, record[key]))
    if len(points) < 2:
        return []
    x, y = map(list, zip(*points, strict=True))
    return [Curve(what, "tokens" if count else "steps", Line(name, x, y), where)]


def ladder_tokens_a_step(folder: Path, logs: dict[str, list[dict]]) -> float | None:
    """Of a ladder's stage 3, from its arguments; None where they say nothing."""
    path = folder / "arguments.json"
    try:
        total = int(json.loads(path.read_text())["stage3_tokens"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return total / max(record["step"] for records in logs.values() for record in records)
