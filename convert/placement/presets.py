"""Which layers stay attention."""

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
    """`round(ratio * num_layers)` layers, evenly spread, the last layer of each stretch: 1, 3, 5, ... at 0.5.

    Raises:
        ValueError: ratio is not between 0 and 1.
    """
    if not 0 <= ratio <= 1:
        raise ValueError(f"The attention ratio must lie between 0 and 1, not {ratio}.")
    count = round(ratio * num_layers)
    return tuple((j + 1) * num_layers // count - 1 for j in range(count))


def pattern_attention_layers(num_layers: int, pattern: str) -> tuple[int, ...]:
    """A pattern of M (mixer) and A (attention), repeated over the layers: "MA", "MMMA", or one letter per layer.

    Raises:
        ValueError: another letter, or a pattern longer than the model.
    """
    pattern = pattern.upper()
    if not pattern or set(pattern) - set("MA"):
        raise ValueError(f"A layer pattern consists of M (mixer) and A (attention), not {pattern!r}.")
    if len(pattern) > num_layers:
        raise ValueError(f"The layer pattern has {len(pattern)} letters, but the teacher has {num_layers} layers.")
    return tuple(i for i in range(num_layers) if pattern[i % len(pattern)] == "A")


def named_attention_layers(num_layers: int, name: str) -> tuple[int, ...]:
    """A published choice by name.

    Raises:
        ValueError: no such name, or it was published for another number of layers.
    """
    if name not in PUBLISHED_ATTENTION_LAYERS:
        raise ValueError(
            f"{name!r} is neither a list of layers (such as 1,3,5) nor a published choice: "
            f"{', '.join(PUBLISHED_ATTENTION_LAYERS)}."
        )
    by_depth = PUBLISHED_ATTENTION_LAYERS[name]
    if num_layers not in by_depth:
        depths = " or ".join(str(depth) for depth in by_depth)
        raise ValueError(f"{name} was published for {depths} layers; this teacher has {num_layers}.")
    return by_depth[num_layers]


def listed_attention_layers(num_layers: int, layers: list[int]) -> tuple[int, ...]:
    """Explicit 0-based indices, sorted.

    Raises:
        ValueError: an index out of range or given twice.
    """
    outside = [i for i in layers if not 0 <= i < num_layers]
    if outside:
        raise ValueError(
            f"Attention layer {outside[0]} is out of range: the teacher's layers are 0 to {num_layers - 1}."
        )
    if len(set(layers)) != len(layers):
        raise ValueError(f"An attention layer is listed twice: {layers}.")
    return tuple(sorted(layers))


def parse_attention_layers(num_layers: int, text: str) -> tuple[int, ...]:
    """ "1,3,5", "" for none, or the name of a published choice.

    Raises:
        ValueError: what `listed_attention_layers` and `named_attention_layers` raise.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if all(part.lstrip("-").isdigit() for part in parts):
        return listed_attention_layers(num_layers, [int(part) for part in parts])
    return named_attention_layers(num_layers, text.strip())
