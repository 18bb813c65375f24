"""Bytes of cache that a sequence takes while generating: keys and values, windows, recurrent states."""

import torch
from transformers import PreTrainedConfig

CONTEXTS = {"4k": 4096, "32k": 32768, "128k": 131072}
"""Tokens at which sizes are shown."""


def cache_bytes(config: PreTrainedConfig, length: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes one sequence of `length` tokens keeps while generating: the teacher's, and the hybrid's.

    Keys and values in `dtype`; recurrent states in float32; a sliding window keeps its window.
    """
    inner = config.mixer_num_heads * config.mixer_head_dim
    recurrent = num_states(config) * config.mixer_head_dim * config.mixer_d_state * 4
    channels = inner
    if config.mixer != "mamba1":
        channels = config.mixer_num_kv_heads * (config.mixer_head_dim + config.mixer_d_state)
        channels += config.mixer_num_heads * config.mixer_d_state
    state = recurrent + channels * config.mixer_d_conv * dtype.itemsize
    states = {"linear_attention": state}
    teacher_types = config.conversion["teacher_layer_types"]
    attention = {kind: attention_bytes(config, kind, length, dtype) for kind in teacher_types}
    hybrids = [i for i, kind in enumerate(config.layer_types) if kind == "hybrid"]
    others = [kind for kind in config.layer_types if kind != "hybrid"]
    hybrid = sum(states[kind] if kind in states else attention[kind] for kind in others)
    hybrid += sum(hybrid_bytes(config, layer, length, dtype) for layer in hybrids)
    return sum(attention[kind] for kind in teacher_types), hybrid


def teacher_bytes(config: PreTrainedConfig, length: int, dtype: torch.dtype) -> int:
    """Bytes one sequence keeps in a hybrid all of whose layers are attention, which are the teacher's."""
    return sum(attention_bytes(config, kind, length, dtype) for kind in config.layer_types)


def hybrid_bytes(config: PreTrainedConfig, layer: int, length: int, dtype: torch.dtype) -> int:
    """Bytes of a hybrid layer after `length` tokens: the same at any length but for its kept heads."""
    windowed = windowed_heads(config, layer)
    kept = config.num_key_value_heads - windowed
    key_and_value = 2 * config.head_dim * dtype.itemsize
    columns = config.hybrid_sinks + config.hybrid_salient + config.window_of(layer)
    size = kept * key_and_value * length + state_bytes(config, layer)
    if length:  # room for all columns from the first token on, each with its salience
        size += columns * (windowed * key_and_value + 4)
    return size


def windowed_heads(config: PreTrainedConfig, layer: int) -> int:
    """Number of key/value heads of a hybrid layer that are not kept."""
    shared = config.num_attention_heads // config.num_key_value_heads
    return config.num_key_value_heads - len(config.full_heads_of(layer)) // shared


def state_bytes(config: PreTrainedConfig, layer: int) -> int:
    """Bytes of the state of a hybrid layer."""
    if config.mixer == "none":
        return 0
    return windowed_heads(config, layer) * (config.head_dim + 1) * (config.state_keys(layer) + 1) * 4


def attention_bytes(config: PreTrainedConfig, layer_type: str, length: int, dtype: torch.dtype) -> int:
    """Bytes of a layer that keeps its attention; one with a window needs all but the window's first column."""
    tokens = min(length, config.sliding_window - 1) if layer_type == "sliding_attention" else length
    return 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize * tokens


def num_states(config: PreTrainedConfig) -> int:
    """Recurrent states of a mixer: one per head, or one per key/value head where they share it."""
    return config.mixer_num_kv_heads if config.mixer_shared_state else config.mixer_num_heads
