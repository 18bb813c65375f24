"""The page of a comparison: its tables and pictures, and how each model goes on with a text, in one HTML file."""

import os
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from convert.checkpoint.pictures import positions_picture
from convert.layout.cache import break_even
from convert.tools.page import Answer, Section, Table, drawn, layers_section, memory_section, page

from .budgets import HEAD, at_budgets
from .generation import common_prefix
from .picture import mean_of, picture, points

IN_MEMORY = ("teacher", "rounded cache", "hybrid")
"""Kinds of caches whose memory is drawn by the length of the context."""
Row = dict[str, Any]


def comparison_page(
    found: dict[str, Any], configs: dict[str, PreTrainedConfig], tokenizer: PreTrainedTokenizerBase
) -> str:
    """The page.

    Args:
        found: the content of compare.json.
        configs: of the hybrids, by their names there.
    """
    methods, settings = found["methods"], found["settings"]
    sections = [quality_section(methods, settings), positions_section(methods)]
    budgets = at_budgets(found)
    if budgets:
        text = "Peak is the largest size while a prompt is read; eviction reads the whole context before it evicts."
        sections.append(Section("Caches of about the same size", text, table=Table("By budget", HEAD, budgets)))
    for number, (name, config) in enumerate(configs.items()):
        of_layers = layers_section(config, settings["length"], f"hybrid{number}")
        sections.append(of_layers._replace(heading=f"{name}: layers"))
    sections.append(totals_section(methods, configs))
    sections += [answers_section(methods, label, tokenizer) for label in methods[0]["continuations"]]
    if found["speed"]:
        rows = [
            [row["which"], f"{row['context']:,}", f"{row['prefill_tokens_per_second']:,.0f}",
             f"{row['decode_tokens_per_second']:.1f}"]
            for row in found["speed"]
        ]  # fmt: skip
        table = Table("Tokens per second, one sequence", ["model", "tokens", "prompt", "decoding"], rows)
        sections.append(Section("Speed", "Emulated caches and those of llama.cpp are not timed.", table=table))
    environment = ", ".join(f"{name} {value}" for name, value in found["environment"].items())
    where = f"convert-to-hybrid compare, commit {found['commit']}, {environment}"
    return page(f"{found['teacher']}: hybrids and other caches", where, sections)


def shown(value: float | None, form: str = ".4f") -> str:
    """A figure; – for one that was not measured."""
    return "–" if value is None else format(value, form)


def quality_section(methods: Sequence[Row], settings: dict[str, Any]) -> Section:
    """KL and recall of each cache by its bytes."""
    rows = [
        [row["name"], f"{row['share']:.1%}", shown(mean_of(row, "everywhere", "kl"), ".4f"),
         shown(mean_of(row, "after_contexts", "kl"), ".4f"), shown(mean_of(row, "after_contexts", "agreement"), ".1%"),
         f"{row['recall']['copy']:.0%}", f"{row['recall']['needle']:.0%}"]
        for row in methods
    ]  # fmt: skip
    head = ["cache", "size", "KL", "KL after contexts", "top-1 agreement", "copied", "needles found"]
    text = (
        f"Sizes are shares of a bfloat16 cache at {settings['length']:,} tokens. KL is the distance to the teacher's "
        "predictions in nats per token, 0 for the same. Rounding, windows and eviction are emulated, and their bytes "
        "counted; caches named after a library are its own, and their bytes measured. KL of llama.cpp's caches of few "
        "bits is from its cache in 16 bits."
    )
    drawing = drawn(picture(points(methods)), "KL to the teacher and needles found, by size of the cache", "quality")
    return Section("Quality by size", text, [drawing], Table("Quality of each cache", head, rows))


def positions_section(methods: Sequence[Row]) -> Section:
    """KL by position, a mean over the texts."""
    lines = {}
    for row in methods[1:]:
        of_texts = [text["by_position"] for text in row["text"].values()]
        if None not in of_texts:
            lines[row["name"]] = [
                (place[0][0], sum(kl for _, kl in place) / len(place)) for place in zip(*of_texts, strict=True)
            ]
    text = "Within its window a hybrid differs by rounding alone. Caches judged only after contexts are missing."
    return Section("KL by position", text, [drawn(positions_picture(lines), "KL to the teacher by position", "kl")])


def totals_section(methods: Sequence[Row], configs: dict[str, PreTrainedConfig]) -> Section:
    """Weights and cache of one sequence, and from where on hybrids take less than their teacher."""
    drawn_rows = [row for row in methods if row["kind"] in IN_MEMORY]
    totals = {row["name"]: [row["weight_bytes"] + size for size in row["bytes_at"].values()] for row in drawn_rows}
    weights = {row["name"]: row["weight_bytes"] for row in methods}
    more = {name: weights[name] - weights[methods[0]["name"]] for name in configs}
    found = {name: break_even(config, more[name]) for name, config in configs.items()}
    words = [
        f"{name} takes less than the teacher " + ("at no length" if n is None else f"from {n:,} tokens on")
        for name, n in found.items()
    ]
    first = next(iter(found.values()), None)
    text = "In bfloat16, or in the bits of each cache."
    if words:
        text += f" {'; '.join(words)}."
    return memory_section(totals, first, text)


def answers_section(methods: Sequence[Row], label: str, tokenizer: PreTrainedTokenizerBase) -> Section:
    """The tokens that each model writes after a row of a text, with the first that is not the teacher's marked."""
    teacher = methods[0]["continuations"][label]
    answers, words = [], []
    for row in methods:
        ids = row["continuations"].get(label)
        if ids is None:
            continue
        alike = common_prefix(teacher, ids)
        answers.append(split_answer(row["name"], ids, alike, tokenizer))
        if row is not methods[0]:
            words.append(f"{row['name']}: {alike} of {len(teacher)} tokens are the teacher's before the first other")
    return Section(f"Going on with {label}", f"{'; '.join(words)}.", answers=answers)


def split_answer(name: str, ids: Sequence[int], alike: int, tokenizer: PreTrainedTokenizerBase) -> Answer:
    """Text of token ids: the first `alike`, the one after them, and the rest."""
    whole = tokenizer.decode(ids)
    ends = [len(os.path.commonprefix([whole, tokenizer.decode(ids[:n])])) for n in (alike, alike + 1)]
    return Answer(name, whole[: ends[0]], whole[ends[0] : ends[1]], whole[ends[1] :])
