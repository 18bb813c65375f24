"""Convert the embedded teacher to an aligned 50 % hybrid, load it where this project is not installed, compare.

make demo        or        python -m recipes.demo [--output runs/demo]
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from convert.config import make_config
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from convert.cli import progress_bars
from convert.pipeline import run
from convert.plan import describe
from convert.teachers.teacher import embedded_teacher
from convert.weights.writer import human_bytes

from .load_elsewhere import answer

PROMPTS = ["What is the capital of France?", "Why is the sky blue? Answer in one sentence."]
MAX_NEW_TOKENS = 40
MAX_TOKENS = 512
HELD_OUT = Path(__file__).with_name("held_out.txt")


def kl_per_token(teacher_logits: torch.Tensor, student_logits: torch.Tensor) -> torch.Tensor:
    """KL(teacher || student) at each position, in nats, from logits (L, vocab)."""
    teacher, student = (logits.float().log_softmax(-1) for logits in (teacher_logits, student_logits))
    return (teacher.exp() * (teacher - student)).sum(-1)


def perplexity(logits: torch.Tensor, ids: torch.Tensor) -> float:
    """Of ids (L,) under logits (L, vocab)."""
    return math.exp(torch.nn.functional.cross_entropy(logits[:-1].float(), ids[1:]).item())


def elsewhere(folder: Path, text: str) -> dict:
    """Load the folder in a fresh process that cannot import this project; its answers and logits."""
    with tempfile.TemporaryDirectory() as scratch:
        job = Path(scratch) / "job.json"
        results = Path(scratch) / "results.pt"
        job.write_text(
            json.dumps(
                {
                    "folder": str(folder.absolute()),
                    "prompts": PROMPTS,
                    "text": text,
                    "max_tokens": MAX_TOKENS,
                    "max_new_tokens": MAX_NEW_TOKENS,
                    "results": str(results),
                }
            )
        )
        script = Path(__file__).with_name("load_elsewhere.py")
        environment = os.environ | {"HF_MODULES_CACHE": f"{scratch}/modules", "TRANSFORMERS_VERBOSITY": "error"}
        subprocess.run([sys.executable, "-I", str(script), str(job)], cwd=scratch, check=True, env=environment)
        return torch.load(results)


@torch.no_grad()
def main(output: Path) -> dict:
    """Run the demo and return its figures."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    console = Console()
    gguf = embedded_teacher()
    text = HELD_OUT.read_text()

    console.rule("convert")
    started = time.perf_counter()
    options = make_config(
        model=str(gguf), output=str(output), attention_ratio=0.5, overwrite=True, work_dir=f"{output}.work"
    )
    with progress_bars(quiet=False) as (set_total, advance, on_align):
        plan = run(options, lambda plan: set_total(plan.summary()["bytes_to_write"]), advance, on_align)
    seconds = time.perf_counter() - started
    console.print(describe(plan), markup=False, highlight=False, soft_wrap=True)
    console.print(f"{seconds:.0f} s -> {output}", highlight=False)

    console.rule("teacher")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    teacher = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :MAX_TOKENS]
    teacher_answers = [answer(teacher, tokenizer, prompt, MAX_NEW_TOKENS) for prompt in PROMPTS]
    teacher_logits = teacher(ids).logits[0]

    console.rule("hybrid, in a process without this project")
    hybrid = elsewhere(output, text)

    table = Table("prompt", "teacher", "hybrid")
    for row in zip(PROMPTS, teacher_answers, hybrid["answers"], strict=True):
        table.add_row(*(cell.strip() for cell in row))
    console.print(table, markup=False)
    kl = kl_per_token(teacher_logits, hybrid["logits"])
    report = {
        "parameters": {"teacher": sum(p.numel() for p in teacher.parameters()), "hybrid": hybrid["parameters"]},
        "loaded_class": hybrid["class"],
        "align": plan.config.conversion["align"],
        "cache_bytes": plan.summary()["cache_bytes"],
        "state_bytes": plan.summary()["state_bytes"],
        "held_out_tokens": ids.shape[1],
        "kl_nats_per_token": kl.mean().item(),
        "perplexity": {
            "teacher": perplexity(teacher_logits, ids[0]),
            "hybrid": perplexity(hybrid["logits"], ids[0]),
        },
        "conversion_seconds": seconds,
    }
    _print_figures(console, report)
    (output.parent / f"{output.name}.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


def _print_figures(console: Console, report: dict) -> None:
    table = Table("", "teacher", "hybrid")
    table.add_row("parameters", *(f"{n:,}" for n in report["parameters"].values()))
    table.add_row("recurrent state, any length", "none", human_bytes(report["state_bytes"]))
    for context, size in report["cache_bytes"].items():
        table.add_row(f"cache at {context} tokens", human_bytes(size["teacher"]), human_bytes(size["hybrid"]))
    table.add_row("perplexity, held-out text", *(f"{p:.4g}" for p in report["perplexity"].values()))
    table.add_row("KL to the teacher, nats per token", "0", f"{report['kl_nats_per_token']:.3f}")
    console.print(table)
    console.print(
        "Every mixer was fitted to the attention it replaces; nothing was trained end to end yet. What each layer is "
        "worth, in KL and in recall: `python -m recipes.layer_scores runs/layers`.",
        style="yellow",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/demo/hybrid"), help="folder of the hybrid")
    main(parser.parse_args().output)
