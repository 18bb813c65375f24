"""Layers and heads that the user names: lists, patterns, shares, and choices that were published."""

import json
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path

from .placement import Heads

# Published choices, 0-based: {number of layers: layers that stay attention}.
PUBLISHED_ATTENTION_LAYERS: dict[str, dict[int, tuple[int, ...]]] = {
    # Bick et al. 2024, Hybrid Phi-Mamba 1.5B
    "hybrid-phi-mamba": {24: (4, 10, 16, 22)},
    # Wang et al. 2024, Mamba in the Llama: Zephyr-7B and Llama-3-8B have 32 layers, Llama-3.2-3B has 28
    "mamba-in-the-llama-75": {32: tuple(i for i in range(32) if i % 4)},
    "mamba-in-the-llama-50": {32: tuple(range(1, 32, 2)), 28: tuple(range(1, 28, 2))},
    "mamba-in-the-llama-25": {32: tuple(range(3, 32, 4))},
    "mamba-in-the-llama-12.5": {32: (7, 15, 23, 31)},
    "mamba-in-the-llama-0": {32: (), 28: ()},
    # Wang et al. 2025, M1-3B
    "m1-3b": {28: (3, 8, 13, 18, 23, 27)},
}


def uniform_attention_layers(num_layers: int, ratio: float) -> tuple[int, ...]:
    """`round(ratio * num_layers)` layers, evenly spread, the last layer of each stretch: 1, 3, 5, ... at 0.5."""
    if not 0 <= ratio <= 1:
        raise ValueError(f"attention_layers as a share must lie between 0 and 1, not {ratio}.")
    return tuple(evenly_of(range(num_layers), round(ratio * num_layers)))


def evenly_of(layers: Sequence[int], count: int) -> list[int]:
    """`count` of these layers, evenly spread, the last one of each stretch."""
    return [layers[(j + 1) * len(layers) // count - 1] for j in range(count)]


def pattern_attention_layers(num_layers: int, pattern: str) -> tuple[int, ...]:
    """A pattern of M (mixer) and A (attention), repeated over the layers: "MA", "MMMA", or one letter per layer."""
    pattern = pattern.upper()
    if len(pattern) > num_layers:
        raise ValueError(f"The layer pattern has {len(pattern)} letters, but the teacher has {num_layers} layers.")
    return tuple(i for i in range(num_layers) if pattern[i % len(pattern)] == "A")


def listed_attention_layers(num_layers: int, layers: list[int]) -> tuple[int, ...]:
    """Explicit 0-based indices, sorted."""
    outside = [i for i in layers if not 0 <= i < num_layers]
    if outside:
        raise ValueError(
            f"Attention layer {outside[0]} is out of range: the teacher's layers are 0 to {num_layers - 1}."
        )
    if len(set(layers)) != len(layers):
        raise ValueError(f"An attention layer is listed twice: {layers}.")
    return tuple(sorted(layers))


def attention_layers(num_layers: int, asked: int | list[int] | str) -> tuple[int, ...]:
    """The layers that the option `attention_layers` names.

    Args:
        asked: a layer, a list of them (also as text: "1,3,5"), "all", "none", a pattern of M and A, or a published
            choice by name.
    """
    if isinstance(asked, int):
        asked = [asked]
    if isinstance(asked, list):
        return listed_attention_layers(num_layers, asked)
    text = asked.strip()
    if text == "all":
        return tuple(range(num_layers))
    if text == "none":
        return ()
    if text and not set(text.upper()) - set("MA"):
        return pattern_attention_layers(num_layers, text)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if all(part.lstrip("-").isdigit() for part in parts):
        return listed_attention_layers(num_layers, [int(part) for part in parts])
    if text not in PUBLISHED_ATTENTION_LAYERS:
        raise ValueError(
            f"{text!r} is neither a list of layers (1,3,5), nor a pattern of M (mixer) and A (attention), nor a "
            f"published choice: {', '.join(PUBLISHED_ATTENTION_LAYERS)}."
        )
    by_depth = PUBLISHED_ATTENTION_LAYERS[text]
    if num_layers not in by_depth:
        depths = " or ".join(str(depth) for depth in by_depth)
        raise ValueError(f"{text} was published for {depths} layers; this teacher has {num_layers}.")
    return by_depth[num_layers]


def kept_heads(
    asked: str | int | float | Mapping[int, Sequence[int]], num_layers: int, num_heads: int
) -> Heads | None:
    """The query heads that the option `attention_heads` names, by layer; None where it only says how many."""
    if isinstance(asked, int | float):
        return None
    try:
        if isinstance(asked, str) and (asked.endswith(".json") or set(asked) - set("0123456789:, ")):
            asked = json.loads(Path(asked).expanduser().read_text())
        if isinstance(asked, str):
            pairs = [(int(layer), int(head)) for layer, head in (p.split(":") for p in asked.split(",") if p.strip())]
        else:
            pairs = [(int(layer), operator.index(head)) for layer, heads in asked.items() for head in heads]
    except FileNotFoundError as error:
        raise ValueError(f"attention_heads {asked}: there is no such file, and it is no list of heads.") from error
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise ValueError(
            f"attention_heads {asked!r} is neither layer:head pairs (16:3,18:0), nor a number or share of key/value "
            'heads, nor a JSON file {"16": [3]}.'
        ) from error
    heads: dict[int, tuple[int, ...]] = {}
    for layer, head in sorted(set(pairs)):
        if not (0 <= layer < num_layers and 0 <= head < num_heads):
            raise ValueError(
                f"attention_heads names {layer}:{head}; layers are 0 to {num_layers - 1}, heads 0 to {num_heads - 1}."
            )
        heads[layer] = (*heads.get(layer, ()), head)
    return heads


def whole_groups(heads: Heads, shared: int) -> Heads:
    """The heads and those that share their key/value heads, whose cache they need anyway."""
    return query_heads(sorted({(layer, head // shared) for layer, of in heads.items() for head in of}), shared)


def counted_heads(asked: int | float, total: int) -> int:
    """Count the key/value heads that `attention_heads` asks for: a number, or a share of their `total`."""
    count = asked
    if isinstance(asked, float):
        if not 0 <= asked <= 1:
            raise ValueError(f"attention_heads {asked} as a share of the key/value heads must lie between 0 and 1.")
        count = round(asked * total)
    if count == 0 and asked > 0:
        raise ValueError(f"attention_heads {asked} of {total} key/value heads is less than one; give a larger share.")
    if not 0 <= count <= total:
        raise ValueError(f"attention_heads {asked} must lie between 0 and the teacher's {total} key/value heads.")
    return count


def query_heads(kv_heads: list[tuple[int, int]], shared: int) -> Heads:
    """The query heads, `shared` of them per key/value head, that read (layer, key/value head) pairs."""
    heads: dict[int, tuple[int, ...]] = {}
    for layer, kv in sorted(kv_heads):
        heads[layer] = (*heads.get(layer, ()), *range(kv * shared, (kv + 1) * shared))
    return heads
