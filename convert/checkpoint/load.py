"""Load a hybrid, or any causal language model of transformers, with its tokenizer."""

import copy
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import HFValidationError
from jinja2 import TemplateError
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig

import modeling_llamba  # noqa: F401  registers its classes
import modeling_phimamba  # noqa: F401

from ..teachers.teacher import check_hub_id, check_not_split, first_line, read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def locate(model: str) -> tuple[str, dict[str, str]]:
    """The name and the arguments that `from_pretrained` takes for a folder, a GGUF file or a Hub id."""
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ValueError(f"{model} is neither a folder nor a GGUF file.")
        check_not_split(path.name)
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{model} has no config.json, so it is not a transformers checkpoint.")
        return str(path), {}
    check_hub_id(model)
    return model, {}


def load_config(model: str, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of a checkpoint."""
    name, where = locate(model)
    try:
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code, **where)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, HFValidationError) as error:
        raise ValueError(f"{model} cannot be read: {first_line(error)}") from error


def prompt_tokenizer(
    model: str, revision: str | None = None, trust_remote_code: bool = False
) -> "PreTrainedTokenizerBase":
    """The tokenizer of a checkpoint for prompts of any lengths: it pads, and on the left."""
    name, where = locate(model)
    tokenizer = read_tokenizer(model, name, **where, revision=revision, trust_remote_code=trust_remote_code)
    tokenizer = copy.deepcopy(tokenizer)  # that of a GGUF file is kept for the conversion, which carries it over
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def read_model(model: str, **options: Any) -> "PreTrainedModel":
    """A causal language model with all of its weights; a GGUF file is dequantised, to float32 if `dtype` is "auto".

    Args:
        options: for `from_pretrained`.

    Raises:
        ValueError: it cannot be found or read, or its weights are damaged.
    """
    from transformers import AutoModelForCausalLM

    name, where = locate(model)
    if where and options.get("dtype") == "auto":
        options["dtype"] = torch.float32
    try:
        loaded, found = AutoModelForCausalLM.from_pretrained(name, output_loading_info=True, **where, **options)
    except SafetensorError as error:
        raise ValueError(f"The weights of {model} are damaged: {first_line(error)}") from error
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{model} does not load: {cause(error, name, options.get('revision'))}") from error
    check_whole(model, found)
    return loaded


def load_model(
    model: str,
    dtype: str = "auto",
    device: str = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> "PreTrainedModel":
    """A causal language model, ready to generate.

    Raises:
        ValueError: it cannot be found or read, the weights are damaged, or there is no such dtype or device.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}.")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("There is no CUDA device here; use --device cpu.")
    loaded = read_model(model, dtype=DTYPES[dtype], revision=revision, trust_remote_code=trust_remote_code)
    # what a fine-tune's training may have left behind
    loaded.generation_config.update(use_cache=True, return_dict_in_generate=False)
    try:
        return loaded.eval().to(device)
    except RuntimeError as error:
        raise ValueError(f"The model cannot be put on --device {device}: {first_line(error)}") from error


def cause(error: Exception, model: str, revision: str | None = None) -> str:
    """The first line of why `from_pretrained` failed, with the file where that is the generation settings."""
    from transformers import GenerationConfig

    try:
        GenerationConfig.from_pretrained(model, revision=revision)
    except OSError:  # there are none
        return first_line(error)
    except (ValueError, TypeError, AttributeError) as refusal:
        return f"its generation_config.json is refused ({first_line(refusal)}); mend or remove that file"
    return first_line(error)


def check_whole(model: str | Path, found: Mapping[str, Collection]) -> None:
    """Refuse a model that transformers filled up with random weights.

    Args:
        found: its `output_loading_info`.
    """
    absent = sorted(found["missing_keys"]) or sorted(str(key) for key in found["mismatched_keys"])
    if absent:
        raise ValueError(
            f"The weights of {model} do not match its config.json: {len(absent)} tensors are missing or of another "
            f"shape, such as {absent[0]}; download or convert it again."
        )


def encode(tokenizer: "PreTrainedTokenizerBase", prompts: list[str], chat: bool) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask (B, L), padded on the left; prompts are chat messages if there is a template."""
    if not prompts or not all(prompt.strip() for prompt in prompts):
        raise ValueError("The prompt is empty; give --prompt some text.")
    if chat and tokenizer.chat_template:
        return encode_chats(tokenizer, [[{"role": "user", "content": prompt}] for prompt in prompts])
    encoded = tokenizer(prompts, return_tensors="pt", padding=len(prompts) > 1)
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def function_tools(tools: Any) -> list[dict[str, Any]]:
    """Tools as chat templates take them, from a list of functions with or without their type around them.

    Parameters that stand by their names alone become an object's properties in JSON schema.

    Raises:
        ValueError: they are no list of JSON objects; how it goes on after what they belong to.
    """
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("has tools that are no list of JSON objects")
    return [_with_schema(tool if "name" not in tool else {"type": "function", "function": tool}) for tool in tools]


def _with_schema(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool whose parameters, if it has any, are a JSON schema."""
    function = tool.get("function")
    parameters = function.get("parameters") if isinstance(function, dict) else None
    if not isinstance(parameters, dict) or not parameters or "properties" in parameters:
        return tool
    if not all(isinstance(value, dict) for value in parameters.values()):
        return tool
    return tool | {"function": function | {"parameters": {"type": "object", "properties": parameters}}}


def parsed_answer(
    text: str, tokenizer: "PreTrainedTokenizerBase", asked: list[int], tools: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Split an answer into the fields of its message; there are none without a `response_template`.

    Args:
        text: as the model wrote it, with special tokens and without the end.
        asked: token ids of the question.
        tools: functions that the question names.
    """
    if getattr(tokenizer, "response_template", None) is None:
        return {}
    try:
        return {"content": ""} | tokenizer.parse_response(text, prefix=tokenizer.decode(asked), tools=tools)
    except ValueError:  # a call that the model did not write well
        return {}


def encode_chats(
    tokenizer: "PreTrainedTokenizerBase",
    chats: list[list[dict[str, str]]],
    tools: list[dict[str, Any]] | None = None,
) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask (B, L) of conversations up to where the model answers, padded on the left."""
    try:
        encoded = tokenizer.apply_chat_template(
            chats, tools, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=len(chats) > 1
        )
    except TemplateError as error:
        raise ValueError(
            f"The tokenizer's chat template is broken ({first_line(error)}); continue a text with generate --raw."
        ) from error
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}
