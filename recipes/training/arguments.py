"""Arguments of the training recipes: TRL's own, and what a teacher and a hybrid add. YAML keys are the field names."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

from .loss import Divergence, LossWeights

TRAINABLE = ("all", "all-but-mlp", "mixers")


@dataclass
class TeacherArguments:
    """The model to learn from."""

    teacher_model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Folder, GGUF file or Hub id; any size, the same vocabulary. Default: what was converted."},
    )
    teacher_revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of the teacher."})
    teacher_dtype: str = field(default="auto", metadata={"help": "Of the teacher's weights: auto, float32, bfloat16."})
    teacher_load_in_8bit: bool = field(default=False, metadata={"help": "Needs bitsandbytes and CUDA."})
    teacher_load_in_4bit: bool = field(default=False, metadata={"help": "Needs bitsandbytes and CUDA."})

    def __post_init__(self):
        if self.teacher_load_in_8bit and self.teacher_load_in_4bit:
            raise ValueError("teacher_load_in_8bit and teacher_load_in_4bit exclude each other.")


@dataclass
class RunArguments:
    """Where a run's result goes and what of the student it changes."""

    overwrite: bool = field(default=False, metadata={"help": "Replace output_dir if it holds a checkpoint."})
    keep_checkpoints: bool = field(default=False, metadata={"help": "Keep OUTPUT_DIR.work when the run is done."})
    trainable: Literal["all", "all-but-mlp", "mixers"] = field(
        default="all", metadata={"help": "Which parameters are trained."}
    )
    other_learning_rate: float | None = field(
        default=None, metadata={"help": "Peak, of everything but the mixers; learning_rate if left out."}
    )
    window_dropout: float = field(
        default=0.0,
        metadata={"help": "Hybrid layers: chance that a sequence does without its window at first; falls to 0."},
    )
    window_dropout_share: float = field(default=0.5, metadata={"help": "Share of the steps over which it falls to 0."})
    max_shard_size: str = field(default="5GB", metadata={"help": "Largest file of the finished model's weights."})
    data_chunk: str | None = field(
        default=None, metadata={"help": "Train on a part of the rows, as 2/32: the second of 32 equal parts."}
    )
    train_decays: bool = field(
        default=False,
        metadata={"help": "With LoRA: train the mixers' own vectors (decay, dt_bias, D, z_bias) in full as well."},
    )

    def __post_init__(self):
        if not 0 <= self.window_dropout <= 1 or not 0 < self.window_dropout_share <= 1:
            raise ValueError("window_dropout must lie in [0, 1] and window_dropout_share in (0, 1].")

    def chunk_of(self, rows: Any) -> Any:
        """The part of the rows that data_chunk names.

        Raises:
            ValueError: it is not N/M with 1 <= N <= M, or there are fewer rows than parts.
        """
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
    """The loss of SFT with a teacher: ce_weight x CE + kl_weight x divergence, both per token."""

    ce_weight: float = field(default=0.0, metadata={"help": "Of the cross entropy to the data's answers."})
    kl_weight: float = field(default=1.0, metadata={"help": "Of the divergence from the teacher."})
    divergence: Divergence = field(
        default="forward", metadata={"help": "forward KL(teacher || student), reverse, or js, their mean."}
    )
    temperature: float = field(default=1.0, metadata={"help": "Of both distributions in the divergence."})
    offline_top_k: int = field(
        default=0,
        metadata={"help": "Compute the teacher's so many likeliest tokens once, keep them on disk, drop the teacher."},
    )

    offline_folder: str | None = field(
        default=None,
        metadata={"help": "Where they are kept for other runs; else beside the checkpoints, and gone with them."},
    )

    def __post_init__(self):
        self.weights()
        if self.offline_folder and not self.offline_top_k:
            raise ValueError("offline_folder is for offline_top_k, which is 0.")
        if self.offline_top_k and self.temperature != 1:
            raise ValueError("offline_top_k keeps probabilities at temperature 1; leave temperature at 1.")
        if self.offline_top_k < 0:
            raise ValueError(f"offline_top_k must be 0 or more, not {self.offline_top_k}.")
        if self.offline_top_k and not self.kl_weight:
            raise ValueError("offline_top_k keeps what the divergence needs, and kl_weight is 0.")

    def weights(self) -> LossWeights:
        """As the loss takes them."""
        return LossWeights(self.ce_weight, self.kl_weight, self.divergence, self.temperature)


def parse(config_class: type, *more: type, argv: list[str] | None = None) -> tuple[Any, ...]:
    """(ScriptArguments, config_class, ModelConfig, DatasetMixtureConfig, *more) from flags and `--config FILE.yaml`.

    Raises:
        ValueError: an unknown key or flag, or a value that cannot be.
    """
    return parse_classes((ScriptArguments, config_class, ModelConfig, DatasetMixtureConfig, *more), argv)


def parse_classes(classes: tuple[type, ...], argv: list[str] | None) -> tuple[Any, ...]:
    """The same for any classes."""
    parser = TrlParser(classes)
    try:
        return parser.parse_args_and_config(argv)
    except ValueError as error:
        unknown = re.match(r"Unknown arguments from config file: \['--(\w+)'", str(error))
        if unknown is None:
            raise
        raise ValueError(f"Unknown key {unknown[1]!r} in the configuration file.") from error
    except (TypeError, yaml.YAMLError) as error:
        raise ValueError(f"The arguments do not parse: {' '.join(str(error).split())}") from error
    except FileNotFoundError as error:
        raise ValueError(f"The configuration file {error.filename} does not exist.") from error


def conversion_of(student: Path) -> dict[str, Any]:
    """What a hybrid folder's configuration says of where it came from; nothing where there is no such file."""
    path = student / "config.json"
    return (json.loads(path.read_text()).get("conversion") or {}) if path.is_file() else {}
