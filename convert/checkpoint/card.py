"""The README.md of a converted model, with the figures that matter and two pictures."""

import re
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from ..hybrids.shapes import layer_letters, legend_of_letters
from ..io.writer import human_bytes
from ..layout.placement import window_in_words
from ..plan import Plan, break_even_in_words
from .code import KERNELS, NEEDED
from .tokenizer import Licence

KL_ROW, RECALL_ROW = "KL to the teacher, nats per token", "recall, of the teacher's"
NOT_MEASURED = "not measured yet: `python -m recipes.evaluate`"
NO_FIGURES = {KL_ROW: NOT_MEASURED, RECALL_ROW: NOT_MEASURED}
"""Replacements for the rows of figures that training makes out of date."""

TEMPLATE = """---
{{ card_data }}
---

# {{ title }}

{{ teacher }} with {{ replaced }}, made by convert-to-hybrid. It loads with `{{ needed }}`:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{{ path }}", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("{{ path }}", trust_remote_code=True)
```

{{ alignment_note }}

{{ kernels }}

| | |
|---|---|
{{ figure_rows }}

## Layers

![what each layer and head is](layers.png)

`{{ layers }}` ({{ legend }})

| per sequence | teacher | this model |
|---|---|---|
{{ cache_rows }}

![cache against context length](cache.png)

{{ memory }}

## Provenance

| | |
|---|---|
{{ provenance_rows }}

"""

ALIGNMENT_NOTES = {
    "none": "**Not aligned.** The attention weights were mapped (Q to C, K to B, V to x, O to out_proj) and nothing "
    "was fitted: this is a starting point for alignment and distillation, not yet a language model.",
    "closed-form": "**Aligned in closed form.** The attention weights were mapped (Q to C, K to B, V to x, O to "
    "out_proj), and each mixer was fitted by itself to the attention it replaces, without training end to end; "
    "`alignment.json` holds the text's size and every layer's held-out error. Recall over a distance suffers first.",
    "mohawk": "**Aligned with MOHAWK.** The mixers were fitted to the attention they replace and then trained (matrix "
    "orientation, hidden-state alignment, distillation; `alignment.json` says which, on how many tokens, and what "
    "each stage changed).",
}

KEPT_NOTE = "Every layer is the teacher's own."
SCALED_NOTE = (
    "Queries and keys are scaled against each other, so that rounding costs less; no score changes. LoRA adapters for "
    "the teacher's `q_proj` or `k_proj` do not fit this model: merge them into the teacher and convert that."
)

WINDOW_NOTE = (
    "**A window and sinks.** The replaced layers are the teacher's own attention, restricted to the last tokens and "
    "the first few; no weight was changed. What lies beyond the window is seen by the other layers and heads only."
)

UNFITTED_STATE_NOTE = (
    "**Not aligned.** The replaced layers are the teacher's own attention, restricted to the last tokens and the "
    "first few. All other tokens are read from a state as softmax would read them if keys and values were Gaussian; "
    "nothing was fitted to those that are."
)
FITTED_STATE_NOTE = (
    "**Aligned in closed form.** The replaced layers are the teacher's own attention, restricted to the last tokens, "
    "the first few and some salient ones. All other tokens are read from a state; what a layer does with it was "
    "fitted to the attention it replaces, without training end to end. `alignment.json` holds the text's size and "
    "every layer's held-out error. Recall over a distance suffers first."
)
NOTES = (*ALIGNMENT_NOTES.values(), WINDOW_NOTE, UNFITTED_STATE_NOTE, FITTED_STATE_NOTE)
"""Paragraphs of which every card contains one, until training replaces it."""


def alignment_note(align: str, window: Any, state: bool) -> str:
    """The paragraph of a card on how the weights came about."""
    if not window or align == "mohawk":
        return ALIGNMENT_NOTES[align]
    if not state:
        return WINDOW_NOTE
    if align == "none":
        return UNFITTED_STATE_NOTE
    return FITTED_STATE_NOTE


def renewed(text: str, rows: dict[str, str], note: str | None = None) -> str:
    """A card's text with new figures and a new paragraph on how the weights came about.

    Only what this project wrote is replaced: the rest of a card is its user's, who may have rewritten it.

    Args:
        rows: rows of the first table, by their names. note: the paragraph; None leaves it.
    """
    if note is not None:
        for known in NOTES:
            text = text.replace(known, note)
    for row, figure in rows.items():
        line = f"| {row} | {figure} |"
        text = re.sub(rf"^\| {re.escape(row)} \|.*$", lambda _, line=line: line, text, flags=re.MULTILINE)
    return text


def _kind_tags(summary: dict[str, Any]) -> list[str]:
    if summary["state"]:
        return ["hybrid-attention"]
    if not summary["mixer_layers"]:
        return []
    if summary["mixer"] is None:
        return ["sliding-window"]
    return ["mamba", summary["mixer"]]


def as_recorded(value: Any) -> str:
    """Write a value of a hybrid's record in words: the entries of a dictionary as "key value", with commas between."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {as_recorded(entry)}" for key, entry in value.items())
    if isinstance(value, list):
        return ", ".join(map(as_recorded, value))
    return str(value)


def make_card(plan: Plan, name: str, licence: Licence) -> ModelCard:
    """The card of the model in folder or repository `name`.

    Args:
        licence: what the teacher's card says of its licence, which the hybrid's weights inherit.
    """
    summary = plan.summary()
    conversion = plan.config.conversion
    replaced = summary["mixer_layers"]
    replacement = f"a {summary['mixer']} mixer"
    legend = legend_of_letters(summary["layer_types"])
    if summary["window"]:
        replacement = "attention to a window"
        hybrid = f"softmax attention to {window_in_words(summary['window'])} tokens and {summary['sinks']} sinks"
        if summary["state"]:
            replacement = "attention to a window and a state"
            hybrid = f"a state beside {hybrid}"
        legend = legend_of_letters(summary["layer_types"], hybrid)
    replaced_in_words = "every attention layer kept"
    note = KEPT_NOTE
    # where queries and keys have norms, the norms' weights are scaled and adapters fit
    if plan.placement.bits.rounds and plan.config.qk_norm is None:
        # PEFT would load such adapters without a word, as all names are the teacher's
        note = f"{KEPT_NOTE} {SCALED_NOTE}"
    memory = ""
    if replaced:
        of_all = f"{len(replaced)} of its {len(replaced) + len(summary['attention_layers'])} attention layers"
        replaced_in_words = f"{of_all} replaced by {replacement}"
        note = alignment_note(conversion["align"], summary["window"], summary["state"])
        memory = (
            f"Bits of a number in the cache: {plan.placement.bits}. Memory: "
            f"{break_even_in_words(summary['break_even'])}."
        )
    cache_rows = [
        f"| {context} tokens | {human_bytes(size['teacher'])} | {human_bytes(size['hybrid'])} |"
        for context, size in summary["cache_bytes"].items()
    ]
    shares = [size["hybrid"] / size["teacher"] for size in summary["cache_bytes"].values()]
    figures = {"cache at 4k and 32k tokens, of the teacher's": f"{shares[0]:.0%}, {shares[1]:.0%}"} | NO_FIGURES
    provenance = {k: v for k, v in conversion.items() if k != "teacher_layer_types" and v not in (None, {})}
    base_model = None
    if plan.teacher.revision is not None:  # a repository of the Hub
        base_model = plan.teacher.name
    return ModelCard.from_template(
        ModelCardData(
            library_name="transformers",
            pipeline_tag="text-generation",
            base_model=base_model,
            tags=["convert-to-hybrid", "hybrid", *_kind_tags(summary)],
            **licence,
        ),
        template_str=TEMPLATE,
        title=name.split("/")[-1],
        path=name,
        teacher=plan.teacher.public_name,
        needed=NEEDED,
        kernels=KERNELS,
        replaced=replaced_in_words,
        layers=layer_letters(summary["layer_types"]),
        legend=legend,
        cache_rows="\n".join(cache_rows),
        memory=memory,
        figure_rows="\n".join(f"| {row} | {figure} |" for row, figure in figures.items()),
        alignment_note=note,
        provenance_rows="\n".join(f"| {key} | `{as_recorded(value)}` |" for key, value in provenance.items()),
    )
