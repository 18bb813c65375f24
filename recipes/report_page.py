"""The page: sections of pictures, tables and matrices, as one HTML file that loads nothing, and as PNG files."""

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from .report_drawing import DARK, LIGHT, to_png, to_svg

PAGE = "report.html"
TEMPLATE = "report_page.html"


@dataclass
class Table:
    """Rows of text under a header; the first column names the row."""

    header: list[str]
    rows: list[list[str]]
    title: str = ""
    source: str = ""
    prose: bool = False
    """Cells hold sentences, not numbers."""


@dataclass
class Picture:
    """A figure, what is seen in it, where it comes from, and its numbers."""

    name: str
    title: str
    figure: Figure
    alt: str
    caption: str
    source: str
    table: Table | None = None


@dataclass
class Strip:
    """One head: the teacher's matrix and each stage's beside it, as a PNG."""

    head: int
    png: bytes
    alt: str
    distances: list[str]

    @property
    def uri(self) -> str:
        """The PNG inside the page."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


@dataclass
class Matrices:
    """The strips of every layer."""

    name: str
    columns: list[str]
    layers: dict[int, list[Strip]]
    sheets: dict[int, bytes]
    caption: str
    source: str


@dataclass
class Headline:
    """A figure worth seeing first."""

    value: str
    what: str
    note: str


@dataclass
class Model:
    """What a hybrid is."""

    name: str
    description: str
    letters: str
    facts: list[tuple[str, str]]


@dataclass
class Section:
    """A part of the page."""

    key: str
    title: str
    lead: str
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    matrices: list[Matrices] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.pictures or self.tables or self.matrices)


@dataclass
class Report:
    """All that the page shows."""

    title: str
    made: str
    headlines: list[Headline]
    models: list[Model]
    sections: list[Section]
    missing: list[tuple[str, str]]
    files: list[tuple[str, str, str]]

    def pictures(self) -> Iterator[Picture]:
        """Of every section."""
        for section in self.sections:
            yield from section.pictures


def render(report: Report) -> str:
    """The HTML."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["svg"] = lambda picture: Markup(to_svg(picture.figure, picture.name, picture.alt))
    return environment.get_template(TEMPLATE).render(report=report, light=LIGHT, dark=DARK)


def write_files(report: Report, folder: Path) -> None:
    """The page and the PNGs in an existing folder."""
    (folder / PAGE).write_text(render(report), encoding="utf-8")
    for picture in report.pictures():
        (folder / f"{picture.name}.png").write_bytes(to_png(picture.figure))
    for section in report.sections:
        for matrices in section.matrices:
            for layer, png in matrices.sheets.items():
                (folder / f"{matrices.name}-layer-{layer:02d}.png").write_bytes(png)


def name_apart(sections: list[Section]) -> None:
    """Give every picture and group of matrices a name of its own, whatever the runs are called."""
    known: set[str] = set()
    for section in sections:
        for shown in (*section.matrices, *section.pictures):
            name, count = shown.name, 2
            while shown.name in known:
                shown.name, count = f"{name}-{count}", count + 1
            known.add(shown.name)


def slug(*words: Any) -> str:
    """A name for a file and an id."""
    text = re.sub(r"[^a-z0-9]+", "-", " ".join(map(str, words)).lower()).strip("-")
    return text[:60].strip("-") or "figure"


def plain(text: Any) -> str:
    """Text without characters that HTML cannot hold."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in str(text))
