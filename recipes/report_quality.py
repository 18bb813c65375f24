"""Sections on how good and how fast: ladders, evaluations, benchmarks, the pipeline, the matrix study."""

import json
import re
from pathlib import Path
from typing import Any

from .report_data import HYBRIDS, Run, parts_of
from .report_drawing import Line, number, tokens
from .report_figures import dots_figure, lines_figure
from .report_page import Picture, Section, Table, slug
from .report_sections import attention_layers, by_share_table, interval, labelled, named, of_run, source

ROWS = {"copy": "mapped, nothing fitted"}
KL = "KL to the teacher, nats per token"


def half_width(interval_: Any) -> float | None:
    """Half of an interval given as that half or as its two ends."""
    if isinstance(interval_, list | tuple) and len(interval_) == 2:
        return (interval_[1] - interval_[0]) / 2
    return interval_ if isinstance(interval_, int | float) else None


def quality_section(runs: list[Run]) -> Section:
    """KL and copying against the share of attention, tokens and bytes."""
    section = Section(
        "quality", "Quality against attention and memory",
        "What is left of the teacher when fewer layers keep their attention, and what a byte of state buys.",
    )  # fmt: skip
    ladders = parts_of(runs, "ladder")
    for run, rows in ladders:
        section.pictures += ladder_pictures(run, rows, ladders)
    if parts_of(runs, "window_ladder"):
        section.pictures += window_pictures(runs)
    section.pictures += evaluated_pictures(runs)
    return section


def ladder_pictures(run: Run, rows: list[dict], ladders: list[Any]) -> list[Picture]:
    """By share of attention, by tokens, and by position."""
    names = list(dict.fromkeys(row["row"] for row in rows))
    by_name = {ROWS.get(name, name): [row for row in rows if row["row"] == name] for name in names}
    pictures, where = [], source(run, "ladder")
    for key, title, unit in (("kl", "KL by share of attention", KL), ("copy", "Copying by share of attention",
                             "share of 150 random tokens copied right")):  # fmt: skip
        lines = []
        for name, own in by_name.items():
            own = sorted((row for row in own if key in row), key=lambda row: -row["attention"])
            spread = [row.get("kl_95") for row in own] if key == "kl" else None
            line = Line(name, [100 * row["attention"] for row in own], [row[key] for row in own], spread)
            line.dashed = name.startswith("window")
            line.color = "grey" if line.dashed else None
            lines += [line] if own else []
        curves = [line for line in lines if len(line.x) > 1] or lines
        if not curves:
            continue
        shares = sorted({x for line in curves for x in line.x}, reverse=True)
        best = min(lines, key=lambda line: line.y[-1]) if key == "kl" else max(lines, key=lambda line: max(line.y))
        pictures.append(
            Picture(
                named(f"share-{key}", ladders, run), f"{title}{of_run(run, ladders)}",
                lines_figure(curves, "share of layers that keep attention, %", unit, log_y=key == "kl", reverse=True,
                             from_zero=True, ticks=shares, left=key == "copy"),
                f"{unit} for {', '.join(line.name for line in curves)} at {', '.join(f'{s:g} %' for s in shares)} of "
                f"attention; {best.name} is best, {number(best.y[0])} at {best.x[0]:g} %.",
                ("Whiskers are 95 % intervals. " if key == "kl" else "")
                + "The same layers and text in every row; the scale is logarithmic." * (key == "kl")
                + "Copying falls off where the layers that serve it are replaced." * (key == "copy"),
                where, by_share_table(lines, "KL" if key == "kl" else "copied"),
            )
        )  # fmt: skip
    share = max({row["attention"] for row in rows}, key=lambda s: sum(row["attention"] == s for row in rows))
    here = sorted((row for row in rows if row["attention"] == share), key=lambda row: row["kl"])
    pictures += [_dots_at(run, here, share, ladders, where)]
    trained = [row for row in here if row.get("tokens")]
    if len(trained) > 1:
        pictures.append(_by_tokens(run, trained, share, ladders, where))
    if all("kl_by_position" in row for row in here):
        pictures.append(_by_position(run, here, share, ladders, where))
    return pictures


def _dots_at(run: Run, rows: list[dict], share: float, ladders: list[Any], where: str) -> Picture:
    names = [ROWS.get(row["row"], row["row"]) for row in rows]
    places = list(range(len(rows)))
    line = Line("", places, [row["kl"] for row in rows], [row.get("kl_95", 0) for row in rows], "blue")
    header = ["", "KL", "perplexity ⁄ teacher's", "top-1 agreement", "copied", "tokens", "seconds"]
    cells = [
        [name, interval(row["kl"], row.get("kl_95")), *(number(row.get(key)) for key in
         ("perplexity_ratio", "top1", "copy", "tokens", "seconds"))]
        for name, row in zip(names, rows, strict=True)
    ]  # fmt: skip
    return Picture(
        named("kl-at-share", ladders, run), f"Every row at {100 * share:g} % attention{of_run(run, ladders)}",
        dots_figure(names, [line], KL, log=True),
        f"KL of {len(rows)} methods from {names[0]}, {number(rows[0]['kl'])}, to {names[-1]}, "
        f"{number(rows[-1]['kl'])}.",
        f"From the nearest to the teacher, {names[0]} at {number(rows[0]['kl'])} nats, to the farthest, {names[-1]} "
        f"at {number(rows[-1]['kl'])}. Whiskers are 95 % intervals.",
        where, Table(header, cells),
    )  # fmt: skip


def _by_tokens(run: Run, rows: list[dict], share: float, ladders: list[Any], where: str) -> Picture:
    rows = sorted(rows, key=lambda row: row["kl"])
    lines = [
        Line(row["row"], [row["tokens"]], [row["kl"]], [row.get("kl_95", 0)]) for row in rows[:9]
    ]  # fmt: skip
    return Picture(
        named("kl-by-tokens", ladders, run), f"KL by tokens, at {100 * share:g} % attention{of_run(run, ladders)}",
        lines_figure(lines, "tokens that passed through a fit or a training step", KL, log_x=True, log_y=True),
        "KL against tokens: "
        + "; ".join(f"{row['row']} {number(row['kl'])} at {number(row['tokens'])}" for row in rows) + ".",
        "Left is cheaper, below is nearer to the teacher.",
        where, Table(["", "tokens", "KL"], [[r["row"], number(r["tokens"]), interval(r["kl"], r.get("kl_95"))]
                                            for r in rows]),
    )  # fmt: skip


def _by_position(run: Run, rows: list[dict], share: float, ladders: list[Any], where: str) -> Picture:
    rows = rows[:6]
    spans = list(rows[0]["kl_by_position"])
    middles = [sum(map(int, span.split("-"))) / 2 for span in spans]
    lines = [
        Line(ROWS.get(row["row"], row["row"]), middles, list(row["kl_by_position"].values()),
             color="grey" if row["row"].startswith("window") else None, dashed=row["row"].startswith("window"))
        for row in rows
    ]  # fmt: skip
    return Picture(
        named("kl-by-position", ladders, run), f"KL by position, at {100 * share:g} % attention{of_run(run, ladders)}",
        lines_figure(lines, "position in the text, tokens", KL, context=True, from_zero=True),
        "KL from the first to the last positions: " + "; ".join(
            f"{line.name} {number(line.y[0])} to {number(line.y[-1])}" for line in lines) + ".",
        f"Means over {', '.join(spans)}, drawn at their middles; the {len(rows)} nearest rows.",
        where, Table(["", *spans], [[line.name, *map(number, line.y)] for line in lines]),
    )  # fmt: skip


def window_pictures(runs: list[Run]) -> list[Picture]:
    """KL against the bytes a replaced layer keeps, a picture per number of layers replaced."""
    ladders = parts_of(runs, "window_ladder")
    pictures = []
    records = [(run, row) for run, rows in ladders for row in rows]
    for count in sorted({len(row["layers"]) for _, row in records}):
        groups: dict[str, list[dict]] = {}
        for run, row in records:
            if len(row["layers"]) == count:
                alone = re.fullmatch(r"window \d+ \+ \d+ sinks", row["row"])
                groups.setdefault("window alone" if alone else labelled(run, ladders, row["row"]), []).append(row)
        lines = []
        for name, rows in groups.items():
            rows = sorted({row["bytes"]: row for row in rows}.values(), key=lambda row: row["bytes"])
            spread = [row.get("kl_95", 0) for row in rows]
            lines.append(Line(name, [row["bytes"] / 1e3 for row in rows], [row["kl"] for row in rows], spread))
        table = [
            [f"{name}: {row['row']}", number(row["bytes"] / 1e3), interval(row["kl"], row.get("kl_95")),
             number(row.get("copy"))]
            for name, rows in groups.items() for row in rows
        ]  # fmt: skip
        pictures.append(
            Picture(
                f"bytes-{count}", f"KL by bytes of state, {count} layers replaced",
                lines_figure(lines, "kB a replaced layer keeps for a sequence", KL, log_x=True, log_y=True),
                f"KL against kB with {count} layers replaced: " + "; ".join(
                    f"{line.name} {number(min(line.y))}" for line in lines) + " at best.",
                "A window of attention alone needs no fit; beside a mixer it leaves the mixer what lies beyond it.",
                " — ".join(source(run, "window_ladder") for run, _ in ladders),
                Table(["", "kB", "KL", "copied"], table),
            )
        )  # fmt: skip
    return pictures


def configof_run(run: Run) -> dict[str, Any] | None:
    """Of the hybrid that an evaluation is about: beside it, or where it says the model lies."""
    config = run.get("hybrid")
    if config is None and "evaluation" in run.parts:
        path = Path(str(run.get("evaluation")["model"])) / "config.json"
        try:
            config = json.loads(path.read_text()) if path.is_file() else None
        except (OSError, ValueError):
            return None
    return config if isinstance(config, dict) and config.get("model_type") in HYBRIDS else None


def evaluated_pictures(runs: list[Run]) -> list[Picture]:
    """KL of several evaluated hybrids against attention and against their cache."""
    points = []
    for run, data in parts_of(runs, "evaluation"):
        config, texts = configof_run(run), data.get("text") or []
        if config and texts and texts[0].get("kl"):
            share = 100 * len(attention_layers(config)) / len(config["layer_types"])
            caches = [s for s in data.get("speed") or [] if s["which"] == "model" and s.get("cache_bytes")]
            largest = max(caches, key=lambda s: s["context"] * s["batch"], default=None)
            kl = texts[0]["kl"]
            points.append((run, share, largest, kl["mean"], half_width(kl.get("interval"))))
    if len(points) < 2:
        return []
    where = " — ".join(source(run, "evaluation") for run, *_ in points)
    table = Table(["hybrid", "attention, %", "cache", "KL"], [
        [run.name, number(share), number(s["cache_bytes"] / 1e6) + " MB" if s else "–", interval(kl, half)]
        for run, share, s, kl, half in points
    ])  # fmt: skip
    told = "; ".join(f"{run.name} {number(kl)} at {share:.3g} %" for run, share, _, kl, _ in points)
    lines = [Line(run.name, [share], [kl], [half or 0.0]) for run, share, _, kl, half in points]
    pictures = [
        Picture("evaluated-share", "The hybrids by share of attention",
                lines_figure(lines, "share of layers that keep attention, %", KL, reverse=True, from_zero=True),
                f"KL of each hybrid: {told}.", f"{told}. Whiskers are 95 % intervals.", where, table)
    ]  # fmt: skip
    sized = [(run, s, kl, half) for run, _, s, kl, half in points if s]
    if len(sized) > 1 and len({s["context"] for _, s, _, _ in sized}) == 1:
        context = tokens(sized[0][1]["context"])
        lines = [Line(run.name, [s["cache_bytes"] / 1e6], [kl], [half or 0.0]) for run, s, kl, half in sized]
        pictures.append(
            Picture("evaluated-bytes", "The hybrids by bytes of cache",
                    lines_figure(lines, f"MB of cache at {context} tokens", KL, log_x=True, from_zero=True),
                    f"KL of each hybrid against its cache at {context} tokens.",
                    "Keys, values and recurrent states; below and left is better.", where, table)
        )  # fmt: skip
    return pictures


def bench_section(runs: list[Run]) -> Section:
    """What `make bench` measured, and whether its targets are met."""
    section = Section("bench", "Bench", "Ratios that the project holds itself to, measured side by side.")
    measured = parts_of(runs, "bench")
    for run, data in measured:
        where = source(run, "bench")
        if data.get("targets"):
            rows = [
                [str(t["name"]), number(t["value"]), str(t["target"]) if isinstance(t["target"], str)
                 else number(t["target"]), "met" if t["met"] else "not met"]
                for t in data["targets"]
            ]  # fmt: skip
            section.tables.append(Table(["target", "measured", "target", ""], rows, "", where))
        scans = data.get("scan") or []
        heads = [row["heads"] for row in scans]
        common = max(set(heads), key=heads.count) if heads else None
        rows = [row for row in scans if row["heads"] == common]
        if len(rows) > 1:
            lengths = [row["length"] for row in rows]
            lines = [Line("SSD scan", lengths, [row["scan_ms"] for row in rows]),
                     Line("causal attention (SDPA)", lengths, [row["sdpa_ms"] for row in rows])]  # fmt: skip
            ratios = ", ".join(f"{row['sdpa_over_scan']:.1f} at {tokens(row['length'])}" for row in rows)
            section.pictures.append(
                Picture(named("scan", measured, run), f"Scan against attention{of_run(run, measured)}",
                        lines_figure(lines, "tokens", f"milliseconds, {common} heads, one thread", context=True,
                                     log_y=True),
                        f"Milliseconds against length; attention takes {ratios} times as long as the scan.",
                        f"Attention takes {ratios} tokens times as long as the scan.", where,
                        Table(["tokens", "heads", "scan, ms", "SDPA, ms", "ratio", "error vs float64"],
                              [[number(r["length"]), str(r["heads"]), number(r["scan_ms"]), number(r["sdpa_ms"]),
                                number(r["sdpa_over_scan"]), number(r["relative_error"])] for r in scans]))
            )  # fmt: skip
        conversion = data.get("conversion")
        if conversion:
            rows = [["conversion over a plain copy", number(conversion["convert_over_copy"])],
                    ["peak memory over the largest shard", number(conversion["peak_over_largest_shard"])],
                    ["seconds", number(conversion["convert_seconds"])]]  # fmt: skip
            title = f"converting {number(conversion['bytes'] / 1e9)} GB in {conversion['shards']} shards"
            section.tables.append(Table([title, "measured"], rows, "", where))
    return section


def pipeline_section(runs: list[Run]) -> Section:
    """KL after every step of `make pipeline`, and what the pulled model answered."""
    section = Section("pipeline", "Pipeline", "From the teacher to a model pulled from a Hub, step by step.")
    for run, data in parts_of(runs, "pipeline"):
        where = source(run, "pipeline")
        columns = [("KL on text", "kl"), ("perplexity", "perplexity"), ("KL on answers", "kl_on_answers"),
                   ("reward accuracy", "reward_accuracy"), ("margin, nats", "margin")]  # fmt: skip
        for part in ("steps", "losses"):
            steps = data.get(part) or []
            if not steps:
                continue
            rows = [[row["name"], *(number(row.get(key)) for _, key in columns)] for row in steps]
            table = Table(["after", *(name for name, _ in columns)], rows)
            students = [row for row in steps if row["name"] != "teacher"]
            places = list(range(len(students)))
            lines = [Line("text", places, [r["kl"] for r in students], color="blue"),
                     Line("answers", places, [r["kl_on_answers"] for r in students], color="red")]  # fmt: skip
            section.pictures.append(
                Picture(slug("pipeline", part, run.name), {"steps": "After each step", "losses": "By loss"}[part],
                        dots_figure([row["name"] for row in students], lines, KL),
                        f"KL on text and answers: {'; '.join(r['name'] + ' ' + number(r['kl']) for r in students)}.",
                        "On held-out web text and on the teacher's held-out answers."
                        + (f" Asked “{data['pulled']['question']}”, the pulled model says “{data['pulled']['answer']}”"
                           if part == "steps" else ""), where, table)
            )  # fmt: skip
    return section


def study_section(runs: list[Run]) -> Section:
    """How near structured matrices come to attention, and what the mixers are worth inside a model."""
    section = Section("study", "Matrices that stand in for attention", "How near each kind of matrix can come.")
    studies = parts_of(runs, "approximation")
    labels = {"low_rank": "LR", "ssd": "SSD", "ssm": "SSM", "lower_bound": "lower bound"}
    for run, data in studies:
        lines = []
        for name, values in (data["distance"] | {"lower_bound": data.get("lower_bound") or {}}).items():
            if isinstance(values, dict) and values:
                dashed = name == "lower_bound"
                sizes = [int(n) for n in values]
                lines.append(Line(labels.get(name, name), sizes, list(values.values()), dashed=dashed,
                                  color="grey" if dashed else None))  # fmt: skip
        section.pictures.append(
            Picture(named("approximation", studies, run), f"Distance by state size{of_run(run, studies)}",
                    lines_figure(lines, "state size N", "Frobenius distance", log_x=True, log_y=True),
                    "Distance to attention by state size: " + "; ".join(
                        f"{line.name} {number(line.y[-1])} at {line.x[-1]}" for line in lines) + ".",
                    f"Means over {data.get('num_matrices', len(data['matrices']))} matrices of "
                    f"{data.get('tokens', '?')} tokens, whose norm is {number(data['norm'])} on average; a Toeplitz "
                    f"matrix comes to {number(data['distance'].get('toeplitz'))}.", source(run, "approximation"),
                    Table(["", *(f"N = {n}" for n in lines[0].x)],
                          [[line.name, *map(number, line.y)] for line in lines]))
        )  # fmt: skip
    for run, data in parts_of(runs, "swap"):
        rows = list(data["rows"].items())
        line = Line("", list(range(len(rows))), [row["kl"] for _, row in rows], [r.get("kl_95", 0) for _, r in rows])
        cells = [[name, interval(r["kl"], r.get("kl_95")), *(number(r[k]) for k in ("error", "perplexity", "copy"))]
                 for name, r in rows]  # fmt: skip
        section.pictures.append(
            Picture(slug("swap", run.name), "Mixers in the same layers",
                    dots_figure([name.replace("_", " ") for name, _ in rows], [line], KL),
                    "KL of each kind of mixer: " + "; ".join(f"{n} {number(r['kl'])}" for n, r in rows) + ".",
                    f"Layers {', '.join(map(str, data['layers']))} replaced by each kind, fitted alike.",
                    source(run, "swap"), Table(["mixer, after", "KL", "error", "perplexity", "copied"], cells))
        )  # fmt: skip
    return section
