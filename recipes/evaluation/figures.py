"""Tables of the README and of docs/results, made from the figures in docs/results/*.json.

    python -m recipes.evaluation.figures     # writes every table between <!-- figures: NAME --> and <!-- end -->, and
                                             # shares.png, the picture of the table in shares.md

A file holds tables by name. A row has `labels`, and a `value` for each of the table's `columns`; `unit`, `command`,
`commit`, `date` and `hardware` are those of the row, else of its table, else of its file; a list has one for each
column. A value that begins with = stands in another file: =PAGE/TABLE/LABELS/COLUMN.
"""

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from .picture import Point, picture

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
PAGES = {
    ROOT / "README.md": "readme",
    RESULTS / "compare.md": "compare",
    RESULTS / "budgets.md": "compare",
    RESULTS / "real_caches.md": "compare",
    RESULTS / "teachers.md": "compare",
    RESULTS / "other_teachers.md": "compare",
    RESULTS / "qwen.md": "compare",
    RESULTS / "qwen-large.md": "compare",
    RESULTS / "quality.md": "quality",
    RESULTS / "recall.md": "quality",
    RESULTS / "calibration.md": "quality",
    RESULTS / "shares.md": "quality",
    RESULTS / "long_rows.md": "quality",
    RESULTS / "ruler.md": "quality",
    RESULTS / "bits.md": "quality",
    RESULTS / "rounded_keys.md": "quality",
    RESULTS / "mohawk.md": "quality",
    RESULTS / "ablations.md": "quality",
    RESULTS / "performance.md": "performance",
    RESULTS / "memory.md": "performance",
    RESULTS / "conversion.md": "performance",
    RESULTS / "gpu.md": "performance",
    RESULTS / "kernels.md": "performance",
    RESULTS / "rehearsal.md": "rehearsal",
    RESULTS / "host_time.md": "rehearsal",
    RESULTS / "device_memory.md": "rehearsal",
    RESULTS / "training.md": "training",
    RESULTS / "losses.md": "training",
    RESULTS / "serving.md": "serving",
    RESULTS / "serving_speed.md": "serving",
    RESULTS / "serving_caches.md": "serving",
    RESULTS / "conversations.md": "serving",
    RESULTS / "speculative.md": "speculative",
    RESULTS / "formats.md": "formats",
    RESULTS / "llama_cpp.md": "formats",
    RESULTS / "structured_matrices.md": "structured_matrices",
}
SOURCE = ("command", "commit", "date", "hardware")
TABLE = re.compile(r"(<!-- figures: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.S)


def load(page: str) -> dict[str, Any]:
    """Read a page's file, with every number as it is written there."""
    return json.loads((RESULTS / f"{page}.json").read_text(), parse_float=Decimal, parse_int=Decimal)


def entries(page: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each figure's name, TABLE/LABELS/COLUMN, and its value, unit, command, commit, date and hardware."""
    file = load(page)
    for name, table in file["tables"].items():
        for row in table["rows"]:
            about = {key: (file | table | row).get(key) for key in ("unit", *SOURCE)}
            for number, column in enumerate(table["columns"]):
                own = {key: each[number] if isinstance(each, list) else each for key, each in about.items()}
                yield f"{name}/{', '.join(row['labels'])}/{column}", own | {"value": row["value"][number]}


def show(entry: dict[str, Any]) -> str:
    """Write a figure as it stands in a table; a reference is looked up."""
    value = entry["value"]
    if isinstance(value, str) and value.startswith("="):
        page, _, name = value[1:].partition("/")
        return show(dict(entries(page))[name])
    if isinstance(value, Decimal):
        value = f"{value:,}"
    return "" if value is None else value + (" %" if entry["unit"] == "%" else "")


def line(cells: list[str]) -> str:
    """A row of a table in Markdown."""
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def sources(found: list[dict[str, Any]]) -> str:
    """The commands, commits and dates behind figures, each command once a day."""
    commits: dict[str, dict[str, None]] = {}
    for entry in found:
        if entry["command"]:
            commits.setdefault(f"`{entry['command']}`, {entry['date']}", {})[entry["commit"]] = None
    return "; ".join(f"{run}, {' and '.join(names)}" for run, names in commits.items())


def render(page: str, name: str) -> str:
    """A table in Markdown, a repeated first label left out, and where its figures come from."""
    table = load(page)["tables"][name]
    found = [entry for key, entry in entries(page) if key.partition("/")[0] == name]
    header = [*table["labels"], *table["columns"]]
    lines = [line(header), "|" + "---|" * len(header)]
    above = None
    for row in table["rows"]:
        first, *others = row["labels"]
        labels = ["" if others and first == above else first, *others]
        start = len(table["columns"]) * (len(lines) - 2)
        lines.append(line([*labels, *(show(entry) for entry in found[start : start + len(table["columns"])])]))
        above = first
    if origin := sources(found):
        lines += ["", f"{origin}."]
    return "\n".join(lines) + "\n"


def rendered(path: Path) -> str:
    """A page's text with every table between its marks made anew."""
    return TABLE.sub(lambda found: found[1] + render(PAGES[path], found[2]) + found[4], path.read_text())


def points_of_shares() -> list[Point]:
    """The rows of the table of shares: mean KL of the texts, and needles from all distances.

    A row's `teacher` has the teacher's, where other needles were hidden than in its row.
    """
    teacher, *rows = load("quality")["tables"]["shares"]["rows"]
    found = []
    for row in rows:
        share, name = row["labels"]
        kl, needles = row["value"][:3], row["value"][3:]
        recall = float(100 * sum(needles) / sum(row.get("teacher", teacher["value"][3:])))
        kind = "teacher, 8 to 2 bits" if name.startswith("teacher") else name
        found.append(Point(kind, float(share.strip("* %")), float(sum(kl) / len(kl)), recall))
    return found


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(rendered(path))
    picture(points_of_shares()).savefig(RESULTS / "shares.png")
