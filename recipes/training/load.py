"""Load a student, a teacher and data sets for the training recipes, or say in one line why that cannot be."""

import contextlib
import hashlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import PartialState
from datasets import DatasetDict, load_dataset
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations import is_fsdp_enabled
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, get_dataset

from convert.checkpoint.load import prompt_tokenizer, read_model
from convert.errors import HTTPError
from convert.hybrids.shapes import HYBRIDS
from convert.teachers.teacher import first_line, read_tokenizer, recorded_teacher
from convert.train.distillation.trainer import check_vocabulary_sizes

from .arguments import TeacherArguments
from .forms import Kind, form_of

DATA_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
RENAMED_TOKENS = 0.01


def read_once(name: str, **options: Any) -> PreTrainedModel:
    """The model of `read_model`; under `fsdp_cpu_ram_efficient_loading` one process of a machine has its weights.

    The others have memory that nothing has touched, so that it takes no room; the trainer fills their shards.
    """
    if not is_fsdp_enabled() or PartialState().is_local_main_process:
        return read_model(name, **options)
    model = read_model(name, device_map="meta", **options)
    if any(buffer.is_meta for _, buffer in model.named_non_persistent_buffers()):
        return read_model(name, **options)  # a quantised file's, which transformers leaves without what it computes
    # not the meta device, which has no addresses, and by theirs an optimizer's parameters are found again
    model._apply(lambda tensor: torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor)
    # `_apply` gave each name a tensor of its own, tied ones too
    model.tie_weights()
    return model


def load_student(arguments: ModelConfig) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """A hybrid, of the installed class, and its tokenizer."""
    name = arguments.model_name_or_path
    if name is None:
        raise ValueError("model_name_or_path is missing; it names the hybrid to train.")
    options = {"dtype": arguments.dtype, "revision": arguments.model_revision}
    if arguments.attn_implementation is not None:
        options["attn_implementation"] = arguments.attn_implementation
    if arguments.load_in_8bit or arguments.load_in_4bit:
        raise ValueError("A hybrid is trained in full precision; load_in_8bit and load_in_4bit are for the teacher.")
    model = read_once(name, **options)
    if model.config.model_type not in HYBRIDS:
        raise ValueError(
            f"{name} is a {model.config.model_type} model, not a hybrid; make one with convert-to-hybrid first."
        )
    return model, read_tokenizer(name, Path(name).expanduser(), revision=arguments.model_revision)


def conversion_of(student: Path) -> dict[str, Any]:
    """The `conversion` entry of a hybrid's configuration, which says where it came from; empty without one."""
    path = student / "config.json"
    return (json.loads(path.read_text()).get("conversion") or {}) if path.is_file() else {}


def side_files(name: str, revision: str | None = None) -> Path:
    """Folder of a student's configuration, card and training record; of a Hub repository they are downloaded."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=["*.json", "*.md"]))
    except (HfHubHTTPError, HFValidationError, HTTPError, OSError, ValueError) as error:
        raise ValueError(f"{name} does not load: {first_line(error)}") from error


def load_teacher(
    arguments: TeacherArguments,
    source: Path | None = None,
    trust_remote_code: bool = False,
    student: nn.Module | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> nn.Module:
    """The teacher, in evaluation mode, without gradients.

    Args:
        source: folder with the hybrid's configuration, which names the model it was converted from; None where
            `arguments` name the teacher.
        student, tokenizer: the hybrid and its tokenizer, whose vocabulary the teacher must share; None where any
            teacher will do.

    Raises:
        ValueError: no teacher is known, it does not load, or it does not predict the student's tokens.
    """
    name, revision = arguments.teacher_model_name_or_path, arguments.teacher_revision
    if name is None:
        name, recorded = recorded_teacher(conversion_of(source) if source else None, "teacher_model_name_or_path")
        revision = revision or recorded
    where = {"revision": revision, "trust_remote_code": trust_remote_code}
    options: dict[str, Any] = {"dtype": arguments.teacher_dtype}
    if arguments.teacher_load_in_8bit or arguments.teacher_load_in_4bit:
        if is_fsdp_enabled():
            raise ValueError("fsdp_cpu_ram_efficient_loading spreads no teacher of bitsandbytes; say false.")
        if importlib.util.find_spec("bitsandbytes") is None:
            raise ValueError("teacher_load_in_8bit and teacher_load_in_4bit need bitsandbytes: pip install it.")
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_8bit=arguments.teacher_load_in_8bit, load_in_4bit=arguments.teacher_load_in_4bit
        )
    try:
        teacher = read_once(name, **where, **options)
    except ValueError as error:
        raise ValueError(f"The teacher does not load: {error}") from error
    if student is not None:
        check_vocabulary_sizes(student, teacher)
        try:
            of_teacher = prompt_tokenizer(name, **where)
        except ValueError:
            pass  # a teacher without a tokenizer
        else:
            check_tokens(tokenizer, of_teacher)
    return teacher.eval().requires_grad_(False)


def check_tokens(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> None:
    """Raise ValueError where more than a few ids mean different tokens; chat models rename some reserved ones."""
    known = {number: token for token, number in theirs.get_vocab().items()}
    other = [(n, token, known[n]) for token, n in ours.get_vocab().items() if n in known and known[n] != token]
    if len(other) > RENAMED_TOKENS * len(known):
        n, token, of_teacher = min(other)
        raise ValueError(
            f"The teacher's vocabulary is another one ({len(other):,} tokens differ: {n} is {of_teacher!r} there and "
            f"{token!r} here); distillation needs one vocabulary."
        )


def load_splits(
    script: ScriptArguments, mixture: DatasetMixtureConfig, evaluates: bool, kind: Kind
) -> tuple[Any, Any]:
    """Training and evaluation data.

    Args:
        evaluates: whether a test split is needed.
        kind: of data, one of whose forms the columns must have.
    """
    try:
        if mixture.datasets:
            with _cached_by_content(*(part.path for part in mixture.datasets)):
                splits = get_dataset(mixture)
        elif script.dataset_name:
            splits = load_named(script.dataset_name, script.dataset_config)
        else:
            raise ValueError("Name the data: dataset_name, or datasets in the YAML file.")
    except (DatasetGenerationError, DatasetNotFoundError, OSError) as error:
        raise ValueError(f"{script.dataset_name} cannot be read: {first_line(error)}") from error
    wanted = [script.dataset_train_split] + ([script.dataset_test_split] if evaluates else [])
    for split in wanted:
        if split not in splits:
            raise ValueError(
                f"The data has no split {split!r} but {', '.join(splits)}; set dataset_train_split, "
                "dataset_test_split, or, for a list of `datasets`, test_split_size."
            )
        form_of(kind, splits[split].column_names)
        if not len(splits[split]):
            raise ValueError(f"The split {split!r} of the data is empty.")
    return splits[script.dataset_train_split], splits[script.dataset_test_split] if evaluates else None


def load_named(name: str, config: str | None = None) -> DatasetDict:
    """The splits of a file, a folder, or a data set on the Hub."""
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix not in DATA_KINDS:
            raise ValueError(f"{name} must be one of {', '.join(DATA_KINDS)}.")
        return load_dataset(DATA_KINDS[path.suffix], data_files=str(path))
    if path.suffix in DATA_KINDS or name.startswith((".", "/", "~")):
        if not path.is_dir():  # no name on the Hub looks like this
            raise ValueError(f"{name} cannot be read: there is no such file or folder.")
    with _cached_by_content(name):
        return load_dataset(name, config)


@contextlib.contextmanager
def _cached_by_content(*names: str) -> Iterator[None]:
    """Have `datasets` keep what it makes of local folders apart by their files.

    It identifies a folder whose card lists its files by the last part of its name alone, and would give the rows of
    another folder, or of the same one before it changed.
    """
    folders = [path for name in names if (path := Path(name).expanduser()).is_dir()]
    files = [file for folder in folders for file in sorted(folder.rglob("*")) if file.is_file()]
    states = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    usual = datasets.config.HF_DATASETS_CACHE
    if states:
        datasets.config.HF_DATASETS_CACHE = Path(usual, hashlib.sha256(repr(states).encode()).hexdigest()[:16])
    try:
        yield
    finally:
        datasets.config.HF_DATASETS_CACHE = usual
