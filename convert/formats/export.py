"""Export a hybrid to one of transformers' own architectures: no remote code, and engines that know it can serve it.

Exact: x and B are repeated for the heads that share them, a gate bias becomes in_proj's, and where the inner width has
to be a multiple of the model's, heads that are zero everywhere fill it up (a norm per head leaves zero zero).
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import ModelCard, ModelCardData
from transformers import AutoConfig, PreTrainedConfig

from ..checkpoint.folder import check_apart, check_output, staged
from ..config import DTYPES, parse_size
from ..pipeline import add_generation_config, add_tokenizer
from ..placement.cache import num_states
from ..plan import STUDENTS, human_bytes, output_dtype
from ..teachers import get_family
from ..teachers.teacher import Teacher, config_errors, download_model
from ..weights.reader import Checkpoint, open_weights
from ..weights.rules import Rule
from ..weights.writer import plan_shards, write_shards
from .import_ import read_json
from .native import STOCK_CLASSES, check_holdable
from .parts import Fill, Part, Parts, Table, make_rules, moved

# transformers reads both spellings; llama.cpp and earlier versions of vLLM only these
LEGACY_LAYER_TYPES = {"linear_attention": "mamba", "full_attention": "attention"}
COPIED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "tie_word_embeddings",
    "attention_dropout",
)
CARD = """---
{{ card_data }}
---

# {{ title }}

{{ source }} as a stock {{ architecture }}, exported by
[convert-to-hybrid](https://pypi.org/project/convert-to-hybrid/): it loads without `trust_remote_code` and gives the
same logits.
"""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of one export."""

    model: str
    """Hub id or local folder of a hybrid of this project."""
    output: str
    to: str = "granitemoehybrid"
    expand: int | None = None
    """Inner width over hidden width; the least that holds the mixers by default."""
    revision: str | None = None
    dtype: str = "auto"
    max_shard_size: str = "5GB"
    overwrite: bool = False

    def __post_init__(self):
        if self.to not in STOCK_CLASSES:
            raise ValueError(f"to must be one of {', '.join(STOCK_CLASSES)}; got {self.to!r}.")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}.")
        parse_size(self.max_shard_size)


@dataclass(frozen=True)
class ExportPlan:
    """Everything that is decided before a weight is copied."""

    source: PreTrainedConfig
    config: PreTrainedConfig
    rules: list[Rule]
    dtype: torch.dtype
    checkpoint: Checkpoint
    folder: Path
    notes: list[str]

    def summary(self) -> dict[str, Any]:
        """The plan as plain data."""
        parameters = sum(math.prod(rule.shape) for rule in self.rules)
        return {
            "architecture": self.config.architectures[0],
            "dtype": str(self.dtype).removeprefix("torch."),
            "parameters": parameters,
            "bytes_to_write": parameters * self.dtype.itemsize,
            "notes": self.notes,
        }


def describe(plan: ExportPlan) -> str:
    """The plan in a few lines for the console."""
    s = plan.summary()
    lines = [
        f"{s['architecture']}, {s['dtype']}",
        f"parameters  {s['parameters']:,} ({human_bytes(s['bytes_to_write'])})",
    ]
    return "\n".join([*lines, *(f"note        {note}" for note in s["notes"])])


def plan_export(options: ExportOptions) -> ExportPlan:
    """Decide everything.

    Raises:
        ValueError: not a hybrid of this project, or one that the architecture cannot hold.
    """
    path = Path(options.model).expanduser()
    folder = path if path.is_dir() else download_model(options.model, options.revision, None, False, True)[0]
    raw = read_json(folder / "config.json") or {}
    kind = str(raw.pop("model_type", None))
    if kind not in STUDENTS or "mixer" not in raw:
        raise ValueError(
            f"{options.model} is no hybrid of this project (model_type {kind!r}); convert or import one first."
        )
    with config_errors(f"{folder / 'config.json'} is not a valid {kind} configuration"):
        source = STUDENTS[kind][0](**raw)
    check_holdable(source, options.to)
    config = stock_config(source, options.to, options.expand)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    checkpoint = open_weights(folder)
    rules = make_rules(
        export_table(source, config, options.to), shapes, checkpoint.tensors, {}, "hybrid of this project"
    )
    dtype = output_dtype(options.dtype, checkpoint.tensors)
    return ExportPlan(source, config, rules, dtype, checkpoint, folder, engine_notes(source, config))


def total_heads(source: PreTrainedConfig, expand: int | None) -> tuple[int, int]:
    """Heads of the exported mixers, zero ones included, and the width they make over the model's.

    Raises:
        ValueError: no number of heads makes that width.
    """
    hidden, width = source.hidden_size, source.mixer_head_dim
    least = -(-source.mixer_num_heads * width // hidden)
    tried = range(least, least + width) if expand is None else [expand]
    for multiple in tried:
        if multiple >= least and multiple * hidden % width == 0:
            return multiple * hidden // width, multiple
    raise ValueError(
        f"expand {expand} cannot hold {source.mixer_num_heads} heads of {width} in a model {hidden} wide; "
        f"leave it out, or give a whole number from {least} on."
    )


def stock_config(source: PreTrainedConfig, target: str, expand: int | None = None) -> PreTrainedConfig:
    """The exported model's configuration.

    Raises:
        ValueError: `expand` does not fit.
    """
    heads, expand = total_heads(source, expand)
    has_bias = source.attention_bias or source.attention_out_bias
    fields = {name: getattr(source, name) for name in COPIED_FIELDS} | {
        "attention_bias": has_bias,
        "mamba_n_heads": heads,
        "mamba_n_groups": heads,
        "mamba_d_head": source.mixer_head_dim,
        "mamba_d_state": source.mixer_d_state,
        "mamba_d_conv": source.mixer_d_conv,
        "mamba_expand": expand,
        "mamba_conv_bias": True,
        "mamba_proj_bias": source.mixer_gate_bias or source.mixer_out_bias,
    }
    if source.head_dim * source.num_attention_heads != source.hidden_size:
        fields["head_dim"] = source.head_dim
    fields |= _granite_fields(source) if target == "granitemoehybrid" else _bamba_fields(source)
    with config_errors(f"The hybrid's config.json gives no valid {target} configuration"):
        config = AutoConfig.for_model(target, **fields)
    config.architectures = [STOCK_CLASSES[target].architecture]
    return config


def _granite_fields(source: PreTrainedConfig) -> dict[str, Any]:
    return {
        "rope_parameters": dict(source.rope_parameters),
        "shared_intermediate_size": source.intermediate_size,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "position_embedding_type": "rope",
        "attention_multiplier": source.head_dim**-0.5,
        "layer_types": list(source.layer_types),
    }


def _bamba_fields(source: PreTrainedConfig) -> dict[str, Any]:
    # unless it is said, Bamba takes half of each head
    rope = {"partial_rotary_factor": 1.0} | dict(source.rope_parameters)
    return {
        "rope_parameters": rope,
        "attn_layer_indices": [i for i, kind in enumerate(source.layer_types) if kind == "full_attention"],
        "mlp_bias": source.mlp_bias,
        "attn_rotary_emb": int(source.head_dim * rope["partial_rotary_factor"]),  # llama.cpp and vLLM look here
    }


def export_table(source: PreTrainedConfig, config: PreTrainedConfig, target: str) -> Table:
    """The exported tensors from ours."""
    stock = STOCK_CLASSES[target]
    table: Table = {"model.embed_tokens.weight": moved("model.embed_tokens.weight")}
    table[f"{stock.final_norm}.weight"] = moved("model.norm.weight")
    if not source.tie_word_embeddings:
        table["lm_head.weight"] = moved("lm_head.weight")
    for i, kind in enumerate(source.layer_types):
        layer = f"model.layers.{i}."
        table[f"{layer}input_layernorm.weight"] = moved(f"{layer}input_layernorm.weight")
        table[f"{layer}{stock.post_norm}.weight"] = moved(f"{layer}post_attention_layernorm.weight")
        for theirs, ours in stock.mlp.items():
            if source.mlp_bias or theirs.endswith("weight"):
                table[f"{layer}{theirs}"] = tuple(Part(f"{layer}{name}") for name in ours)
        if kind == "full_attention":
            table |= _attention_table(source, config, f"{layer}self_attn.")
        else:
            table |= _mixer_table(source, config, f"{layer}mixer.", f"{layer}mamba.")
    return table


def _attention_table(source: PreTrainedConfig, config: PreTrainedConfig, prefix: str) -> Table:
    table: Table = {f"{prefix}{p}_proj.weight": moved(f"{prefix}{p}_proj.weight") for p in "qkvo"}
    if config.attention_bias:
        kv = source.num_key_value_heads * source.head_dim
        rows = {"q": source.num_attention_heads * source.head_dim, "k": kv, "v": kv, "o": source.hidden_size}
        for p in "qkvo":
            is_there = source.attention_out_bias if p == "o" else source.attention_bias
            name = f"{prefix}{p}_proj.bias"
            table[name] = moved(name) if is_there else (Fill(rows[p]),)
    return table


def _mixer_table(source: PreTrainedConfig, config: PreTrainedConfig, ours: str, theirs: str) -> Table:
    """[z, x, B, C, dt] with as many heads of each as the stock mixer has, the missing ones zero."""
    H, G, P, N = source.mixer_num_heads, source.mixer_num_kv_heads, source.mixer_head_dim, source.mixer_d_state
    extra, per_state = config.mamba_n_heads - H, H // num_states(source)
    ends = [0, H * P, H * P + G * P, H * P + G * (P + N), H * P + G * (P + N) + H * N]

    def streams(name: str, first: int) -> Parts:
        """x, B and C, which begin at row `first` of z, x, B, C."""
        x, B, C = ((name, ends[k] - first, ends[k + 1] - first) for k in (1, 2, 3))
        return _without_empty(
            Part(*x, block=P, times=H // G), Fill(extra * P), Part(*B, block=N, times=H // G), Fill(extra * N),
            Part(*C), Fill(extra * N),
        )  # fmt: skip

    def per_head(name: str, fill: float = 0.0, times: int = 1) -> Parts:
        return _without_empty(Part(f"{ours}{name}", times=times), Fill(extra, fill))

    weight = f"{ours}in_proj.weight"
    table: Table = {
        f"{theirs}in_proj.weight": _without_empty(
            Part(weight, 0, H * P), Fill(extra * P), *streams(weight, 0), Part(weight, ends[4], times=per_state),
            Fill(extra),
        ),
        f"{theirs}conv1d.weight": streams(f"{ours}conv1d.weight", H * P),
        f"{theirs}conv1d.bias": streams(f"{ours}conv1d.bias", H * P),
        f"{theirs}dt_bias": per_head("dt_bias", times=per_state),
        f"{theirs}A_log": per_head("A_log", times=per_state),
        f"{theirs}D": per_head("D"),
        f"{theirs}norm.weight": _without_empty(Part(f"{ours}norm.weight"), Fill(extra * P, 1.0)),
        f"{theirs}out_proj.weight": (Part(f"{ours}out_proj.weight", extra_columns=extra * P),),
    }  # fmt: skip
    if config.mamba_proj_bias:
        gate = Part(f"{ours}z_bias") if source.mixer_gate_bias else Fill(H * P)
        others = (H + extra) * (P + 2 * N + 1)
        table[f"{theirs}in_proj.bias"] = _without_empty(gate, Fill(extra * P + others))
        out = f"{ours}out_proj.bias"
        table[f"{theirs}out_proj.bias"] = moved(out) if source.mixer_out_bias else (Fill(source.hidden_size),)
    return table


def _without_empty(*parts: Part | Fill) -> Parts:
    return tuple(part for part in parts if not (isinstance(part, Fill) and part.count == 0))


def engine_notes(source: PreTrainedConfig, config: PreTrainedConfig) -> list[str]:
    """What other engines make of it (docs/formats.md says how each was checked)."""
    notes = []
    if "linear_attention" not in source.layer_types:
        return notes
    if config.model_type == "granitemoehybrid" and "full_attention" in source.layer_types:
        notes.append("llama.cpp takes the rotary embedding off hybrids of this architecture; use --to bamba for it")
    if config.mamba_expand != 2:
        notes.append("llama.cpp loads this architecture with an inner width of twice the model's only: --expand 2")
    if config.mamba_proj_bias:
        notes.append("llama.cpp has no biases on the mixers' projections: convert with --no-gate-bias --no-out-bias")
    if source.rope_parameters["rope_type"] == "llama3":
        notes.append("llama.cpp's converter refuses this architecture with Llama 3's RoPE scaling")
    if hasattr(config, "head_dim"):
        notes.append("llama.cpp and vLLM compute the head dimension from the width, and this model's is another")
    return notes


def export_checkpoint(
    options: ExportOptions,
    on_plan: Callable[[ExportPlan], None] = lambda plan: None,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> ExportPlan:
    """Export a hybrid.

    Args:
        on_plan: called once the plan stands. progress: called with the number of bytes of weights just written.

    Raises:
        ValueError: bad options or checkpoint. OSError: the disk.
    """
    output = Path(options.output).expanduser().resolve()
    check_output(output, options.overwrite)
    plan = plan_export(options)
    check_apart(output, plan.folder)
    on_plan(plan)
    shards = plan_shards(plan.rules, plan.dtype, parse_size(options.max_shard_size))
    itself = Teacher(options.model, plan.folder, plan.source, get_family("llama"))
    with staged(output) as folder:
        write_shards(shards, plan.checkpoint, plan.dtype, folder, progress)
        add_tokenizer(itself, folder, trust_remote_code=False)
        add_generation_config(itself, folder)
        card = ModelCardData(library_name="transformers", pipeline_tag="text-generation", tags=["convert-to-hybrid"])
        made = ModelCard.from_template(
            card, template_str=CARD, title=output.name, source=Path(options.model).name,
            architecture=plan.config.architectures[0],
        )  # fmt: skip
        made.save(folder / "README.md")
        _write_config(plan.config, plan.dtype, folder / "config.json")
    return plan


def _write_config(config: PreTrainedConfig, dtype: torch.dtype, path: Path) -> None:
    """With the spellings that readers other than transformers know."""
    config.dtype = dtype
    config.rope_theta = config.rope_parameters["rope_theta"]
    config.time_step_limit = (0.0, 1e30)  # infinity, which is the default, is no JSON
    config.to_json_file(path)
    written = read_json(path)
    del written["time_step_limit"]
    if "layer_types" in written:
        written["layer_types"] = [LEGACY_LAYER_TYPES[kind] for kind in written["layer_types"]]
    path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")


__all__ = [
    "ExportOptions",
    "ExportPlan",
    "describe",
    "export_checkpoint",
    "export_table",
    "plan_export",
    "stock_config",
]
