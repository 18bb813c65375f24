"""What a sequence keeps while generating, in bytes: keys and values, windows, recurrent states."""

import torch
from transformers import PreTrainedConfig

CONTEXTS = {"4k": 4096, "32k": 32768, "128k": 131072}
"""Tokens at which sizes are shown."""


def cache_bytes(config: PreTrainedConfig, length: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes one sequence of `length` tokens keeps while generating: the teacher's, and the hybrid's.

    Keys and values in `dtype`; recurrent states in float32; a sliding window keeps its window.
    """
    per_token = 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize
    inner = config.mixer_num_heads * config.mixer_head_dim
    recurrent = num_states(config) * config.mixer_head_dim * config.mixer_d_state * 4
    channels = inner
    if config.mixer != "mamba1":
        channels = config.mixer_num_kv_heads * (config.mixer_head_dim + config.mixer_d_state)
        channels += config.mixer_num_heads * config.mixer_d_state
    state = recurrent + channels * config.mixer_d_conv * dtype.itemsize
    if config.mixer == "none":
        state = 0
    reads = config.hybrid_read == "normalised"
    states = {"linear_attention": state, "hybrid": 0 if reads else state}
    shared = config.num_attention_heads // config.num_key_value_heads
    kept = sum(len({head // shared for head in heads}) for heads in config.hybrid_full_heads or ())
    heads = kept * per_token // config.num_key_value_heads * length
    teacher_types = config.conversion["teacher_layer_types"]
    attention = {kind: attention_bytes(config, kind, length, dtype) for kind in teacher_types}
    hybrid = sum(states[kind] if kind in states else attention[kind] for kind in config.layer_types)
    for layer in (i for i, kind in enumerate(config.layer_types) if kind == "hybrid"):
        hybrid += window_bytes(config, layer, length, dtype) + (read_bytes(config, layer) if reads else 0)
    return sum(attention[kind] for kind in teacher_types), hybrid + heads


def read_bytes(config: PreTrainedConfig, layer: int) -> int:
    """Bytes of the state of a layer with the normalised read."""
    return config.num_key_value_heads * (config.head_dim + 1) * (config.state_keys(layer) + 1) * 4


def attention_bytes(config: PreTrainedConfig, layer_type: str, length: int, dtype: torch.dtype) -> int:
    """Bytes of a layer that keeps its attention; one with a window needs all but the window's first column."""
    tokens = min(length, config.sliding_window - 1) if layer_type == "sliding_attention" else length
    return 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize * tokens


def window_bytes(config: PreTrainedConfig, layer: int, length: int, dtype: torch.dtype) -> int:
    """Bytes that a layer's window, sinks, salient tokens, and tokens on their way to the mixer's state take."""
    key_and_value = 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize
    sinks = config.hybrid_sinks if length else 0  # room for all of them from the first token on
    recent = min(length, config.window_of(layer) - 1)
    size = key_and_value * (recent + sinks)
    if config.hybrid_salient and length:
        size += key_and_value * config.hybrid_salient + 4 * (recent + config.hybrid_salient)  # and their salience
    if config.mixer_sees == "beyond" and config.hybrid_read == "linear":
        heads = config.mixer_num_kv_heads if config.mixer == "discrete_mamba2" else num_states(config)
        stepped = dtype.itemsize if config.mixer == "discrete_mamba2" else 4  # the step size is float32
        waiting = heads * (config.mixer_head_dim * stepped + config.mixer_d_state * dtype.itemsize)
        size += config.window_of(layer) * (waiting + 4 * num_states(config))
    return size


def num_states(config: PreTrainedConfig) -> int:
    """Recurrent states of a mixer: one per head, or one per key/value head where they share it."""
    return config.mixer_num_kv_heads if config.mixer_shared_state else config.mixer_num_heads
