"""Arguments of the training recipes: TRL's own, and what a teacher and a hybrid add. YAML keys are the field names."""

import dataclasses
import difflib
import re
from dataclasses import dataclass, field
from typing import Any

import yaml
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

from convert.options import Trainable, parse_size
from convert.train.distillation.loss import Divergence, LossWeights


@dataclass
class TeacherLoadingArguments:
    """Arguments for loading the teacher."""

    teacher_dtype: str = field(
        default="auto", metadata={"help": "Type of the teacher's weights: auto, float32 or bfloat16."}
    )
    teacher_load_in_8bit: bool = field(
        default=False, metadata={"help": "Load the teacher in 8 bit, with bitsandbytes and CUDA."}
    )
    teacher_load_in_4bit: bool = field(
        default=False, metadata={"help": "Load the teacher in 4 bit, with bitsandbytes and CUDA."}
    )

    def __post_init__(self):
        if self.teacher_load_in_8bit and self.teacher_load_in_4bit:
            raise ValueError("teacher_load_in_8bit and teacher_load_in_4bit exclude each other.")


@dataclass
class TeacherArguments(TeacherLoadingArguments):
    """The model to learn from."""

    teacher_model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Folder, GGUF file or Hub id of the teacher, of any size and the same vocabulary. Default: the "
            "model that the hybrid was converted from."
        },
    )
    teacher_revision: str | None = field(
        default=None, metadata={"help": "Branch, tag or commit of the teacher. Default: the one recorded with it."}
    )


@dataclass
class RunArguments:
    """Arguments for the folder of a result and for the parameters that are trained."""

    overwrite: bool = field(default=False, metadata={"help": "Replace output_dir if it holds a checkpoint."})
    trainable: Trainable = field(
        default="all",
        metadata={
            "help": "Which parameters are trained. beyond-window leaves alone what the first tokens, all within the "
            "window, pass through."
        },
    )
    max_shard_size: str = field(
        default="5GB", metadata={"help": "Largest weights file of the finished model, such as 5GB."}
    )
    data_chunk: str | None = field(
        default=None, metadata={"help": "Part of the rows to train on: 2/32 is the second of 32 equal parts."}
    )

    def __post_init__(self):
        parse_size(self.max_shard_size)

    def chunk_of(self, rows: Any) -> Any:
        """The part of the rows that data_chunk names, all of them by default."""
        if self.data_chunk is None:
            return rows
        match = re.fullmatch(r"(\d+)/(\d+)", self.data_chunk)
        number, parts = (int(match[1]), int(match[2])) if match else (0, 0)
        if not 1 <= number <= parts <= len(rows):
            raise ValueError(f"data_chunk must be N/M with 1 <= N <= M <= {len(rows)} rows, not {self.data_chunk!r}.")
        edges = [round(i * len(rows) / parts) for i in (number - 1, number)]
        return rows.select(range(*edges))


@dataclass
class LossArguments:
    """SFT with a teacher: the loss is ce_weight x CE + kl_weight x divergence, both per token."""

    ce_weight: float = field(default=0.0, metadata={"help": "Weight of the cross entropy to the data's answers."})
    kl_weight: float = field(default=1.0, metadata={"help": "Weight of the divergence from the teacher."})
    divergence: Divergence = field(
        default="forward", metadata={"help": "forward KL(teacher || student), reverse, or js (Jensen-Shannon)."}
    )
    temperature: float = field(default=1.0, metadata={"help": "Divides both models' logits in the divergence."})
    other_learning_rate: float | None = field(
        default=None,
        metadata={"help": "Peak learning rate of everything but the mixers; learning_rate if left out."},
    )

    def __post_init__(self):
        self.weights()

    def weights(self) -> LossWeights:
        """The weights as the loss takes them."""
        return LossWeights(self.ce_weight, self.kl_weight, self.divergence, self.temperature)


def parse(config_class: type, *more: type, argv: list[str] | None = None) -> tuple[Any, ...]:
    """The arguments of data, trainer (`config_class`), model, data mixture and `more`; see `parse_classes`."""
    return parse_classes((ScriptArguments, config_class, ModelConfig, DatasetMixtureConfig, *more), argv)


def parse_classes(classes: tuple[type, ...], argv: list[str] | None) -> tuple[Any, ...]:
    """Objects of `classes` from flags and `--config FILE.yaml`."""
    parser = TrlParser(classes)
    try:
        return parser.parse_args_and_config(argv)
    except ValueError as error:
        # TRL raises a plain ValueError, which its text alone tells from others
        unknown = re.match(r"Unknown arguments from config file: \['--(\w+)'", str(error))
        if unknown is None:
            raise
        known = [item.name for each in classes for item in dataclasses.fields(each)]
        nearest = difflib.get_close_matches(unknown[1], known, 1, 0.5)
        hint = "."
        if nearest:
            hint = f"; did you mean {nearest[0]}?"
        raise ValueError(f"Unknown key {unknown[1]!r} in the configuration file{hint}") from error
    except (TypeError, yaml.YAMLError) as error:
        raise ValueError(f"The arguments do not parse: {' '.join(str(error).split())}") from error
    except FileNotFoundError as error:
        raise ValueError(f"The configuration file {error.filename} does not exist.") from error
