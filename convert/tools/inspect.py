"""Describe a hybrid from its configuration, its alignment.json and the headers of its weights."""

import copy
import math
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from rich.console import Group
from rich.table import Table
from transformers import PreTrainedConfig
from transformers.utils import cached_file

from modeling_llamba.model.config_values import RECURRENT

from ..checkpoint.card import as_recorded
from ..checkpoint.load import load_config, locate
from ..errors import during, printable
from ..hybrids.shapes import HYBRIDS, MIXER_LAYERS, layer_letters, legend_of_letters, tensor_shapes
from ..io.reader import open_weights, read_json
from ..io.writer import human_bytes
from ..layout.cache import break_even, cache_bytes, contexts
from ..layout.placement import Placement, window_in_words
from ..plan import break_even_in_words

MIXER_FIELDS = (
    "num_heads", "num_kv_heads", "head_dim", "d_state", "d_conv", "activation", "norm", "rotary",
)  # fmt: skip


def hybrid_config(model: str, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of a hybrid; one that records no teacher is compared with full attention in every layer.

    Raises:
        ValueError: it is no hybrid.
    """
    with during(f"reading {model}"):
        config = load_config(model, revision, trust_remote_code=trust_remote_code)
    if config.model_type not in HYBRIDS:
        raise ValueError(
            f"{model} is a {config.model_type} model, not a hybrid; `convert-to-hybrid {model} OUT` makes one."
        )
    attention = {"teacher_layer_types": ["full_attention"] * len(config.layer_types)}
    config.conversion = attention | (config.conversion or {})
    return config


def inspect_model(model: str, revision: str | None = None) -> dict[str, Any]:
    """Layers, mixers, sizes, cache and provenance of a hybrid, as plain data."""
    config = hybrid_config(model, revision)
    folder = Path(model).expanduser()
    if any(folder.glob("*.safetensors")):
        open_weights(folder)
    layers = list(config.layer_types)
    parameters = sum(math.prod(shape) for shape in tensor_shapes(config).values())
    dtype = config.dtype or torch.float32
    report = {
        "model": model,
        "model_type": config.model_type,
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": parameters,
        "weight_bytes": parameters * dtype.itemsize,
        "teacher_weight_bytes": _parameters_of_attention(config) * dtype.itemsize,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "layer_map": layer_letters(layers),
        "layer_types": layers,
        "attention_layers": [i for i, kind in enumerate(layers) if kind not in (*MIXER_LAYERS, RECURRENT)],
        "attention_heads": {"query": config.num_attention_heads, "key_value": config.num_key_value_heads},
        "mixer": None,
        "provenance": dict(config.conversion or {}),
        "alignment": _alignment(model, revision),
    }
    if "linear_attention" in layers:
        report["mixer"] = {"kind": config.mixer} | {f: getattr(config, f"mixer_{f}") for f in MIXER_FIELDS}
        report["mixer"]["backend"] = config.backend
    if "hybrid" in layers:
        windows = {i: config.window_of(i) for i, kind in enumerate(layers) if kind == "hybrid"}
        tokens = config.hybrid_window
        if isinstance(config.hybrid_window, list):
            tokens = windows
        report["window"] = {"tokens": tokens, "sinks": config.hybrid_sinks}
        report["window"] |= {"block": config.hybrid_block, "salient": config.hybrid_salient}
        has_state = config.mixer != "none"
        planes = (config.hybrid_state_planes or config.rotary_planes) if has_state else None
        report["window"] |= {"state": has_state, "planes": planes, "rank": config.hybrid_rank}
        report["full_heads"] = sum(len(heads) for heads in config.hybrid_full_heads or ())
    report["bits"] = str(Placement.of(config).bits)
    sizes = {name: cache_bytes(config, length) for name, length in contexts(config).items()}
    report["cache_bytes"] = {name: {"all_attention": all_, "this_model": own} for name, (all_, own) in sizes.items()}
    if set(MIXER_LAYERS) & set(layers):
        more = report["weight_bytes"] - report["teacher_weight_bytes"]
        report["break_even"] = {f"{bits} bits": break_even(config, more, bits) for bits in (16, 8)}
    return report


def _parameters_of_attention(config: PreTrainedConfig) -> int:
    """Number of parameters of the model in which every layer has the attention of its teacher."""
    teacher = copy.deepcopy(config)
    teacher.layer_types = config.conversion["teacher_layer_types"]
    return sum(math.prod(shape) for shape in tensor_shapes(teacher).values())


def _alignment(model: str, revision: str | None) -> dict[str, Any] | None:
    """The content of alignment.json: the text, and each mixer's held-out error. None where there is no such file."""
    try:
        path = cached_file(
            locate(model)[0], "alignment.json", revision=revision, _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )  # fmt: skip
    except (OSError, HFValidationError):
        return None
    if path is None:
        return None
    return read_json(Path(path))


def describe_model(report: dict[str, Any]) -> Group:
    """The report of `inspect_model` as tables for a terminal."""
    attention = len(report["attention_layers"])
    total = len(report["layer_types"])
    facts = Table.grid(padding=(0, 2))
    facts.add_row("model", printable(f"{report['model']} ({report['model_type']}, {report['dtype']})"))
    letters = legend_of_letters(report["layer_types"])
    facts.add_row("layers", f"{report['layer_map']}  ({letters}; {attention} of {total} keep their attention)")
    if report["mixer"]:
        rest = ", ".join(f"{key} {value}" for key, value in report["mixer"].items() if key != "kind")
        facts.add_row("mixer", f"{report['mixer']['kind']}: {rest}")
    if "window" in report:
        window = report["window"]
        state = f"a state of {window['planes']} rotary planes" if window["state"] else "no state"
        held = f"{window['sinks']} sinks, {window['salient']} salient tokens"
        line = f"{window_in_words(window['tokens'])} tokens, {held}, {state}; "
        facts.add_row("window", f"{line}{report['full_heads']} query heads keep full attention")
    facts.add_row("cache", f"bits of a number: {report['bits']}")
    facts.add_row("size", f"{report['parameters']:,} parameters, {human_bytes(report['weight_bytes'])}")
    if "break_even" in report:
        facts.add_row("memory", break_even_in_words(report["break_even"]))
    for key, value in report["provenance"].items():
        if key != "teacher_layer_types" and value not in (None, {}):
            facts.add_row(printable(key), printable(as_recorded(value)))
    if not report["provenance"].keys() - {"teacher_layer_types"}:
        facts.add_row("teacher", "not recorded")
    facts.add_row("alignment", printable(_alignment_line(report["alignment"])))
    cache = Table("cache per sequence", "attention throughout", "this model", "share")
    for context, size in report["cache_bytes"].items():
        share = f"{size['this_model'] / size['all_attention']:.1%}"
        cache.add_row(context, human_bytes(size["all_attention"]), human_bytes(size["this_model"]), share)
    return Group(facts, cache)


def _alignment_line(alignment: dict[str, Any] | None) -> str:
    if alignment is None:
        return "no alignment.json"
    line = f"on {alignment.get('tokens', '?')} tokens of {alignment.get('text', '?')}"
    fits = alignment.get("held_out_error") or {}
    errors = {layer: figures.get("refined") or figures.get("solved") for layer, figures in fits.items()}
    errors = {layer: error for layer, error in errors.items() if error is not None}
    if not errors:
        return line
    worst = max(errors, key=errors.get)
    mean = sum(errors.values()) / len(errors)
    return f"{line}; held-out error {mean:.3f} on average, most in layer {worst} ({errors[worst]:.3f})"
