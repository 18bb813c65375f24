"""Sections on what was converted: layers and heads with their scores, matrices, distances over stages."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from .report_data import Run, RunError, parts_of
from .report_drawing import Line, number, short
from .report_figures import cells_figure, image_png, layer_figure, lines_figure, on_paper, strip
from .report_page import Matrices, Picture, Section, Strip, Table, plain, slug

LETTERS = {"linear_attention": "M", "hybrid": "H"}


def source(run: Run, kind: str) -> str:
    """File, command and, where the file says so, commit."""
    part = run.parts[kind]
    told = part.data if isinstance(part.data, dict) else {}
    words = [str(part.path), plain(told.get("command") or part.kind.command)]
    return " · ".join(words + ([f"commit {told['commit']}"] if told.get("commit") else []))


def labelled(run: Run, runs: list[Any], name: str = "") -> str:
    """The name of a curve, with its run's where there are several."""
    return ", ".join(word for word in (run.name if len(runs) > 1 or not name else "", name) if word)


def named(name: str, runs: list[Any], run: Run) -> str:
    """The name of a file and id."""
    return slug(name, run.name) if len(runs) > 1 else name


def first_round(scores: dict[str, dict]) -> dict[int, dict]:
    """Scores of each layer replaced alone."""
    scores = scores.get("scores", scores)
    alone = {key.removeprefix("|"): value for key, value in scores.items() if key.removeprefix("|").isdecimal()}
    return {int(layer): alone[layer] for layer in sorted(alone, key=int)}


def layer_section(runs: list[Run]) -> Section:
    """What replacing each layer costs, which layers keep attention, and what the placement is worth."""
    section = Section("layers", "Layers", "What replacing one layer's attention costs, and which layers keep theirs.")
    scored = [(run, "layer_scores", data) for run, data in parts_of(runs, "layer_scores")]
    scored += [
        (run, "alignment", data["layer_scores"]) for run, data in parts_of(runs, "alignment") if "layer_scores" in data
    ]
    for run, kind, data in scored:
        scores = first_round(data)
        placements = data.get("placements", []) if "scores" in data else []
        choices = [
            (f"{place['placement'].removeprefix('kl+recall, ')}, {100 * place['attention']:g} %",
             kept_in(place, scores))
            for place in placements
            if "round" in place["placement"] or (place["placement"] == "uniform" and place["attention"] == 0.5)
        ]  # fmt: skip
        if not choices:
            hybrids = [run] if kind == "alignment" else runs
            choices = [(of.name, attention_layers(config)) for of, config in parts_of(hybrids, "hybrid")][:4]
        section.pictures.append(_layer_picture(run, kind, scores, choices, scored))
        if placements:
            section.pictures += placement_pictures(run, placements, data.get("teacher", {}), scored)
    return section


def _layer_picture(run: Run, kind: str, scores: dict[int, dict], choices: list, scored: list[Any]) -> Picture:
    layers, kl, recall = list(scores), *([score[what] for score in scores.values()] for what in ("kl", "recall"))
    worst, worst_recall = (_listed([layers[i] for i in np.argsort(values)[::-1][:3]]) for values in (kl, recall))
    rows = [
        [str(layer), number(score["kl"]), number(score["recall"])]
        + ["attention" if layer in kept else "mixer" for _, kept in choices]
        for layer, score in scores.items()
    ]
    return Picture(
        named("layers", scored, run), f"Cost by layer{of_run(run, scored)}", layer_figure(layers, kl, recall, choices),
        f"Bars of KL and recall loss for {len(layers)} layers; KL is highest for layers {worst}, recall loss for "
        f"{worst_recall}.",
        f"Each layer replaced alone, after a quick fit. KL to the teacher is highest for {worst}; what serves recall "
        f"sits in {worst_recall}." + (" Below, filled: the layers that keep their attention." if choices else ""),
        source(run, kind), Table(["layer", "KL", "recall lost", *(name for name, _ in choices)], rows),
    )  # fmt: skip


def kept_in(place: dict, layers: Iterable[int]) -> list[int]:
    """Layers that keep attention in a placement."""
    return [layer for layer in layers if layer not in place["replaced"]]


def attention_layers(config: dict) -> list[int]:
    """Layers of a hybrid's configuration that are attention."""
    return [i for i, kind in enumerate(config["layer_types"]) if kind not in LETTERS]


def placement_pictures(run: Run, placements: list[dict], teacher: dict, runs: list[Any]) -> list[Picture]:
    """KL and copying against the share of attention, a curve per way to choose layers."""
    ways = list(dict.fromkeys(place["placement"] for place in placements))
    pictures = []
    for what, title, unit in (
        ("kl", "What the choice of layers is worth", "KL, nats per token"),
        ("copy_accuracy", "The same for copying", "share of tokens copied right"),
    ):
        lines = [_by_share(way, [p for p in placements if p["placement"] == way], what) for way in ways]
        lines = [line for line in lines if line.x]
        if not lines:
            continue
        told = f" The teacher copies {number(teacher[what])}." if what in teacher and what != "kl" else ""
        pictures.append(
            Picture(
                named(f"placement-{what.split('_')[0]}", runs, run), f"{title}{of_run(run, runs)}",
                lines_figure(lines, "share of layers that keep attention, %", unit, log_y=what == "kl", reverse=True,
                             from_zero=True, ticks=lines[0].x, left=what != "kl"),
                f"{unit} against the share of attention for {', '.join(ways)}.",
                f"Hybrids with the same quick fits, layers chosen in different ways.{told}",
                source(run, "layer_scores"), by_share_table(lines, unit),
            )
        )  # fmt: skip
    return pictures


def _by_share(name: str, rows: list[dict], what: str) -> Line:
    rows = sorted((row for row in rows if row.get(what) is not None), key=lambda row: -row["attention"])
    return Line(name, [100 * row["attention"] for row in rows], [row[what] for row in rows])


def by_share_table(lines: list[Line], unit: str) -> Table:
    """A row per curve, a column per share."""
    shares = sorted({x for line in lines for x in line.x}, reverse=True)
    rows = []
    for line in lines:
        spread = line.spread if line.spread is not None else [None] * len(line.x)
        cells = {x: (y, s) for x, y, s in zip(line.x, line.y, spread, strict=True)}
        rows.append([line.name, *(interval(*cells[x]) if x in cells else "–" for x in shares)])
    return Table([unit, *(f"{share:g} %" for share in shares)], rows)


def interval(value: float, half: float | None) -> str:
    """0.293 ± 0.035."""
    return number(value) if half is None else f"{number(value)} ± {number(half, 2)}"


def head_section(runs: list[Run]) -> Section:
    """How much each head serves recall, and what keeping the best brings."""
    section = Section(
        "heads", "Heads", "Which heads look back at what has to be copied, and what keeping them brings."
    )
    scored = parts_of(runs, "head_scores")
    for run, data in scored:
        values = np.array(data["scores"], dtype=float).T
        best = ", ".join(f"{layer}:{kv}" for layer, kv in data["ranked"][:6])
        heads, layers = ([str(i) for i in range(n)] for n in values.shape)
        rows = [[layer, *(number(v) for v in values[:, i])] for i, layer in enumerate(layers)]
        section.pictures.append(
            Picture(
                named("heads", scored, run), f"Attention on the token to copy{of_run(run, scored)}",
                cells_figure(values, heads, layers, "layer", "query head"),
                f"Heat map of {len(layers)} layers by {len(heads)} query heads; the largest score is "
                f"{number(values.max())}; the best key/value heads are {best}.",
                f"Darker is more, up to {number(values.max())}. The best key/value heads, layer:head, are {best}.",
                source(run, "head_scores"), Table(["layer", *heads], rows),
            )
        )  # fmt: skip
        kept = data["kept"]
        line = Line("", [row["bytes"] / 1e6 for row in kept], [row["copy"] for row in kept])
        section.pictures.append(
            Picture(
                named("heads-kept", scored, run), f"Copying by heads kept{of_run(run, scored)}",
                lines_figure([line], "MB of keys and values at 4k tokens, per sequence",
                             "share of tokens copied right", log_x=True, from_zero=True),
                f"Copying rises from {number(kept[0]['copy'])} with {kept[0]['kept']} heads to "
                f"{number(kept[-1]['copy'])} with {kept[-1]['kept']}.",
                f"Every layer sees a window of {data.get('window', '?')} tokens and 4 sinks; the best heads keep full "
                f"attention: {', '.join(str(row['kept']) for row in kept)} of them from left to right. The teacher "
                f"copies {number(data['teacher']['copy'])} with {number(data['teacher_bytes'] / 1e6)} MB.",
                source(run, "head_scores"),
                Table(["heads kept", "copied", "loss, nats", "MB"],
                      [[str(r["kept"]), number(r["copy"]), number(r["loss"]), number(r["bytes"] / 1e6)]
                       for r in kept]),
            )
        )  # fmt: skip
    return section


def matrix_section(runs: list[Run]) -> Section:
    """The teacher's attention beside each stage's unrolled mixer, and how far apart they are."""
    section = Section(
        "matrices", "Attention, unrolled",
        "The teacher's attention matrix beside the matrix that each stage's mixer amounts to, head by head.",
    )  # fmt: skip
    measured = parts_of(runs, "matrices")
    for run, data in measured:
        section.matrices.append(matricesof_run(run, data, named("matrices", measured, run)))
        for which, title, told in (
            ("beyond_first", "Distance by layer, without the first token", "without the first token's column, on "
             "which heads spend what they do not need, and after the best scalar per head"),
            ("scaled", "Distance by layer, at the best scale", "after the best scalar per head: out_proj takes it up"),
            ("relative", "Distance by layer, as it is", "as the mixer stands"),
        ):  # fmt: skip
            lines = []
            for stage in data["stages"]:
                means = {int(layer): float(np.mean(row)) for layer, row in stage[which].items()}
                lines.append(Line(stage["name"], list(means), list(means.values())))
            section.pictures.append(
                Picture(
                    named(f"matrix-distance-{which}", measured, run), f"{title}{of_run(run, measured)}",
                    lines_figure(lines, "layer", "‖M − A‖ ⁄ ‖A‖, mean over heads", log_y=which == "relative",
                                 from_zero=True),
                    f"Relative distance by layer for {', '.join(line.name for line in lines)}; on average "
                    + ", ".join(f"{line.name} {number(float(np.mean(line.y)))}" for line in lines) + ".",
                    f"Frobenius distance of the mixer's matrix M to the attention A it replaced, {told}; mean over "
                    f"{data['heads']} heads and {data['sequences']} sequences of {data['length']} tokens. 1 is as far "
                    "as a matrix of zeros.",
                    source(run, "matrices"), by_layer_table(lines),
                )
            )  # fmt: skip
    return section


def by_layer_table(lines: list[Line]) -> Table:
    """A row per layer, a column per curve, the mean below."""
    layers = sorted({x for line in lines for x in line.x})
    cells = [dict(zip(line.x, line.y, strict=True)) for line in lines]
    rows = [[str(layer), *(number(of.get(layer)) for of in cells)] for layer in layers]
    mean = ["mean", *(number(float(np.mean(line.y))) for line in lines)]
    return Table(["layer", *(line.name for line in lines)], [*rows, mean])


def matricesof_run(run: Run, data: dict[str, Any], name: str) -> Matrices:
    """The strips, from matrices.npz beside matrices.json.

    Raises:
        RunError: the file is not there, or not what goes with the other.
    """
    path = run.parts["matrices"].path.with_suffix(".npz")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            teacher = arrays["teacher"]
            pictures = [arrays[f"stage_{i}"] for i in range(len(data["stages"]))]
    except (OSError, ValueError, KeyError, EOFError, SyntaxError) as error:
        raise RunError(f"{path} does not go with matrices.json beside it ({error}); run mixer_matrices.") from error
    names = [short(stage["name"], 22) for stage in data["stages"]]
    layers, sheets = {}, {}
    for row, layer in enumerate(data["layers"]):
        strips, images = [], []
        for head in range(data["heads"]):
            tiles, told = [teacher[row, head]], ["teacher"]
            distances = ["distance"]
            for stage, of_stage in zip(data["stages"], pictures, strict=True):
                present = layer in stage["layers"]
                tiles.append(of_stage[stage["layers"].index(layer), head] if present else None)
                away = stage["beyond_first"][str(layer)][head] if present else None
                distances.append(number(away))
                told.append(f"{plain(stage['name'])} at distance {number(away)}" if present else "not replaced")
            images.append(strip(tiles))
            strips.append(
                Strip(head, image_png(images[-1]), f"Layer {layer}, head {head}: {', '.join(told)}.", distances)
            )
        space = np.zeros((max(images[0].shape[0] // 8, 1), *images[0].shape[1:]))
        sheet = [part for image in images for part in (image, space)][:-1]
        sheets[layer] = image_png(on_paper(np.concatenate(sheet)))
        layers[layer] = strips
    caption = (
        f"Rows are queries, columns keys, {data['length']} tokens of {plain(data['text'])}; a pixel is the share of "
        "attention that its tokens get. Orange is positive, blue negative, opacity the root of the size. Mixers are "
        "shown at the best scale per head without the first column, on which heads spend what they do not need; below "
        "each, the relative Frobenius distance to the teacher's without it (1 is a matrix of zeros)."
    )
    return Matrices(name, ["teacher", *names], layers, sheets, caption, source(run, "matrices"))


def distance_section(runs: list[Run]) -> Section:
    """Each layer's held-out error over the stages, as alignment.json tells it."""
    section = Section(
        "distances", "Distance over stages",
        "How far each replaced layer's output is from the attention's, on held-out text, stage by stage.",
    )  # fmt: skip
    aligned = parts_of(runs, "alignment")
    for run, data in aligned:
        lines = stage_lines(data)
        if not lines:
            continue
        means = ", ".join(f"{line.name} {number(float(np.mean(line.y)))}" for line in lines)
        section.pictures.append(
            Picture(
                named("distance", aligned, run), f"Error of the attention's output{of_run(run, aligned)}",
                lines_figure(lines, "layer", "‖mixer(u) − y‖² ⁄ ‖y‖²", log_y=True),
                f"Relative squared error by layer; means: {means}.",
                f"Relative squared error on sequences that no fit has seen, of {plain(data.get('text', '?'))}. "
                f"Means: {means}.",
                source(run, "alignment"), by_layer_table(lines),
            )
        )  # fmt: skip
    return section


def stage_lines(data: dict[str, Any]) -> list[Line]:
    """A curve over layers per stage that has an error by layer in the same measure."""
    lines = []
    fits = {int(layer): fit for layer, fit in (data.get("held_out_error") or {}).items()}
    for name, told in (("mapped", "mapped"), ("solved", "closed form, solved"), ("refined", "closed form, refined")):
        values = {layer: fit[name] for layer, fit in fits.items() if fit.get(name) is not None}
        if values and not (name == "refined" and lines and list(values.values()) == lines[-1].y):
            lines.append(Line(told, list(values), list(values.values())))
    for number_, stages in enumerate(data.get("stages") or []):
        by_layer = (stages.get("hidden_state_alignment") or {}).get("layers") or {}
        if by_layer and (stages["hidden_state_alignment"].get("settings") or {}).get("target", "mixer") == "mixer":
            again = "" if number_ == 0 or len(data["stages"]) == 1 else f", run {number_ + 1}"
            layers = [int(layer) for layer in by_layer]
            lines.append(Line(f"after stage 2{again}", layers, [pair[1] for pair in by_layer.values()]))
            if not fits and number_ == 0:
                lines.insert(0, Line("before stage 2", layers, [pair[0] for pair in by_layer.values()]))
    return lines


def of_run(run: Run, runs: list[Any]) -> str:
    """The end of a title, where several runs have such a figure."""
    return f", {run.name}" if len(runs) > 1 else ""


def _listed(values: list[int]) -> str:
    return f"{', '.join(map(str, values[:-1]))} and {values[-1]}" if len(values) > 1 else str(values[0])
