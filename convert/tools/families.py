"""The teachers that can be converted, and what of each was tested; the README's table is made from it."""

from typing import Any

from rich.table import Table
from transformers import AutoConfig

from modeling_llamba.model.config_values import ATTENTION_ALONE, RECURRENT

from ..formats.export import holders
from ..hybrids.shapes import HYBRIDS
from ..teachers import FAMILIES
from ..teachers.base import TeacherFamily
from ..teachers.teacher import hybrid_fields

REAL_WEIGHTS = {"llama": "SmolLM2-135M-Instruct"}
"""Teachers whose own weights the tests convert; every family is tested on small random ones."""


def families() -> list[dict[str, Any]]:
    """One entry per family, as plain data."""
    return [
        {
            "model_type": family.model_type,
            "models": family.title,
            "hybrid": HYBRIDS[family.hybrid].__name__.removesuffix("Config"),
            "formats": ["safetensors", *(["gguf"] if family.gguf else [])],
            "export": export_targets(family),
            "weights": ["random", *([REAL_WEIGHTS[family.model_type]] if family.model_type in REAL_WEIGHTS else [])],
        }
        for family in FAMILIES.values()
    ]


def export_targets(family: TeacherFamily) -> list[str]:
    """The architectures that can hold an export-ready hybrid of a teacher with its family's default configuration and
    no window of its own."""
    if any(family.constants.get(name) for name in ATTENTION_ALONE):
        return []  # what is exported has mixers, which these teachers do not become
    fields, types = hybrid_fields(AutoConfig.for_model(family.model_type), family)
    if RECURRENT in types:
        return []
    layers = ["linear_attention", *["full_attention"] * (len(types) - 1)]
    config = HYBRIDS[family.hybrid](**fields, layer_types=layers, mixer="mamba2", mixer_qk_norm=fields.get("qk_norm"))
    return holders(config)


def describe_families(report: list[dict[str, Any]]) -> Table:
    """The report as a table for the console."""
    table = Table(box=None)
    for heading in ("teacher", "model_type", "becomes", "tested from", "weights in tests", "exports to"):
        table.add_column(heading, overflow="fold")
    for of in report:
        lists = (", ".join(of[key]) or "-" for key in ("formats", "weights", "export"))
        table.add_row(of["models"], of["model_type"], of["hybrid"], *lists)
    return table


def readme_table() -> str:
    """The table of the README: teachers by what they become."""
    becomes: dict[str, list[str]] = {}
    for of in families():
        becomes.setdefault(of["hybrid"], []).append(of["models"])
    rows = [f"| {', '.join(titles)} | {hybrid} |" for hybrid, titles in becomes.items()]
    return "\n".join(["| teacher | saved as class |", "|---|---|", *rows])
