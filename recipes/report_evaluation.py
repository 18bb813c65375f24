"""Sections on what `recipes.evaluate` measured: likelihood by position, recall, generation, tasks, speed."""

import math
from typing import Any

from .report_data import Run, parts_of
from .report_drawing import Line, number, tokens
from .report_figures import dots_figure, lines_figure
from .report_page import Picture, Section, Table, slug
from .report_quality import KL, half_width
from .report_sections import interval, labelled, named, of_run, source


def evaluation_section(runs: list[Run]) -> Section:
    """All of it but speed."""
    section = Section(
        "evaluation", "Evaluation", "Likelihood, recall, generation and tasks, beside the teacher in the same run."
    )
    evaluated = parts_of(runs, "evaluation")
    if any(data.get("text") for _, data in evaluated):
        section.pictures += position_pictures(evaluated)
        section.tables.append(text_table(evaluated))
    for run, data in evaluated:
        section.pictures += recall_pictures(run, data.get("recall") or [], evaluated)
        if data.get("tasks"):
            section.pictures.append(task_picture(run, data["tasks"], evaluated))
    if any(data.get("generation") for _, data in evaluated):
        section.tables.append(generation_table(evaluated))
    return section


def text_table(evaluated: list[tuple[Run, dict]]) -> Table:
    """A row per hybrid and text."""
    rows = []
    for run, data in evaluated:
        for text in data.get("text") or []:
            kl = text.get("kl") or {}
            rows.append(
                [
                    labelled(run, evaluated, text["name"]), f"{text['sequences']} × {number(text['length'])}",
                    interval(kl.get("mean"), half_width(kl.get("interval"))), number(text.get("perplexity")),
                    number(text.get("teacher_perplexity")), number(text.get("perplexity_ratio")),
                    number(text.get("agreement")),
                ]
            )  # fmt: skip
    header = ["text", "tokens", "KL, nats", "perplexity", "teacher's", "ratio", "top-1 agreement"]
    return Table(header, rows, "", " — ".join(source(run, "evaluation") for run, _ in evaluated))


def position_pictures(evaluated: list[tuple[Run, dict]]) -> list[Picture]:
    """KL and perplexity by position, a curve per hybrid and text."""
    kl, perplexity = [], []
    for run, data in evaluated:
        for text in data.get("text") or []:
            spans = text.get("by_position") or []
            if len(spans) < 2:
                continue
            name = labelled(run, evaluated, text["name"])
            middle = [(span["start"] + span["stop"]) / 2 for span in spans]
            kl.append(Line(name, middle, [span["kl"] for span in spans]))
            perplexity.append(Line(name, middle, [span["perplexity"] for span in spans]))
            if not any(line.name == f"teacher, {text['name']}" for line in perplexity):
                theirs = [span["teacher_perplexity"] for span in spans]
                perplexity.append(Line(f"teacher, {text['name']}", middle, theirs, color="grey", dashed=True))
    where = " — ".join(source(run, "evaluation") for run, _ in evaluated)
    pictures = []
    for name, lines, unit, told in (
        ("position-kl", kl, KL, "Each point is the mean over a span of positions, drawn at its middle."),
        ("position-perplexity", perplexity, "perplexity", "Dashed: the teacher on the same text."),
    ):
        for page in range(0, len(lines), 7):
            shown = lines[page : page + 7]
            ends = "; ".join(f"{line.name} {number(line.y[0])} to {number(line.y[-1])}" for line in shown)
            pictures.append(
                Picture(slug(name, page or ""), f"{'KL' if unit == KL else 'Perplexity'} by position",
                        lines_figure(shown, "position in the text, tokens", unit, context=True, from_zero=unit == KL),
                        f"{unit} from the first to the last positions: {ends}.", told, where,
                        Table(["", *(tokens(x) for x in shown[0].x)],
                              [[line.name, *map(number, line.y)] for line in shown]))
            )  # fmt: skip
    return pictures


def recall_pictures(run: Run, rows: list[dict], evaluated: list[Any]) -> list[Picture]:
    """Accuracy against length, a picture per probe."""
    pictures = []
    for probe in dict.fromkeys(row["probe"] for row in rows):
        own = [row for row in rows if row["probe"] == probe]
        lengths = sorted({row["length"] for row in own})
        lines = []
        for which in ("model", "teacher"):
            means, errors = [], []
            for length in lengths:
                values = [row for row in own if row["length"] == length]
                means.append(sum(row[which] for row in values) / len(values))
                squares = sum((row.get("standard_error") or 0.0) ** 2 for row in values)
                errors.append(1.96 * math.sqrt(squares) / len(values))
            theirs = which == "teacher"
            name = "teacher" if theirs else "hybrid"
            lines.append(Line(name, lengths, means, None if theirs else errors, "grey" if theirs else "blue", theirs))
        cells = [
            [tokens(row["length"]), "–" if row.get("distance") is None else number(row["distance"]),
             number(row["model"]), number(row["teacher"]), number(row.get("standard_error")),
             number(row.get("samples"))]
            for row in own
        ]  # fmt: skip
        ends = f"{number(lines[0].y[0])} at {tokens(lengths[0])} to {number(lines[0].y[-1])} at {tokens(lengths[-1])}"
        pictures.append(
            Picture(slug("recall", probe, run.name if len(evaluated) > 1 else ""),
                    f"Recall: {str(probe).replace('_', ' ')}{of_run(run, evaluated)}",
                    lines_figure(lines, "tokens of context", "share answered right", context=True, from_zero=True),
                    f"Accuracy of the hybrid from {ends}; of the teacher {number(lines[1].y[0])} to "
                    f"{number(lines[1].y[-1])}.",
                    "Means over what the probe asks at each length; whiskers are 95 % intervals of the hybrid's.",
                    source(run, "evaluation"),
                    Table(["length", "distance", "hybrid", "teacher", "standard error", "samples"], cells))
        )  # fmt: skip
    return pictures


def task_picture(run: Run, tasks: list[dict], evaluated: list[Any]) -> Picture:
    """Scores of the hybrid between chance and the teacher."""
    names = [task["task"] for task in tasks]
    places = list(range(len(tasks)))
    chance = [math.nan if task.get("chance") is None else task["chance"] for task in tasks]
    errors = [1.96 * (task.get("standard_error") or 0.0) for task in tasks]
    lines = [
        Line("hybrid", places, [task["model"] for task in tasks], errors, "blue"),
        Line("teacher", places, [task["teacher"] for task in tasks], None, "red"),
        Line("chance", places, chance, None, "grey"),
    ]
    cells = [
        [task["task"], str(task.get("metric", "")), number(task["model"]), number(task["teacher"]),
         number(task.get("chance")), number(task.get("relative")), number(task.get("standard_error")),
         number(task.get("documents"))]
        for task in tasks
    ]  # fmt: skip
    relative = "; ".join(f"{task['task']} {number(task.get('relative'))}" for task in tasks)
    return Picture(
        named("tasks", evaluated, run), f"Tasks{of_run(run, evaluated)}", dots_figure(names, lines, "score"),
        f"Scores of hybrid, teacher and chance; relative scores: {relative}.",
        f"Relative scores, (hybrid − chance) ⁄ (teacher − chance): {relative}. Whiskers: 1.96 standard errors.",
        source(run, "evaluation"),
        Table(["task", "metric", "hybrid", "teacher", "chance", "relative", "standard error", "documents"], cells),
    )  # fmt: skip


def generation_table(evaluated: list[tuple[Run, dict]]) -> Table:
    """A row per hybrid."""
    rows = []
    for run, data in evaluated:
        made = data.get("generation")
        if made:
            rules = made.get("instructions") or {}
            rows.append([run.name, number(made.get("greedy_agreement")), number(made.get("repetition")),
                         number(made.get("teacher_repetition")), number(rules.get("model")),
                         number(rules.get("teacher")), number(rules.get("count"))])  # fmt: skip
    header = ["generation", "greedy agreement", "repetition", "teacher's", "instructions followed", "teacher's", "of"]
    return Table(header, rows, "", " — ".join(source(run, "evaluation") for run, _ in evaluated))


def speed_section(runs: list[Run]) -> Section:
    """Throughput and cache against context, hybrid and teacher."""
    section = Section("speed", "Speed and memory", "Throughput and cache as the context grows, beside the teacher.")
    evaluated = [(run, data) for run, data in parts_of(runs, "evaluation") if data.get("speed")]
    for run, data in evaluated:
        rows = data["speed"]
        header = ["", "batch", "context", "prefill, tokens/s", "decode, tokens/s", "s a token", "cache, MB"]
        cells = [
            ["hybrid" if row["which"] == "model" else "teacher", str(row["batch"]), tokens(row["context"]),
             *(number(row.get(key)) for key in
               ("prefill_tokens_per_second", "decode_tokens_per_second", "seconds_per_token")),
             number(row["cache_bytes"] / 1e6) if row.get("cache_bytes") is not None else "–"]
            for row in rows
        ]  # fmt: skip
        for key, title, unit, scale in (
            ("decode_tokens_per_second", "Decoding", "tokens per second", 1),
            ("prefill_tokens_per_second", "Reading a prompt", "tokens per second", 1),
            ("cache_bytes", "Cache", "MB in all", 1e6),
        ):
            lines = speed_lines(rows, key, scale)
            if not lines:
                continue
            told = "; ".join(f"{line.name} {number(line.y[-1])} at {tokens(line.x[-1])}" for line in lines)
            section.pictures.append(
                Picture(slug("speed", key.split("_")[0], run.name if len(evaluated) > 1 else ""),
                        f"{title}{of_run(run, evaluated)}",
                        lines_figure(lines, "tokens of context", unit, context=True, from_zero=True),
                        f"{title}, {unit}: {told}.", f"At the longest context: {told} {unit}.",
                        source(run, "evaluation"), Table(header, cells))
            )  # fmt: skip
    return section


def speed_lines(rows: list[dict], key: str, scale: float) -> list[Line]:
    """A curve per model and batch size."""
    lines, batches = [], sorted({row["batch"] for row in rows})
    for which in ("model", "teacher"):
        for i, batch in enumerate(batches[:3]):
            own = sorted((row for row in rows if row["which"] == which and row["batch"] == batch
                          and row.get(key) is not None), key=lambda row: row["context"])  # fmt: skip
            name = "hybrid" if which == "model" else "teacher"
            if own:
                lines.append(
                    Line(name + (f", batch {batch}" if len(batches) > 1 else ""), [row["context"] for row in own],
                         [row[key] / scale for row in own],
                         color=("blue", "green", "violet")[i] if which == "model" else "grey", dashed=which != "model")
                )  # fmt: skip
    return lines
