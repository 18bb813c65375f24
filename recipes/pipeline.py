"""The whole way on real data, on a CPU: teacher -> hybrid -> SeqKD data -> SFT -> DPO -> Hub -> pulled -> answers.

make pipeline        or        python -m recipes.pipeline [runs/pipeline] [--push-to-hub me/hybrid]

Every step leaves a folder, and a step whose folder is there is not done again. After each, KL to the teacher and
perplexity are measured on held-out web text; training reports KL on the teacher's held-out answers (SFT) and reward
accuracy and margin on held-out preference pairs (DPO). `make pipeline` pushes to a stand-in Hub on this machine.

Answers are short, for the sake of time. Most are cut off, which makes no difference to the KL.
"""

import argparse
import json
import math
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from convert.checkpoint.hub import prepare_repository, upload
from convert.checkpoint.load import load_model, prompt_tokenizer
from convert.cli import progress_bars
from convert.fit.text import documents, token_rows
from convert.options import make_options
from convert.pipeline import run
from convert.teachers.teacher import embedded_teacher

from . import dpo, seqkd, sft
from .evaluation import validation_text
from .evaluation.load_elsewhere import run_elsewhere
from .evaluation.metrics import figures, per_token, reader
from .evaluation.validation_text import write_lines
from .training.load import load_named
from .training.save import LABELS, read_record

CHATS = "llamafactory==0.9.5"
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
PROMPTS, TURNS = 192, 8
PAIRS, HELD_OUT_PAIRS = 32, 200
PAIR_TOKENS = 128
QUESTION = "What is the capital of France?"
COMMON = [
    "--use_cpu", "true", "--bf16", "false", "--report_to", "none", "--disable_tqdm", "true", "--logging_steps", "4",
    "--save_strategy", "no", "--eval_strategy", "epoch", "--num_train_epochs", "1",
    "--per_device_train_batch_size", "4",
    "--lr_scheduler_type", "cosine", "--warmup_steps", "0.1", "--gradient_checkpointing", "false",
]  # fmt: skip
SFT = ["--learning_rate", "2e-5", "--trainable", "beyond-window", "--max_length", "1024",
       "--per_device_train_batch_size", "1"]  # fmt: skip


def measure(model: nn.Module, teacher: nn.Module, rows: torch.Tensor) -> dict[str, float]:
    """KL to the teacher and perplexity, both per token, on rows of token ids (B, L)."""
    found = figures(per_token(reader(model), reader(teacher), rows, batch_size=1))
    return {"kl": found["kl"], "perplexity": found["perplexity"]}


def prepare_data(gguf: Path, folder: Path) -> None:
    """Write what is missing: prompts and preference pairs, web text, and the teacher's answers to the prompts."""
    if not (folder / "prompts.jsonl").is_file():
        fetch_chats(folder, prompt_tokenizer(str(gguf)))
    if not (folder / "text" / "owt_5.jsonl").is_file():
        validation_text.main(folder / "text")
    if not (folder / "seqkd").is_dir():
        seqkd.main([
            "--teacher_model_name_or_path", str(gguf), "--dataset_name", str(folder / "prompts.jsonl"),
            "--output_dir", str(folder / "seqkd"), "--max_prompts", str(PROMPTS), "--max_prompt_length", "128",
            "--max_new_tokens", "64", "--batch_size", "32", "--test_share", "0.2", "--truncated", "keep",
        ])  # fmt: skip
    if not (folder / "chats" / "test.jsonl").is_file():
        join_turns(folder / "seqkd", folder / "chats")


def join_turns(answers: Path, folder: Path) -> None:
    """Write conversations of TURNS prompts and their answers.

    A single answer fits into the hybrid's window, where it is its teacher already and has nothing to learn.
    """
    folder.mkdir(exist_ok=True)
    for name in ("train.jsonl", "test.jsonl"):
        rows = [json.loads(line) for line in (answers / name).read_text().splitlines()]
        chats = [rows[i : i + TURNS] for i in range(0, len(rows), TURNS)]
        joined = [[turn for row in chat for turn in row["prompt"] + row["completion"]] for chat in chats]
        write_lines(folder / name, [{"messages": turns} for turns in joined])


def fetch_chats(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write prompts.jsonl, and preference pairs whose prompts are short as pairs/train.jsonl and pairs/test.jsonl.

    They lie in the source archive of the PyPI package `llamafactory` (Apache-2.0), which is downloaded, not installed:
    instructions like those of Stanford Alpaca (whose data set is CC BY-NC 4.0), and chosen and rejected answers.
    """
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
        subprocess.run([*command, "--no-binary", "llamafactory", CHATS], check=True)
        (archive,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(archive) as source:
            files = {member.name.rsplit("/", 1)[-1]: member for member in source if "/data/" in member.name}
            names = ("alpaca_en_demo.json", "dpo_en_demo.json")
            prompts, pairs = (json.load(source.extractfile(files[name])) for name in names)

    def message(turn: dict[str, str]) -> dict[str, str]:
        return {"role": ROLES[turn["from"]], "content": turn["value"]}

    pairs = [
        {
            "prompt": [message(row["conversations"][-1])],  # earlier turns would fill what fits
            "chosen": [message(row["chosen"])],
            "rejected": [message(row["rejected"])],
        }
        for row in pairs
    ]
    # DPOTrainer leaves out a pair whose prompt fills max_length.
    pairs = [pair for pair in pairs if prompt_length(pair["prompt"], tokenizer) < PAIR_TOKENS]
    pairs = pairs[: PAIRS + HELD_OUT_PAIRS]
    every = len(pairs) // PAIRS
    train = range(0, PAIRS * every, every)
    (folder / "pairs").mkdir(exist_ok=True)
    write_lines(folder / "pairs" / "train.jsonl", [pairs[i] for i in train])
    write_lines(folder / "pairs" / "test.jsonl", [pair for i, pair in enumerate(pairs) if i not in train])
    write_lines(folder / "prompts.jsonl", [{key: row[key] for key in ("instruction", "input")} for row in prompts])


def prompt_length(turns: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of tokens in a prompt of these turns."""
    return len(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))


def train(recipe: Callable, student: Path, gguf: Path, data: Path, output: Path, *more: str) -> Path:
    """Run a recipe unless its result is there."""
    if not (output / "config.json").is_file():
        named = ["--model_name_or_path", str(student), "--teacher_model_name_or_path", str(gguf)]
        recipe([*named, "--dataset_name", str(data), "--output_dir", str(output), *COMMON, *more])
    return output


def push_and_pull(model: Path, repository: str, folder: Path) -> dict[str, Any]:
    """Push to the Hub, load from there in a process that cannot import this project, and ask the question."""
    repository = prepare_repository(repository)
    upload(model, repository)
    # without this machine's cache and token, as anybody else would load it
    pulled = run_elsewhere(repository, [QUESTION], QUESTION, 64, 40, HF_HOME=str(folder / "hub-cache"), HF_TOKEN="")
    return {"class": pulled["class"], "question": QUESTION, "answer": pulled["answers"][0].strip()}


def main(folder: Path, push_to_hub: str | None) -> dict[str, Any]:
    """Run the steps whose results are missing; returns everything that was measured."""
    logging.set_verbosity_error()
    gguf = embedded_teacher()
    started = time.perf_counter()
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    prepare_data(gguf, folder)
    hybrid, finetuned, preferred = (folder / name for name in ("hybrid", "sft", "dpo"))
    if not (hybrid / "config.json").is_file():
        with progress_bars(quiet=False) as progress:
            run(make_options(str(gguf), str(hybrid)), progress=progress)
    train(sft.main, hybrid, gguf, folder / "chats", finetuned, *SFT)
    dpo_options = ["--learning_rate", "2e-5", "--beta", "0.1", "--max_length", str(PAIR_TOKENS)]
    train(dpo.main, finetuned, gguf, folder / "pairs", preferred, *dpo_options, "--precompute_ref_log_probs", "true")
    teacher = load_model(str(gguf))
    held_out = str(folder / "text" / "owt_5.jsonl")
    text = token_rows(documents(held_out), prompt_tokenizer(str(gguf)), 512, 4, held_out)
    models = {"teacher": teacher}
    for path in (hybrid, finetuned, preferred):
        models[path.name] = load_model(str(path), "float32")
    steps = [{"name": name} | measure(model, teacher, text) for name, model in models.items()]
    training = [{key: stage[key] for key in ("stage", "before", "after")} for stage in read_record(preferred)]
    report: dict[str, Any] = {"steps": steps, "training": training}
    if push_to_hub is not None:
        pulled = push_and_pull(preferred, push_to_hub, folder)
        report |= {"pulled_and_answered": bool(pulled["answer"]), "pulled": pulled}
    report["rows"] = {name: len(load_named(str(folder / name))["train"]) for name in ("chats", "pairs")}
    report["seconds"] = time.perf_counter() - started
    (folder / "results.json").write_text(json.dumps(report, indent=2) + "\n")
    show(report)
    return report


def accuracy_margin(accuracy: float) -> float:
    """Half of the 95 % interval of an accuracy over the held-out pairs."""
    return 1.96 * math.sqrt(accuracy * (1 - accuracy) / HELD_OUT_PAIRS)


def show(report: dict[str, Any]) -> None:
    """Print the tables."""
    console = Console()
    table = Table("after", "KL", "perplexity", title="steps, on held-out text")
    for row in report["steps"]:
        table.add_row(row["name"], f"{row['kl']:.4f}", f"{row['perplexity']:.3f}")
    console.print(table)
    table = Table("stage", "", "before", "after", title="training, on held-out answers and pairs")
    for stage in report["training"]:
        for key in sorted(LABELS.keys() & stage["before"].keys() & stage["after"].keys()):
            cells = [f"{stage[when][key]:.4f}" for when in ("before", "after")]
            if key == "eval_rewards/accuracies":
                margins = (accuracy_margin(stage[when][key]) for when in ("before", "after"))
                cells = [f"{cell} ± {margin:.3f}" for cell, margin in zip(cells, margins, strict=True)]
            table.add_row(stage["stage"], LABELS[key], *cells)
    console.print(table)
    if "pulled" in report:
        console.print(f"{report['pulled']['question']} {report['pulled']['answer']}", highlight=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/pipeline"))
    parser.add_argument("--push-to-hub", metavar="REPOSITORY", help="push the model, pull it and ask it a question")
    main(**vars(parser.parse_args()))
