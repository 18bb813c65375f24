"""Small pictures for model cards: what each layer is, what its cache takes, where it falls short of its teacher."""

import itertools
from collections.abc import Sequence
from math import log2, log10
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from modeling_llamba.model.config_values import RECURRENT

from ..io.writer import human_bytes
from ..layout.cache import FULL, MIXER, RECURRENT_STATE, SALIENT, SLIDING, STATE, cache_bytes

LAYERS, CACHE, KL = "layers.png", "cache.png", "kl.png"
LEAST_KL = 1e-5
"""Smallest KL that is drawn: on a scale of powers of ten 0 has no place."""
TEACHER_COLOR, HYBRID_COLOR = "#4a5568", "#dd6b20"
LINE_COLORS = ("#dd6b20", "#2b6cb0", "#2f855a", "#805ad5", "#c53030", "#b7791f", "#0987a0", TEACHER_COLOR)
LEGEND_LINE, BELOW = 0.17, 0.48
"""Inches of a line of a legend above a picture, and of the numbers and the label under its axes."""
KINDS = {
    "attention": "#2b6cb0",
    "the teacher's sliding window": "#90cdf4",
    "mixer": HYBRID_COLOR,
    "the teacher's state": "#9ae6b4",
    "window and state": "#fbd38d",
    "window": "#cbd5e0",
}


PART_COLORS = {
    FULL: KINDS["attention"], SALIENT: KINDS["window"], STATE: KINDS["window and state"],
    SLIDING: KINDS["the teacher's sliding window"], MIXER: KINDS["mixer"],
    RECURRENT_STATE: KINDS["the teacher's state"],
}  # fmt: skip


def save_pictures(config: PreTrainedConfig, folder: Path) -> None:
    """Write layers.png and cache.png of a hybrid into a folder."""
    layers_picture(config).savefig(folder / LAYERS)
    cache_picture(config).savefig(folder / CACHE)


def head_kinds(config: PreTrainedConfig) -> list[list[str]]:
    """Kinds (of KINDS) of the key/value heads of each layer."""
    beside = "window and state"
    if config.mixer == "none":
        beside = "window"
    names = dict(zip(("full_attention", "sliding_attention", "linear_attention", RECURRENT), KINDS, strict=False))
    shared = config.num_attention_heads // config.num_key_value_heads
    kept = [{head // shared for head in heads} for heads in config.hybrid_full_heads or [[]] * len(config.layer_types)]
    return [
        ["attention" if head in kept[layer] else names.get(kind, beside) for head in range(config.num_key_value_heads)]
        for layer, kind in enumerate(config.layer_types)
    ]


def layers_picture(config: PreTrainedConfig) -> Any:
    """A square per layer and key/value head, in the colour of what it is."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    columns = head_kinds(config)
    kinds = list(KINDS)
    layers = len(columns)
    heads = len(columns[0])
    rows = min(0.17 * heads, 2.4)
    height = rows + 0.95
    figure, axes = new_figure(height, (0.09, 0.42 / height, 0.89, rows / height))
    codes = [[kinds.index(columns[layer][head]) for layer in range(layers)] for head in range(heads)]
    colors = ListedColormap(list(KINDS.values()))
    axes.pcolormesh(codes, cmap=colors, vmin=-0.5, vmax=len(KINDS) - 0.5, edgecolors="white", linewidth=1)
    axes.invert_yaxis()
    for set_ticks, count, most in ((axes.set_xticks, layers, 16), (axes.set_yticks, heads, 4)):
        shown = range(0, count, -(-count // most))
        set_ticks([i + 0.5 for i in shown], shown)
    axes.tick_params(length=0, labelsize=9)
    axes.set_xlabel("layer", labelpad=1)
    axes.set_ylabel("KV head")
    patches = [Patch(color=KINDS[kind], label=kind) for kind in kinds if any(kind in column for column in columns)]
    figure.legend(handles=patches, ncols=len(patches), loc="upper center", frameon=False)
    return figure


def cache_picture(config: PreTrainedConfig) -> Any:
    """Bytes of the cache against the context's length, teacher and hybrid, both axes logarithmic."""
    exponents = range(8, 18)
    # logarithms on linear axes: matplotlib's logarithmic axes take several times as long to draw
    sizes = [[log10(max(size, 1)) for size in cache_bytes(config, 2**k)] for k in exponents]
    figure, axes = new_figure(2.4, (0.12, 0.2, 0.85, 0.72))
    for values, color, name in zip(zip(*sizes, strict=True), (TEACHER_COLOR, HYBRID_COLOR), ("teacher", "this model"),
                                   strict=True):  # fmt: skip
        axes.plot(exponents, values, color=color, label=name, linewidth=2)
    for k in (12, 15):
        teacher, hybrid = sizes[k - exponents[0]]
        axes.plot(k, hybrid, "o", color=HYBRID_COLOR)
        axes.annotate(f"{10 ** (hybrid - teacher):.0%}", (k, hybrid), xytext=(6, -12), textcoords="offset points")
    low, high = axes.get_ylim()
    powers = range(max(int(low) + 1, 0), int(high) + 1)
    axes.set_yticks(powers, [f"{10 ** (p % 3)} {('B', 'kB', 'MB', 'GB', 'TB', 'PB')[p // 3]}" for p in powers])
    label_tokens(axes, exponents, "tokens of context")
    return figure


def parts_picture(layers: Sequence[dict[str, int]]) -> Any:
    """A bar for each layer: the bytes of its cache, by the names of `PARTS`."""
    figure, axes = new_figure(2.6, (0.12, 0.17, 0.85, 0.66))
    below = [0.0] * len(layers)
    for part, color in PART_COLORS.items():
        sizes = [layer.get(part, 0) / 1000 for layer in layers]
        if any(sizes):
            axes.bar(range(len(layers)), sizes, bottom=below, color=color, label=part)
        below = [size + under for size, under in zip(sizes, below, strict=True)]
    axes.set_xlabel("layer", labelpad=1)
    axes.set_ylabel("kB")
    axes.tick_params(labelsize=9, length=2)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(ncols=3, loc="upper center", frameon=False, fontsize=9)
    return figure


def totals_picture(totals: dict[str, Sequence[int]], exponents: Sequence[int], break_even: int | None) -> Any:
    """Bytes of weights and cache by the length of the context.

    Args:
        totals: of each model, at 2**k tokens for each k of `exponents`.
        break_even: tokens at which a dotted line stands.
    """
    figure, axes = new_figure(2.6, (0.14, 0.19, 0.83, 0.76))
    for (name, sizes), color in zip(totals.items(), itertools.cycle(LINE_COLORS[::-1])):
        axes.plot(exponents, sizes, "o-", color=color, label=name, markersize=3)
    if break_even is not None:
        axes.axvline(log2(break_even), color="#000000", linestyle=":", linewidth=1, label="break-even")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda size, _: human_bytes(size))
    label_tokens(axes, exponents, "tokens of context")
    return figure


def positions_picture(kl: dict[str, Sequence[tuple[int, float]]]) -> Any:
    """KL to the teacher by position, both axes logarithmic.

    Args:
        kl: of each method, where a range of positions ends, and the mean KL in it.
    """
    columns = 2
    figure, axes = figure_under_legend(len(kl), columns, 2, (0.12, 0.85))
    ends: list[float] = []
    for (name, found), color in zip(kl.items(), itertools.cycle(LINE_COLORS)):
        ends = [log2(end) for end, _ in found]
        axes.plot(ends, [max(value, LEAST_KL) for _, value in found], "o-", color=color, label=name, markersize=3)
    axes.set_yscale("log")
    label_tokens(axes, ends, "position, tokens")
    if axes.get_legend():
        axes.get_legend().remove()
    figure.legend(*axes.get_legend_handles_labels(), ncols=columns, loc="upper center", frameon=False, fontsize=8)
    return figure


def kl_picture(
    positions: Sequence[tuple[int, float]], recall: dict[str, list[tuple[int, float | None, float]]]
) -> Any:
    """KL by position, and recall by distance.

    Args:
        positions: where a range of positions ends, and the mean KL to the teacher in it, in nats per token.
        recall: for each probe, distances in tokens, and the shares recalled by the teacher and by the hybrid.
    """
    count = bool(positions) + bool(recall)
    width = 0.9 / count - 0.04
    figure, *panels = new_figure(2.6, *((0.08 + i * (width + 0.07), 0.19, width, 0.68) for i in range(count)))
    if positions:
        ends = [log2(end) for end, _ in positions]
        panels[0].plot(ends, [kl for _, kl in positions], "o-", color=HYBRID_COLOR)
        panels[0].set_ylim(bottom=0)
        panels[0].set_title("KL to the teacher, nats per token", fontsize=10)
        label_tokens(panels[0], ends, "position, tokens")
    if recall:
        distances: list[float] = []
        for color, (probe, rows) in zip(LINE_COLORS, recall.items(), strict=False):
            x = [log2(max(distance, 1)) for distance, _, _ in rows]
            distances += x
            panels[-1].plot(x, [of_hybrid for _, _, of_hybrid in rows], "o-", color=color, label=probe)
            if all(of_teacher is not None for _, of_teacher, _ in rows):
                panels[-1].plot(x, [of_teacher for _, of_teacher, _ in rows], "o:", color=color, alpha=0.6)
        panels[-1].set_ylim(-0.05, 1.05)
        panels[-1].set_title("recall (dotted: teacher)", fontsize=10)
        label_tokens(panels[-1], distances, "distance, tokens")
    return figure


def new_figure(height: float, *places: tuple[float, float, float, float]) -> tuple[Any, ...]:
    """A figure 600 pixels wide, which needs no display, and its axes, each at (left, bottom, width, height)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, height), dpi=100)
    return figure, *(figure.add_axes(place) for place in places)


def figure_under_legend(entries: int, columns: int, height: float, *spans: tuple[float, float]) -> tuple[Any, ...]:
    """A figure with room above its axes for a legend of so many entries, and the axes.

    Args:
        columns: of the legend. height: of the axes, in inches. spans: left edge and width of each, as shares.
    """
    lines = 1 + -(-entries // columns)  # one of them is empty
    whole = BELOW + height + LEGEND_LINE * lines
    return new_figure(whole, *((left, BELOW / whole, width, height / whole) for left, width in spans))


def label_tokens(axes: Any, exponents: Sequence[float], label: str) -> None:
    """Name the powers of two on the horizontal axis, and make the axes look like those of the other pictures."""
    ticks = range(int(min(exponents)), int(max(exponents)) + 1)
    ticks = ticks[:: -(-len(ticks) // 10)]
    axes.set_xticks(ticks, [f"{2**k}" if k < 10 else f"{2 ** (k - 10)}k" for k in ticks])
    axes.set_xlabel(label, labelpad=1)
    axes.tick_params(labelsize=9, length=2)
    axes.grid(color="#e2e8f0", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9)
