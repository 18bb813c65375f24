"""Sequence-level knowledge distillation data: the teacher answers prompts (Kim and Rush 2016).

    python -m recipes.seqkd --config recipes/configs/llamba/seqkd.yaml [--any_key value ...]

Prompts: `messages` (up to the first answer), `prompt` (a text or messages), or `instruction` and `input`. Answers are
generated in batches with the teacher's chat template, written as they come, and, when all are there, put in place as
a folder that `dataset_name:` of the other recipes takes: train.jsonl, test.jsonl, README.md. Interrupted, the same
command goes on. Every batch has its own seed, so that makes no difference to the result.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerBase, set_seed
from trl import DatasetMixtureConfig, ScriptArguments

from convert.checkpoint.folder import check_apart, staged
from convert.checkpoint.load import load_tokenizer

from .training.arguments import TeacherArguments, parse_classes
from .training.chat_format import as_text, question_ids, question_of
from .training.load import device_of, load_splits, load_teacher
from .training.run import local_files, one_line_errors

COLUMNS = [{"messages"}, {"prompt"}, {"instruction"}]


@dataclass
class SeqKDArguments:
    """How the teacher answers, and where to."""

    output_dir: str = field(metadata={"help": "Folder to write."})
    format: Literal["messages", "prompt-completion"] = field(
        default="prompt-completion", metadata={"help": "TRL's format of the rows."}
    )
    max_prompts: int | None = field(default=None, metadata={"help": "Take so many prompts, from the first on."})
    max_prompt_length: int = field(default=1024, metadata={"help": "Tokens; longer prompts are left out."})
    max_new_tokens: int = field(default=1024, metadata={"help": "Tokens of an answer."})
    truncated: Literal["drop", "keep"] = field(
        default="drop", metadata={"help": "Answers that max_new_tokens cut off, which would teach to stop anywhere."}
    )
    batch_size: int = field(default=16, metadata={"help": "Prompts answered at once."})
    do_sample: bool = field(default=False, metadata={"help": "Sample instead of taking the likeliest token."})
    temperature: float = field(default=1.0, metadata={"help": "Of sampling."})
    top_p: float = field(default=1.0, metadata={"help": "Of sampling."})
    test_share: float = field(default=0.05, metadata={"help": "Share of the rows that go into test.jsonl."})
    seed: int = field(default=0, metadata={"help": "Of sampling, and of which rows are test rows."})
    engine: Literal["auto", "transformers", "vllm"] = field(
        default="auto", metadata={"help": "auto takes vLLM where it is installed and CUDA is there."}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run the teacher's own code."})
    overwrite: bool = field(default=False, metadata={"help": "Replace output_dir."})

    def __post_init__(self):
        for name in ("max_new_tokens", "max_prompt_length", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if not 0 <= self.test_share < 1:
            raise ValueError(f"test_share must lie in [0, 1), not {self.test_share}.")
        if not self.do_sample and (self.temperature != 1.0 or self.top_p != 1.0):
            raise ValueError("temperature and top_p are for sampling; say do_sample: true.")


@dataclass
class Prompt:
    """One question, as messages or (for a teacher without chat template) as a text."""

    turns: list[dict[str, str]] | str
    ids: list[int]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Generate; counts of what was kept and left out."""
    classes = (ScriptArguments, DatasetMixtureConfig, TeacherArguments, SeqKDArguments)
    script, mixture, teaching, arguments = parse_classes(classes, argv)
    output = Path(arguments.output_dir).expanduser().resolve()
    if output.exists() and any(output.iterdir()):
        if not arguments.overwrite:
            raise ValueError(f"{output} exists and is not empty; choose another output_dir or say --overwrite.")
        if not is_seqkd_data(output):
            raise ValueError(f"{output} holds no data of this recipe, so --overwrite will not replace it.")
        for kept in (script.dataset_name, teaching.teacher_model_name_or_path):
            if kept is not None and Path(kept).expanduser().exists():
                check_apart(output, Path(kept).expanduser().resolve())
    if teaching.teacher_model_name_or_path is None:
        raise ValueError("teacher_model_name_or_path is missing; it names who answers.")
    rows, _ = load_splits(script, mixture, False, COLUMNS)
    try:
        tokenizer = load_tokenizer(
            teaching.teacher_model_name_or_path, teaching.teacher_revision, arguments.trust_remote_code
        )
    except ValueError as error:
        raise ValueError(f"The teacher's tokenizer does not load: {error}") from error
    if arguments.format == "messages" and tokenizer.chat_template is None:
        raise ValueError("The teacher has no chat template, so there are no messages; say format: prompt-completion.")
    prompts, counts = read_prompts(rows, tokenizer, arguments)
    if not prompts:
        raise ValueError(f"No prompt is left: {counts}; raise max_prompt_length or check the data.")
    work = output.with_name(f"{output.name}.work")
    answers = answer_all(prompts, tokenizer, teaching, arguments, work)
    return put_in_place(
        prompts, answers, counts, output, work, arguments, teaching, script.dataset_name or "a mixture"
    )


def is_seqkd_data(folder: Path) -> bool:
    """Whether this recipe wrote it."""
    card = folder / "README.md"
    return card.is_file() and "- seqkd" in card.read_text()


def read_prompts(
    rows: Any, tokenizer: PreTrainedTokenizerBase, arguments: SeqKDArguments
) -> tuple[list[Prompt], dict[str, int]]:
    """The questions in the data, each once, and how many were left out for what."""
    prompts, seen = [], set()
    counts = {"duplicates": 0, "too long": 0, "empty": 0}
    for row in rows:
        if len(prompts) == arguments.max_prompts:
            break
        turns = question_of(row)
        if not turns or not any(turn["content"].strip() for turn in turns):
            counts["empty"] += 1
            continue
        if tokenizer.chat_template is None:
            turns = as_text(turns)
        ids = question_ids(turns, tokenizer)
        if tuple(ids) in seen:
            counts["duplicates"] += 1
        elif len(ids) > arguments.max_prompt_length:
            counts["too long"] += 1
        else:
            seen.add(tuple(ids))
            prompts.append(Prompt(turns, ids))
    return prompts, counts


def answer_all(
    prompts: list[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    teaching: TeacherArguments,
    arguments: SeqKDArguments,
    work: Path,
) -> dict[int, dict[str, Any]]:
    """Index of a prompt to {"text", "finished"}; what `work` already holds is not asked again."""
    work.mkdir(parents=True, exist_ok=True)
    key, path = run_key(prompts, teaching, arguments), work / "answers.jsonl"
    marker = work / "run.txt"
    if path.is_file() and (not marker.is_file() or marker.read_text() != key):
        raise ValueError(f"{work} holds answers of another run; delete it or choose another output_dir.")
    marker.write_text(key)
    answers = read_answers(path)
    # like lengths together, so that little is padding; the batches do not depend on what is there already
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i].ids), i))
    batches = [order[i : i + arguments.batch_size] for i in range(0, len(order), arguments.batch_size)]
    left = [(n, batch) for n, batch in enumerate(batches) if not all(i in answers for i in batch)]
    if not left:
        return answers
    generate = engine(teaching, tokenizer, arguments)
    with open(path, "a") as file:
        for number, batch in tqdm(left, desc="answers", unit="batch"):
            set_seed((arguments.seed * 1_000_003 + number) % 2**32)
            for i, ids in zip(batch, generate([prompts[i].ids for i in batch]), strict=True):
                answers[i] = finished_answer(ids, tokenizer, generate.stops)
                file.write(json.dumps({"index": i} | answers[i]) + "\n")
            file.flush()
            os.fsync(file.fileno())
    return answers


def run_key(prompts: list[Prompt], teaching: TeacherArguments, arguments: SeqKDArguments) -> str:
    """Of everything the answers depend on."""
    shown = {k: v for k, v in vars(arguments).items() if k not in ("output_dir", "overwrite", "format", "test_share")}
    files = local_files(teaching.teacher_model_name_or_path)
    text = json.dumps([shown, vars(teaching), files, [prompt.ids for prompt in prompts]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_answers(path: Path) -> dict[int, dict[str, Any]]:
    """What was written before an interruption; a line cut short at the end is dropped."""
    answers, whole = {}, 0
    if not path.is_file():
        return answers
    content = path.read_bytes()
    for line in content.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        record = json.loads(line)
        answers[record.pop("index")] = record
        whole += len(line)
    if whole < len(content):
        with open(path, "r+b") as file:
            file.truncate(whole)
    return answers


def finished_answer(ids: list[int], tokenizer: PreTrainedTokenizerBase, stops: set[int]) -> dict[str, Any]:
    """The text of an answer, and whether the teacher ended it itself."""
    end = next((n for n, token in enumerate(ids) if token in stops), None)
    text = tokenizer.decode(ids[:end], skip_special_tokens=True)
    # a continued text goes on where it was, its first space included; a turn of a chat stands by itself
    return {"text": text if tokenizer.chat_template is None else text.strip(), "finished": end is not None}


class TransformersEngine:
    """`model.generate` on left-padded batches."""

    def __init__(self, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, arguments: SeqKDArguments):
        self.model, self.tokenizer, self.arguments = model, tokenizer, arguments
        declared = model.generation_config.eos_token_id
        declared = declared if isinstance(declared, list) else [declared]
        self.stops = {stop for stop in (*declared, tokenizer.eos_token_id) if stop is not None}
        # the teacher's own settings may hold penalties, and greedy would not be greedy
        model.generation_config = GenerationConfig(bos_token_id=model.generation_config.bos_token_id)

    @torch.no_grad()
    def __call__(self, prompts: list[list[int]]) -> list[list[int]]:
        """Token ids of the answers."""
        inputs = self.tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(device_of(self.model))
        sampling: dict[str, Any] = {"do_sample": False}
        if self.arguments.do_sample:
            sampling = {"do_sample": True, "temperature": self.arguments.temperature, "top_p": self.arguments.top_p}
            sampling["top_k"] = 0
        drawn = self.model.generate(
            **inputs,
            max_new_tokens=self.arguments.max_new_tokens,
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=sorted(self.stops),
            **sampling,
        )
        return [row.tolist() for row in drawn[:, inputs["input_ids"].shape[1] :]]


class VllmEngine:
    """vLLM, where it is installed."""

    def __init__(self, teaching: TeacherArguments, tokenizer: PreTrainedTokenizerBase, arguments: SeqKDArguments):
        from vllm import LLM, SamplingParams

        self.model = LLM(
            teaching.teacher_model_name_or_path,
            revision=teaching.teacher_revision,
            dtype=teaching.teacher_dtype,
            trust_remote_code=arguments.trust_remote_code,
            seed=arguments.seed,
            max_model_len=arguments.max_prompt_length + arguments.max_new_tokens,
        )
        self.sampling = SamplingParams(
            temperature=arguments.temperature if arguments.do_sample else 0.0,
            top_p=arguments.top_p,
            max_tokens=arguments.max_new_tokens,
            seed=arguments.seed,
        )
        self.stops = {tokenizer.eos_token_id}

    def __call__(self, prompts: list[list[int]]) -> list[list[int]]:
        """Token ids of the answers, the end of sequence included where one was reached."""
        outputs = self.model.generate([{"prompt_token_ids": ids} for ids in prompts], self.sampling, use_tqdm=False)
        stop = next(iter(self.stops))
        return [
            [*output.outputs[0].token_ids, *([stop] if output.outputs[0].finish_reason == "stop" else [])]
            for output in outputs
        ]


def engine(teaching: TeacherArguments, tokenizer: PreTrainedTokenizerBase, arguments: SeqKDArguments) -> Any:
    """What answers batches of prompts.

    Raises:
        ValueError: vLLM was asked for and is not installed, or the teacher does not load.
    """
    has_vllm = importlib.util.find_spec("vllm") is not None
    if arguments.engine == "vllm" and not has_vllm:
        raise ValueError("engine: vllm needs vLLM: pip install vllm, or say engine: transformers.")
    quantised = teaching.teacher_load_in_4bit or teaching.teacher_load_in_8bit
    if arguments.engine == "vllm" and quantised:
        raise ValueError("teacher_load_in_8bit and teacher_load_in_4bit are for engine: transformers.")
    if arguments.engine == "vllm" or (
        not quantised and arguments.engine == "auto" and has_vllm and torch.cuda.is_available()
    ):
        return VllmEngine(teaching, tokenizer, arguments)
    teacher = load_teacher(teaching, None, arguments.trust_remote_code)
    if not quantised:
        teacher = teacher.to("cuda" if torch.cuda.is_available() else "cpu")
    return TransformersEngine(teacher, tokenizer, arguments)


def put_in_place(
    prompts: list[Prompt],
    answers: dict[int, dict[str, Any]],
    counts: dict[str, int],
    output: Path,
    work: Path,
    arguments: SeqKDArguments,
    teaching: TeacherArguments,
    source: str,
) -> dict[str, Any]:
    """Write train.jsonl, test.jsonl and the card, and rename the folder to its name."""
    rows = list(kept_rows(prompts, answers, counts | {}, arguments))
    counts = counts | {
        "empty answers": sum(not answer["text"].strip() for answer in answers.values()),
        "cut off": sum(not answer["finished"] for answer in answers.values()),
    }
    if not rows:
        raise ValueError(
            f"No answer is left: {counts['cut off']} of {len(answers)} were cut off at {arguments.max_new_tokens} "
            "tokens; raise max_new_tokens or say truncated: keep."
        )
    share = int(len(rows) * arguments.test_share)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(arguments.seed)).tolist()
    tests = set(order[:share])
    splits = {"train": [row for i, row in enumerate(rows) if i not in tests], "test": [rows[i] for i in sorted(tests)]}
    report = {"rows": {name: len(part) for name, part in splits.items()}, "left out": counts}
    with staged(output) as folder:
        for name, part in splits.items():
            if part:
                (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        (folder / "README.md").write_text(card(report, arguments, teaching, source))
    shutil.rmtree(work)
    return report | {"output": str(output)}


def kept_rows(
    prompts: list[Prompt], answers: dict[int, dict[str, Any]], counts: dict[str, int], arguments: SeqKDArguments
) -> Iterator[dict[str, Any]]:
    """Rows in the order of the prompts."""
    for i, prompt in enumerate(prompts):
        answer = answers[i]
        if not answer["text"].strip() or (not answer["finished"] and arguments.truncated == "drop"):
            continue
        if isinstance(prompt.turns, str):
            yield {"prompt": prompt.turns, "completion": answer["text"]}
            continue
        reply = [{"role": "assistant", "content": answer["text"]}]
        if arguments.format == "messages":
            yield {"messages": prompt.turns + reply}
        else:
            yield {"prompt": prompt.turns, "completion": reply}


def card(report: dict[str, Any], arguments: SeqKDArguments, teaching: TeacherArguments, source: str) -> str:
    """The README.md of the data."""
    teacher = Path(teaching.teacher_model_name_or_path)
    teacher_name = teacher.name if teacher.exists() else teaching.teacher_model_name_or_path
    source_name = Path(source).name if Path(source).exists() else source
    how = (
        f"sampled at temperature {arguments.temperature}, top-p {arguments.top_p}" if arguments.do_sample else "greedy"
    )
    files = "".join(f"\n  - split: {name}\n    path: {name}.jsonl" for name, n in report["rows"].items() if n)
    left_out = ", ".join(f"{n} {why}" for why, n in report["left out"].items())
    return f"""---
configs:
- config_name: default
  data_files:{files}
task_categories:
- text-generation
tags:
- seqkd
- synthetic
- convert-to-hybrid
---

# Answers of {teacher_name}

Sequence-level knowledge distillation data, made with `recipes.generate_seqkd_data` of convert-to-hybrid: the teacher's
own answers to the prompts of {source_name}, {how}, at most {arguments.max_new_tokens} tokens, seed {arguments.seed}.

{", ".join(f"{n} rows in {name}" for name, n in report["rows"].items())}, in TRL's {arguments.format} format.
Left out or counted: {left_out}; answers cut off were {"left out" if arguments.truncated == "drop" else "kept"}.

The prompts are under the licence of their source, the answers under the terms of the teacher.
"""


if __name__ == "__main__":
    with one_line_errors("--verbose" in sys.argv):
        print(json.dumps(main([argument for argument in sys.argv[1:] if argument != "--verbose"])))
