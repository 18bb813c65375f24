"""The whole way on real data, on a CPU: teacher -> hybrid -> SeqKD data -> SFT -> DPO -> Hub -> pulled -> answers.

make pipeline        or        python -m recipes.pipeline [runs/pipeline] [--compare-losses]

Every step leaves a folder, and a step whose folder is there is not done again. After each the model is measured on
held-out data: KL to the teacher and perplexity on web text, KL on the teacher's held-out answers, and reward accuracy
and margin against the teacher on held-out preference pairs. The Hub is a stand-in on this machine.

Answers are short, so that this takes an hour or two on two cores; most are cut off. To the KL that is no difference.
Cross entropy learns from them to stop anywhere: `--compare-losses` shows what it costs in KL, not how it would do on
whole answers.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from convert.checkpoint.load import load_tokenizer
from convert.config import make_config
from convert.pipeline import run
from convert.teachers.teacher import embedded_teacher
from tests.doubles.hub import TOKEN, HubServer

from . import dpo, sft, validation_text
from . import seqkd as generate_seqkd_data
from .evaluation.metrics import figures, per_token, reader
from .evaluation.texts import TextSource
from .training import chat_data

PROMPTS = 224
PAIRS, HELD_OUT_PAIRS = 48, 24
PAIR_TOKENS = 192
QUESTION = "What is the capital of France?"
REPOSITORY = "me/hybrid"
COMMON = [
    "--use_cpu", "true", "--bf16", "false", "--report_to", "none", "--disable_tqdm", "true", "--logging_steps", "4",
    "--save_strategy", "no", "--eval_strategy", "epoch", "--num_train_epochs", "1",
    "--per_device_train_batch_size", "4",
    "--lr_scheduler_type", "cosine", "--warmup_steps", "0.1", "--gradient_checkpointing", "false",
]  # fmt: skip
SFT = ["--learning_rate", "2e-4", "--other_learning_rate", "2e-5", "--max_length", "256"]
LOSSES = {"KL": ("1", "0"), "KL + CE": ("1", "1"), "CE": ("0", "1")}


class Judge:
    """Held-out data, and what the teacher makes of it."""

    def __init__(self, gguf: Path, folder: Path):
        self.tokenizer = load_tokenizer(str(gguf))
        self.teacher = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        ).eval()
        self.text = TextSource(str(folder / "text" / "owt_5.jsonl")).rows(self.tokenizer, 512, 4)
        answers = load_dataset(str(folder / "seqkd"))["test"]
        self.answers = [self._ids(row["prompt"], row["completion"]) for row in answers]
        pairs = load_dataset(str(folder / "pairs"))["test"]
        names = ("chosen", "rejected")
        self.pairs = [[self._ids(row["prompt"], row[name], PAIR_TOKENS) for name in names] for row in pairs]
        self.reference = [[self._log_prob(self.teacher, *answer) for answer in pair] for pair in self.pairs]

    def _ids(self, prompt: list[dict], answer: list[dict], longest: int | None = None) -> tuple[torch.Tensor, int]:
        start, whole = (
            self.tokenizer.apply_chat_template(turns, add_generation_prompt=generate, return_dict=True)["input_ids"]
            for turns, generate in ((prompt, True), (prompt + answer, False))
        )
        return torch.tensor([whole[:longest]]), len(start)

    @torch.no_grad()
    def measure(self, model: nn.Module) -> dict[str, float]:
        """KL and perplexity on text; KL on answers; reward accuracy and margin (nats, beta left out) on pairs."""
        ours, teacher = reader(model), reader(self.teacher)
        on_text = figures(per_token(ours, teacher, self.text, 1))
        chat = torch.cat([per_token(ours, teacher, ids, 1).kl[0, start - 1 : -1] for ids, start in self.answers])
        margins = torch.tensor(
            [
                (self._log_prob(model, *pair[0]) - known[0]) - (self._log_prob(model, *pair[1]) - known[1])
                for pair, known in zip(self.pairs, self.reference, strict=True)
            ]
        )
        return {
            "kl": on_text["kl"],
            "perplexity": on_text["perplexity"],
            "kl_on_answers": chat.mean().item(),
            "reward_accuracy": (margins > 0).float().mean().item(),
            "margin": margins.mean().item(),
        }

    @torch.no_grad()
    def _log_prob(self, model: nn.Module, ids: torch.Tensor, start: int) -> float:
        log_probs = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
        return log_probs.gather(-1, ids[0, start:, None]).sum().item()


def prepare_data(gguf: Path, folder: Path) -> None:
    """Real prompts, the teacher's answers, preference pairs that fit, and text."""
    if not (folder / "chat" / "pairs.jsonl").is_file():
        chat_data.main(folder / "chat")
    if not (folder / "text" / "owt_5.jsonl").is_file():
        validation_text.main(folder / "text")
    if not (folder / "seqkd").is_dir():
        generate_seqkd_data.main([
            "--teacher_model_name_or_path", str(gguf), "--dataset_name", str(folder / "chat" / "prompts.jsonl"),
            "--output_dir", str(folder / "seqkd"), "--max_prompts", str(PROMPTS), "--max_prompt_length", "128",
            "--max_new_tokens", "64", "--batch_size", "32", "--test_share", "0.1", "--truncated", "keep",
        ])  # fmt: skip
    if not (folder / "pairs" / "test.jsonl").is_file():
        pairs = [json.loads(line) for line in (folder / "chat" / "pairs.jsonl").read_text().splitlines()]
        pairs.sort(key=lambda pair: len(json.dumps(pair)))
        chosen = pairs[: PAIRS + HELD_OUT_PAIRS]
        every = (PAIRS + HELD_OUT_PAIRS) // HELD_OUT_PAIRS  # long and short ones in both splits
        (folder / "pairs").mkdir(exist_ok=True)
        chat_data.write(folder / "pairs" / "train.jsonl", [p for i, p in enumerate(chosen) if i % every])
        chat_data.write(folder / "pairs" / "test.jsonl", chosen[::every])


def train(recipe: Callable, student: Path, gguf: Path, data: Path, output: Path, *more: str) -> Path:
    """Run a recipe unless its result is there."""
    if not (output / "config.json").is_file():
        named = ["--model_name_or_path", str(student), "--teacher_model_name_or_path", str(gguf)]
        recipe([*named, "--dataset_name", str(data), "--output_dir", str(output), *COMMON, *more])
    return output


def push_and_pull(model: Path, folder: Path) -> dict[str, Any]:
    """Push to a stand-in Hub, pull in a process that knows nothing of this project, ask; what it answered."""
    (folder / "hub").mkdir(exist_ok=True)
    job, results = folder / "job.json", folder / "pulled.pt"
    with HubServer(folder / "hub") as hub:
        environment = os.environ | hub.environment(folder / "hub-cache")
        command = [sys.executable, "-m", "recipes.publish", str(model), REPOSITORY]
        subprocess.run(command, check=True, env=environment | {"HF_TOKEN": TOKEN})
        asked = {"folder": REPOSITORY, "prompts": [QUESTION], "text": QUESTION, "max_tokens": 64, "max_new_tokens": 40}
        job.write_text(json.dumps(asked | {"results": str(results.absolute())}))
        script = Path(__file__).with_name("load_elsewhere.py")
        environment |= {"HF_MODULES_CACHE": str((folder / "hub-cache" / "modules").absolute())}
        environment.pop("HF_TOKEN")
        subprocess.run([sys.executable, "-I", str(script), str(job.absolute())], check=True, env=environment)
    pulled = torch.load(results)
    return {"class": pulled["class"], "question": QUESTION, "answer": pulled["answers"][0].strip()}


def main(folder: Path, compare_losses: bool) -> dict[str, Any]:
    """Run what is left to do; everything measured."""
    logging.set_verbosity_error()
    gguf, started, folder = embedded_teacher(), time.perf_counter(), folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    prepare_data(gguf, folder)
    hybrid, finetuned, preferred = (folder / name for name in ("hybrid", "sft", "dpo"))
    if not (hybrid / "config.json").is_file():
        run(make_config(model=str(gguf), output=str(hybrid), attention_ratio=0.5, work_dir=str(folder / "align")))
    train(sft.main, hybrid, gguf, folder / "seqkd", finetuned, *SFT)
    dpo_options = ["--learning_rate", "5e-6", "--beta", "0.1", "--max_length", str(PAIR_TOKENS)]
    train(dpo.main, finetuned, gguf, folder / "pairs", preferred, *dpo_options, "--precompute_ref_log_probs", "true")
    judge = Judge(gguf, folder)
    steps = [{"name": "teacher"} | judge.measure(judge.teacher) | {"reward_accuracy": None}]  # against itself
    steps += [{"name": path.name} | judge.measure(load(path)) for path in (hybrid, finetuned, preferred)]
    report: dict[str, Any] = {"steps": steps}
    if compare_losses:
        report["losses"] = [{"name": "hybrid"} | {k: v for k, v in steps[1].items() if k != "name"}]
        for name, (kl, ce) in LOSSES.items():
            loss = ["--kl_weight", kl, "--ce_weight", ce]
            path = finetuned if name == "KL" else folder / f"sft-{name.replace(' ', '')}"
            train(sft.main, hybrid, gguf, folder / "seqkd", path, *SFT, *loss)
            report["losses"].append({"name": name} | judge.measure(load(path)))
    pulled = push_and_pull(preferred, folder)
    report |= {"pulled_and_answered": bool(pulled["answer"]), "pulled": pulled}
    report["rows"] = {name: len(load_dataset(str(folder / name))["train"]) for name in ("seqkd", "pairs")}
    report["seconds"] = time.perf_counter() - started
    (folder / "results.json").write_text(json.dumps(report, indent=2) + "\n")
    show(report)
    return report


def load(folder: Path) -> nn.Module:
    """A model of the pipeline."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def show(report: dict[str, Any]) -> None:
    """Print the tables."""
    console = Console()
    for title in ("steps", "losses"):
        table = Table("after", "KL", "perplexity", "KL, answers", "reward accuracy", "margin", title=title)
        for row in report.get(title, []):
            table.add_row(row["name"], *("–" if v is None else f"{v:.3f}" for k, v in row.items() if k != "name"))
        if table.rows:
            console.print(table)
    console.print(f"{report['pulled']['question']} {report['pulled']['answer']}", highlight=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/pipeline"))
    parser.add_argument("--compare-losses", action="store_true", help="also SFT with KL + CE and with CE alone")
    arguments = parser.parse_args()
    main(arguments.folder, arguments.compare_losses)
