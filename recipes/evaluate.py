"""Measure a hybrid beside its teacher: text, recall, generation, tasks, speed.

python -m recipes.evaluate MODEL [--teacher T] [--output DIR] [--parts text recall generation tasks speed]
python -m recipes.evaluate runs/demo/hybrid --lengths 512 2048 --tasks arc_easy piqa --update-card

Results go to DIR/evaluation.json and DIR/evaluation.md. Every finished cell is kept in DIR, so the same command goes
on where it was interrupted. docs/guide/evaluation.md says what each figure is.
"""

import dataclasses
import hashlib
import json
import re
import sys
from argparse import RawDescriptionHelpFormatter
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.markup import escape
from transformers import HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from convert.checkpoint.load import load_config, load_model, locate, prompt_tokenizer
from convert.checkpoint.tokenizer import differing_text
from convert.cli import console, one_line_errors, progress_bars, set_verbosity
from convert.errors import during
from convert.memory import keep_free_memory
from convert.teachers.teacher import public_name, recorded_teacher

from .evaluation.commit import project_commit
from .evaluation.generation import PROMPTS, continuations, judge
from .evaluation.metrics import SHORTEST, Reader, by_position, figures, per_token, reader
from .evaluation.recall import hits, questions, scores
from .evaluation.results import ResultsFolder, markdown, update_card
from .evaluation.ruler import ESSAYS, generators, ruler_scores
from .evaluation.ruler import SHORTEST as SHORTEST_RULER
from .evaluation.ruler import TASKS as RULER
from .evaluation.speed import speed
from .evaluation.tasks import run_task, side_by_side, task_manager
from .evaluation.texts import PYTHON_DOCS, SHIPPED, TextSource, hash_files

PARTS = ("text", "recall", "generation", "tasks", "speed")
SHORTEST_RECALL = 64
COUNTS = ("sequences", "max_new_tokens", "contexts", "speed_batches", "speed_tokens", "limit", "batch_size")


def option(default: Any, help: str) -> Any:
    """A field with a default value and what --help says of it."""
    if isinstance(default, list) and default:
        help += f" Default: {' '.join(map(str, default))}."
    elif default not in (None, False, []):
        help += f" Default: {default}."
    return field(default_factory=lambda: default, metadata={"help": help})


@dataclass(frozen=True)
class Options:
    """Options: what to measure, and how."""

    model: str = field(metadata={"help": "Folder or Hub id of a hybrid, or of any causal language model."})
    teacher: str | None = option(None, "Model to compare with, or none. Default: the one that MODEL records.")
    output: str | None = option(None, "Folder for the results. Default: runs/evaluation/NAME.")
    parts: list[str] | None = option(None, f"Some of {' '.join(PARTS)}. Default: all; tasks if --tasks names some.")
    text: list[str] = option([SHIPPED], f"{SHIPPED}, {PYTHON_DOCS}, a file, or a Hub data set's name:config:split.")
    text_column: str = option("text", "Column of a data set that holds the text.")
    lengths: list[int] = option([512], "Numbers of tokens per sequence.")
    sequences: int = option(8, "Number of sequences of each text, recall probe or RULER task at each length.")
    recall_lengths: list[int] | None = option(None, "Numbers of tokens per recall probe. Default: --lengths.")
    depths: list[float] = option([0.1, 0.5, 0.9], "Where needle and passkey are hidden: 0 is first, 1 is last.")
    max_new_tokens: int = option(64, "Largest number of tokens of an answer.")
    temperature: float = option(0.0, "Sampling temperature of the answers; 0 decodes greedily.")
    tasks: list[str] | None = option(None, "Names of lm-eval tasks; ruler and the tasks of it need no network.")
    ruler_lengths: list[int] = option([1024, 2048, 4096, 8192], "Numbers of tokens of a row of RULER with its answer.")
    include_path: str | None = option(None, "Folder with lm-eval tasks of your own as YAML files.")
    num_fewshot: int | None = option(None, "Number of examples before each question of a task.")
    chance: list[str] = option([], "TASK=0.25: the score of guessing, where a task does not tell it.")
    contexts: list[int] | None = option(None, "Numbers of tokens in the cache for speed. Default: --lengths.")
    speed_batches: list[int] = option([1], "Numbers of sequences at once for speed.")
    speed_tokens: int = option(32, "Number of decoding steps that are timed.")
    limit: int | None = option(None, "Largest number of sequences, prompts and documents of anything.")
    batch_size: int = option(8, "Number of sequences read at once; changes no figure.")
    seed: int = option(0, "Seed of the recall probes and of sampled answers.")
    dtype: str = option("auto", "auto, float32, bfloat16 or float16.")
    device: str = option("cpu", "cpu or cuda.")
    trust_remote_code: bool = option(False, "Run the code that a repository brings along.")
    update_card: bool = option(False, "Put the figures into MODEL/README.md.")
    json: bool = option(False, "Print evaluation.json instead of the tables.")
    verbose: bool = option(False, "Show tracebacks and the libraries' messages.")

    def __post_init__(self):
        fill = {"parts": [part for part in PARTS if part != "tasks" or self.tasks], "tasks": [],
                "recall_lengths": self.lengths, "contexts": self.lengths}  # fmt: skip
        for name, value in fill.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        named = [RULER if task == "ruler" else (task,) for task in self.tasks]
        object.__setattr__(self, "tasks", list(dict.fromkeys(chain.from_iterable(named))))
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown or not self.parts:
            raise ValueError(f"--parts takes some of {', '.join(PARTS)}; got {', '.join(unknown) or 'none'}.")
        if "tasks" in self.parts and not self.tasks:
            raise ValueError("--parts names tasks, and --tasks names none.")
        if self.tasks and "tasks" not in self.parts:
            raise ValueError("--tasks names tasks, and --parts leaves them out.")
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise ValueError(f"{self.include_path} is not a folder; --include-path takes one with YAML files.")
        if "text" in self.parts and min(self.lengths) < SHORTEST:
            raise ValueError(f"--lengths must be {SHORTEST} or more.")
        if "recall" in self.parts and min(self.recall_lengths) < SHORTEST_RECALL:
            raise ValueError(f"--recall-lengths must be {SHORTEST_RECALL} or more; without, --lengths count.")
        if min(self.ruler_lengths, default=0) < SHORTEST_RULER:
            raise ValueError(f"--ruler-lengths must be {SHORTEST_RULER} or more.")
        if not all(0 <= depth <= 1 for depth in self.depths) or len(set(self.depths)) < len(self.depths):
            raise ValueError("--depths must be different numbers from 0 to 1.")
        for name in COUNTS:
            value = getattr(self, name)
            if not isinstance(value, list):
                value = [value]
            if any(number is not None and number < 1 for number in value):
                raise ValueError(f"--{name.replace('_', '-')} must be 1 or more.")
        if len({source.label for source in self.sources}) < len(self.sources):
            raise ValueError("Two --text have the same name; rename one, since results are told apart by it.")
        if self.update_card and not Path(self.model).expanduser().is_dir():
            raise ValueError(f"--update-card writes into a model's folder, and {self.model} is none.")
        for text in self.chance:
            if re.fullmatch(r".+=0?\.?\d+", text) is None or not 0 <= float(text.rpartition("=")[2]) < 1:
                raise ValueError(f"--chance takes TASK=NUMBER with a number from 0 to below 1; got {text!r}.")

    @property
    def sources(self) -> list[TextSource]:
        """The texts."""
        return [TextSource(text, self.text_column) for text in self.text]

    @property
    def chances(self) -> dict[str, float]:
        """Score of guessing, by task."""
        return {task: float(number) for task, _, number in (text.rpartition("=") for text in self.chance)}

    def capped(self, count: int) -> int:
        """`count`, or the limit where that is smaller."""
        if self.limit is None:
            return count
        return min(count, self.limit)

    def settings(self, teacher_revision: str | None) -> dict[str, Any]:
        """Settings that the results of each part depend on, besides those that their rows record."""
        first, own_tasks = self.sources[0], self.include_path and hash_files(Path(self.include_path), "*.yaml")
        own = {
            "text": {"sequences": self.sequences, "column": self.text_column},
            "recall": {"text": [*first, first.fingerprint()], "sequences": self.sequences, "depths": self.depths},
            "generation": {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature},
            "tasks": {"include_path": [self.include_path, own_tasks], "num_fewshot": self.num_fewshot},
            "speed": {"speed_tokens": self.speed_tokens},
        }
        where = {"model": (self.model, None), "teacher": (self.teacher, teacher_revision)}
        common: dict[str, Any] = {
            which: name and [name, fingerprint(name, revision, self.trust_remote_code)]
            for which, (name, revision) in where.items()
        }
        common |= {name: getattr(self, name) for name in ("limit", "seed", "dtype", "device")}
        return {"common": common} | {part: own[part] for part in self.parts}


def fingerprint(model: str, revision: str | None, trust_remote_code: bool) -> str | None:
    """Changes when a checkpoint does: names, sizes and times of a local one's files; a Hub repository's commit."""
    name, where = locate(model)
    path = Path(name)
    if not path.is_dir():
        return getattr(load_config(model, revision, trust_remote_code), "_commit_hash", None)
    files = [*path.glob("*.safetensors"), *path.glob("*.bin")]
    if where:
        files = [path / where["gguf_file"]]
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(files)]
    digest = hashlib.sha256(repr(states).encode())
    if (path / "config.json").is_file():
        digest.update((path / "config.json").read_bytes())
    return digest.hexdigest()[:16]


def find_teacher_of(options: Options) -> tuple[str | None, str | None]:
    """The teacher named, none, or the one the checkpoint records, and the recorded commit."""
    if options.teacher == "none":
        return None, None
    if options.teacher is not None:
        return options.teacher, None
    config = load_config(options.model, trust_remote_code=options.trust_remote_code)
    try:
        return recorded_teacher(getattr(config, "conversion", None), "--teacher")
    except ValueError as error:
        raise ValueError(f"{error} Or measure the model alone: --teacher none.") from error


class Evaluation:
    """Measures model and teacher part by part; loads them when first needed, since a finished one needs neither."""

    def __init__(self, options: Options, teacher_revision: str | None, folder: ResultsFolder, progress):
        self.options, self.folder, self.progress = options, folder, progress
        self.names: dict[str, tuple[str, str | None]] = {"model": (options.model, None)}
        if options.teacher is not None:
            self.names["teacher"] = (options.teacher, teacher_revision)
        self.manager = None
        # before anything is computed for nothing
        if set(RULER) & set(options.tasks):
            generators()
        if of_lm_eval := [task for task in options.tasks if task not in RULER]:
            self.manager = task_manager(of_lm_eval, options.include_path)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, which has to read text as the teacher's does."""
        options = self.options
        found, *others = (prompt_tokenizer(*where, options.trust_remote_code) for where in self.names.values())
        if others and others[0].get_vocab() != found.get_vocab():
            raise ValueError(f"{options.teacher} has another vocabulary than {options.model}; give its own --teacher.")
        if others and (text := differing_text(found, others[0])) is not None:
            raise ValueError(
                f"The tokenizers of {options.model} and {options.teacher} give other ids for {text[:40]!r}; convert "
                "the teacher again."
            )
        return found

    @cached_property
    def models(self) -> dict[str, PreTrainedModel]:
        """`model` and, where there is one, `teacher`, which have to predict the same tokens."""
        # tokenizers first: another vocabulary is refused before any weights are loaded
        options, _ = self.options, self.tokenizer
        found = {
            which: load_model(name, options.dtype, options.device, revision, options.trust_remote_code)
            for which, (name, revision) in self.names.items()
        }
        sizes = {model.get_output_embeddings().weight.shape[0] for model in found.values()}
        if len(sizes) > 1:
            raise ValueError(f"{options.model} and {options.teacher} differ in vocabulary: {sorted(sizes)} tokens.")
        lengths = {"text": options.lengths, "recall": options.recall_lengths, "speed": options.contexts}
        if set(RULER) & set(options.tasks):
            lengths["tasks"] = options.ruler_lengths
        longest = max((max(of_part) for part, of_part in lengths.items() if part in options.parts), default=0)
        for which, model in found.items():
            known = getattr(model.config, "max_position_embeddings", None)
            if known is not None and longest > known:
                text = f"the {which} was made for {known} tokens, and {longest} are asked for."
                console.print(f"[yellow]warning:[/] {escape(text)}")
        return found

    @cached_property
    def readers(self) -> dict[str, Reader]:
        """Readers of both models, by name."""
        return {which: reader(model) for which, model in self.models.items()}

    def text(self) -> list[dict[str, Any]]:
        """A row per text and length."""
        return [
            self.folder.cell("text", f"{source.label} {source.fingerprint()} {length}", self._text, source, length)
            for source in self.options.sources
            for length in self.options.lengths
        ]

    def _text(self, source: TextSource, length: int) -> dict[str, Any]:
        o, what = self.options, f"{source.label}, {length} tokens"
        ids = source.rows(self.tokenizer, length, o.capped(o.sequences)).to(self.models["model"].device)
        advance = partial(self.progress, what, total=len(ids))
        found = per_token(self.readers["model"], self.readers.get("teacher"), ids, o.batch_size, advance)
        row = {"name": source.label, "length": length, "sequences": len(ids)}
        return row | figures(found) | {"by_position": by_position(found)}

    def recall(self) -> list[dict[str, Any]]:
        """Rows per length, probe and distance."""
        cells = [self.folder.cell("recall", str(n), self._recall, n) for n in self.options.recall_lengths]
        return [row for cell in cells for row in cell]

    def _recall(self, length: int) -> list[dict[str, Any]]:
        o, model = self.options, self.models["model"]
        prose = o.sources[0].rows(self.tokenizer, length, o.capped(o.sequences))
        asked = questions(prose, self.tokenizer, model.config.vocab_size, o.depths, o.seed)
        rows: list[dict[str, Any]] = []
        for done, question in enumerate(asked, 1):
            said = {w: hits(own, question.probe, o.batch_size, model.device) for w, own in self.readers.items()}
            rows += scores(question, **said)
            self.progress(f"recall, {length} tokens", done, len(asked))
        return rows

    def generation(self) -> dict[str, Any]:
        """Figures over all prompts, and the answers."""
        prompts = list(PROMPTS[: self.options.capped(len(PROMPTS))])
        said = {w: self.folder.cell("generation", w, self._said, w, prompts) for w in self.names}
        answers = said["model"], said.get("teacher")
        return self.folder.cell(
            "generation", "compared", lambda: judge(prompts, *answers, self.tokenizer, self.options.max_new_tokens)
        )

    def _said(self, which: str, prompts: list[str]) -> list[list[int]]:
        o, advance = self.options, partial(self.progress, f"generation, {which}", total=len(prompts))
        model = self.models[which]
        how = o.max_new_tokens, o.batch_size, advance, o.temperature, o.seed
        return continuations(model, self.tokenizer, prompts, *how)

    def tasks(self) -> list[dict[str, Any]]:
        """A row per task and metric; the metrics of RULER are its lengths."""
        o, rows = self.options, []
        asked = [(task, n) for task in o.tasks for n in (o.ruler_lengths if task in RULER else (None,))]
        for done, (task, length) in enumerate(asked, 1):
            cell = task if length is None else f"{task} {length} {o.capped(o.sequences)}"
            found = {w: self.folder.cell("tasks", f"{cell} {w}", self._task, task, length, w) for w in self.names}
            rows += side_by_side(found["model"], found.get("teacher"), o.chances)
            self.progress("tasks", done, len(asked))
        return rows

    def _task(self, task: str, length: int | None, which: str) -> dict[str, Any]:
        o, model = self.options, self.models[which]
        if length is None:
            return run_task(self.manager, task, model, self.tokenizer, o.batch_size, o.limit, o.num_fewshot, o.seed)
        count = o.capped(o.sequences)
        advance = partial(self.progress, f"{task}, {length} tokens, {which}", total=count)
        values = ruler_scores(model, self.tokenizer, task, length, count, o.batch_size, o.seed, advance)
        metric = str(length)
        if task in ESSAYS:
            # the text is not lm-eval's, so the score must not be taken for one that others published
            metric += f",{SHIPPED}"
        score = {"value": sum(values) / len(values), "better": True, "values": values}
        return {task: {"documents": count, "chance": None, "chances": None, "metrics": {metric: score}}}

    def speed(self) -> list[dict[str, Any]]:
        """Rows per context, batch and model."""
        sizes = [(batch, context) for context in self.options.contexts for batch in self.options.speed_batches]
        return [row for size in sizes for row in self.folder.cell("speed", f"{size}", self._speed, *size)]

    def _speed(self, batch: int, context: int) -> list[dict[str, Any]]:
        advance = partial(self.progress, f"speed, {batch} x {context} tokens")
        return speed(self.models, batch, context, self.options.speed_tokens, advance=advance)


def evaluate(options: Options) -> dict[str, Any]:
    """Run what is not done yet, write all results, and return them.

    Raises:
        ValueError: something cannot be measured; what was finished before is kept.
    """
    keep_free_memory()
    teacher, revision = find_teacher_of(options)
    options = dataclasses.replace(options, teacher=teacher)
    folder = ResultsFolder(place_of(options), options.settings(revision))
    with progress_bars(quiet=False) as progress:
        evaluation = Evaluation(options, revision, folder, progress)
        parts = {part: getattr(evaluation, part)() for part in PARTS if part in options.parts}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    where = versions | {"device": options.device, "threads": torch.get_num_threads()}
    names = {"model": options.model, "teacher": options.teacher, "commit": project_commit()}
    results = folder.finish(names | {"environment": where} | parts)
    if options.update_card:
        update_card(Path(options.model).expanduser(), results)
    return results


def place_of(options: Options) -> Path:
    """Folder of the results."""
    if options.output:
        return Path(options.output)
    model = Path(options.model).expanduser().resolve()
    return Path("runs/evaluation") / Path(public_name(str(model))).name


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Read the command line, which begins with MODEL, and measure."""
    if arguments is None:
        arguments = sys.argv[1:]
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--model", *arguments]
    verbose = "--verbose" in arguments
    set_verbosity(verbose, quiet=False)
    with one_line_errors(verbose, "the same command goes on from here"):
        logging.disable_progress_bar()
        usage = "python -m recipes.evaluate MODEL [options]"
        if not any(argument.startswith(("--model", "-h", "--help")) for argument in arguments):
            raise ValueError(f"Name the model to measure first: {usage}.")
        parser = HfArgumentParser(
            Options, usage=usage, description=__doc__, formatter_class=RawDescriptionHelpFormatter
        )
        (options,) = parser.parse_args_into_dataclasses(arguments)
        with during("evaluating", lower="--lengths or --sequences"):
            results = evaluate(options)
        if options.json:
            sys.stdout.write(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
        else:
            sys.stdout.write(markdown(results))
            console.print(f"[green]done[/] {place_of(options)}")
        return results


if __name__ == "__main__":
    main()
