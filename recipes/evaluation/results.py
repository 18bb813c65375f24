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

from huggingface_hub import EvalResult

from convert.checkpoint.card import KL_ROW, RECALL_ROW, renewed
from convert.checkpoint.pictures import KL, kl_picture
from convert.io.folder import note_made, write_beside
from convert.io.writer import human_bytes
from convert.teachers.teacher import public_name

from ..training.save import EVALUATION, card_in, eval_results
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

LIKELIHOOD = ("kl", "teacher_perplexity", "perplexity", "perplexity_ratio", "agreement")
# of each part, what its tables say and their columns
SECTIONS = {
    "text": (
        "Nats per token; ± is a 95 % interval over sequences.", ("name", "sequences", "length", *LIKELIHOOD)
    ),
    "recall": (
        "Share answered correctly ± one standard error over sequences; of distance –, at all distances.",
        ("probe", "length", "distance", "teacher", "model", "samples"),
    ),
    "generation": (
        "Share of each answer in common with the teacher's, share of equal answers, median number of tokens before "
        "the first difference, tokens over the teacher's; answers cut off where the teacher's end; repeated 4-grams; "
        "share of the instructions followed.",
        ("prompts", "greedy_agreement", "equal_answers", "tokens_alike", "length_ratio", "cut_off",
         "teacher_repetition", "repetition", "instructions", "teacher_following", "model_following"),
    ),
    "tasks": (
        "Relative: (model − chance) / (teacher − chance) ± one standard error; – where the teacher is at chance.",
        ("task", "metric", "documents", "chance", "chance_from", "teacher", "model", "relative"),
    ),
    "speed": (
        "Medians of runs in turns, side by side in one process.",
        ("which", "batch", "context", "prefill_tokens_per_second", "decode_tokens_per_second", "seconds_per_token",
         "cache_bytes", "weight_bytes"),
    ),
}  # fmt: skip


class ResultsFolder:
    """The folder of an evaluation.

    Args:
        settings: what the results of each part depend on, and under `common` what all of them depend on.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        # as they come back from a file, where tuples are lists: `finish` compares the two
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
        """Return `compute(*arguments)`, or its result from before under the same settings."""
        key = json.dumps([name, self.settings["common"], self.settings[part]], sort_keys=True)
        readable = re.sub(r"[^A-Za-z0-9.=-]+", "_", f"{part} {name}")[:80]
        path = self.path / CELLS / f"{readable}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        if not path.is_file():
            self._write(path, compute(*arguments))
        # read even when just computed, so that a resumed run goes on with the same types
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
    for part, (note, columns) in SECTIONS.items():
        if part in evaluation:
            rows = evaluation[part]
            if part == "generation":
                share = {f"{which}_following": rows["instructions"][which] for which in ("teacher", "model")}
                rows = [rows | share | {"instructions": rows["instructions"]["count"]}]
            lines += ["", f"## {part.capitalize()}", "", note, "", *_table(rows, columns)]
    for text in evaluation.get("text", []):
        lines += ["", f"### {text['name']}, {text['length']} tokens, by position", ""]
        lines += _table(text["by_position"], ("start", "stop", *LIKELIHOOD))
    return "\n".join(lines) + "\n"


def _table(rows: list[Row], columns: tuple[str, ...]) -> list[str]:
    head = [column.replace("_", " ") for column in columns]
    lines = [head, ["---"] * len(columns), *([_cell(row, column) for column in columns] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def _cell(row: Row, column: str) -> str:
    """A figure, with its interval or standard error where the row has one; – where there is none."""
    value, width = row.get(column), row.get(f"{column}_interval", row.get(f"{column}_error"))
    if value is None:
        return "–"
    if column.endswith("_bytes"):
        return human_bytes(value)
    if not isinstance(value, float):
        return str(value)
    if width is None:
        return f"{value:.3f}"
    return f"{value:.3f} ± {width:.3f}"


def update_card(folder: Path, evaluation: Evaluation) -> None:
    """Put the figures into the card of a model's folder: its first table, its results, a section, and a picture.

    Results of other data sets that the card holds already stay.
    """
    path = folder / "README.md"
    card = card_in(folder, folder.resolve().name)
    results = card_results(evaluation)
    ours = {(result.dataset_type, result.metric_type) for result in results}
    before = [r for r in card.data.eval_results or [] if (r.dataset_type, r.metric_type) not in ours]
    if before or results:
        card.data.eval_results = [*before, *results]
        card.data.model_name = card.data.model_name or folder.resolve().name
    rows, picture = first_rows(evaluation), []
    texts, recall = compared(evaluation)
    if texts or recall:
        positions = [(row["stop"], row["kl"]) for text in texts[-1:] for row in text["by_position"]]
        by_probe: dict[str, list[tuple]] = {}
        for row in sorted(recall, key=lambda row: row["distance"] or 0):
            if row["distance"] is not None:
                by_probe.setdefault(row["probe"], []).append((row["distance"], row["teacher"], row["model"]))
        kl_picture(positions, by_probe).savefig(folder / KL)
        note_made(folder, KL)
        picture = [f"![KL by position and recall by distance]({KL})", ""]
    teacher = evaluation["teacher"]
    public = evaluation | {"teacher": teacher and public_name(teacher)}
    section = markdown(public).split("\n", 2)[2].replace("\n#", "\n##").strip()
    text = renewed(card.text, rows).split(EVALUATION)[0].rstrip()
    content = "\n".join([f"---\n{card.data.to_yaml()}\n---\n{text}\n", EVALUATION, "", *picture, section, ""])
    write_beside(path, lambda partial: partial.write_text(content))


def compared(evaluation: Evaluation) -> tuple[list[Row], list[Row]]:
    """The rows of text, shortest first, and of recall, if a teacher was measured beside the model."""
    texts = [row for row in evaluation.get("text", []) if row["kl"] is not None]
    recall = [row for row in evaluation.get("recall", []) if row["teacher"] is not None]
    return sorted(texts, key=lambda row: row["length"]), recall


def first_rows(evaluation: Evaluation) -> dict[str, str]:
    """KL on the longest text and relative recall, as the card's first table has them."""
    rows, (texts, recall) = {}, compared(evaluation)
    if texts:
        rows[KL_ROW] = f"{_cell(texts[-1], 'kl')} ({texts[-1]['name']}, {texts[-1]['length']} tokens)"
    if recall:
        share = relative_recall(recall)
        rows[RECALL_ROW] = "the teacher recalls nothing"
        if share is not None:
            rows[RECALL_ROW] = f"{share:.0%}"
    return rows


def card_results(evaluation: Evaluation) -> list[EvalResult]:
    """Convert it to a card's metadata."""
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
    return eval_results(
        (f"{data}, {config}" if config else data, data.partition(":")[0], config, None, metric, name, value)
        for data, config, metric, name, value in figures
        if value is not None
    )
