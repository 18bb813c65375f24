"""Speculative decoding on one thread: tokens per pass of the target, and CPU time over that of plain decoding.

The target is the hybrid that `make demo` leaves; its prompt asks to correct a paragraph, which suits prompt lookup.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from convert.checkpoint.load import encode, load_model, load_tokenizer
from convert.teachers.teacher import embedded_teacher

from .measure import Report, Table, interleaved

HYBRID = Path("runs/demo/hybrid")
NEW_TOKENS, REPEATS = 48, 2
PROMPT = """Rewrite the following paragraph, correcting mistakes only: The old harbour lie at the end of the \
town, where the river meet the sea. Every morning the fishermen takes their boats out before the sun rise, and every \
evening they comes back with what the sea have given them. The harbour lie quiet in winter, when the storms keeps the \
boats at home."""


def compare(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], drafts: list[tuple[str, Any, int]], new_tokens: int
) -> Report:
    """Plain decoding and each draft in turns; a draft is its name, what `generate` takes as `draft`, and a length."""
    outputs = {}

    def decoding(name: str, **options: Any):
        def run() -> None:
            outputs[name] = model.generate(
                **inputs, max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True, **options
            )

        return run

    calls = {"plain": decoding("plain")}
    for name, draft, length in drafts:
        options = {"custom_generate": model.speculative_decoding, "draft": draft, "num_draft_tokens": length}
        calls[f"{name}, K = {length}"] = decoding(f"{name}, K = {length}", **options)
    timings = interleaved(calls, REPEATS)
    report, rows = Report(), []
    for name in list(calls)[1:]:
        known = outputs[name].statistics.summary()
        same = torch.equal(outputs[name].sequences, outputs["plain"].sequences)
        ratio = timings[name].median / timings["plain"].median
        report.add(f"speculative decoding, {name}: outputs unlike plain decoding's", float(not same), 0.0)
        if name == "prompt lookup, K = 4":
            report.add(f"speculative decoding, {name}: time over plain decoding", ratio, 1.0)
        accepted = known["acceptance_rate"]
        rows.append([name, f"{known['tokens_per_target_pass']:.2f}", "" if accepted is None else f"{accepted:.2f}",
                     f"{ratio:.2f}", f"{known['extra_bytes'] / 1e6:.1f}"])  # fmt: skip
    columns = ["draft, tokens drafted per pass", "tokens per pass", "accepted", "time over plain", "extra MB"]
    report.tables.append(Table(columns, rows))
    return report


def measure(output: Path, hybrid: Path = HYBRID) -> Report:
    """Prompt lookup at several lengths, and the hybrid's teacher, as drafts."""
    if not hybrid.is_dir():
        return Report(skipped={"speculative decoding": f"there is no {hybrid}; run `make demo` first"})
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    model, teacher = (load_model(str(path), dtype="float32") for path in (hybrid, embedded_teacher()))
    drafts = [("prompt lookup", "prompt-lookup", length) for length in (2, 3, 4, 8)]
    drafts += [("teacher", teacher, 4)]
    return compare(model, encode(load_tokenizer(str(hybrid)), [PROMPT], chat=True), drafts, NEW_TOKENS)
