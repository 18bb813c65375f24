"""Convert the embedded teacher as the command does by default, load it where this project is not installed, compare.

make demo        or        python -m recipes.demo [--output runs/demo/hybrid]
"""

import argparse
import json
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from convert.cli import progress_bars
from convert.options import make_options
from convert.pipeline import run
from convert.plan import describe
from convert.teachers.teacher import embedded_teacher
from convert.weights.writer import human_bytes

from .evaluation.load_elsewhere import answer, run_elsewhere
from .evaluation.metrics import Reader, figures, per_token, reader

PROMPTS = ["What is the capital of France?", "Why is the sky blue? Answer in one sentence."]
MAX_NEW_TOKENS, MAX_TOKENS = 40, 512
HELD_OUT = Path(__file__).parent / "evaluation" / "held_out.txt"


def main(output: Path) -> dict:
    """Run the demo and return its figures."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    console, gguf, text = Console(), embedded_teacher(), HELD_OUT.read_text()

    console.rule("convert")
    started = time.perf_counter()
    options = make_options(str(gguf), str(output), overwrite=True, work_dir=f"{output}.work")
    with progress_bars(quiet=False) as progress:
        plan = run(options, progress=progress)
    seconds = time.perf_counter() - started
    console.print(describe(plan), markup=False, highlight=False, soft_wrap=True)
    console.print(f"{seconds:.0f} s -> {output}", highlight=False)

    console.rule("teacher, and the hybrid in a process without this project")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    teacher = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    hybrid = run_elsewhere(str(output.absolute()), PROMPTS, text, MAX_TOKENS, MAX_NEW_TOKENS)
    table = Table("prompt", "teacher", "hybrid")
    for prompt, of_hybrid in zip(PROMPTS, hybrid["answers"], strict=True):
        table.add_row(prompt, answer(teacher, tokenizer, prompt, MAX_NEW_TOKENS).strip(), of_hybrid.strip())
    console.print(table, markup=False)

    ids = tokenizer(text, return_tensors="pt").input_ids[:, :MAX_TOKENS]
    known = Reader(lambda ids: hybrid["logits"][None], lambda logits: logits)
    compared = figures(per_token(known, reader(teacher), ids, batch_size=1))
    summary = plan.summary()
    report = {
        "parameters": {"teacher": teacher.num_parameters(), "hybrid": hybrid["parameters"]},
        "loaded_class": hybrid["class"],
        "align": plan.config.conversion["align"],
        "cache_bytes": summary["cache_bytes"],
        "state_bytes": summary["state_bytes"],
        "held_out_tokens": ids.shape[1],
        "kl_nats_per_token": compared["kl"],
        "perplexity": {"teacher": compared["teacher_perplexity"], "hybrid": compared["perplexity"]},
        "conversion_seconds": seconds,
    }
    table = Table("", "teacher", "hybrid")
    table.add_row("parameters", *(f"{n:,}" for n in report["parameters"].values()))
    table.add_row("recurrent state, any length", "none", human_bytes(report["state_bytes"]))
    for context, size in report["cache_bytes"].items():
        table.add_row(f"cache at {context} tokens", human_bytes(size["teacher"]), human_bytes(size["hybrid"]))
    table.add_row("perplexity, held-out text", *(f"{p:.4g}" for p in report["perplexity"].values()))
    table.add_row("KL to the teacher, nats per token", "0", f"{report['kl_nats_per_token']:.3f}")
    console.print(table)
    console.print(
        "Every mixer was fitted to the attention it replaces; nothing was trained end to end yet. What is lost beyond "
        f"KL: `python -m recipes.evaluate {output}`.",
        style="yellow",
    )
    (output.parent / f"{output.name}.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/demo/hybrid"), help="Folder of the hybrid.")
    main(parser.parse_args().output)
