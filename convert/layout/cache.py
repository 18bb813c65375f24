"""Bytes of cache that a sequence takes while generating: keys and values, windows, recurrent states."""

import torch
from transformers import PreTrainedConfig

from modeling_llamba.hybrid.rounding import Rounding
from modeling_llamba.model.config_values import RECURRENT

from ..hybrids.shapes import state_sizes

CACHE_DTYPE = torch.bfloat16
"""Type in which caches are counted, whatever type the weights are stored in: a model may be loaded in any."""
CONTEXTS = {"4k": 4096, "32k": 32768, "128k": 131072}
"""Numbers of tokens at which sizes are shown for every model."""
FULL, SALIENT, STATE, SLIDING, MIXER, RECURRENT_STATE = PARTS = (
    "full attention", "window and salient tokens", "state", "the teacher's sliding window", "mixer",
    "the teacher's state",
)  # fmt: skip
"""Parts of a hybrid's cache."""
LONGEST = {"256k": 262_144}
"""Number of tokens at which they are shown for teachers that were made for as many."""


def contexts(config: PreTrainedConfig) -> dict[str, int]:
    """Tokens at which the sizes of this model's cache are shown."""
    return CONTEXTS | {name: length for name, length in LONGEST.items() if length <= config.max_position_embeddings}


def cache_bytes(config: PreTrainedConfig, length: int, dtype: torch.dtype = CACHE_DTYPE) -> tuple[int, int]:
    """Bytes one sequence of `length` tokens keeps while generating: the teacher's, and the hybrid's.

    Keys and values in `dtype`, the hybrid's in its bits; recurrent states in float32.
    """
    teacher_types = config.conversion["teacher_layer_types"]
    whole = {kind: layer_bytes(config, kind, length, dtype) for kind in set(teacher_types)}
    hybrid = sum(sum(parts.values()) for parts in parts_of_layers(config, length, dtype))
    return sum(whole[kind] for kind in teacher_types), hybrid


def parts_of_layers(config: PreTrainedConfig, length: int, dtype: torch.dtype = CACHE_DTYPE) -> list[dict[str, int]]:
    """Bytes of each layer of a hybrid after `length` tokens, by the names of `PARTS`."""
    bits = {"full_attention": config.full_attention_bits, "sliding_attention": config.window_bits}
    names = {"full_attention": FULL, "sliding_attention": SLIDING, RECURRENT: RECURRENT_STATE}
    alike = {
        kind: {names[kind]: layer_bytes(config, kind, length, dtype, bits.get(kind, 16))}
        for kind in names.keys() & set(config.layer_types)
    }
    alike["linear_attention"] = {MIXER: mixer_bytes(config, dtype)}
    return [
        hybrid_parts(config, layer, length, dtype) if kind == "hybrid" else alike[kind]
        for layer, kind in enumerate(config.layer_types)
    ]


def mixer_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of a mixer: of its state in float32, of its convolution in `dtype`."""
    inner = config.mixer_num_heads * config.mixer_head_dim
    recurrent = num_states(config) * config.mixer_head_dim * config.mixer_d_state * 4
    # the convolution keeps the last inputs of x, and but for mamba1 of B and C as well
    channels = inner
    if config.mixer != "mamba1":
        channels = config.mixer_num_kv_heads * (config.mixer_head_dim + config.mixer_d_state)
        channels += config.mixer_num_heads * config.mixer_d_state
    return recurrent + channels * config.mixer_d_conv * dtype.itemsize


def break_even(config: PreTrainedConfig, more_weights: int, bits: int = 16) -> int | None:
    """Smallest number of tokens of one sequence at which a hybrid takes less memory in all than its teacher.

    Args:
        more_weights: bytes by which the hybrid's weights exceed the teacher's.
        bits: bits of the teacher's cache. At 8, each key and each value has a scale in 16 bits.

    Returns:
        None if there is no such number below 2^30.
    """

    def is_less(length: int) -> bool:
        return cache_bytes(config, length)[1] + more_weights < rounded_teacher_bytes(config, length, bits)

    low = 0
    high = 2**30
    if not is_less(high):
        return None
    # a hybrid's cache grows more slowly, so once it takes less it stays less
    while high - low > 1:
        middle = (low + high) // 2
        if is_less(middle):
            high = middle
        else:
            low = middle
    return high


def rounded_teacher_bytes(config: PreTrainedConfig, length: int, bits: int) -> int:
    """Bytes one sequence keeps in the teacher of a hybrid with keys and values in so many bits; states stay whole."""
    return sum(layer_bytes(config, kind, length, bits=bits) for kind in config.conversion["teacher_layer_types"])


def teacher_bytes(config: PreTrainedConfig, length: int, dtype: torch.dtype = CACHE_DTYPE) -> int:
    """Bytes one sequence keeps in a hybrid all of whose layers are the teacher's."""
    return sum(layer_bytes(config, kind, length, dtype) for kind in config.layer_types)


def hybrid_parts(config: PreTrainedConfig, layer: int, length: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of a hybrid layer after `length` tokens: the same at any length but for its kept heads."""
    windowed = windowed_heads(config, layer)
    kept = config.num_key_value_heads - windowed
    columns = config.hybrid_sinks + config.hybrid_salient + config.window_of(layer)
    parts = {FULL: kept * pair_bytes(config, config.full_attention_bits, dtype) * length, SALIENT: 0}
    if length:  # room for all columns from the first token on, each with its salience
        parts[SALIENT] = columns * (windowed * pair_bytes(config, config.window_bits, dtype) + 4)
    return parts | {STATE: state_bytes(config, layer)}


def pair_bytes(config: PreTrainedConfig, bits: int | list[int], dtype: torch.dtype) -> int:
    """Bytes of a head's key and value of one token."""
    return sum(rounding.width(dtype) for rounding in Rounding.of_pair(bits, config.head_dim))


def windowed_heads(config: PreTrainedConfig, layer: int) -> int:
    """Number of key/value heads of a hybrid layer that are not kept."""
    shared = config.num_attention_heads // config.num_key_value_heads
    return config.num_key_value_heads - len(config.full_heads_of(layer)) // shared


def state_bytes(config: PreTrainedConfig, layer: int) -> int:
    """Bytes of the state of a hybrid layer."""
    if config.mixer == "none":
        return 0
    # sums of [v; 1] [1; k']^T in float32 (modeling_llamba/hybrid/eviction.py), hence one more on both sides
    return windowed_heads(config, layer) * (config.head_dim + 1) * (config.state_keys(layer) + 1) * 4


def layer_bytes(
    config: PreTrainedConfig,
    layer_type: str,
    length: int,
    dtype: torch.dtype = CACHE_DTYPE,
    bits: int | list[int] = 16,
) -> int:
    """Bytes of a layer that stays as it is in the teacher, keys and values in so many bits."""
    if layer_type == RECURRENT:
        return recurrent_bytes(config, dtype)
    return attention_bytes(config, layer_type, length, dtype, bits)


def recurrent_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of a layer that holds a state in the teacher: of its convolution in `dtype`, of the state in float32."""
    of_convolution, of_state = state_sizes(config)
    return dtype.itemsize * of_convolution + 4 * of_state


def attention_bytes(
    config: PreTrainedConfig,
    layer_type: str,
    length: int,
    dtype: torch.dtype = CACHE_DTYPE,
    bits: int | list[int] = 16,
) -> int:
    """Bytes of a layer that keeps its attention, keys and values in so many bits.

    A sliding window of W tokens, the current one included, needs W - 1 tokens in the cache.
    """
    tokens = length
    if layer_type == "sliding_attention":
        tokens = min(length, config.sliding_window - 1)
    config = config.of_kind(layer_type)
    return config.num_key_value_heads * pair_bytes(config, bits, dtype) * tokens


def num_states(config: PreTrainedConfig) -> int:
    """Recurrent states of a mixer: one per head, or one per key/value head where they share it."""
    if config.mixer_shared_state:
        return config.mixer_num_kv_heads
    return config.mixer_num_heads
