"""Run of a training recipe around its trainer: check arguments, resume, write the finished folder, push it."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.markup import escape
from torch import nn
from transformers import PreTrainedTokenizerBase, Trainer
from transformers.integrations import is_fsdp_enabled
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments

from convert.checkpoint.hub import prepare_repository, upload
from convert.cli import console, one_line_errors
from convert.errors import during
from convert.io.folder import (
    TRAINING_WORK,
    OutputFolder,
    check_apart,
    remove_work,
)
from convert.options import parse_size
from convert.teachers.teacher import public_name
from convert.train.distillation.trainer import (  # fmt: skip
    last_whole_checkpoint,
    set_trainable,
    train_and_evaluate,
    whole_model,
)

from .arguments import RunArguments
from .forms import Kind, read_rows, unused
from .load import conversion_of, load_splits, load_student, side_files
from .save import StageRecord, hyperparameters, try_to_write, write_checkpoint

NO_PART_OF_THE_RESULT = (
    "hub_token", "hub_private_repo", "hub_model_id", "push_to_hub", "logging_dir", "output_dir",
    "overwrite", "report_to", "resume_from_checkpoint", "run_name",
)  # fmt: skip
LOCAL_INPUTS = ("model_name_or_path", "teacher_model_name_or_path", "dataset_name")
DATA_AND_WEIGHTS = (".safetensors", ".gguf", ".bin", ".json", ".jsonl", ".parquet", ".csv", ".arrow")


class Run:
    """A recipe's run from its arguments to a finished folder, which it holds the lock of.

    Args:
        stage: name of the recipe.
        config: the trainer's arguments; its output_dir becomes OUTPUT_DIR.work, where checkpoints lie.
        model_config: names the student.
        arguments: where the result goes and which parameters are trained.
        others: the recipe's other arguments; a run is continued only if all of them are the same.
    """

    def __init__(self, stage: str, config: Any, model_config: ModelConfig, arguments: RunArguments, *others: Any):
        self.stage = stage
        self.config = config
        self.model_config = model_config
        self.arguments = arguments
        self.others = others
        self.state = PartialState()
        output = Path(config.output_dir).expanduser().resolve()
        self.owner = OutputFolder(output, arguments.overwrite, kept=TRAINING_WORK)
        self.teacher: str | None = None
        self.repository = None
        self._check(model_config.model_name_or_path)

    def __enter__(self) -> "Run":
        config = self.config
        student = self.model_config.model_name_or_path
        with contextlib.ExitStack() as stack:
            if self.state.is_main_process:
                # one process holds the lock for all: the others would be refused as another run
                stack.enter_context(self.owner)
                if Path(student).expanduser().is_dir():
                    check_apart(self.owner.output, Path(student).expanduser())
                self.owner.make_work()
            with self.state.main_process_first():
                self.source = side_files(student, self.model_config.model_revision)
            if config.push_to_hub:
                self.repository = prepare_repository(
                    config.hub_model_id or self.owner.output.name, bool(config.hub_private_repo)
                )
            config.push_to_hub = False  # the finished folder is pushed, not checkpoints
            config.output_dir = str(self.owner.work)
            settings = (self.model_config, self.arguments, *self.others)
            self.key = self._key(config.to_dict(), *map(dataclasses.asdict, settings))
            # what is pushed last is left first: the folder's lock is held until all processes are done
            stack.push(_wait_for_all)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def _check(self, student: str | None) -> None:
        if student is None:
            raise ValueError("model_name_or_path is missing; it names the hybrid to train.")
        if self.model_config.use_peft and self.arguments.trainable != "all":
            raise ValueError("With LoRA the adapters are trained; leave trainable at 'all'.")
        if self.config.resume_from_checkpoint or self.config.hub_token:
            raise ValueError(
                "resume_from_checkpoint is not needed (the same command goes on by itself), and hub_token is taken "
                "from HF_TOKEN or `hf auth login`; leave both out."
            )
        if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
            raise ValueError("DeepSpeed is not supported; shard with FSDP (recipes/configs/accelerate/fsdp2.yaml).")
        sharded = os.environ.get("ACCELERATE_USE_FSDP") == "true"
        if sharded and os.environ.get("FSDP_VERSION") == "1":
            raise ValueError("FSDP 1 is not supported; say fsdp_version: 2.")
        if self.model_config.use_peft and sharded:
            raise ValueError("LoRA under FSDP cannot be merged into the model at the end; use DDP.")
        if self.stage != "sft" and is_fsdp_enabled():  # TRL's trainers would shard what each process has read
            raise ValueError("fsdp_cpu_ram_efficient_loading is for recipes.sft; say false.")

    def _key(self, *settings: dict[str, Any]) -> str:
        """A hash of everything the result depends on; a checkpoint of another run must not be continued."""
        kept: list = [{k: v for k, v in values.items() if k not in NO_PART_OF_THE_RESULT} for values in settings]
        # another student, teacher or text at the same path is another run
        kept += [local_files(v) for values in kept for k, v in sorted(values.items()) if k in LOCAL_INPUTS]
        return hashlib.sha256(json.dumps([self.stage, kept], sort_keys=True, default=str).encode()).hexdigest()

    def load(
        self, script: ScriptArguments, mixture: DatasetMixtureConfig, kind: Kind
    ) -> tuple[Any, Any, nn.Module, PreTrainedTokenizerBase]:
        """Rows to train and to evaluate on in TRL's form, the student and its tokenizer."""
        train, held_out = load_splits(script, mixture, self.config.eval_strategy != "no", kind)
        train = self.arguments.chunk_of(train)
        if self.state.is_main_process:
            name_unused(train, kind)
        train, held_out = to_both(lambda rows: self.read(rows, kind), train, held_out)
        student, tokenizer = load_student(self.model_config)
        if not self.model_config.use_peft:
            set_trainable(student, self.arguments.trainable)
        return train, held_out, student, tokenizer

    def read(self, rows: Any, kind: Kind) -> Any:
        """Rows in TRL's form; how many empty texts are left out is printed."""
        found = read_rows(rows, kind)
        if len(found) < len(rows) and self.state.is_main_process:
            console.print(f"left out: {len(rows) - len(found)} rows of {len(rows)} whose text is empty")
        return found

    def check_rows(self, given: int, trainer: Trainer) -> None:
        """Say how many of the `given` rows the trainer's preparation left out."""
        left = len(trainer.train_dataset)
        # packing joins rows, so that a smaller number does not mean that any is missing
        packed = getattr(self.config, "packing", False)
        if not left:
            raise ValueError(
                f"Nothing is left of the data's {given} rows: every prompt fills max_length "
                f"({self.config.max_length}); raise it or shorten the prompts."
            )
        if left < given and not packed:
            self.say(f"[yellow]{given - left} of {given} rows left out:[/] the prompt alone fills max_length.")

    def train(
        self, trainer: Trainer, tokenizer: PreTrainedTokenizerBase, data: str, settings: dict[str, Any]
    ) -> dict[str, Any]:
        """Train, write the finished folder, push it; returns what was measured before and after."""
        record = StageRecord(
            stage=self.stage,
            teacher=self.teacher,
            data=Path(data).stem if Path(data).is_file() else public_name(data),
            settings=settings | {"trainable": self.arguments.trainable} | hyperparameters(self.config),
        )
        self._try_to_finish(trainer, tokenizer, record)
        checkpoint = self._checkpoint()
        with during(f"training into {self.owner.output}", lower="per_device_train_batch_size or max_length"):
            outcome = train_and_evaluate(trainer, checkpoint)
        record.before = outcome.before
        record.after = outcome.after
        record.log = outcome.log
        for entry in trainer.state.log_history:
            record.tokens = entry.get("num_tokens", record.tokens)
        self._finish(trainer, tokenizer, record)
        return {"stage": self.stage, "before": record.before, "after": record.after, "output": str(self.owner.output)}

    def _checkpoint(self) -> str | None:
        """The newest whole checkpoint of this very run."""
        work = self.owner.work
        path = work / "run.json"
        checkpoint = last_whole_checkpoint(work)
        known = None
        if path.is_file():
            known = json.loads(path.read_text())["key"]
        if checkpoint is not None and known != self.key:
            raise ValueError(f"{work} holds checkpoints of another run; delete it, or choose another output_dir.")
        # or the key would be written before another process has read the last one
        self.state.wait_for_everyone()
        if self.state.is_main_process:
            path.write_text(json.dumps({"key": self.key}))
        return checkpoint

    def note_teacher(self, teacher: nn.Module | None) -> None:
        """Keep the teacher's name for the record; the model itself may be let go."""
        if teacher is not None:
            name = teacher.config._name_or_path or conversion_of(self.source).get("teacher", "")
            self.teacher = public_name(name)

    def _try_to_finish(self, trainer: Trainer, tokenizer: PreTrainedTokenizerBase, record: StageRecord) -> None:
        """Find out before the training what would fail after it."""
        model = trainer.accelerator.unwrap_model(trainer.model)
        check_adapters(model)
        if self.state.is_main_process:
            if hasattr(model, "get_base_model"):  # without its adapters
                model = model.get_base_model()
            try_to_write(model, tokenizer, self.source, self.owner.output.name, record)
        self.state.wait_for_everyone()

    def _finish(self, trainer: Trainer, tokenizer: PreTrainedTokenizerBase, record: StageRecord) -> None:
        model = whole_model(trainer)
        if self.state.is_main_process:
            output = self.owner.output
            size = parse_size(self.arguments.max_shard_size)
            write_checkpoint(model, tokenizer, self.source, self.owner, record, size)
            remove_work(self.owner.work, TRAINING_WORK)  # before the upload, whose failure would keep it
            if self.repository is not None:
                upload(output, self.repository, f"Add {self.stage}")
            self.say(f"[green]{self.stage}[/] -> {output}")
        self.state.wait_for_everyone()

    def say(self, text: str) -> None:
        """Print a line, once for all processes."""
        if self.state.is_main_process:
            console.print(text)


def _wait_for_all(kind: type | None, *error: object) -> None:
    """Wait for the other processes at the end of a run in which none has failed."""
    if torch.distributed.is_available() and torch.distributed.is_initialized() and kind is None:
        torch.distributed.barrier()


def check_adapters(model: nn.Module) -> None:
    """Refuse DoRA on a weight in which a row is zero, whose direction is none.

    Raises:
        ValueError: naming the modules.
    """
    magnitudes = {name: p for name, p in model.named_parameters() if ".lora_magnitude_vector." in name}
    zero = [name.partition(".lora_magnitude_vector.")[0] for name, p in magnitudes.items() if not p.all()]
    if zero:
        kinds = sorted({name.rpartition(".")[2] for name in zero})
        raise ValueError(
            f"use_dora divides by the norm of each row of a weight, and {len(zero)} weights have rows of zeros, those "
            f"of gates and decays for instance; say use_dora: false, or leave {', '.join(kinds)} out of "
            "lora_target_modules."
        )


def name_unused(rows: Any, kind: Kind) -> None:
    """Print a line with the columns that nothing reads, where there are any."""
    if columns := unused(rows, kind):
        console.print(f"[yellow]columns that nothing uses:[/] {escape(', '.join(columns))}")


def to_both(change: Callable[[Any], Any], train: Any, held_out: Any | None) -> tuple[Any, Any | None]:
    """Change the rows to train on, and those held out where there are any."""
    if held_out is None:
        return change(train), None
    return change(train), change(held_out)


def local_files(name: str | None) -> list[tuple[str, int, int]]:
    """Name, size and time of the files at a path; empty for a name on the Hub."""
    path = Path(name or "").expanduser()
    if not name or not path.exists():
        return []
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in DATA_AND_WEIGHTS)
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def script(main: Callable[[list[str]], Any]) -> Any:
    """Run a recipe on the command line's arguments; an error is one line, and `--verbose` shows its traceback."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--verbose"]
    verbose = len(arguments) < len(sys.argv) - 1
    if not verbose:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        warnings.simplefilter("ignore", FutureWarning)  # the libraries' to one another
    with one_line_errors(verbose):
        return main(arguments)
