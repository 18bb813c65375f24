"""Sections on what `recipes.evaluate` measured: likelihood by position, recall, generation, tasks, speed."""

import math
from typing import Any

from .report_data import Run, parts_of
from .report_drawing import Line, number, tokens
from .report_figures import dots_figure, lines_figure
from .report_page import Picture, Section, Table, plain, slug
from .report_quality import KL, half_width
from .report_sections import interval, labelled, named, of_run, source

ANSWERS = 6


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
            section.pictures += task_pictures(run, data["tasks"], evaluated)
    if any(data.get("generation") for _, data in evaluated):
        section.tables.append(generation_table(evaluated))
    told = [(run, data) for run, data in evaluated if (data.get("generation") or {}).get("answers")]
    section.tables += [answer_table(run, data) for run, data in told]
    return section


def text_table(evaluated: list[tuple[Run, dict]]) -> Table:
    """A row per hybrid and text."""
    rows = []
    for run, data in evaluated:
        for text in data.get("text") or []:
            kl = text.get("kl") or {}
            rows.append(
                [
                    labelled(run, evaluated, str(text["name"])), f"{text['sequences']} × {number(text['length'])}",
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
            name = labelled(run, evaluated, text_name(text, data["text"]))
            kl += _over_spans(name, text, "kl")
            perplexity += _over_spans(name, text, "perplexity")
            theirs = f"teacher, {text_name(text, data['text'])}"
            if not any(line.name == theirs for line in perplexity):
                perplexity += _over_spans(theirs, text, "teacher_perplexity", color="grey", dashed=True)
    where = " — ".join(source(run, "evaluation") for run, _ in evaluated)
    pictures = []
    for name, lines, unit, told in (
        ("position-kl", kl, KL, "Each point is the mean over a span of positions, drawn at its middle."),
        ("position-perplexity", perplexity, "perplexity", "Dashed: the teacher on the same text."),
    ):
        for page in range(0, len(lines), 6):
            shown = lines[page : page + 6]
            ends = "; ".join(f"{line.name} {number(line.y[0])} to {number(line.y[-1])}" for line in shown)
            places = sorted({x for line in shown for x in line.x})
            cells = [dict(zip(line.x, line.y, strict=True)) for line in shown]
            pictures.append(
                Picture(slug(name, page or ""), f"{'KL' if unit == KL else 'Perplexity'} by position",
                        lines_figure(shown, "position in the text, tokens", unit, context=True, from_zero=unit == KL,
                                     log_y=unit != KL),
                        f"{unit} from the first to the last positions: {ends}.", told, where,
                        Table(["position", *(line.name for line in shown)],
                              [[number(x), *(number(of.get(x)) for of in cells)] for x in places]))
            )  # fmt: skip
    return pictures


def text_name(text: dict, texts: list[dict]) -> str:
    """A text's name, with its length where it is there in several."""
    alone = sum(other["name"] == text["name"] for other in texts) == 1
    return str(text["name"]) if alone else f"{text['name']}, {tokens(text['length'])}"


def _over_spans(name: str, text: dict, key: str, **style: Any) -> list[Line]:
    spans = [span for span in text.get("by_position") or [] if span.get(key) is not None]
    if len(spans) < 2:
        return []
    return [Line(name, [(s["start"] + s["stop"]) / 2 for s in spans], [s[key] for s in spans], **style)]


def _whole(rows: list[dict]) -> list[dict]:
    """The rows over all distances where there are any: those of single distances count the same answers again."""
    return [row for row in rows if row.get("distance") is None] or rows


def recall_pictures(run: Run, rows: list[dict], evaluated: list[Any]) -> list[Picture]:
    """Accuracy against length, a picture per probe."""
    pictures = []
    for probe in dict.fromkeys(row["probe"] for row in rows):
        own = [row for row in rows if row["probe"] == probe]
        lengths = sorted({row["length"] for row in own})
        lines = []
        for which, name, error in (
            ("model", "hybrid", "standard_error"),
            ("teacher", "teacher", "teacher_standard_error"),
        ):
            of_length = {n: [r for r in own if r["length"] == n and r.get(which) is not None] for n in lengths}
            of_length = {length: _whole(values) for length, values in of_length.items() if values}
            means = [sum(row[which] for row in values) / len(values) for values in of_length.values()]
            squares = [sum((row.get(error) or 0.0) ** 2 for row in values) for values in of_length.values()]
            widths = [1.96 * math.sqrt(s) / len(v) for s, v in zip(squares, of_length.values(), strict=True)]
            if means:
                theirs = which == "teacher"
                lines.append(Line(name, list(of_length), means, widths, "grey" if theirs else "blue", theirs))
        cells = [
            [tokens(row["length"]), "–" if row.get("distance") is None else number(row["distance"]),
             number(row["model"]), number(row["teacher"]), number(row.get("standard_error")),
             number(row.get("samples"))]
            for row in own
        ]  # fmt: skip
        ends = "; ".join(
            f"{line.name} {number(line.y[0])} at {tokens(line.x[0])} to {number(line.y[-1])} at {tokens(line.x[-1])}"
            for line in lines
        )
        pictures.append(
            Picture(slug("recall", probe, run.name if len(evaluated) > 1 else ""),
                    f"Recall: {str(probe).replace('_', ' ')}{of_run(run, evaluated)}",
                    lines_figure(lines, "tokens of context", "share answered right", context=True, from_zero=True),
                    f"Share answered right: {ends}.",
                    "Means over what the probe asks at each length; whiskers are 1.96 standard errors.",
                    source(run, "evaluation"),
                    Table(["length", "distance", "hybrid", "teacher", "standard error", "samples"], cells))
        )  # fmt: skip
    return pictures


def task_pictures(run: Run, tasks: list[dict], evaluated: list[Any]) -> list[Picture]:
    """Scores of hybrid, teacher and chance; then what is left of the teacher's score over chance."""
    names = task_names(tasks)
    lines = [
        Line(name, list(range(len(tasks))), [_or_nan(task.get(key)) for task in tasks], None, color)
        for name, key, color in (
            ("hybrid", "model", "blue"),
            ("teacher", "teacher", "red"),
            ("chance", "chance", "grey"),
        )
    ]
    header = ["task", "metric", "hybrid", "teacher", "chance", "relative", "documents"]
    cells = [
        [task["task"], str(task.get("metric", "")), *(number(task.get(key)) for key in ("model", "teacher", "chance")),
         interval(task.get("relative"), _times(task.get("standard_error"))), number(task.get("documents"))]
        for task in tasks
    ]  # fmt: skip
    where, table = source(run, "evaluation"), Table(header, cells)
    scores = "; ".join(f"{t['task']} {number(t['model'])} of {number(t.get('teacher'))}" for t in tasks)
    pictures = [
        Picture(
            named("tasks", evaluated, run), f"Tasks{of_run(run, evaluated)}", dots_figure(names, lines, "score"),
            f"Scores of hybrid and teacher: {scores}.", "Scored by lm-eval, both models in one run.", where, table,
        )
    ]  # fmt: skip
    judged = [(name, task) for name, task in zip(names, tasks, strict=True) if task.get("relative") is not None]
    if judged:
        relative = [task["relative"] for _, task in judged]
        spread = [_times(task.get("standard_error")) or 0.0 for _, task in judged]
        told = "; ".join(f"{name} {number(task['relative'])}" for name, task in judged)
        pictures.append(
            Picture(
                named("tasks-relative", evaluated, run),
                f"Score over chance, of the teacher's{of_run(run, evaluated)}",
                dots_figure([name for name, _ in judged],
                            [Line("", list(range(len(judged))), relative, spread, "blue")],
                            "(hybrid − chance) ⁄ (teacher − chance)", marks=(0.0, 1.0)),
                f"Relative scores: {told}.", "0 is chance, 1 the teacher; whiskers are 1.96 standard errors.",
                where, table,
            )
        )  # fmt: skip
    return pictures


def task_names(tasks: list[dict]) -> list[str]:
    """A task's name, with its metric where it has several."""
    names = [str(task["task"]) for task in tasks]
    return [
        name if names.count(name) == 1 else f"{name}, {task.get('metric')}"
        for name, task in zip(names, tasks, strict=True)
    ]


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _times(error: float | None) -> float | None:
    return None if error is None else 1.96 * error


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


def answer_table(run: Run, data: dict) -> Table:
    """The first answers of hybrid and teacher."""
    answers = data["generation"]["answers"][:ANSWERS]
    rows = [[plain(answer[key]) for key in ("prompt", "model", "teacher")] for answer in answers]
    header = ["prompt", f"{run.name} answers", "the teacher answers"]
    return Table(header, rows, "", source(run, "evaluation"), prose=True)


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
            ("cache_bytes", "Cache", "MB of keys, values and states", 1e6),
        ):
            lines = speed_lines(rows, key, scale)
            if not lines:
                continue
            told = "; ".join(f"{line.name}: {number(line.y[-1])}" for line in lines)
            longest = tokens(max(line.x[-1] for line in lines))
            section.pictures.append(
                Picture(slug("speed", key.split("_")[0], run.name if len(evaluated) > 1 else ""),
                        f"{title}{of_run(run, evaluated)}",
                        lines_figure(lines, "tokens of context", unit, context=True, from_zero=True),
                        f"{title}, {unit}, at {longest} tokens: {told}.",
                        f"At {longest} tokens, in {unit}: {told}.",
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
