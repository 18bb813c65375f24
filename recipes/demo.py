"""Convert the embedded teacher as the command does by default, load it where this project is not installed, compare.

make demo        or        python -m recipes.demo [--output runs/demo/hybrid]
"""

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from convert.checkpoint.load import load_model, prompt_tokenizer
from convert.cli import progress_bars
from convert.fit.probes import needle_probe, plain_tokens
from convert.io.writer import human_bytes
from convert.options import make_options
from convert.pipeline import run
from convert.plan import describe_seconds, plan_printer
from convert.teachers.teacher import embedded_teacher

from .evaluation.load_elsewhere import answer, run_elsewhere
from .evaluation.metrics import Reader, figures, per_token, reader
from .evaluation.recall import hits
from .evaluation.speed import decoding_rates

PROMPTS = ["What is the capital of France?", "Why is the sky blue? Answer in one sentence."]
MAX_NEW_TOKENS, MAX_TOKENS = 40, 1024
NEEDLES, NEEDLE, PLACE = 8, 8, 32
"""Texts with a needle, its tokens, and where it begins."""
LONG = 16384
"""Tokens of context at which decoding is timed."""
HELD_OUT = Path(__file__).parent / "evaluation" / "held_out.txt"


def main(output: Path) -> dict:
    """Run the demo and return its figures."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    console, gguf, text = Console(), embedded_teacher(), HELD_OUT.read_text()

    console.rule("convert")
    options = make_options(str(gguf), str(output), overwrite=True)

    print_plan = plan_printer(lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True))
    with progress_bars(quiet=False) as progress:
        plan = run(options, print_plan, progress)
    console.print(f"{describe_seconds(plan)} -> {output}", highlight=False)

    console.rule("teacher, and the hybrid in a process without this project")
    tokenizer = prompt_tokenizer(str(gguf))
    teacher = load_model(str(gguf))
    hybrid = run_elsewhere(str(output.absolute()), PROMPTS, text, MAX_TOKENS, MAX_NEW_TOKENS)
    table = Table("prompt", "teacher", "hybrid")
    for prompt, of_hybrid in zip(PROMPTS, hybrid["answers"], strict=True):
        table.add_row(prompt, answer(teacher, tokenizer, prompt, MAX_NEW_TOKENS).strip(), of_hybrid.strip())
    console.print(table, markup=False)

    console.rule("what is kept, and what it costs")
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :MAX_TOKENS]
    known = Reader(lambda ids: hybrid["logits"][None], lambda logits: logits)
    compared = figures(per_token(known, reader(teacher), ids, batch_size=1))
    models = {"teacher": teacher, "hybrid": load_model(str(output), "float32")}
    vocabulary = plain_tokens(teacher.config.vocab_size)
    probe = needle_probe(ids.expand(NEEDLES, -1), vocabulary, seed=1, width=NEEDLE, place=PLACE)
    answers = probe.answers.sum().item()
    summary = plan.summary()
    report = {
        "parameters": summary["parameters"],
        "loaded_class": hybrid["class"],
        "align": plan.config.conversion["align"],
        "cache_bytes": summary["cache_bytes"],
        "break_even": summary["break_even"],
        "state_bytes": summary["state_bytes"],
        "held_out_tokens": ids.shape[1],
        "kl_nats_per_token": compared["kl"],
        "perplexity": {"teacher": compared["teacher_perplexity"], "hybrid": compared["perplexity"]},
        "recall": {
            which: hits(reader(model), probe, 1, model.device).sum().item() / answers
            for which, model in models.items()
        },
        "decode_tokens_per_second": decoding_rates(models, LONG),
        "conversion_seconds": plan.config.conversion["seconds"],
    }
    rows = {
        "parameters": ("{:,}", report["parameters"]),
        "perplexity of held-out text": ("{:.4g}", report["perplexity"]),
        f"random tokens found again, {ids.shape[1] - PLACE} back": ("{:.0%}", report["recall"]),
        f"tokens per second after {LONG:,}": ("{:.1f}", report["decode_tokens_per_second"]),
    }
    table = Table("", "teacher", "hybrid")
    for context, size in report["cache_bytes"].items():
        table.add_row(f"cache of {context} tokens", human_bytes(size["teacher"]), human_bytes(size["hybrid"]))
    for what, (form, figure) in rows.items():
        table.add_row(what, form.format(figure["teacher"]), form.format(figure["hybrid"]))
    table.add_row("KL to the teacher, nats per token", "0", f"{report['kl_nats_per_token']:.3f}")
    console.print(table)
    console.print(
        "Every layer was fitted to the attention it replaces; nothing was trained end to end. Beside other caches: "
        f"`convert-to-hybrid compare {gguf} {output}`.",
        style="yellow",
        soft_wrap=True,  # so that the command can be copied
    )
    console.print(saved_and_paid(report), style="bold", highlight=False)
    (output.parent / f"{output.name}.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


def saved_and_paid(report: dict) -> str:
    """Say what a hybrid takes less of, and what it costs."""
    cache, parameters, recall = report["cache_bytes"]["4k"], report["parameters"], report["recall"]
    rates, even = report["decode_tokens_per_second"], report["break_even"]["16 bits"]
    saved = "never less memory" if even is None else f"less memory from {even:,} tokens on"
    return (
        f"At 4k tokens the hybrid's cache has {cache['hybrid'] / cache['teacher']:.0%} of the teacher's bytes; "
        f"weights and cache together take {saved}. After {LONG:,} tokens it decodes "
        f"{rates['hybrid'] / rates['teacher']:.1f} times as fast. It costs {report['kl_nats_per_token']:.3f} nats of "
        f"KL per token on a text of {report['held_out_tokens']:,} tokens, {recall['teacher']:.0%} to "
        f"{recall['hybrid']:.0%} of recall, and {parameters['hybrid'] / parameters['teacher'] - 1:.1%} more weights."
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/demo/hybrid"), help="Folder of the hybrid.")
    main(parser.parse_args().output)
