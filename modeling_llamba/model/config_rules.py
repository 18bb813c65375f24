"""Rules between the fields of a configuration."""

import math
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .config_values import (
    ACTIVATIONS,
    ATTENTION_ALONE,
    BACKEND_NAMES,
    CACHE_BITS,
    LAYER_TYPES,
    MIXERS,
    QK_NORMS,
    RECURRENT,
    ROPE_NUMBERS,
    ROPES,
    SIZES,
    SOFT_CAPS,
    check_numbers,
)


def check_config(config) -> None:
    """Refuse contradictory fields.

    Raises:
        ValueError: naming the field and what it may be.
    """
    for name, allowed in {
        "mixer": MIXERS,
        "mixer_activation": ("identity", "silu"),
        "mixer_norm": ("none", "head", "whole"),
        "qk_norm": QK_NORMS,
        "mixer_qk_norm": QK_NORMS,
        "backend": BACKEND_NAMES,
    }.items():
        if getattr(config, name) not in allowed:
            raise ValueError(f"{name} must be one of {allowed}, not {getattr(config, name)!r}.")
    if config.hidden_act not in ACTIVATIONS:
        raise ValueError(f"hidden_act must be one of transformers' activations, not {config.hidden_act!r}.")
    check_numbers(vars(config))
    absent = [name for name in SIZES if getattr(config, name) is None]
    if absent:
        raise ValueError(f"{absent[0]} must be a whole number of at least 1, not None.")
    if config.pad_token_id is not None and not -config.vocab_size <= config.pad_token_id < config.vocab_size:
        raise ValueError(f"pad_token_id {config.pad_token_id} is no token of a vocabulary of {config.vocab_size}.")
    for name in ("embedding_multiplier", "attention_multiplier", "logits_scaling", *SOFT_CAPS):
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be a finite number above 0, not {value!r}.")
    _check_rotary(config)
    unknown = sorted(set(config.layer_types) - set(LAYER_TYPES))
    if unknown or len(config.layer_types) != config.num_hidden_layers:
        raise ValueError(
            f"layer_types needs {config.num_hidden_layers} entries out of {LAYER_TYPES}; "
            f"got {len(config.layer_types)}" + (f", unknown: {unknown}." if unknown else ".")
        )
    if config.sliding_heads is not None:
        _check_sliding_heads(config)
    for name in ("full_attention_bits", "window_bits"):
        _check_bits(config, name)
    if config.key_offsets and (config.learned_sinks or config.attn_logit_softcapping is not None):
        raise ValueError("Beside learned_sinks or attn_logit_softcapping scores change with key_offsets.")
    if "sliding_attention" in config.layer_types and config.sliding_window is None:
        raise ValueError("layer_types has sliding_attention, so sliding_window must be set.")
    if RECURRENT in config.layer_types and config.recurrent is None:
        raise ValueError(f"layer_types has {RECURRENT}, so recurrent must say what these layers are.")
    alone = [name for name in ATTENTION_ALONE if getattr(config, name)]
    if alone and "linear_attention" in config.layer_types:
        raise ValueError(f"A mixer cannot follow {alone[0]}; use hybrid layers.")
    if config.learned_sinks and config.attn_logit_softcapping is not None:
        raise ValueError("No attention of transformers' knows learned_sinks and attn_logit_softcapping together.")
    for kind in ("full_attention", "sliding_attention"):
        if config.num_attention_heads % config.of_kind(kind).num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads.")
    if config.mixer_num_heads % config.mixer_num_kv_heads:
        raise ValueError("mixer_num_heads must be a multiple of mixer_num_kv_heads.")
    if config.mixer == "mamba1" and config.mixer_head_dim % config.mixer_d_state:
        raise ValueError(
            "mamba1 cuts each head into pieces of mixer_d_state channels, so mixer_head_dim "
            f"({config.mixer_head_dim}) must be a multiple of it ({config.mixer_d_state})."
        )
    if config.mixer == "mamba1" and (config.mixer_rotary and config.mixer_d_state != config.mixer_head_dim):
        raise ValueError("mamba1 with mixer_rotary needs mixer_d_state == mixer_head_dim.")
    if config.mixer_decay_bias and config.mixer != "discrete_mamba2":
        raise ValueError("mixer_decay_bias exists for discrete_mamba2 only; the other mixers have dt_bias.")
    if config.backend in ("mamba_ssm", "fla") and config.mixer == "mamba1":
        raise ValueError("mamba1 runs on the torch scan only; use backend 'auto' or 'torch'.")
    if config.mixer_shared_state and config.mixer == "mamba1":
        raise ValueError("mamba1 has a decay per channel; mixer_shared_state exists for the other mixers.")
    if config.mixer_norm != "none" and config.mixer != "mamba2":
        raise ValueError("mixer_norm exists for the mamba2 mixer only; use 'none'.")
    if config.mixer == "none" and "linear_attention" in config.layer_types:
        raise ValueError("layer_types has linear_attention, so mixer must be one of the mixers, not 'none'.")
    _check_window(config)


def _check_bits(config, name: str) -> None:
    value = getattr(config, name)
    pair = value if isinstance(value, list) else [value, value]
    if len(pair) != 2 or not set(pair) <= set(CACHE_BITS):
        raise ValueError(f"{name} must be one of {CACHE_BITS}, or a list of two for keys and values, not {value!r}.")
    for width in config.head_widths:
        if min(pair) < 8 and width % 16:
            raise ValueError(f"{name} of less than 8 needs a head_dim that is a multiple of 16, not {width}.")
        if min(pair) < 16 and width % 2:
            raise ValueError(f"{name} of less than 16 needs an even head_dim, not {width}.")


def _check_sliding_heads(config) -> None:
    if set(config.sliding_heads) != {"num_key_value_heads", "head_dim"} or None in config.sliding_heads.values():
        raise ValueError(f"sliding_heads needs num_key_value_heads and head_dim, not {config.sliding_heads!r}.")
    if config.attention_multiplier is None:
        raise ValueError("With sliding_heads, attention_multiplier says the one factor on all scores.")
    local = [config.rope_of(i) == "local" for i in range(config.num_hidden_layers)]
    if local != [kind == "sliding_attention" for kind in config.layer_types]:
        raise ValueError("With sliding_heads, layer_rope is local where layer_types has sliding_attention.")


def _check_rotary(config) -> None:
    layers = ["main"] * config.num_hidden_layers if config.layer_rope is None else config.layer_rope
    if len(layers) != config.num_hidden_layers or not set(layers) <= set(ROPES):
        raise ValueError(f"layer_rope needs {config.num_hidden_layers} entries out of {ROPES}, not {layers}.")
    if ("local" in layers) != (config.local_rope_parameters is not None):
        raise ValueError("local_rope_parameters is needed where layer_rope has local, and nowhere else.")
    for rope in (config.rope_parameters, config.local_rope_parameters):
        if rope is not None:
            _check_rope(rope)
    rotated = set(layers) != {"none"} and set(config.layer_types) - {"linear_attention", RECURRENT}
    if rotated and config.rope_parameters is not None and 2 * config.rotary_planes > config.head_dim:
        raise ValueError(f"head_dim must be even where a rotary embedding turns all of it, not {config.head_dim}.")


def _check_rope(rope: dict[str, Any]) -> None:
    kinds = ("default", *sorted(ROPE_INIT_FUNCTIONS))
    kind = rope.get("rope_type")
    if kind not in kinds:
        raise ValueError(f"rope_type must be one of {kinds}, not {kind!r}.")
    scaled = ("original_max_position_embeddings",) if rope.get("llama_4_scaling_beta") is not None else ()
    for name in ("rope_theta", "partial_rotary_factor", *ROPE_NUMBERS.get(kind, ()), *scaled):
        value = rope.get(name, 1.0 if name == "partial_rotary_factor" else None)
        if not isinstance(value, (int, float)) or value <= 0:
            raise ValueError(f"{name} of RoPE {kind} must be a number above 0, not {value!r}.")
    for name in ("short_factor", "long_factor") if kind == "longrope" else ():
        if rope.get(name) is None:
            raise ValueError(f"{name} of RoPE {kind} must be a list of numbers above 0, not None.")


def _check_window(config) -> None:
    if "hybrid" in config.layer_types:
        hybrids = [i for i, kind in enumerate(config.layer_types) if kind == "hybrid"]
        for name in ("hybrid_window", "hybrid_rank"):
            value = getattr(config, name)
            if isinstance(value, list) and len(value) != config.num_hidden_layers:
                raise ValueError(f"{name} as a list needs {config.num_hidden_layers} entries, one a layer.")
        for width in sorted({config.window_of(i) or 0 for i in hybrids}):
            if width < 2 * config.hybrid_block or width % config.hybrid_block:
                raise ValueError(
                    f"layer_types has hybrid, so hybrid_window must be a multiple of hybrid_block "
                    f"({config.hybrid_block}) and at least two of it, not {width}."
                )
        main = config.rope_parameters or {}
        ropes = [main, *(config.local_rope_parameters for i in hybrids if config.rope_of(i) == "local")]
        shares = {rope.get("partial_rotary_factor", 1.0) for rope in ropes}
        if config.mixer != "none" and (main.get("rope_type") == "proportional" or len(shares) > 1):
            raise ValueError(
                "The state of a hybrid layer needs one partial_rotary_factor for all of them and a rope_type that "
                "is not 'proportional'; use mixer 'none'."
            )
    if config.hybrid_full_heads is None:
        return
    if len(config.hybrid_full_heads) != config.num_hidden_layers:
        raise ValueError(f"hybrid_full_heads needs a list of heads for each of {config.num_hidden_layers} layers.")
    for i, heads in enumerate(config.hybrid_full_heads):
        if heads and config.layer_types[i] != "hybrid":
            raise ValueError(f"hybrid_full_heads names heads of layer {i}, which is not hybrid.")
        if len(set(heads)) != len(heads) or not set(heads) <= set(range(config.num_attention_heads)):
            raise ValueError(
                f"hybrid_full_heads of layer {i} must be different heads below "
                f"{config.num_attention_heads}; got {heads}."
            )
        shared = config.num_attention_heads // config.num_key_value_heads
        groups = {head // shared for head in heads}
        if len(groups) * shared != len(heads) or len(groups) == config.num_key_value_heads:
            raise ValueError(
                f"hybrid_full_heads of layer {i} must name all {shared} query heads of a key/value head or none, "
                f"and leave a key/value head out; got {heads}."
            )
