"""Pages of HTML about hybrids: one file with its pictures, which opens without a network."""

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup
from transformers import PreTrainedConfig

from ..checkpoint.pictures import layers_picture, parts_picture, totals_picture
from ..io.folder import write_beside
from ..io.writer import human_bytes
from ..layout.cache import cache_bytes, parts_of_layers
from ..plan import break_even_in_words
from ..teachers.teacher import public_name
from .inspect import hybrid_config

TEMPLATE = Path(__file__).with_name("page.html")
EXPONENTS = range(8, 18)
"""Powers of two, the numbers of tokens at which bytes are drawn."""
OF_THE_PAGE = {"#000000": "currentColor", "#e2e8f0": "var(--line)", "#4a5568": "var(--grey)"}
"""Colours of pictures that follow the reader's light or dark page."""


class Picture(NamedTuple):
    """A picture as SVG, and what it shows."""

    svg: Markup
    caption: str


class Table(NamedTuple):
    """A table, whose first column names its rows."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


class Answer(NamedTuple):
    """A text in three parts: the same as the original's, the first word that is not, and the rest."""

    name: str
    alike: str
    first: str
    rest: str


class Section(NamedTuple):
    """A heading, a text, and what stands under it."""

    heading: str
    text: str
    pictures: Sequence[Picture] = ()
    table: Table | None = None
    answers: Sequence[Answer] = ()


def page(title: str, where: str, sections: Sequence[Section]) -> str:
    """The page.

    Args:
        where: the commit and the machine of the figures.
    """
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=title, where=where, sections=sections
    )


def write_page(file: str, content: str) -> None:
    """Write a page to a file that a user names, in the place of what it was."""
    write_beside(Path(file).expanduser(), lambda partial: partial.write_text(content, encoding="utf-8"))


def drawn(figure: Any, caption: str, name: str) -> Picture:
    """A picture of matplotlib's, whose text stays text and whose black and grey are the page's.

    Args:
        name: of the picture, which makes its ids differ from those of others on the page.
    """
    import matplotlib

    content = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(content, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = content.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(?<=\bid=")|(?<=href="#)|(?<=url\(#)', f"{name}-", text)
    for color, ours in OF_THE_PAGE.items():
        text = text.replace(color, ours)
    label = Markup('<svg role="img" aria-label="{}"').format(caption)
    return Picture(Markup(text.replace("<svg", label, 1)), caption)


def layers_section(config: PreTrainedConfig, tokens: int, name: str) -> Section:
    """The kinds of a hybrid's layers and heads, and the bytes that each layer's cache takes at so many tokens.

    Args:
        name: of the hybrid, in ids.
    """
    parts = parts_of_layers(config, tokens)
    total = human_bytes(sum(sum(layer.values()) for layer in parts))
    pictures = [
        drawn(layers_picture(config), "What each layer and key/value head is", f"{name}-layers"),
        drawn(parts_picture(parts), "Bytes of each layer's cache, by what it holds", f"{name}-parts"),
    ]
    return Section("Layers", f"At {tokens:,} tokens the cache takes {total}.", pictures)


def memory_section(totals: dict[str, Sequence[int]], break_even: int | None, text: str) -> Section:
    """Bytes by the length of the context.

    Args:
        totals: of each model, weights and cache together, at the numbers of tokens of `EXPONENTS`.
        break_even: tokens from which on a hybrid takes less than its teacher; None if it never does.
    """
    picture = totals_picture(totals, EXPONENTS, break_even)
    return Section("Memory", text, [drawn(picture, "Weights and cache of one sequence, by its length", "memory")])


def inspect_page(report: dict[str, Any], revision: str | None = None) -> str:
    """The page of one hybrid.

    Args:
        report: of `inspect_model`.
        revision: of the repository that the report is about.
    """
    config = hybrid_config(report["model"], revision)
    rows = [
        [context, human_bytes(size["all_attention"]), human_bytes(size["this_model"]),
         f"{size['this_model'] / size['all_attention']:.1%}"]
        for context, size in report["cache_bytes"].items()
    ]  # fmt: skip
    sizes = zip(*(cache_bytes(config, 2**k) for k in EXPONENTS), strict=True)
    weights = {"teacher": report["teacher_weight_bytes"], "this model": report["weight_bytes"]}
    totals = {name: [of + size for size in own] for (name, of), own in zip(weights.items(), sizes, strict=True)}
    found = report.get("break_even", {})
    text = break_even_in_words(found) if found else "This model has its teacher's cache."
    memory = memory_section(totals, found.get("16 bits"), f"{text[0].upper()}{text[1:].removesuffix('.')}.")
    table = Table("Cache of one sequence", ["tokens", "teacher", "this model", "share"], rows)
    where = f"{report['model_type']}, {report['parameters']:,} parameters, {report['dtype']}"
    return page(
        public_name(report["model"]), where, [layers_section(config, 4096, "hybrid"), memory._replace(table=table)]
    )
