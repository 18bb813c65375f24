"""The Mamba in the Llama (Wang et al. 2024), with Mamba-1 (v1) or Mamba-2 (v2) mixers, and M1 (Wang et al. 2025).

config.json is the base model's; mamba_config.json says which layers stay attention. Weights trained with a quirk keep
it: Mamba-1 adds dt_proj's bias twice, and repeats x and B for grouped queries in runs of N channels, not of a head,
which are heads of N channels to our mixer. Mamba-2's norm has an epsilon of 1e-5 whatever the model's is.

Shapes: H heads, K key/value heads, P head dim, N state.
"""

import json
import math
import re
from typing import Any

from transformers import PreTrainedConfig

from modeling_llamba import LlambaConfig

from ..io.rules import Fill, Part
from ..teachers import get_family
from ..teachers.teacher import config_errors, hybrid_fields, read_config
from .base import ANY, ForeignCheckpoint, Format, head_and_embedding, rotary_buffers
from .table import Table, renamed

EMBEDDING = "model.embed_tokens.weight"
MAMBA2_NORM_EPS = 1e-5
MLP = ("gate_proj", "up_proj", "down_proj")
UNDERSTOOD = ("d_model", "ssm_cfg", "rms_norm_eps", "hidden_act", "n_layer", "attn_layers")
HARMLESS = dict.fromkeys(("vocab_size", "d_inner", "d_xb", "intermediate_size", "num_key_value_heads"), ANY)
"""Entries that are ignored, because the tensors have these sizes."""
SSM_HARMLESS = dict.fromkeys(
    ("chunk_size", "dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "A_init_range", "conv_init", "headdim",
     "nheads", "use_mem_eff_path", "use_fast_path", "layer_idx", "device", "dtype", "layer", "process_group",
     "sequence_parallel", "repeat_kv_before_conv", "d_xb", "d_inner", "d_ssm"), ANY,
) | {"expand": 1, "bias": False, "conv_bias": True, "D_has_hdim": False, "rmsnorm": True, "norm_before_gate": False,
     "dt_limit": [0.0, math.inf], "activation": "silu"}  # fmt: skip


def mamba_layers(source: ForeignCheckpoint) -> list[int]:
    """Layers with a mixer, by their tensors; a ValueError where mamba_config.json or a tensor's name contradicts."""
    placed = {name: re.match(r"model\.layers\.(\d+)\.mamba\.", name) for name in source.tensors if ".mamba." in name}
    astray = [name for name, match in placed.items() if match is None]
    if astray or not placed:
        what = f"tensor {astray[0]}" if astray else "no Mamba layers"
        raise ValueError(f"{source.name} has {what}; those of a Mamba layer are named model.layers.N.mamba.*.")
    found = sorted({int(match[1]) for match in placed.values()})
    if source.mamba_config is None:
        raise ValueError(
            f"{source.name} has Mamba layers ({len(found)} of them) but no mamba_config.json, which says their sizes; "
            "copy it beside config.json."
        )
    said = source.mamba_section
    total = said.get("n_layer", int)
    kept = []
    if "attn_layers" in said.values:
        kept = said.need("attn_layers", list)
    if any(type(layer) is not int for layer in kept):
        raise ValueError(f"{said.file}: attn_layers must be a list of layer numbers, not {kept}.")
    # that there are so many layers is looked at first: they would all be listed
    if total is not None and (total > len(source.tensors) or sorted(set(range(total)) - set(kept)) != found):
        raise ValueError(f"mamba_config.json leaves other layers than {found}, which have the Mamba tensors.")
    return found


def fields(source: ForeignCheckpoint) -> dict[str, Any]:
    """Fields of the hybrid's configuration: the base model's, and the mixer's."""
    replaced = mamba_layers(source)
    base = _base_config(source)
    said = source.mamba_section.only(UNDERSTOOD, HARMLESS)
    own = {
        "d_model": base.hidden_size,
        "rms_norm_eps": getattr(base, "rms_norm_eps", None),
        "hidden_act": base.hidden_act,
    }
    for name, of_base in own.items():
        value = "silu"
        if said.values.get(name) != "swish":
            value = said.values.get(name)
        if value not in (None, of_base):
            raise ValueError(f"{said.file}: {name} is {value}, but the base model's is {of_base}; ours share one.")
    with config_errors(f"{source.section.file} is not a valid {base.model_type} configuration"):
        kept, types = hybrid_fields(base, get_family(base.model_type))
        LlambaConfig(**kept, layer_types=types)  # refuses what no hybrid can have
    if "sliding_attention" in types and not is_m1(source):
        source.note(
            f"the base model's window of {base.sliding_window} tokens is kept, as in training; the original's "
            f"inference wrapper drops it (--set sliding_window={base.max_position_embeddings})",
            "sliding_window",
        )
    if is_mamba2(source):
        mixer = _mamba2_fields(source, replaced[0])
    else:
        mixer = _mamba1_fields(source, replaced[0])
    return kept | mixer | {
        "conversion": {"teacher_layer_types": types},
        "layer_types": ["linear_attention" if i in replaced else kind for i, kind in enumerate(types)],
        "tie_word_embeddings": source.is_tied(EMBEDDING, base.tie_word_embeddings),
        "mixer_gate_bias": False,
        "mixer_out_bias": False,
    }  # fmt: skip


def _base_config(source: ForeignCheckpoint) -> PreTrainedConfig:
    if source.config:
        base = read_config(source.config, source.section.file)
    elif source.base is not None:
        base = source.base
    else:
        raise ValueError(f"{source.name} has no config.json; name the model it was made from (--base).")
    if base.rope_parameters.get("rope_type", "default") != "default":
        if is_m1(source):
            theta = base.rope_parameters["rope_theta"]
            base.rope_parameters = {"rope_type": "default", "rope_theta": theta}
            source.note("rope_scaling of the base model is left out: M1 trains and runs without it", "rope_parameters")
        else:
            plain = json.dumps({"rope_type": "default", "rope_theta": base.rope_parameters["rope_theta"]})
            source.note(
                "rope_scaling of the base model is kept, as in training; the original's inference wrapper drops it "
                f"(--set 'rope_parameters={plain}')",
                "rope_parameters",
            )
    return base


def _mamba2_fields(source: ForeignCheckpoint, layer: int) -> dict[str, Any]:
    ssm = source.mamba_section.section("ssm_cfg")
    prefix = f"model.layers.{layer}.mamba."
    ssm.only(("ngroups", "d_state"), SSM_HARMLESS | {"d_conv": source.shape(f"{prefix}conv1d.weight", 3)[-1]})
    heads = ssm.need("ngroups", int)
    state = ssm.need("d_state", int)
    channels, _, taps = source.shape(f"{prefix}conv1d.weight", 3)
    return {
        "mixer": "mamba2",
        "mixer_num_heads": heads,
        # as many as heads, where x and B are repeated before the convolution
        "mixer_num_kv_heads": (channels - heads * state) // (2 * state),
        "mixer_head_dim": state,
        "mixer_d_state": state,
        "mixer_d_conv": taps,
        "mixer_activation": "silu",
        "mixer_norm": "head",
        "mixer_norm_eps": MAMBA2_NORM_EPS,
    }


def _mamba1_fields(source: ForeignCheckpoint, layer: int) -> dict[str, Any]:
    prefix = f"model.layers.{layer}.mamba."
    inner, state = source.shape(f"{prefix}A_log", 2)
    rank = source.shape(f"{prefix}dt_proj.weight", 2)[1]
    taps = source.shape(f"{prefix}conv1d.weight", 3)[-1]
    ssm = source.mamba_section.section("ssm_cfg")
    known = {"d_state": state, "d_conv": taps, "dt_rank": rank}
    if ssm.values.get("dt_rank") == "auto":
        known["dt_rank"] = "auto"
    ssm.only((), SSM_HARMLESS | known)
    return {
        "mixer": "mamba1",
        "mixer_num_heads": inner // state,
        "mixer_num_kv_heads": _kv_width(source, prefix) // state,
        "mixer_head_dim": state,
        "mixer_d_state": state,
        "mixer_d_conv": taps,
        "mixer_activation": "silu",
        "mixer_norm": "none",
        "mixer_dt_rank": rank,
    }


def _kv_width(source: ForeignCheckpoint, prefix: str) -> int:
    if f"{prefix}in_proj_x.weight" in source.tensors:
        return source.shape(f"{prefix}in_proj_x.weight", 2)[0]
    inner, rank = source.shape(f"{prefix}dt_proj.weight", 2)
    return (source.shape(f"{prefix}in_proj.weight", 2)[0] - 2 * inner - rank) // 2


def table(source: ForeignCheckpoint, config: PreTrainedConfig) -> tuple[Table, dict[str, str]]:
    """Map the hybrid's tensors to their sources, and list those of the checkpoint that are left out."""
    rows, dropped = head_and_embedding(source, EMBEDDING, config)
    rows["model.norm.weight"] = renamed("model.norm.weight")
    for i, kind in enumerate(config.layer_types):
        prefix = f"model.layers.{i}."
        names = ["input_layernorm", "post_attention_layernorm", *(f"mlp.{part}" for part in MLP)]
        rows |= {f"{prefix}{name}.weight": renamed(f"{prefix}{name}.weight") for name in names}
        if config.mlp_bias:
            names = {part: f"{prefix}mlp.{part}.bias" for part in MLP}
            rows |= {name: renamed(name) for name in names.values()}
            for part, name in names.items():
                if name not in source.tensors and kind == "linear_attention":  # whose MLP has no biases
                    rows[name] = (Fill(source.shape(f"{prefix}mlp.{part}.weight", 2)[0]),)
        if kind != "linear_attention":
            rows |= _attention_table(source, config, prefix)
        elif config.mixer == "mamba2":
            rows |= _mamba2_table(source, config, prefix)
        else:
            rows |= _mamba1_table(source, config, prefix)
    return rows, dropped | rotary_buffers(source)


def _attention_table(source: ForeignCheckpoint, config: PreTrainedConfig, prefix: str) -> Table:
    fused = f"{prefix}mha.in_proj.weight"
    if fused not in source.tensors:
        names = [f"{prefix}self_attn.{p}_proj.weight" for p in "qkvo"]
        names += [f"{prefix}self_attn.{p}_proj.bias" for p in "qkv" if config.attention_bias]
        names += [f"{prefix}self_attn.o_proj.bias"] * config.attention_out_bias
        return {name: renamed(name) for name in names}
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    ends = {"q": (0, q), "k": (q, q + kv), "v": (q + kv, q + 2 * kv)}
    rows: Table = {f"{prefix}self_attn.{p}_proj.weight": (Part(fused, *ends[p]),) for p in "qkv"}
    return rows | {f"{prefix}self_attn.o_proj.weight": renamed(f"{prefix}mha.out_proj.weight")}


def _mamba2_table(source: ForeignCheckpoint, config: PreTrainedConfig, prefix: str) -> Table:
    mine = f"{prefix}mixer."
    theirs = f"{prefix}mamba."
    same = ("dt_bias", "A_log", "D", "conv1d.weight", "conv1d.bias", "norm.weight", "out_proj.weight")
    rows = {f"{mine}{name}": renamed(f"{theirs}{name}") for name in same}
    name = f"{theirs}in_proj.weight"
    inner = config.mixer_num_heads * config.mixer_head_dim
    P = config.mixer_head_dim
    width = (source.shape(name, 2)[0] - 2 * inner - config.mixer_num_heads) // 2
    times = config.mixer_num_kv_heads * P // max(width, 1)
    rows[f"{mine}in_proj.weight"] = renamed(name)
    if times > 1:
        ends = [inner, inner + width, inner + 2 * width]
        x, B = (Part(name, ends[k], ends[k + 1], block=P, times=times) for k in range(2))
        rows[f"{mine}in_proj.weight"] = (Part(name, 0, inner), x, B, Part(name, ends[2]))
    return rows


def _mamba1_table(source: ForeignCheckpoint, config: PreTrainedConfig, prefix: str) -> Table:
    mine = f"{prefix}mixer."
    theirs = f"{prefix}mamba."
    rows = {
        f"{mine}{name}": renamed(f"{theirs}{name}") for name in ("A_log", "D", "dt_proj.weight", "out_proj.weight")
    }
    # the original adds this bias in dt_proj, and once more before the softplus
    rows[f"{mine}dt_proj.bias"] = (Part(f"{theirs}dt_proj.bias", scale=2.0),)
    state = config.mixer_d_state
    times = 1
    if source.shape(f"{theirs}conv1d.weight", 3)[0] != config.mixer_num_heads * config.mixer_head_dim:
        times = config.mixer_num_heads // config.mixer_num_kv_heads  # it convolves before it repeats
    for name in ("conv1d.weight", "conv1d.bias"):
        rows[f"{mine}{name}"] = (Part(f"{theirs}{name}", block=state, times=times),)
    apart = ("in_proj_z", "in_proj_x", "B_proj", "C_proj", "dt_proj_down")
    fused = f"{theirs}in_proj.weight"
    if fused in source.tensors:
        whole = renamed(fused)
    else:
        whole = tuple(Part(f"{theirs}{name}.weight") for name in apart)
    return rows | {f"{mine}in_proj.weight": whole}


def _has(source: ForeignCheckpoint, ending: str) -> bool:
    return any(name.endswith(ending) for name in source.tensors)


def is_mamba2(source: ForeignCheckpoint) -> bool:
    """Return True if the mixers are Mamba-2, by their tensors: the configuration does not tell."""
    return _has(source, ".mamba.dt_bias")


def is_m1(source: ForeignCheckpoint) -> bool:
    """Return True if the projections of attention, or of Mamba-1, are fused, as in M1."""
    return _has(source, ".mha.in_proj.weight") or (_has(source, ".mamba.in_proj.weight") and not is_mamba2(source))


def _format(name: str, sign: str, recognises) -> Format:
    return Format(
        name=name, sign=sign, hybrid=lambda source: "llamba", recognises=recognises, fields=fields, table=table
    )


MAMBA_IN_LLAMA_1 = _format(
    "Mamba in the Llama v1", "model.layers.*.mamba.in_proj_x", lambda source: _has(source, ".mamba.in_proj_x.weight")
)
MAMBA_IN_LLAMA_2 = _format(
    "Mamba in the Llama v2",
    "model.layers.*.mamba.in_proj and dt_bias",
    lambda source: is_mamba2(source) and not is_m1(source),
)
M1 = _format("M1", "model.layers.*.mha, or a fused mamba.in_proj with dt_proj", is_m1)
