"""Export a hybrid to one of transformers' own architectures: no remote code, and engines that know it can serve it.

Both are Llama's block with a Mamba-2 mixer: convolution with SiLU, a gated RMSNorm per group of heads. With as many
groups as heads that norm is ours per head, and B and C have no rotary embedding. The export is exact: x and B are
repeated for the heads that share them, a gate bias becomes in_proj's, and where the inner width has to be a multiple
of the model's, heads that are zero everywhere fill it up (a norm per head leaves zero zero).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig

from modeling_llamba.model.config_values import RECURRENT, SOFT_CAPS

from ..hybrids.shapes import HYBRIDS, OWN_FIELDS, meta_shapes
from ..io.reader import open_weights, read_json
from ..io.rules import Fill, Part, Parts
from ..io.writer import Progress, output_dtype
from ..layout.cache import num_states
from ..layout.placement import Placement
from ..options import ExportOptions, ExportTarget
from ..teachers import get_family
from ..teachers.base import COMMON_FIELDS
from ..teachers.teacher import Teacher, config_errors, public_name
from .table import Table, make_rules, renamed
from .transfer import TransferPlan, find_checkpoint, transfer

# transformers reads both spellings; llama.cpp and earlier versions of vLLM only these
LEGACY_LAYER_TYPES = {"linear_attention": "mamba", "full_attention": "attention"}
COPIED_FIELDS = (*COMMON_FIELDS, "rms_norm_eps")
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")


@dataclass(frozen=True, kw_only=True)
class NativeClass:
    """One of transformers' architectures: where its names differ from ours, and what it lacks."""

    architecture: str
    final_norm: str
    post_norm: str
    mlp: Mapping[str, tuple[str, ...]]
    """Each of its tensors in a layer's MLP, made of ours one below the other."""
    mlp_bias: bool
    partial_rotary: bool
    multipliers: bool
    """True if it has Granite's multipliers on embeddings, scores, residual branches and logits."""
    fields: Callable[[PreTrainedConfig], dict[str, Any]]
    """Fields of its configuration, besides those that all have, for a hybrid's configuration."""


def _granite_fields(source: PreTrainedConfig) -> dict[str, Any]:
    return {
        "shared_intermediate_size": source.intermediate_size,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "position_embedding_type": "rope",
        "attention_multiplier": source.score_scale,
        **{name: getattr(source, name) for name in MULTIPLIERS},
        "layer_types": list(source.layer_types),
    }


def _bamba_fields(source: PreTrainedConfig) -> dict[str, Any]:
    # by default Bamba rotates half of each head
    rope = {"partial_rotary_factor": 1.0} | dict(source.rope_parameters)
    return {
        "rope_parameters": rope,
        "attn_layer_indices": [i for i, kind in enumerate(source.layer_types) if kind == "full_attention"],
        "mlp_bias": source.mlp_bias,
        "attn_rotary_emb": int(source.head_dim * rope["partial_rotary_factor"]),  # llama.cpp and vLLM look here
    }


NATIVE_CLASSES: dict[ExportTarget, NativeClass] = {
    "granitemoehybrid": NativeClass(
        architecture="GraniteMoeHybridForCausalLM",
        final_norm="model.norm",
        post_norm="post_attention_layernorm",
        mlp={
            "shared_mlp.input_linear.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            "shared_mlp.output_linear.weight": ("mlp.down_proj.weight",),
        },
        mlp_bias=False,
        partial_rotary=False,
        multipliers=True,
        fields=_granite_fields,
    ),
    "bamba": NativeClass(
        architecture="BambaForCausalLM",
        final_norm="model.final_layernorm",
        post_norm="pre_ff_layernorm",
        mlp={
            f"feed_forward.{p}_proj.{kind}": (f"mlp.{p}_proj.{kind}",)
            for p in ("gate", "up", "down")
            for kind in ("weight", "bias")
        },
        mlp_bias=True,
        partial_rotary=True,
        multipliers=False,
        fields=_bamba_fields,
    ),
}


def obstacles(config: PreTrainedConfig, native: NativeClass) -> list[str]:
    """List what an architecture cannot hold of a hybrid; empty where it can hold all of it."""
    if config.model_type != "llamba":
        return ["Phi's parallel block and LayerNorm"]
    kinds = set(config.layer_types)
    found = {
        # their cache counts tokens in an attention layer, so that not even a forward pass works without one
        "a model without an attention layer": not kinds & {"full_attention", "sliding_attention", "hybrid"},
        "layers with a window": "hybrid" in kinds,
        "layers with a state of the teacher's": RECURRENT in kinds,
        "gates on the attention": config.attention_gate,
        "learned sinks": config.learned_sinks,
        "norms on values": config.value_norm,
        "a factor on what each block returns": config.layer_scalar,
        "attention with a sliding window": "sliding_attention" in kinds,
        f"the MLP's activation {config.hidden_act}": config.hidden_act not in ("silu", "swish"),
        "norms on queries and keys": config.qk_norm is not None and "full_attention" in kinds,
        "biases in the MLP": config.mlp_bias and not native.mlp_bias,
        "a bias on the head": config.lm_head_bias,
        "partial rotary embedding": config.rope_parameters.get("partial_rotary_factor", 1.0) != 1
        and not native.partial_rotary,
        **{
            f"norms {place} mixer and MLP": True
            for place in sorted({config.norms_of(i) for i in range(config.num_hidden_layers)} - {"before"})
        },
        "norms that multiply by 1 + weight": config.norm_unit_offset,
        "experts": config.num_experts is not None,
        "queries that grow with their position": config.rope_parameters.get("llama_4_scaling_beta") is not None,
        "another rotary embedding in some layers, or none": bool({"local", "none"} & set(config.layer_rope or ())),
        **{f"{name} {getattr(config, name)}": getattr(config, name) is not None for name in SOFT_CAPS},
        **{
            f"{name} {getattr(config, name)}": getattr(config, name) != default and not native.multipliers
            for name, default in [*((name, 1) for name in MULTIPLIERS), ("attention_multiplier", None)]
        },
    }
    if "linear_attention" in kinds:
        found |= {
            f"the mixer {config.mixer}": config.mixer != "mamba2",
            "a convolution without SiLU": config.mixer_activation != "silu",
            "rotary embedding on B and C": config.mixer_rotary,
            f"the mixer's norm {config.mixer_norm!r}": config.mixer_norm != "head",
            "a norm in the mixer with an epsilon of its own": config.mixer_norm_eps not in (None, config.norm_eps),
            "norms on B and C": config.mixer_qk_norm is not None,
            "a bias on all of in_proj": config.mixer_in_bias,
        }
    return [what for what, is_so in found.items() if is_so]


def holders(config: PreTrainedConfig) -> list[ExportTarget]:
    """List the architectures that can hold all of a hybrid."""
    return [target for target, native in NATIVE_CLASSES.items() if not obstacles(config, native)]


def check_exportable(config: PreTrainedConfig) -> None:
    """Raise a ValueError if no architecture can hold a hybrid; it says why the last one cannot."""
    if not holders(config):
        *_, last = NATIVE_CLASSES
        check_holdable(config, last)


def check_holdable(config: PreTrainedConfig, target: str) -> None:
    """Raise a ValueError that lists what an architecture cannot hold of a hybrid, if there is anything."""
    found = obstacles(config, NATIVE_CLASSES[target])
    if found:
        raise ValueError(
            f"{target} cannot hold {', '.join(found)}. It takes a conversion with --export-ready of a teacher of "
            "Llama's kind without norms on queries and keys or a sliding window, some of whose layers stay attention."
        )


def total_heads(source: PreTrainedConfig, expand: int | None) -> tuple[int, int]:
    """Number of heads of an exported mixer, zero ones included, and its inner width over the model's width."""
    hidden = source.hidden_size
    width = source.mixer_head_dim
    # the inner width is a whole multiple of the model's; heads that this adds are zero
    least = -(-source.mixer_num_heads * width // hidden)
    tried = range(least, least + width)
    if expand is not None:
        tried = [expand]
    for multiple in tried:
        if multiple >= least and multiple * hidden % width == 0:
            return multiple * hidden // width, multiple
    raise ValueError(
        f"expand {expand} cannot hold {source.mixer_num_heads} heads of {width} in a model {hidden} wide; "
        f"leave it out, or give a whole number from {least} on."
    )


def native_config(source: PreTrainedConfig, target: str, expand: int | None = None) -> PreTrainedConfig:
    """Configuration of the exported model."""
    heads, expand = total_heads(source, expand)
    fields = {name: getattr(source, name) for name in COPIED_FIELDS} | {
        "attention_bias": source.attention_bias or source.attention_out_bias,
        "mamba_n_heads": heads,
        # a C of its own for each head, which only as many groups as heads allow
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
    fields |= NATIVE_CLASSES[target].fields(source)
    with config_errors(f"The hybrid's config.json gives no valid {target} configuration"):
        config = AutoConfig.for_model(target, **fields)
    config.architectures = [NATIVE_CLASSES[target].architecture]
    return config


def export_table(source: PreTrainedConfig, config: PreTrainedConfig, target: str) -> Table:
    """Map the exported tensors to their sources."""
    native = NATIVE_CLASSES[target]
    table: Table = {"model.embed_tokens.weight": renamed("model.embed_tokens.weight")}
    table[f"{native.final_norm}.weight"] = renamed("model.norm.weight")
    if not source.tie_word_embeddings:
        table["lm_head.weight"] = renamed("lm_head.weight")
    for i, kind in enumerate(source.layer_types):
        layer = f"model.layers.{i}."
        table[f"{layer}input_layernorm.weight"] = renamed(f"{layer}input_layernorm.weight")
        table[f"{layer}{native.post_norm}.weight"] = renamed(f"{layer}post_attention_layernorm.weight")
        for theirs, ours in native.mlp.items():
            if source.mlp_bias or theirs.endswith("weight"):
                table[f"{layer}{theirs}"] = tuple(Part(f"{layer}{name}") for name in ours)
        if kind == "full_attention":
            table |= _attention_table(source, config, f"{layer}self_attn.")
        else:
            table |= _mixer_table(source, config, f"{layer}mixer.", f"{layer}mamba.")
    return table


def _attention_table(source: PreTrainedConfig, config: PreTrainedConfig, prefix: str) -> Table:
    table: Table = {f"{prefix}{p}_proj.weight": renamed(f"{prefix}{p}_proj.weight") for p in "qkvo"}
    if config.attention_bias:
        kv = source.num_key_value_heads * source.head_dim
        rows = {"q": source.num_attention_heads * source.head_dim, "k": kv, "v": kv, "o": source.hidden_size}
        for p in "qkvo":
            is_there = source.attention_bias
            if p == "o":
                is_there = source.attention_out_bias
            name = f"{prefix}{p}_proj.bias"
            table[name] = _bias(name, is_there, rows[p])
    return table


def _mixer_table(source: PreTrainedConfig, config: PreTrainedConfig, ours: str, theirs: str) -> Table:
    """[z, x, B, C, dt] with as many heads of each as the exported mixer has, the missing ones zero."""
    H, G, P, N = source.mixer_num_heads, source.mixer_num_kv_heads, source.mixer_head_dim, source.mixer_d_state
    extra = config.mamba_n_heads - H
    per_state = H // num_states(source)
    # first rows of z, x, B, C and the steps in our in_proj
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
        if source.mixer_gate_bias:
            gate = Part(f"{ours}z_bias")
        else:
            gate = Fill(H * P)
        others = (H + extra) * (P + 2 * N + 1)
        table[f"{theirs}in_proj.bias"] = _without_empty(gate, Fill(extra * P + others))
        out = f"{ours}out_proj.bias"
        table[f"{theirs}out_proj.bias"] = _bias(out, source.mixer_out_bias, source.hidden_size)
    return table


def _bias(name: str, is_there: bool, size: int) -> Parts:
    """The source of a bias: the hybrid's own, or zeros where it has none."""
    if is_there:
        return renamed(name)
    return (Fill(size),)


def _without_empty(*parts: Part | Fill) -> Parts:
    return tuple(part for part in parts if not (isinstance(part, Fill) and part.count == 0))


def engine_notes(source: PreTrainedConfig, config: PreTrainedConfig) -> list[str]:
    """List the limits of the export in other engines; docs/guide/formats.md says how each was checked."""
    notes = []
    if "linear_attention" not in source.layer_types:
        return notes
    if config.mamba_n_groups > 1:
        notes.append(
            "transformers before 5.23 normalises all heads of a mixer at once in this class, which is wrong here"
        )
    if config.model_type == "granitemoehybrid" and "full_attention" in source.layer_types:
        notes.append("llama.cpp takes the rotary embedding off hybrids of this architecture; use --to bamba for it")
    if config.mamba_expand != 2:
        notes.append("llama.cpp loads this architecture with an inner width of twice the model's only: --expand 2")
    if config.mamba_proj_bias:
        notes.append(
            "llama.cpp has no biases on the mixers' projections: convert with --mixer.gate_bias false "
            "--mixer.out_bias false"
        )
    if source.rope_parameters["rope_type"] == "llama3":
        notes.append("llama.cpp's converter refuses this architecture with Llama 3's RoPE scaling")
    if hasattr(config, "head_dim"):
        notes.append("llama.cpp and vLLM compute the head dimension from the width, and this model's is another")
    return notes


def plan_export(options: ExportOptions) -> TransferPlan:
    """Plan an export: the native configuration, and a rule for each tensor of it.

    Raises:
        ValueError: the model is no hybrid of this project, or one that the architecture cannot hold.
    """
    folder, commit = find_checkpoint(options)
    raw = read_json(folder / "config.json") or {}
    kind = str(raw.pop("model_type", None))
    if kind not in HYBRIDS or not OWN_FIELDS & raw.keys():
        raise ValueError(
            f"{options.model} is no hybrid of this project (model_type {kind!r}); convert or import one first."
        )
    with config_errors(f"{folder / 'config.json'} is not a valid {kind} configuration"):
        source = HYBRIDS[kind].from_dict(raw)
    check_holdable(source, options.to)
    config = native_config(source, options.to, options.expand)
    architecture = config.architectures[0]
    shapes = meta_shapes(getattr(transformers, architecture), config)
    checkpoint = open_weights(folder)
    name = Path(public_name(options.model)).name
    table = export_table(source, config, options.to)
    offsets = (name for name in checkpoint.tensors if name.endswith("key_offset"))
    dropped = dict.fromkeys(offsets, "softmax is the same without it")
    same = "the same logits"
    if Placement.of(source).bits.rounds:
        same = "the hybrid's logits but for the rounding of the hybrid's cache"
    return TransferPlan(
        source=Teacher(options.model, folder, source, get_family("llama"), commit),
        from_format=f"{kind} with {source.mixer}",
        to_format=architecture,
        config=config,
        rules=make_rules(table, shapes, checkpoint.tensors, dropped, "hybrid of this project"),
        dtype=output_dtype(options.output.dtype, checkpoint.tensors),
        checkpoint=checkpoint,
        description=f"{name} as transformers' own {architecture}, exported by convert-to-hybrid: it "
        f"loads without `trust_remote_code` and gives {same}.",
        notes=engine_notes(source, config),
        dropped=dropped,
    )


def export_checkpoint(
    options: ExportOptions,
    on_plan: Callable[[TransferPlan], None] = lambda plan: None,
    progress: Progress = lambda what, done, total: None,
) -> TransferPlan:
    """Export a hybrid; see `transfer` for the arguments and errors."""
    return transfer(options, plan_export, _write_config, on_plan, progress)


def _write_config(config: PreTrainedConfig, folder: Path, dtype: torch.dtype) -> None:
    """Write config.json with the spellings that readers other than transformers accept."""
    config.dtype = dtype
    config.rope_theta = config.rope_parameters["rope_theta"]
    config.time_step_limit = (0.0, 1e30)  # infinity, which is the default, is no JSON
    path = folder / "config.json"
    config.to_json_file(path)
    written = read_json(path)
    del written["time_step_limit"]
    if "layer_types" in written:
        written["layer_types"] = [LEGACY_LAYER_TYPES[kind] for kind in written["layer_types"]]
    path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
