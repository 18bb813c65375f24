"""The figures of a report, from plain numbers.

Each function returns a matplotlib figure in the style of `report_drawing`; what is drawn, and from which file, is
decided in `report_sections`.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .report_drawing import (
    FONT,
    LIGHT,
    MARKERS,
    Line,
    canvas,
    draw_cells,
    draw_dots,
    draw_lines,
    log_axis,
    reach,
    short,
    styled,
    token_axis,
    unit,
    wrapped,
)

PNG_WHITE = np.array([0xFB, 0xFA, 0xF7]) / 255
POSITIVE, NEGATIVE = (0.80, 0.42, 0.08), (0.16, 0.45, 0.78)  # seen on light and on dark ground


@styled
def lines_figure(
    lines: Sequence[Line], x: str, y: str, *, log_x: bool = False, log_y: bool = False, context: bool = False,
    reverse: bool = False, from_zero: bool = False, ticks: Sequence[float] | None = None, left: bool = False,
) -> Figure:  # fmt: skip
    """Curves with their names at their ends.

    Args:
        context: x counts tokens of context, written 512, 4k, 32k. reverse: x falls to the right. left: names stand at
            the first points, where curves meet at the last.
    """
    lines = [Line(**vars(line)) for line in lines]
    rows = sum(1.3 + wrapped(line.name).count("\n") for line in lines)
    room = {"left": 0.36, "right": 0.92} if left else {}
    figure, axes = canvas(max(2.5, 0.75 + rows * FONT * 1.12 / 72), **room)
    xs = [float(value) for line in lines for value in line.x]
    ys = reach(lines, log_y)
    # limits first: the names are placed by what is on the screen
    axes.update_datalim([(min(xs), min(ys)), (max(xs), max(ys))])
    axes.autoscale_view()
    if context:
        token_axis(axes.xaxis, xs)
    elif log_x and min(xs) > 0:
        log_axis(axes.xaxis, xs)
    elif max(xs) >= 1e4:
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e3:g}k" if value else "0")
    if ticks is not None:
        axes.set_xticks(list(ticks), [f"{at:g}" for at in ticks])
    if log_y and min(ys) > 0 and max(ys) > 4 * min(ys):
        log_axis(axes.yaxis, ys)
    elif from_zero:
        axes.set_ylim(min(0.0, *ys), max(ys) * 1.08 or 1.0)
    if reverse:
        axes.invert_xaxis()
    if left:
        axes.yaxis.tick_right()
    axes.autoscale(False)
    axes.set(xlabel=x)
    unit(axes, y)
    draw_lines(axes, lines, left)
    return figure


@styled
def dots_figure(
    names: Sequence[str], lines: Sequence[Line], x: str, log: bool = False, marks: Sequence[float] = ()
) -> Figure:
    """A row of dots per name; which dot is which stands above in its colour; `marks` are values to compare with."""
    longest = max(len(short(name, 34)) for name in names)
    figure, axes = canvas(
        max(1.4, 0.8 + 0.215 * len(names)), left=min(0.52, 0.05 + longest * FONT * 0.55 / 324), right=0.96
    )
    for mark in marks:
        axes.axvline(mark, color=LIGHT["muted"], linewidth=0.8, zorder=0)
    draw_dots(axes, names, lines, log)
    axes.set(xlabel=x)
    if len(lines) > 1 or lines[0].name:
        key(axes, [(line.name, line.color or "ink", MARKERS[i % len(MARKERS)]) for i, line in enumerate(lines)])
    return figure


def key(axes: Axes, names: Sequence[tuple[str, str, str]]) -> None:
    """Names with their markers in a row above the axes."""
    figure = axes.figure
    box = axes.get_window_extent()
    at, right = 12.0, figure.get_figwidth() * 72 - 6
    widths = [14 + len(short(name)) * FONT * 0.53 for name, _, _ in names]
    at = max(6.0, min(box.x0 * 72 / figure.dpi, right - sum(widths)))
    top = figure.get_figheight() * 72 - 8
    for (name, color, marker), width in zip(names, widths, strict=True):
        spot = dict(xycoords="figure points", annotation_clip=False, va="center")  # noqa: C408
        axes.annotate(short(name), (at + 8, top), color=LIGHT[color], ha="left", **spot)
        figure.add_artist(_marker(figure, at + 2, top, color, marker))
        at += width


def _marker(figure: Figure, x: float, y: float, color: str, marker: str):
    from matplotlib.lines import Line2D

    width, height = figure.get_figwidth() * 72, figure.get_figheight() * 72
    return Line2D([x / width], [y / height], marker=marker, color=LIGHT[color], linestyle="", markeredgewidth=0)


@styled
def layer_figure(
    layers: Sequence[int], kl: Sequence[float], recall: Sequence[float], choices: Sequence[tuple[str, Sequence[int]]]
) -> Figure:
    """What replacing each layer costs, and under it which layers keep attention in each choice."""
    rows = 0.17 * len(choices)
    figure, axes = canvas(
        3.5 + rows, panels=3 if choices else 2, left=0.25, right=0.97, sharex=True,
        gridspec_kw={"height_ratios": [1.15, 1.15, max(rows, 0.1)] if choices else [1, 1]},
    )  # fmt: skip
    for panel, values, color, label in (
        (axes[0], kl, "blue", "KL, nats per token"),
        (axes[1], recall, "red", "recall lost, nats per answer"),
    ):
        panel.bar(layers, values, color=LIGHT[color], width=0.72)
        panel.axhline(0, color=LIGHT["line"], linewidth=0.5)
        panel.margins(y=0.1)
        unit(panel, label, color)
        panel.tick_params(axis="x", length=0)
    if choices:
        kept = np.array([[1.0 if layer in chosen else 0.1 for layer in layers] for _, chosen in choices])
        draw_cells(axes[2], kept, "ink")
        axes[2].set_xlim(-0.6, len(layers) - 0.4)
        axes[2].set_yticks(range(len(choices)), [short(name, 17) for name, _ in choices])
        unit(axes[2], "layers that keep their attention")
    step = 5 if len(layers) > 12 else 1
    axes[-1].set_xticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    axes[-1].set_xlabel("layer")
    return figure


@styled
def cells_figure(values: np.ndarray, rows: Sequence[str], columns: Sequence[str], x: str, y: str) -> Figure:
    """A heat map, opacity by value from 0 to the largest."""
    figure, axes = canvas(max(1.6, 0.85 + 0.155 * len(rows)), left=0.12, right=0.97)
    top = np.nanmax(values) if np.isfinite(values).any() else 1.0
    draw_cells(axes, np.where(np.isfinite(values), 0.04 + 0.96 * values / (top or 1.0), np.nan))
    steps = 5 if len(columns) > 16 else 1, 2 if len(rows) > 16 else 1
    axes.set_xticks(range(0, len(columns), steps[0]), list(columns)[:: steps[0]])
    axes.set_yticks(range(0, len(rows), steps[1]), list(rows)[:: steps[1]])
    axes.set(xlabel=x)
    unit(axes, y)
    return figure


def strip(matrices: Sequence[np.ndarray | None]) -> np.ndarray:
    """Matrices (P, P) side by side as RGBA: orange above zero, blue below, as opaque as the root of their size."""
    pixels = next(m.shape[-1] for m in matrices if m is not None)
    gap = max(pixels // 10, 1)
    tiles = []
    for i, matrix in enumerate(matrices):
        tile = np.zeros((pixels, pixels, 4))
        if matrix is not None:
            values = np.nan_to_num(matrix.astype(float))
            tile[..., :3] = np.where(values[..., None] < 0, NEGATIVE, POSITIVE)
            tile[..., 3] = np.round(31 * np.sqrt(np.clip(np.abs(values), 0, 1))) / 31
            tile[tile[..., 3] == 0] = 0
        tiles += [tile] if i == 0 else [np.zeros((pixels, gap, 4)), tile]
    return np.concatenate(tiles, axis=1)


def on_paper(image: np.ndarray) -> np.ndarray:
    """An RGBA image on light ground, as RGB."""
    alpha = image[..., 3:]
    return image[..., :3] * alpha + PNG_WHITE * (1 - alpha)


def image_png(image: np.ndarray) -> bytes:
    """A PNG of an RGB or RGBA image with values from 0 to 1."""
    import io

    from matplotlib.image import imsave

    buffer = io.BytesIO()
    imsave(buffer, (255 * image).round().astype(np.uint8), format="png")
    return buffer.getvalue()
