"""The top of the page: what each hybrid is, and the figures worth seeing first."""

import json
from typing import Any

from convert.inspection import inspect_model
from convert.plan import human_bytes

from .report_data import COMMANDS, Run, parts_of
from .report_drawing import number, tokens
from .report_page import Headline, Model, plain
from .report_quality import half_width

CONTEXT = "32k"
# what a report can show, and the parts any of which it is made from
WANTED = {
    "what the model is: layers, sizes, provenance": ("hybrid",),
    "what replacing each layer costs": ("layer_scores",),
    "which heads serve recall": ("head_scores",),
    "attention beside each stage's unrolled mixer": ("matrices",),
    "error of each layer over the stages of alignment": ("alignment",),
    "loss and KL against tokens": ("training", "logs"),
    "KL against the share of attention kept": ("ladder",),
    "KL against bytes of state": ("window_ladder",),
    "likelihood, recall, tasks, generation and speed beside the teacher": ("evaluation",),
    "speed and memory against targets": ("bench",),
    "the whole pipeline, step by step": ("pipeline",),
    "how near structured matrices come to attention": ("approximation",),
}


def models(runs: list[Run]) -> list[Model]:
    """A description of every hybrid."""
    return [_model(run) for run, _ in parts_of(runs, "hybrid")]


def _model(run: Run) -> Model:
    told = inspect_model(str(run.folder))
    attention, total = len(told["attention_layers"]), len(told["layer_types"])
    origin = told["provenance"]
    mixer = told["mixer"] or {"kind": "no"}
    description = (
        f"{plain(origin.get('teacher', 'A teacher that is not recorded'))} with {total - attention} of its {total} "
        f"attention layers replaced by a {plain(mixer['kind'])} mixer."
    )
    cache, align = told["cache_bytes"][CONTEXT], origin.get("align")
    facts = [
        ("alignment", {"none": "none: mapped only", None: "not recorded"}.get(align, align)),
        ("parameters", f"{told['parameters']:,} in {told['dtype']}"),
        (f"cache at {CONTEXT} tokens",
         f"{human_bytes(cache['this_model'])} of {human_bytes(cache['all_attention'])} with attention throughout"),
    ]  # fmt: skip
    if told["mixer"]:
        facts.append(("mixer", f"{mixer['num_heads']} heads of {mixer['head_dim']}, state {mixer['d_state']}"))
    if "window" in told:
        facts.append(("window", f"{told['window']['tokens']} tokens and {told['window']['sinks']} sinks"))
    if told["alignment"] and "text" in told["alignment"]:
        facts.append(("fitted on", f"{number(told['alignment'].get('tokens'))} tokens of "
                                   f"{plain(told['alignment']['text'])}"))  # fmt: skip
    for stage in run.get("training") or []:
        facts.append((plain(stage["stage"]), f"{number(stage.get('tokens'))} tokens of {plain(stage.get('data'))}"))
    if origin.get("versions"):
        facts.append(("made with", ", ".join(f"{k} {v}" for k, v in origin["versions"].items())))
    return Model(run.name, description, told["layer_map"], [(name, plain(value)) for name, value in facts])


def headlines(runs: list[Run]) -> list[Headline]:
    """At most six figures: of the first evaluation and hybrid, else of ladders and benchmarks."""
    found = []
    for run, data in parts_of(runs, "evaluation")[:1]:
        found += _of_evaluation(run, data)
    for run, _ in parts_of(runs, "hybrid")[:1]:
        cache = inspect_model(str(run.folder))["cache_bytes"][CONTEXT]
        share = cache["this_model"] / cache["all_attention"]
        found.append(Headline(f"{share:.0%}", f"of the teacher's cache at {CONTEXT} tokens",
                              f"{human_bytes(cache['this_model'])}, {run.name}"))  # fmt: skip
        beside = run.folder.with_name(f"{run.folder.name}.json")
        if not parts_of(runs, "evaluation") and beside.is_file():
            found += _of_demo(run, beside)
    for run, rows in parts_of(runs, "ladder")[:1]:
        for share in sorted({row["attention"] for row in rows if row.get("tokens")}, reverse=True)[:1]:
            best = min((r for r in rows if r["attention"] == share and r.get("tokens")), key=lambda r: r["kl"])
            found.append(Headline(f"{best['kl']:.3f}", f"nats of KL at {share:.0%} attention, best fitted",
                                  f"{best['row']}, {number(best['tokens'])} tokens, {run.name}"))  # fmt: skip
    for _, data in parts_of(runs, "matrices")[:1]:
        last = data["stages"][-1]
        values = [x for row in last["beyond_first"].values() for x in row]
        found.append(Headline(f"{sum(values) / len(values):.2f}", "relative distance of the mixers' matrices",
                              f"after {last['name']}, first column left out, 1 is a matrix of zeros"))  # fmt: skip
    for run, data in parts_of(runs, "bench")[:1]:
        if data.get("targets"):
            met = sum(bool(t["met"]) for t in data["targets"])
            found.append(Headline(f"{met} of {len(data['targets'])}", "bench targets met", run.name))
        elif data.get("scan"):
            longest = max(data["scan"], key=lambda row: row["length"])
            found.append(Headline(f"{longest['sdpa_over_scan']:.0f}×", "the scan's speed over attention's",
                                  f"{tokens(longest['length'])} tokens, one thread, {run.name}"))  # fmt: skip
    return [Headline(plain(h.value), plain(h.what), plain(h.note)) for h in found[:6]]


def _of_evaluation(run: Run, data: dict[str, Any]) -> list[Headline]:
    found = []
    for text in (data.get("text") or [])[:1]:
        kl = text.get("kl") or {}
        if kl.get("mean") is not None:
            half = half_width(kl.get("interval"))
            found.append(Headline(number(kl["mean"]), "nats a token of KL to the teacher",
                                  f"± {number(half, 2)}, {text['name']}, {run.name}"))  # fmt: skip
        if text.get("perplexity_ratio") is not None:
            both = f"{number(text.get('perplexity'))} over {number(text.get('teacher_perplexity'))}"
            found.append(Headline(f"{text['perplexity_ratio']:.3g}×", "the teacher's perplexity", both))
        if text.get("agreement") is not None:
            found.append(Headline(f"{text['agreement']:.0%}", "of likeliest tokens are the teacher's", text["name"]))
    decoding = {
        (s["which"], s["batch"], s["context"]): s.get("decode_tokens_per_second") for s in data.get("speed") or []
    }
    both = [
        key[1:]
        for key, value in decoding.items()
        if key[0] == "model" and value and decoding.get(("teacher", *key[1:]))
    ]
    if both:
        at = max(both, key=lambda key: (key[1], -key[0]))
        ratio = decoding["model", *at] / decoding["teacher", *at]
        found.append(
            Headline(f"{ratio:.2f}×", "the teacher's decoding speed", f"batch {at[0]}, {tokens(at[1])} tokens")
        )
    return found


def _of_demo(run: Run, path) -> list[Headline]:
    """What `make demo` wrote beside the hybrid."""
    try:
        told = json.loads(path.read_text())
        kl, perplexity = told["kl_nats_per_token"], told["perplexity"]
        return [
            Headline(number(kl), "nats a token of KL to the teacher",
                     f"{told['held_out_tokens']} held-out tokens, {path.name}"),
            Headline(f"{perplexity['hybrid'] / perplexity['teacher']:.3g}×", "the teacher's perplexity", path.name),
        ]  # fmt: skip
    except (ValueError, KeyError, TypeError):
        return []


def missing(runs: list[Run]) -> list[tuple[str, str]]:
    """What is not shown, and the command that writes it."""
    present = {kind for run in runs for kind in run.parts}
    return [
        (what, COMMANDS[kinds[0]])
        for what, kinds in WANTED.items()
        if not present & set(kinds)
    ]  # fmt: skip
