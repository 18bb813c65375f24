"""Sequence-level knowledge distillation data: the teacher answers prompts (Kim and Rush 2016).

    python -m recipes.seqkd --config recipes/configs/llamba/seqkd.yaml [--any_key value ...]

Prompts: the questions in data of any form that docs/guide/training.md lists, with a row's tools. Answers are generated
in batches with the teacher's chat template, written as they come, and, when all are there, put in place as a folder
that `dataset_name:` of the other recipes takes: train.jsonl, test.jsonl, README.md. Interrupted, the same command goes
on. Every batch has its own seed, so that makes no difference to the result.

With `--server http://HOST:PORT/v1` the answers are made by whatever serves the teacher there and speaks OpenAI's
protocol, `--concurrency` at a time; of the teacher itself only the tokenizer is read here.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerBase, set_seed
from trl import DatasetMixtureConfig, ScriptArguments

from convert.checkpoint.load import parsed_answer, prompt_tokenizer
from convert.io.folder import TRAINING_WORK, OutputFolder, check_apart, check_output
from convert.teachers.teacher import public_name

from .training.arguments import TeacherArguments, parse_classes
from .training.chat_format import as_text, question_ids
from .training.forms import BESIDE_TURNS, FIELDS, Row, Turns, reader, refuse
from .training.load import load_splits, load_teacher
from .training.run import local_files, name_unused, script
from .training.server import Server

Answers = dict[int, dict[str, Any]]
"""{"text", "finished"} by number of the prompt, and "tool_calls" where a server took them out of the text."""


@dataclass
class SeqKDArguments:
    """Options of the teacher's answers, and of those that are kept."""

    output_dir: str = field(metadata={"help": "Folder to write."})
    max_prompts: int | None = field(default=None, metadata={"help": "Number of prompts to answer; all by default."})
    max_prompt_length: int = field(default=1024, metadata={"help": "Longest prompt in tokens."})
    max_new_tokens: int = field(default=1024, metadata={"help": "Longest answer in tokens."})
    truncated: Literal["drop", "keep"] = field(
        default="drop",
        metadata={"help": "Answers cut off at max_new_tokens, which teach to stop anywhere."},
    )
    batch_size: int = field(default=16, metadata={"help": "Number of prompts answered at once."})
    server: str | None = field(
        default=None,
        metadata={"help": "URL of a server that speaks OpenAI's protocol, as http://localhost:8000/v1, and answers."},
    )
    server_model: str | None = field(
        default=None, metadata={"help": "The teacher's name there, if the server has several models."}
    )
    concurrency: int = field(default=16, metadata={"help": "Number of prompts that the server has at once."})
    temperature: float = field(default=0.0, metadata={"help": "Temperature of sampling; 0 takes the likeliest token."})
    test_share: float = field(default=0.05, metadata={"help": "Share of the rows that become the test split."})
    seed: int = field(default=0, metadata={"help": "Seed of sampling and of the choice of test rows."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code from the teacher's repository."})
    overwrite: bool = field(default=False, metadata={"help": "Replace output_dir if this recipe wrote it."})

    def __post_init__(self):
        for name in ("max_new_tokens", "max_prompt_length", "batch_size", "concurrency"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if not 0 <= self.test_share < 1:
            raise ValueError(f"test_share must lie in [0, 1), not {self.test_share}.")
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 or more, not {self.temperature}.")
        if self.server is None and self.server_model is not None:
            raise ValueError("server_model has no effect without server, the URL of one.")


@dataclass
class Prompt:
    """One question, as messages or (for a teacher without chat template) as a text."""

    turns: Turns | str
    ids: list[int]
    beside: Row
    """Tools and other arguments of its row for the chat template."""


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Generate the data; returns how many answers were kept, and how many were left out for which reason."""
    classes = (ScriptArguments, DatasetMixtureConfig, TeacherArguments, SeqKDArguments)
    data, mixture, teaching, arguments = parse_classes(classes, argv)
    output = Path(arguments.output_dir).expanduser().resolve()
    check_output(output, arguments.overwrite)
    if teaching.teacher_model_name_or_path is None:
        raise ValueError("teacher_model_name_or_path is missing; it names who answers.")
    rows, _ = load_splits(data, mixture, False, "questions")
    name_unused(rows, "questions")
    try:
        tokenizer = prompt_tokenizer(
            teaching.teacher_model_name_or_path, teaching.teacher_revision, arguments.trust_remote_code
        )
    except ValueError as error:
        raise ValueError(f"The teacher's tokenizer does not load: {error}") from error
    prompts, counts = read_prompts(rows, tokenizer, arguments)
    if not prompts:
        raise ValueError(f"No prompt is left: {counts}; raise max_prompt_length or check the data.")
    for kept in (data.dataset_name, teaching.teacher_model_name_or_path):
        if kept is not None and Path(kept).expanduser().exists():
            check_apart(output, Path(kept).expanduser().resolve())
    with OutputFolder(output, arguments.overwrite, kept=TRAINING_WORK) as owner:
        answers = answer_all(prompts, tokenizer, teaching, arguments, owner.make_work())
        splits = split_rows(prompts, answers, arguments)
        reasons = [reason_to_leave_out(answer, arguments) for answer in answers]
        counts |= {reason: reasons.count(reason) for reason in ("empty answers", "cut off")}
        report = {
            "rows": {name: len(part) for name, part in splits.items()},
            "left out": counts,
            "kept though cut off": sum(
                reason is None and not answer["finished"] for reason, answer in zip(reasons, answers, strict=True)
            ),
        }
        with owner.staged() as folder:
            for name, part in splits.items():
                if part:
                    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
            source = data.dataset_name or "a mixture"
            (folder / "README.md").write_text(card(report, arguments, teaching, source, types_of(splits)))
    return report | {"output": str(output)}


def read_prompts(
    rows: Any, tokenizer: PreTrainedTokenizerBase, arguments: SeqKDArguments
) -> tuple[list[Prompt], dict[str, int]]:
    """The questions in the data, each once, and how many rows were left out for which reason."""
    prompts = []
    seen = set()
    refused = {}
    counts = {"duplicates": 0, "too long": 0, "empty": 0}
    read = reader(rows, "questions")
    for number, row in enumerate(rows):
        if len(prompts) == arguments.max_prompts:
            break
        try:
            row = read(row, number)
            turns = row["prompt"]
            if not turns or not any(turn["content"].strip() for turn in turns):
                counts["empty"] += 1
                continue
            if tokenizer.chat_template is None:
                turns = as_text(turns, number, row)
            ids = question_ids(turns, tokenizer, row, number)
        except ValueError as error:
            refused[number] = str(error)
            continue
        if tuple(ids) in seen:
            counts["duplicates"] += 1
        elif len(ids) > arguments.max_prompt_length:
            counts["too long"] += 1
        else:
            seen.add(tuple(ids))
            beside = {name: row[name] for name in BESIDE_TURNS if row.get(name)}
            prompts.append(Prompt(turns, ids, beside))
    refuse(refused, rows)
    return prompts, counts


def answer_all(
    prompts: list[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    teaching: TeacherArguments,
    arguments: SeqKDArguments,
    work: Path,
) -> list[dict[str, Any]]:
    """{"text", "finished"} for each prompt; what `work` already holds is not asked again."""
    key = run_key(prompts, teaching, arguments)
    path = work / "answers.jsonl"
    marker = work / "run.txt"
    # a run that stopped before its first answer has left none that could mix with this run's
    begun = path.is_file() and path.stat().st_size > 0
    if begun and (not marker.is_file() or marker.read_text() != key):
        raise ValueError(f"{work} holds answers of another run; delete it or choose another output_dir.")
    marker.write_text(key)
    answers = read_answers(path)
    if arguments.server is None:
        found = from_teacher(prompts, answers, tokenizer, teaching, arguments)
    else:
        found = from_server(prompts, answers, arguments)
    with open(path, "a") as file, tqdm(desc="answers", total=len(prompts), initial=len(answers)) as bar:
        for some in found:
            answers |= some
            file.write("".join(json.dumps({"index": i} | answer) + "\n" for i, answer in some.items()))
            file.flush()
            # answers take hours, and a crash of the machine loses what the system has not written
            os.fsync(file.fileno())
            bar.update(len(some))
    return [answers[i] for i in range(len(prompts))]


def from_teacher(
    prompts: list[Prompt],
    known: Answers,
    tokenizer: PreTrainedTokenizerBase,
    teaching: TeacherArguments,
    arguments: SeqKDArguments,
) -> Iterator[Answers]:
    """Answers of the teacher, loaded here, to the prompts of each batch that holds one without an answer."""
    # like lengths together, so that little is padding; the batches do not depend on what is there already
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i].ids), i))
    batches = [order[i : i + arguments.batch_size] for i in range(0, len(order), arguments.batch_size)]
    left = [(n, batch) for n, batch in enumerate(batches) if not all(i in known for i in batch)]
    teacher = Answerer(teaching, tokenizer, arguments) if left else None
    for number, batch in left:
        # a seed for each batch, so that a run that resumes draws what an uninterrupted one would
        set_seed(seed_of(arguments, number))
        drawn = teacher([prompts[i].ids for i in batch])
        yield {
            i: finished_answer(ids, tokenizer, teacher.stops, prompts[i]) for i, ids in zip(batch, drawn, strict=True)
        }


def from_server(prompts: list[Prompt], known: Answers, arguments: SeqKDArguments) -> Iterator[Answers]:
    """Answers of a server to the prompts without one, as they come; each has a seed of its own."""
    left = [i for i in range(len(prompts)) if i not in known]
    if not left:
        return
    server = Server(arguments.server, arguments.server_model)
    sampling = arguments.max_new_tokens, arguments.temperature
    with ThreadPoolExecutor(arguments.concurrency) as pool:
        asked = {
            pool.submit(server.answer, prompts[i].turns, prompts[i].beside, *sampling, seed_of(arguments, i)): i
            for i in left
        }
        failed = None
        try:
            for done in as_completed(list(asked)):
                failed = done.exception()
                if failed is not None:
                    break
                yield {asked.pop(done): done.result()}
        finally:
            # or leaving the pool would wait for answers to all questions that are still queued
            pool.shutdown(cancel_futures=True)
    if failed is None:
        return
    # those that were under way when one failed
    for done, i in asked.items():
        if not done.cancelled() and done.exception() is None:
            yield {i: done.result()}
    raise failed


def seed_of(arguments: SeqKDArguments, number: int) -> int:
    """Seed of a batch or a prompt."""
    # numpy, which `set_seed` seeds as well, takes no larger number
    return (arguments.seed * 1_000_003 + number) % 2**32


def run_key(prompts: list[Prompt], teaching: TeacherArguments, arguments: SeqKDArguments) -> str:
    """A hash of everything the answers depend on."""
    # the first four say what becomes of the answers, the others where and how fast they are made
    without = ("output_dir", "overwrite", "test_share", "truncated", "server", "concurrency")
    shown = {k: v for k, v in vars(arguments).items() if k not in without}
    shown["by a server"] = arguments.server is not None
    files = local_files(teaching.teacher_model_name_or_path)
    text = json.dumps([shown, vars(teaching), files, [prompt.ids for prompt in prompts]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_answers(path: Path) -> Answers:
    """The answers written before an interruption, by prompt; a line cut short at the end is removed."""
    answers = {}
    whole = 0
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


def finished_answer(
    ids: list[int], tokenizer: PreTrainedTokenizerBase, stops: set[int], prompt: Prompt | None = None
) -> dict[str, Any]:
    """The text of an answer, and whether the teacher ended it itself.

    Its reasoning and calls stand apart if a prompt in turns is given and the tokenizer can tell them from the text.
    """
    end = next((n for n, token in enumerate(ids) if token in stops), None)
    text = tokenizer.decode(ids[:end])  # with special tokens, which may mark reasoning or a call
    finished = {"finished": end is not None}
    if tokenizer.chat_template is None:  # a continued text keeps its first space; a turn of a chat needs none
        return {"text": text} | finished
    parsed = {}
    if prompt is not None and not isinstance(prompt.turns, str):
        parsed = parsed_answer(text, tokenizer, prompt.ids, prompt.beside.get("tools"))
    said = {name: value for name, value in parsed.items() if name in FIELDS and name not in ("role", "content")}
    return {"text": parsed.get("content", text).strip()} | finished | said


class Answerer:
    """The teacher, which answers batches of prompts by `generate`, padded on the left."""

    def __init__(self, teaching: TeacherArguments, tokenizer: PreTrainedTokenizerBase, arguments: SeqKDArguments):
        self.tokenizer = tokenizer
        self.arguments = arguments
        self.model = load_teacher(teaching, None, arguments.trust_remote_code)
        if not (teaching.teacher_load_in_4bit or teaching.teacher_load_in_8bit):
            self.model.to("cuda" if torch.cuda.is_available() else "cpu")
        declared = self.model.generation_config.eos_token_id
        declared = declared if isinstance(declared, list) else [declared]
        self.stops = {stop for stop in (*declared, tokenizer.eos_token_id) if stop is not None}
        # the teacher's own settings may hold penalties, and greedy would not be greedy
        self.model.generation_config = GenerationConfig(bos_token_id=self.model.generation_config.bos_token_id)

    @torch.no_grad()
    def __call__(self, prompts: list[list[int]]) -> list[list[int]]:
        inputs = self.tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(self.model.device)
        temperature = self.arguments.temperature
        # without top_k transformers draws from the 50 likeliest tokens alone
        sampling = {"temperature": temperature, "top_k": 0} if temperature else {}
        drawn = self.model.generate(
            **inputs,
            max_new_tokens=self.arguments.max_new_tokens,
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=sorted(self.stops),
            do_sample=temperature > 0,
            **sampling,
        )
        return [row.tolist() for row in drawn[:, inputs["input_ids"].shape[1] :]]


def reason_to_leave_out(answer: dict[str, Any], arguments: SeqKDArguments) -> str | None:
    """Reason for which an answer is left out of the data; None for one that is kept."""
    if not answer["text"].strip() and "tool_calls" not in answer:
        return "empty answers"
    if not answer["finished"] and arguments.truncated == "drop":
        return "cut off"
    return None


def split_rows(
    prompts: list[Prompt], answers: list[dict[str, Any]], arguments: SeqKDArguments
) -> dict[str, list[dict[str, Any]]]:
    """The rows to keep, by split, in the order of the prompts."""
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        if reason_to_leave_out(answer, arguments) is not None:
            continue
        text = answer["text"]
        is_text = isinstance(prompt.turns, str)
        said = {name: value for name, value in answer.items() if name in FIELDS}
        completion = text if is_text else [{"role": "assistant", "content": text, **said}]
        rows.append({"prompt": prompt.turns, "completion": completion, **prompt.beside})
    if not rows:
        cut_off = sum(not answer["finished"] for answer in answers)
        raise ValueError(
            f"No answer is left: {cut_off} of {len(answers)} were cut off at {arguments.max_new_tokens} tokens; raise "
            "max_new_tokens or say truncated: keep."
        )
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(arguments.seed)).tolist()
    tests = set(order[: int(len(rows) * arguments.test_share)])
    return {"train": [row for i, row in enumerate(rows) if i not in tests], "test": [rows[i] for i in sorted(tests)]}


def types_of(splits: dict[str, list[Row]]) -> dict[str, str]:
    """Types of the columns for the card, or `datasets` would take them from the rows at the beginning of a file."""
    values = {name: value for rows in splits.values() for row in rows for name, value in row.items()}
    return {
        name: "dtype: json" if name in BESIDE_TURNS else "dtype: string" if isinstance(value, str) else "list: json"
        for name, value in values.items()
    }


def card(
    report: dict[str, Any],
    arguments: SeqKDArguments,
    teaching: TeacherArguments,
    source: str,
    types: dict[str, str],
) -> str:
    """The README.md of the data."""
    teacher_name = public_name(teaching.teacher_model_name_or_path)
    source_name = public_name(source)
    how = f"sampled at temperature {arguments.temperature}" if arguments.temperature else "greedy"
    files = "".join(f"\n  - split: {name}\n    path: {name}.jsonl" for name, n in report["rows"].items() if n)
    features = "".join(f"\n  - name: {name}\n    {described}" for name, described in types.items())
    left_out = ", ".join(f"{n} {why}" for why, n in report["left out"].items())
    return f"""---
configs:
- config_name: default
  data_files:{files}
dataset_info:
  features:{features}
task_categories:
- text-generation
tags:
- seqkd
- synthetic
- convert-to-hybrid
---

# Answers of {teacher_name}

Sequence-level knowledge distillation data, made with `recipes.seqkd` of convert-to-hybrid: the teacher's
own answers to the prompts of {source_name}, {how}, at most {arguments.max_new_tokens} tokens, seed {arguments.seed}.

{", ".join(f"{n} rows in {name}" for name, n in report["rows"].items())}, in TRL's prompt-completion format.
Left out: {left_out}. Kept though cut off: {report["kept though cut off"]}.

The prompts are under the licence of their source, the answers under the terms of the teacher.
"""


if __name__ == "__main__":
    print(json.dumps(script(main)))
