"""Figures in one typographic system: drawn once by matplotlib, shown as inline SVG in the page's colours and as PNG.

Every colour of a figure is one of `LIGHT`; in the page it becomes a CSS variable, so that a figure follows the page
into the dark. Figures are narrow (`WIDTH`), so that their text stays readable on a phone. Series are told apart by
labels at their ends, not by legends; the colours keep apart under the common colour-vision deficiencies.
"""

import io
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

WIDTH = 4.5
FONT = 9.0
LIGHT = {
    "paper": "#fbfaf7", "ink": "#1d1c1a", "muted": "#6a6861", "line": "#dcdad2", "faint": "#efede6",
    "blue": "#0f62a8", "red": "#b8450b", "green": "#0a7457", "violet": "#8a3f86", "ochre": "#876006",
    "grey": "#77756e",
}  # fmt: skip
DARK = {
    "paper": "#171614", "ink": "#ecebe6", "muted": "#a5a299", "line": "#3a3833", "faint": "#24231f",
    "blue": "#72b4f2", "red": "#f5935a", "green": "#56c6a2", "violet": "#d799d2", "ochre": "#dcb252",
    "grey": "#98958c",
}  # fmt: skip
SERIES = ("blue", "red", "green", "violet", "ochre", "ink")  # grey is for what others are compared with
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "report", "text.parse_math": False, "axes.unicode_minus": True,
    "font.family": "sans-serif", "font.size": FONT, "axes.titlesize": FONT, "axes.titleweight": "normal",
    "axes.titlelocation": "left", "axes.titlepad": 7, "axes.labelsize": FONT, "xtick.labelsize": FONT,
    "ytick.labelsize": FONT,
    "text.color": LIGHT["ink"], "axes.labelcolor": LIGHT["muted"], "axes.titlecolor": LIGHT["muted"],
    "axes.edgecolor": LIGHT["line"], "xtick.color": LIGHT["line"], "ytick.color": LIGHT["line"],
    "xtick.labelcolor": LIGHT["muted"], "ytick.labelcolor": LIGHT["muted"], "grid.color": LIGHT["line"],
    "figure.facecolor": "none", "axes.facecolor": "none", "axes.grid": True, "axes.grid.axis": "y",
    "axes.axisbelow": True, "grid.linewidth": 0.5, "axes.spines.top": False, "axes.spines.right": False,
    "axes.spines.left": False, "xtick.major.width": 0.5, "ytick.major.width": 0.0, "xtick.minor.size": 0.0,
    "ytick.minor.size": 0.0, "axes.linewidth": 0.5, "lines.linewidth": 1.6, "lines.markersize": 4,
    "lines.solid_capstyle": "round",
}  # fmt: skip


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """A function that draws a figure, in this style whatever the caller's is."""
    return matplotlib.rc_context(STYLE)(draw)


@dataclass
class Line:
    """A curve with its name; `spread` is half of an interval at each point."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float] | None = None
    color: str | None = None
    dashed: bool = False


def canvas(height: float = 2.7, panels: int = 1, right: float = 0.72, left: float = 0.13, **options) -> tuple:
    """A figure and its axes, one above the other; `right` is where the room for labels begins."""
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.subplots(panels, 1, squeeze=False, **options)[:, 0]
    top, bottom = 0.24 / height, 0.44 / height
    figure.subplots_adjust(left=left, right=right, top=1 - top, bottom=bottom, hspace=0.42)
    return (figure, axes[0]) if panels == 1 else (figure, axes)


def short(name: str, length: int = 26) -> str:
    """A name that fits beside a curve, without characters that an SVG cannot hold."""
    name = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(name))
    return name if len(name) <= length else f"{name[: length - 1]}…"


def wrapped(name: str, width: int = 19) -> str:
    """A name in three lines at most, about as long as one another."""
    lines = textwrap.wrap(short(name, 80), width, break_on_hyphens=False) or [""]
    if len(lines) > 3:
        return "\n".join([*lines[:2], short(f"{lines[2]} {lines[3]}", width)])
    for narrower in range(width - 1, 4, -1):
        evener = textwrap.wrap(short(name, 80), narrower, break_long_words=False, break_on_hyphens=False)
        if len(evener) > len(lines):
            break
        lines = evener
    return "\n".join(lines)


def unit(axes: Axes, text: str, color: str = "muted") -> None:
    """What the y axis counts, above it and at the figure's left edge."""
    box = axes.get_position()
    axes.set_title(text, x=-box.x0 / box.width, color=LIGHT[color])


def draw_lines(axes: Axes, lines: Sequence[Line], left: bool = False) -> None:
    """Curves with intervals, and their names at their last points, or `left` of the first."""
    for i, line in enumerate(lines):
        line.color = line.color or SERIES[i % len(SERIES)]
        marker = MARKERS[i % len(MARKERS)] if len(line.x) < 40 else ""
        style = {"color": LIGHT[line.color], "linestyle": (0, (3, 2)) if line.dashed else "-"}
        axes.plot(line.x, line.y, marker=marker, markeredgewidth=0, **style)
        if line.spread is not None:
            half = halves(line, axes.get_yscale() == "log")
            axes.errorbar(line.x, line.y, half, fmt="none", ecolor=style["color"], elinewidth=0.8, alpha=0.6)
    label_ends(axes, lines, left)


def halves(line: Line, log: bool) -> np.ndarray:
    """Half intervals around y; on a logarithmic axis they stay above zero."""
    spread = np.nan_to_num(np.asarray(line.spread if line.spread is not None else 0.0, float))
    spread = np.broadcast_to(spread, np.shape(line.y))
    return np.minimum(spread, np.abs(line.y) * 0.95) if log else spread


def label_ends(axes: Axes, lines: Sequence[Line], left: bool) -> None:
    """Write every curve's name beside its last or first point, apart from one another."""
    points = 72 / axes.figure.dpi
    ends = []
    for line in lines:
        shown = [(x, y) for x, y in zip(line.x, line.y, strict=True) if np.isfinite(y)]
        on_screen = sorted((axes.transData.transform(point) * points for point in shown), key=lambda p: p[0])
        if on_screen and line.name:
            path = [float(y) for _, y in (on_screen if left else reversed(on_screen))]
            ends.append((path, on_screen[0 if left else -1][0], line))
    ends.sort(key=lambda end: end[0])  # where curves meet, by where they come from
    box = axes.get_window_extent()
    edge, low, high = (box.x0 if left else box.x1) * points, box.y0 * points, box.y1 * points
    places = spread_out([end[0][0] for end in ends], [_height(end[2].name) for end in ends], low, high)
    for (path, x, line), place in zip(ends, places, strict=True):
        ink = LIGHT[line.color or "ink"]
        axes.annotate(
            wrapped(line.name), (x, path[0]), (edge + (-13 if left else 13), place), xycoords="figure points",
            textcoords="figure points", color=ink, va="center", ha="right" if left else "left", linespacing=1.0,
            annotation_clip=False, arrowprops={"arrowstyle": "-", "color": ink, "lw": 0.4, "alpha": 0.6, "shrinkA": 1,
                                               "shrinkB": 3},
        )  # fmt: skip


def _height(name: str) -> float:
    return FONT * 1.12 * (1 + wrapped(name).count("\n")) + 1.5


def spread_out(places: list[float], heights: list[float], low: float, high: float) -> list[float]:
    """Sorted places moved apart until neighbours of these heights do not overlap, within the limits if possible."""
    moved = list(places)
    for i in range(len(moved)):
        floor = low if i == 0 else moved[i - 1] + (heights[i - 1] + heights[i]) / 2
        moved[i] = max(moved[i], floor)
    ceiling = high
    for i in reversed(range(len(moved))):
        moved[i] = min(moved[i], ceiling)
        ceiling = moved[i] - (heights[i] + heights[i - 1]) / 2
    return moved


def draw_dots(axes: Axes, names: Sequence[str], lines: Sequence[Line], log: bool = False) -> None:
    """Rows of dots, a row per name from top to bottom; the x of each line are rows, its y what is measured."""
    axes.grid(False)
    for row in range(len(names)):
        axes.axhline(row, color=LIGHT["line"], linewidth=0.5, zorder=0)
    for i, line in enumerate(lines):
        line.color = line.color or SERIES[i % len(SERIES)]
        if line.spread is not None:
            axes.errorbar(line.y, line.x, xerr=halves(line, log), fmt="none", ecolor=LIGHT[line.color], elinewidth=0.8)
        axes.plot(line.y, line.x, MARKERS[i % len(MARKERS)], color=LIGHT[line.color], markeredgewidth=0)
    axes.set_yticks(range(len(names)), [short(name, 34) for name in names], color=LIGHT["ink"])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", pad=4)
    if log:
        log_axis(axes.xaxis, reach(lines, log))


def reach(lines: Sequence[Line], log: bool) -> list[float]:
    """Every finite y with its interval."""
    ends = [end for line in lines for end in (np.asarray(line.y, float) + s * halves(line, log) for s in (-1, 1))]
    return [float(y) for end in ends for y in end if np.isfinite(y)]


def log_axis(axis, values: Sequence[float]) -> None:
    """Logarithmic around positive values, with ticks that read as numbers."""
    axes, low, high = axis.axes, min(values), max(values)
    (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
    decades = np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
    steps = (1, 2, 5) if high < 300 * low else (1,)
    ticks = [s * 10.0**d for d in (decades if high < 1e6 * low else decades[::2]) for s in steps]
    margin = 1.2
    shown = [t for t in ticks if low / margin <= t <= high * margin] or [low]
    axis.set_ticks(shown, [tick(t) for t in shown])
    axis.set_minor_locator(matplotlib.ticker.NullLocator())
    (axes.set_xlim if axis is axes.xaxis else axes.set_ylim)(low / margin, high * margin)


def tick(value: float) -> str:
    """0.05, 20, 50k, 1e-07."""
    return tokens(value) if value >= 1e4 else f"{value:g}"


def token_axis(axis, values: Sequence[float]) -> None:
    """Powers of two or what was measured, written 512, 4k, 32k."""
    axes = axis.axes
    axes.set_xscale("log", base=2)
    ticks = sorted({float(value) for value in values})
    while len(ticks) > 6:
        ticks = ticks[1::2] if len(ticks) % 2 == 0 else ticks[::2]
    axis.set_ticks(ticks, [tokens(at) for at in ticks])
    axis.set_minor_locator(matplotlib.ticker.NullLocator())


def draw_cells(axes: Axes, values: np.ndarray, color: str = "blue") -> None:
    """A heat map of values (rows, columns) from 0 to 1, as opacity of one colour; NaN stays empty."""
    axes.grid(False)
    rows, columns = values.shape
    for row, column in zip(*np.nonzero(np.isfinite(values)), strict=True):
        alpha = float(np.round(np.clip(values[row, column], 0.0, 1.0), 3))
        cell = Rectangle((column - 0.46, row - 0.44), 0.92, 0.88, facecolor=LIGHT[color], alpha=alpha, linewidth=0)
        axes.add_patch(cell)
    axes.set(xlim=(-0.6, columns - 0.4), ylim=(rows - 0.4, -0.6))


def number(value: float | None, digits: int = 3) -> str:
    """Short enough for a table: 0.0123, 1.23, 1,234; a dash for what is not there."""
    if value is None or not isinstance(value, int | float):
        return "–"
    if not np.isfinite(value):
        return str(value)
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    if float(value).is_integer():
        return f"{int(value):,}"
    places = max(digits - 1 - int(np.floor(np.log10(abs(value)))), 0)
    text = f"{value:,.{min(places, 4)}f}"
    return text.rstrip("0").rstrip(".") if "." in text and abs(value) >= 1 else text


def tokens(count: float) -> str:
    """512, 1,536, 4k, 128k, 1.5M."""
    if count < 1e4 and count % 1024:
        return f"{count:,.4g}" if count < 1000 else f"{count:,.0f}"
    for size, letter in ((1024, "k"),) if count % 1024 == 0 else ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.4g}{letter}"
    return f"{count:.4g}"


def to_svg(figure: Figure, name: str, alt: str) -> str:
    """The figure for a page: the page's font and colours, ids of its own, an accessible name."""
    from markupsafe import escape

    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    for unwanted in (r"<metadata>.*?</metadata>", r"<style[^>]*>.*?</style>", r"<!--.*?-->", r"<defs>\s*</defs>"):
        svg = re.sub(unwanted, "", svg, flags=re.S)
    viewbox = re.search(r'viewBox="([^"]+)"', svg)[1]
    opening = f'<svg class="plot" viewBox="{viewbox}" role="img" aria-label="{escape(alt)}">'
    svg = opening + svg[svg.index(">", svg.index("<svg")) + 1 :]
    svg = re.sub(r"font-family: ?[^;\"<]*;? ?", "", svg)  # the page's own instead
    svg = re.sub(r"font: ?(?:\d+ )?([\d.]+)px [^;\"<]*", r"font-size: \1px", svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg.replace("url(#", f"url(#{name}-"))
    for color, code in LIGHT.items():
        svg = re.sub(rf"((?:fill|stroke): ?){code}\b", rf"\1var(--{color})", svg)
    return svg


def to_png(figure: Figure) -> bytes:
    """The figure in light colours."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="png", dpi=200, facecolor=LIGHT["paper"], bbox_inches="tight", pad_inches=0.12)
    return buffer.getvalue()
