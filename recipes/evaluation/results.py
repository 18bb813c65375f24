"""Results of an evaluation: finished cells on disk, all of them as Markdown, and their place in a model card.

DIR/parts/*.json hold the cells (a text at a length, a task of one model, ...), each under a key of all it depends on,
so that an interrupted evaluation goes on. DIR/evaluation.json holds all results, DIR/evaluation.md their tables.
"""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from convert.checkpoint.card import KL_ROW, RECALL_ROW, with_figures
from convert.checkpoint.folder import write_beside
from convert.checkpoint.pictures import KL, kl_picture
from convert.weights.writer import human_bytes

from ..training.save import EVALUATION, new_card
from .recall import relative_recall

CELLS, RESULTS, REPORT = "parts", "evaluation.json", "evaluation.md"
Evaluation = dict[str, Any]
Row = dict[str, Any]
# what tells the rows of a part from each other
KEYS = {
    "text": ("name", "length"),
    "recall": ("probe", "length", "distance"),
    "tasks": ("task", "metric"),
    "speed": ("which", "batch", "context"),
}


class ResultsFolder:
    """The folder of an evaluation.

    Args:
        settings: what the results of each part depend on, and under `common` what all of them depend on.

    Raises:
        ValueError: there is something else in that place.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path, self.settings = path, json.loads(json.dumps(settings))
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file; --output takes a folder.")
        if path.exists() and any(path.iterdir()) and not (path / CELLS).is_dir():
            raise ValueError(f"{path} holds something else than an evaluation; choose another --output.")
        (path / CELLS).mkdir(parents=True, exist_ok=True)

    def _read(self, path: Path) -> Any:
        try:
            return json.loads(path.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is damaged; delete it, and it is made again.") from error

    def _write(self, path: Path, content: Any) -> None:
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        write_beside(path, lambda partial: partial.write_text(text))

    def cell(self, part: str, name: str, compute: Callable[..., Any], *arguments: Any) -> Any:
        """What `compute(*arguments)` returns, or what it returned before under the same settings."""
        key = json.dumps([name, self.settings["common"], self.settings[part]], sort_keys=True)
        readable = re.sub(r"[^A-Za-z0-9.=-]+", "_", f"{part} {name}")[:80]
        path = self.path / CELLS / f"{readable}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        if not path.is_file():
            self._write(path, compute(*arguments))
        return self._read(path)

    def finish(self, found: Evaluation) -> Evaluation:
        """Write evaluation.json and evaluation.md, with the rows of earlier runs that had the same settings."""
        path = self.path / RESULTS
        before = self._read(path) if path.is_file() else {}
        known = before.get("settings", {})
        if known.get("common") != self.settings["common"]:
            before, known = {}, {}
        results = found | {"settings": known | self.settings}
        for part in ("text", "recall", "generation", "tasks", "speed"):
            if part not in found:
                results |= {part: before[part]} if part in before else {}
            elif part in KEYS and known.get(part) == self.settings[part]:
                new = {tuple(row[key] for key in KEYS[part]) for row in found[part]}
                kept = [row for row in before.get(part, []) if tuple(row[key] for key in KEYS[part]) not in new]
                results[part] = kept + found[part]
        self._write(path, results)
        write_beside(self.path / REPORT, lambda partial: partial.write_text(markdown(results)))
        return results


def markdown(evaluation: Evaluation) -> str:
    """Every part as tables."""
    known = [("commit", evaluation.get("commit")), *evaluation.get("environment", {}).items()]
    where = ", ".join(f"{name} {value}" for name, value in known if value is not None)
    lines = [f"# Evaluation of {evaluation['model']}", "", f"Teacher: {evaluation['teacher'] or 'none'}. {where}."]
    for part, section in {"text": _text, "recall": _recall, "generation": _generation, "tasks": _tasks,
                          "speed": _speed}.items():  # fmt: skip
        if part in evaluation:
            lines += ["", f"## {part.capitalize()}", "", *section(evaluation[part])]
    return "\n".join(lines) + "\n"


def _figure(value: float | None, width: float | None = None, digits: int = 3) -> str:
    if value is None:
        return "–"
    return f"{value:.{digits}f}" + ("" if width is None else f" ± {width:.{digits}f}")


def _table(rows: list[Row], columns: dict[str, Callable[[Row], Any]]) -> list[str]:
    lines = [list(columns), ["---"] * len(columns)]
    lines += [[str(cell(row)) for cell in columns.values()] for row in rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _with_interval(name: str, digits: int = 3) -> Callable[[Row], str]:
    return lambda row: _figure(row[name], row[f"{name}_interval"], digits)


def _text(texts: list[Row]) -> list[str]:
    columns = {
        "KL(teacher ‖ model)": _with_interval("kl"),
        "perplexity, teacher": lambda row: _figure(row["teacher_perplexity"], digits=2),
        "model": _with_interval("perplexity", 2),
        "ratio": _with_interval("perplexity_ratio"),
        "top-1 agreement": _with_interval("agreement"),
    }
    of_text = {"text": lambda row: row["name"], "tokens": lambda row: f"{row['sequences']} x {row['length']}"}
    lines = ["Nats per token; ± is a 95 % interval over sequences.", "", *_table(texts, of_text | columns)]
    where = {"positions": lambda row: f"{row['start']}–{row['stop']}"}
    for text in texts:
        lines += ["", f"{text['name']}, {text['length']} tokens, by position:", ""]
        lines += _table(text["by_position"], where | columns)
    return lines


def _recall(rows: list[Row]) -> list[str]:
    columns = {
        "probe": lambda row: row["probe"],
        "length": lambda row: row["length"],
        "distance": lambda row: "all" if row["distance"] is None else row["distance"],
        "teacher": lambda row: _figure(row["teacher"], row["teacher_standard_error"], 2),
        "model": lambda row: _figure(row["model"], row["standard_error"], 2),
        "sequences": lambda row: row["samples"],
    }
    return ["Share answered correctly ± one standard error over sequences.", "", *_table(rows, columns)]


def _generation(found: Row) -> list[str]:
    followed = found["instructions"]
    rows = [
        ("greedy tokens in common with the teacher's", 1.0, found["greedy_agreement"]),
        ("4-grams that occurred before", found["teacher_repetition"], found["repetition"]),
        (f"instructions followed, of {followed['count']}", followed["teacher"], followed["model"]),
    ]
    columns = {"": lambda row: row[0], "teacher": lambda row: _figure(row[1]), "model": lambda row: _figure(row[2])}
    return [f"Greedy, {found['prompts']} prompts.", "", *_table(rows, columns)]


def _tasks(rows: list[Row]) -> list[str]:
    columns = {
        "task": lambda row: row["task"],
        "metric": lambda row: row["metric"],
        "documents": lambda row: row["documents"],
        "chance": lambda row: f"{row['chance']:.3f} ({row['chance_from']})",
        "teacher": lambda row: _figure(row["teacher"]),
        "model": lambda row: _figure(row["model"]),
        "relative": lambda row: _figure(row["relative"], row["standard_error"]),
    }
    note = "Relative: (model − chance) / (teacher − chance) ± one standard error; – where the teacher is at chance."
    return [note, "", *_table(rows, columns)]


def _speed(rows: list[Row]) -> list[str]:
    columns = {
        "": lambda row: row["which"],
        "batch x context": lambda row: f"{row['batch']} x {row['context']}",
        "prefill tokens/s": lambda row: f"{row['prefill_tokens_per_second']:.0f}",
        "decode tokens/s": lambda row: f"{row['decode_tokens_per_second']:.1f}",
        "ms per step": lambda row: f"{1e3 * row['seconds_per_token']:.1f}",
        "cache": lambda row: human_bytes(row["cache_bytes"]),
        "weights": lambda row: human_bytes(row["weight_bytes"]),
    }
    return ["Medians of runs in turns, side by side in one process.", "", *_table(rows, columns)]


def update_card(folder: Path, evaluation: Evaluation) -> None:
    """Put the figures into the card of a model's folder: its first table, its results, a section, and a picture.

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
    texts = [text for text in evaluation.get("text", []) if text["kl"] is not None]
    recall = [row for row in evaluation.get("recall", []) if row["teacher"] is not None]
    rows, positions = {}, []
    if texts:
        longest = max(texts, key=lambda text: text["length"])
        kl = _figure(longest["kl"], longest["kl_interval"])
        rows[KL_ROW] = f"{kl} ({longest['name']}, {longest['length']} tokens)"
        positions = [(row["stop"], row["kl"]) for row in longest["by_position"]]
    if recall:
        share = relative_recall(recall)
        rows[RECALL_ROW] = "the teacher recalls nothing" if share is None else f"{share:.0%}"
    by_probe: dict[str, list[tuple]] = {}
    for row in sorted(evaluation.get("recall", []), key=lambda row: row["distance"] or 0):
        if row["distance"] is not None:
            by_probe.setdefault(row["probe"], []).append((row["distance"], row["teacher"], row["model"]))
    picture = []
    if positions or by_probe:
        kl_picture(positions, by_probe).savefig(folder / KL)
        picture = [f"![KL by position and recall by distance]({KL})", ""]
    teacher = evaluation["teacher"]
    public = evaluation | {"teacher": Path(teacher).name if teacher and Path(teacher).exists() else teacher}
    section = markdown(public).split("\n", 2)[2].replace("\n## ", "\n### ").strip()
    text = with_figures(card.text, rows).split(EVALUATION)[0].rstrip()
    content = "\n".join([f"---\n{card.data.to_yaml()}\n---\n{text}\n", EVALUATION, "", *picture, section, ""])
    write_beside(path, lambda partial: partial.write_text(content))


def card_results(evaluation: Evaluation) -> list[EvalResult]:
    """What a card's metadata holds of it."""
    figures = []
    for text in evaluation.get("text", []):
        where = (text["name"], f"{text['length']} tokens")
        figures += [
            (*where, "kl", "KL(teacher ‖ model), nats per token", text["kl"]),
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
