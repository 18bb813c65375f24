"""An evaluation as Markdown, and as the results and a section of a model card."""

from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from convert.alignment.fit import write_beside
from convert.weights.writer import human_bytes

from ..training.save import EVALUATION, new_card

Evaluation = dict[str, Any]


def markdown(evaluation: Evaluation) -> str:
    """Every part as tables."""
    teacher = evaluation["teacher"] or "none"
    parts = [f"# Evaluation of {evaluation['model']}", "", f"Teacher: {teacher}. {_where(evaluation)}"]
    sections = {
        "text": _text,
        "recall": _recall,
        "generation": _generation,
        "tasks": _tasks,
        "speed": _speed,
    }
    for name, section in sections.items():
        if name in evaluation:
            parts += ["", *section(evaluation[name])]
    return "\n".join(parts) + "\n"


def _where(evaluation: Evaluation) -> str:
    known = [("commit", evaluation.get("commit"))] + list(evaluation.get("environment", {}).items())
    return ", ".join(f"{name} {value}" for name, value in known if value is not None) + "."


def _figure(value: float | None, width: float | None = None, digits: int = 3) -> str:
    if value is None:
        return "–"
    return f"{value:.{digits}f}" + ("" if width is None else f" ± {width:.{digits}f}")


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _text(texts: list[dict[str, Any]]) -> list[str]:
    rows = [
        [
            text["name"],
            f"{text['sequences']} x {text['length']}",
            _figure(*((text["kl"]["mean"], text["kl"]["interval"]) if text["kl"] else (None,))),
            _figure(text["teacher_perplexity"], digits=2),
            _figure(text["perplexity"], text["perplexity_interval"], digits=2),
            _figure(text["perplexity_ratio"], text.get("perplexity_ratio_interval")),
            _figure(text["agreement"], text.get("agreement_interval")),
        ]
        for text in texts
    ]
    head = ["text", "tokens", "KL(teacher ‖ model)", "perplexity, teacher", "model", "ratio", "top-1 agreement"]
    lines = ["## Text", "", "Nats per token; ± is a 95 % interval over sequences.", "", *_table(head, rows)]
    for text in texts:
        rows = [
            [
                f"{row['start']}–{row['stop']}",
                _figure(row["kl"]),
                _figure(row["teacher_perplexity"], digits=2),
                _figure(row["perplexity"], digits=2),
                _figure(row["perplexity_ratio"]),
                _figure(row["agreement"]),
            ]
            for row in text["by_position"]
        ]
        head = ["positions", "KL", "perplexity, teacher", "model", "ratio", "agreement"]
        lines += ["", f"{text['name']}, {text['length']} tokens, by position:", "", *_table(head, rows)]
    return lines


def _recall(recall: list[dict[str, Any]]) -> list[str]:
    rows = [
        [
            row["probe"],
            str(row["length"]),
            "all" if row["distance"] is None else str(row["distance"]),
            _figure(row["teacher"], row["teacher_standard_error"], 2),
            _figure(row["model"], row["standard_error"], 2),
            str(row["samples"]),
        ]
        for row in recall
    ]
    head = ["probe", "length", "distance", "teacher", "model", "sequences"]
    return ["## Recall", "", "Share answered rightly ± one standard error over sequences.", "", *_table(head, rows)]


def _generation(found: dict[str, Any]) -> list[str]:
    followed = found["instructions"]
    rows = [
        ["greedy tokens in common with the teacher's", "1", _figure(found["greedy_agreement"])],
        ["4-grams that occurred before", _figure(found["teacher_repetition"]), _figure(found["repetition"])],
        [
            f"instructions followed, of {followed['count']}",
            _figure(followed["teacher"]),
            _figure(followed["model"]),
        ],
    ]
    lines = ["## Generation", "", f"Greedy, {found['prompts']} prompts.", ""]
    return lines + _table(["", "teacher", "model"], rows)


def _tasks(tasks: list[dict[str, Any]]) -> list[str]:
    rows = [
        [
            row["task"],
            row["metric"],
            str(row["documents"]),
            f"{row['chance']:.3f} ({row['chance_from']})",
            _figure(row["teacher"]),
            _figure(row["model"]),
            _figure(row["relative"], row["standard_error"]),
        ]
        for row in tasks
    ]
    head = ["task", "metric", "documents", "chance", "teacher", "model", "relative"]
    note = "Relative: (model − chance) / (teacher − chance) ± one standard error; – where the teacher is at chance."
    return ["## Tasks", "", note, "", *_table(head, rows)]


def _speed(speed: list[dict[str, Any]]) -> list[str]:
    rows = [
        [
            row["which"],
            f"{row['batch']} x {row['context']}",
            f"{row['prefill_tokens_per_second']:.0f}",
            f"{row['decode_tokens_per_second']:.1f}",
            f"{1e3 * row['seconds_per_token']:.1f}",
            human_bytes(row["cache_bytes"]),
            human_bytes(row["weight_bytes"]),
        ]
        for row in speed
    ]
    head = ["", "batch x context", "prefill tokens/s", "decode tokens/s", "ms per step", "cache", "weights"]
    return ["## Speed", "", "Medians of runs in turns, side by side in one process.", "", *_table(head, rows)]


def update_card(folder: Path, evaluation: Evaluation) -> None:
    """Put the figures into the card of a model's folder, as its evaluation results and as a section.

    Results of other data sets that the card holds already stay.
    """
    path = folder / "README.md"
    card = ModelCard.load(path) if path.is_file() else new_card(folder.resolve().name)
    results = card_results(evaluation)
    ours = {(result.dataset_type, result.metric_type) for result in results}
    before = [r for r in card.data.eval_results or [] if (r.dataset_type, r.metric_type) not in ours]
    if before or results:
        card.data.eval_results = [*before, *results]
        card.data.model_name = card.data.model_name or folder.resolve().name
    teacher = evaluation["teacher"]
    public = evaluation | {"teacher": Path(teacher).name if teacher and Path(teacher).exists() else teacher}
    section = markdown(public).split("\n", 2)[2].replace("\n## ", "\n### ").strip()
    text = f"{card.text.split(EVALUATION)[0].rstrip()}\n\n{EVALUATION}\n\n{section}\n"
    content = f"---\n{card.data.to_yaml()}\n---\n{text}"
    write_beside(path, lambda partial: partial.write_text(content))


def card_results(evaluation: Evaluation) -> list[EvalResult]:
    """What a card's metadata holds of it."""
    figures = []
    for text in evaluation.get("text", []):
        where = (text["name"], f"{text['length']} tokens")
        figures += [
            (*where, "kl", "KL(teacher ‖ model), nats per token", (text["kl"] or {}).get("mean")),
            (*where, "perplexity", "perplexity", text["perplexity"]),
            (*where, "perplexity_ratio", "perplexity over the teacher's", text["perplexity_ratio"]),
            (*where, "agreement", "top-1 agreement with the teacher", text["agreement"]),
        ]
    if "generation" in evaluation:
        followed = evaluation["generation"]["instructions"]["model"]
        figures.append(("instructions", None, "followed", "instructions followed, by rules", followed))
    for row in evaluation.get("tasks", []):
        metric, share = row["metric"], "share of the teacher's score over chance"
        figures.append((row["task"], None, metric, metric, row["model"]))
        figures.append((row["task"], None, f"{metric}_relative", f"{metric}: {share}", row["relative"]))
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=dataset,
            dataset_name=dataset if config is None else f"{dataset}, {config}",
            dataset_config=config,
            metric_type=metric,
            metric_name=name,
            metric_value=round(value, 6),
        )
        for dataset, config, metric, name, value in figures
        if value is not None
    ]
