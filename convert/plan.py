"""The plan of a conversion: the hybrid's configuration, a rule for every tensor, and what it will cost."""

import math
import typing
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from modeling_llamba.model.config_values import RECURRENT

from .hybrids.shapes import layer_letters, tensor_shapes
from .io.reader import BLOCK_BYTES, TensorInfo
from .io.rules import Fill, Kind, Rule, Source, rule_of
from .io.writer import human_bytes
from .layout.cache import break_even, cache_bytes, contexts, rounded_teacher_bytes
from .layout.config import hybrid_config
from .layout.placement import Decision, Placement, Undecided, window_in_words
from .resolve import Resolved
from .teachers.teacher import Teacher, declared_layer_types
from .teachers.weights import TeacherWeights

UNDECIDED: dict[Undecided, str] = {
    "layers": "the layers with attention shown are placeholders; the run chooses them by scores",
    "heads": "the run chooses the heads that keep full attention by scores",
    "windows": "the width of each layer's window is chosen during the run; the mean width is shown here for all",
    "planes": "the part of a key that enters the states is chosen during the run, and with it heads and widths",
    "bits": "the bits of full attention are chosen during the run, and with them numbers of heads or widths",
}
"""Note for each part of a placement that scores choose during a run."""


@dataclass(frozen=True)
class Plan:
    """Decisions of a conversion. A run makes a plan from headers first, and again after the scores and the fit."""

    weights: TeacherWeights
    resolved: Resolved
    config: PreTrainedConfig
    """Configuration of the hybrid."""
    placement: Placement
    rules: list[Rule]
    """One per tensor of the hybrid, in the order in which they are written."""
    notes: tuple[str, ...] = ()
    """Notes for the user: on values that only a run can choose, and on features of the teacher that a state lacks."""
    alignment_bytes: int | None = None
    """Estimated memory of aligning, of the whole process or of the device, where there is an estimate."""

    @property
    def teacher(self) -> Teacher:
        """The teacher that is converted."""
        return self.weights.teacher

    @property
    def dtype(self) -> torch.dtype:
        """The type that weights are written in."""
        return self.resolved.dtype

    @property
    def parameters_after(self) -> int:
        """Number of parameters in the hybrid."""
        return sum(math.prod(rule.shape) for rule in self.rules)

    @property
    def parameters_before(self) -> int:
        """Number of parameters in the teacher that are used."""
        used = {name for rule in self.rules for name in rule.sources}
        return sum(math.prod(self.weights.checkpoint.tensors[name].shape) for name in used)

    @property
    def more_weights(self) -> int:
        """Bytes by which the hybrid's weights exceed the teacher's."""
        return (self.parameters_after - self.parameters_before) * self.dtype.itemsize

    @property
    def bytes_to_write(self) -> int:
        """Size of the hybrid's weights on disk."""
        return sum(rule.nbytes(self.dtype) for rule in self.rules)

    def summary(self) -> dict[str, Any]:
        """The plan as plain data, for `--dry-run --json`, the card and the console."""
        kinds = Counter(rule.kind for rule in self.rules)
        hybrid = self.placement.hybrid
        states = [i for i, kind in enumerate(self.config.layer_types) if kind == RECURRENT]
        of_hybrid: dict[str, Any] = dict.fromkeys(("block", "rank", "salient", "window", "sinks"))
        if hybrid is not None:
            of_hybrid = {name: getattr(hybrid, name) for name in of_hybrid} | {"rank": self.config.hybrid_rank}
        if len(set(self.placement.windows.values())) > 1:
            of_hybrid["window"] = self.placement.windows
        return of_hybrid | {
            "teacher": self.teacher.name,
            "revision": self.teacher.revision,
            "teacher_family": self.teacher.family.model_type,
            "student_family": self.config.model_type,
            "mixer": self.config.mixer if "linear_attention" in self.config.layer_types else None,
            "state": hybrid is not None and hybrid.state,
            "attention_heads": {i: heads for i, heads in enumerate(self.config.hybrid_full_heads or ()) if heads},
            "layer_types": self.config.layer_types,
            "attention_layers": [i for i in self.placement.attention_layers if i not in states],
            "mixer_layers": list(self.placement.replaced_layers),
            "state_layers": states,
            "dtype": str(self.dtype).removeprefix("torch."),
            "tensors": {kind: kinds[kind] for kind in typing.get_args(Kind)} | {"dropped": len(self.weights.dropped)},
            "derived": {rule.target: list(rule.sources) for rule in self.rules if rule.kind == "derived"},
            "initialised": [rule.target for rule in self.rules if rule.kind == "initialised"],
            "dropped": dict(self.weights.dropped),
            "parameters": {"teacher": self.parameters_before, "hybrid": self.parameters_after},
            "bytes_to_write": self.bytes_to_write,
            "state_bytes": cache_bytes(self.config, 0)[1],
            "bits": self.placement.bits.config_fields(),
            "expected_peak_memory_bytes": self.expected_peak_memory(),
            "expected_alignment_bytes": self.alignment_bytes,
            "cache_bytes": {
                name: dict(zip(("teacher", "hybrid"), cache_bytes(self.config, length), strict=True))
                | {"teacher_int8": rounded_teacher_bytes(self.config, length, 8)}
                for name, length in contexts(self.config).items()
            },
            "break_even": {f"{bits} bits": break_even(self.config, self.more_weights, bits) for bits in (16, 8)},
            "decided": self.decided(),
            "notes": list(self.notes),
        }

    def decided(self) -> dict[str, dict[str, Any]]:
        """Return the values that the user did not give, each with its reason, as plain data."""
        found = self.resolved.decided()
        if "bits" in found:
            found["bits"]["value"] = str(self.placement.bits)
        return found

    def expected_peak_memory(self) -> int:
        """Bytes above the interpreter's own: buffers for reading, and a mixer's projections in float32."""
        derived = [4 * math.prod(rule.shape) for rule in self.rules if rule.kind == "derived"]
        return 16 * BLOCK_BYTES + self.weights.checkpoint.buffer_bytes() + 2 * max(derived, default=0)


def make_plan(weights: TeacherWeights, decision: Decision, resolved: Resolved) -> Plan:
    """Build the configuration of the hybrid and a rule for each of its tensors, without reading weights.

    Raises:
        ValueError: the options, the configuration and the tensors do not fit together.
    """
    placement = decision.placement
    windows = placement.windows.keys() & set(resolved.bounded)
    assert not windows, f"layers that have a window in the teacher keep it: {windows}"
    config = hybrid_config(weights, placement, resolved.mixer)
    replaced = tuple(f"model.layers.{layer}.self_attn." for layer in placement.replaced_layers)
    kept = {name: source for name, source in weights.sources_for(config).items() if not name.startswith(replaced)}
    rules = {name: rule_of(name, source) for name, source in kept.items()}
    for layer in placement.replaced_layers:
        rules |= {
            rule.target: rule for rule in weights.mixer_rules(config, layer, resolved.initial_decay, resolved.seed)
        }
    for name, shape in tensor_shapes(config).items():
        if name.endswith("self_attn.key_offset"):
            rules[name] = rule_of(name, Source((Fill(shape[0]),), shape))
    if resolved.output.dtype == "auto":
        rules = {name: _in_own_type(rule, weights.checkpoint.tensors, resolved.dtype) for name, rule in rules.items()}
    used = {name for rule in rules.values() for name in rule.sources}
    unused = set(weights.checkpoint.tensors) - used - set(weights.dropped)
    assert not unused, f"teacher tensors without a place: {sorted(unused)}"
    return Plan(
        weights=weights,
        resolved=resolved,
        config=config,
        placement=placement,
        rules=_in_reading_order(rules, weights.checkpoint.tensors),
        notes=(
            *weights.notes,
            *(UNDECIDED[part] for part in decision.undecided),
            *decision.notes,
            *_wide_windows(weights, placement, resolved.context),
            *_lost(config),
            *_far(placement, resolved),
        ),
    )


def _in_own_type(rule: Rule, teacher: dict[str, TensorInfo], dtype: torch.dtype) -> Rule:
    """The rule of a tensor, written as the teacher stores it where it is only moved or scaled.

    Qwen3.5's states have decays and norms in float32 among weights in bfloat16.
    """
    types = {teacher[name].dtype for name in rule.sources}
    if rule.kind not in ("moved", "scaled") or len(types) > 1 or dtype in types:
        return rule
    return replace(rule, dtype=types.pop())


def minutes(seconds: float) -> str:
    """225.0 -> "3 min 45 s"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s"


def describe_seconds(plan: Plan) -> str:
    """Describe the time that each stage of a finished conversion took."""
    stages = plan.config.conversion["seconds"]
    parts = ", ".join(f"{stage} {minutes(seconds)}" for stage, seconds in stages.items())
    return f"took {minutes(sum(stages.values()))}: {parts}"


def plan_printer(say: Callable[[str], None]) -> Callable[[Plan], None]:
    """Return a function that prints a plan; later calls print only the lines that have changed."""
    said: set[str] = set()

    def news(plan: Plan) -> None:
        # scores and the fit change only a few lines of a plan
        lines = [line for line in describe(plan).splitlines() if line not in said]
        said.update(lines)
        if lines:
            say("\n".join(lines))

    return news


def _wide_windows(weights: TeacherWeights, placement: Placement, context: int) -> list[str]:
    """Return notes on windows of the teacher that hide no token; their layers are converted like all others."""
    config = weights.teacher.config
    declared = {i for i, kind in enumerate(declared_layer_types(config)) if kind == "sliding_attention"}
    width = getattr(config, "sliding_window", None)
    if width is not None and not weights.teacher.family.windows:
        return [f"sliding_window {width} is no part of a {config.model_type} model, so it counts as none"]
    replaced = declared & set(placement.replaced_layers)
    if not replaced:
        return []
    if width >= config.max_position_embeddings:
        return [
            f"sliding_window {width} hides nothing within max_position_embeddings "
            f"{config.max_position_embeddings}, so it counts as none"
        ]
    return [
        f"sliding_window {width} hides nothing within {context} tokens, so its layers are converted like all others; "
        f"beyond {width} tokens they remember more than the teacher's (a --context above {width} keeps its windows)"
    ]


def _lost(config: PreTrainedConfig) -> list[str]:
    """Notes on parts of the teacher's attention that have no counterpart in a state."""
    if config.attn_logit_softcapping is None or not {"hybrid", "linear_attention"} & set(config.layer_types):
        return []
    kept = f"attn_logit_softcapping {config.attn_logit_softcapping} holds where attention stays, windows included"
    if config.mixer == "none":
        return [kept]
    return [f"{kept}; a state has no scores to cap"]


def _far(placement: Placement, resolved: Resolved) -> list[str]:
    """Why a hybrid will be far from its teacher, where that follows from the options."""
    method = resolved.alignment.method
    if not placement.replaced_layers or resolved.mixer["mixer"] == "none":
        return []
    if method == "none" and resolved.has_windows:
        return [
            "nothing is fitted (--align none): the readout of states assumes Gaussian keys and values, so outputs are "
            "far from the teacher's"
        ]
    if method == "none":
        return ["nothing is fitted (--align none): this is a start for training, not yet a language model"]
    if placement.hybrid is None and not resolved.export_ready and method == "closed-form":
        return ["mixers alone are far from the teacher until they are trained; --window 32 is much closer"]
    return []


def _in_reading_order(rules: dict[str, Rule], teacher: dict[str, TensorInfo]) -> list[Rule]:
    """Sort rules by the position of their sources in the teacher's files, so that files are read front to back.

    A rule without a source follows the rule before it.
    """
    # a dictionary of tensors is in the order of the files
    position = {name: index for index, name in enumerate(teacher)}
    keys = {}
    last = 0
    for target, rule in rules.items():
        last = min((position[name] for name in rule.sources), default=last)
        keys[target] = last
    return sorted(rules.values(), key=lambda rule: keys[rule.target])


def describe(plan: Plan) -> str:
    """The plan in a few lines for the console."""
    s = plan.summary()
    layers = layer_letters(s["layer_types"])
    replacement = _replacement_in_words(s)
    heads = " ".join(f"{layer}:{','.join(map(str, of))}" for layer, of in s["attention_heads"].items())
    counts = ", ".join(f"{count} {kind}" for kind, count in s["tensors"].items())
    kinds = {"attention": "attention_layers", "mixer": "mixer_layers"}
    if s["window"]:
        kinds = {"attention": "attention_layers", "hybrid": "mixer_layers"}
    if s["state_layers"]:
        kinds["with the teacher's own state"] = "state_layers"
    layers += f"  ({', '.join(f'{len(s[of])} {kind}' for kind, of in kinds.items())})"
    lines = [
        f"{s['teacher']} ({s['teacher_family']}) -> {s['student_family']} with {replacement}, {s['dtype']}",
        f"layers      {layers}",
        f"tensors     {counts}",
        f"parameters  {s['parameters']['teacher']:,} -> {s['parameters']['hybrid']:,}",
        f"to write    {human_bytes(s['bytes_to_write'])}; peak memory of writing about "
        f"{human_bytes(s['expected_peak_memory_bytes'])} on top of Python's own",
    ]
    if plan.alignment_bytes is not None:
        lines.append(f"to align    about {human_bytes(plan.alignment_bytes)} of memory")
    for context, size in s["cache_bytes"].items():
        share = size["hybrid"] / size["teacher"]
        lines.append(
            f"cache {context:>4}  {human_bytes(size['teacher'])} -> {human_bytes(size['hybrid'])} per sequence "
            f"({share:.1%} of bfloat16's, {size['hybrid'] / size['teacher_int8']:.1%} of int8's)"
        )
    if s["mixer"] or s["state"]:
        lines.append(f"states      {human_bytes(s['state_bytes'])} included in each cache above")
    if s["mixer_layers"] or plan.placement.bits.rounds:
        lines.append(f"bits        {plan.placement.bits}")
    if s["mixer_layers"]:
        lines.append(f"memory      {break_even_in_words(s['break_even'])}")
    if heads and UNDECIDED["heads"] in plan.notes:
        number = sum(map(len, s["attention_heads"].values()))
        lines.append(f"full heads  {number} query heads, which the run chooses")
    elif heads:
        lines.append(f"full heads  {heads}  (layer:query heads that keep full attention)")
    lines += [f"dropped     {text}" for text in dropped_in_words(plan)]
    lines += [f"note        {note}" for note in plan.notes]
    return "\n".join(lines)


def _replacement_in_words(s: dict[str, Any]) -> str:
    if not s["mixer_layers"]:
        return "every layer kept"
    if not s["window"]:
        return s["mixer"]
    text = f"a window of {window_in_words(s['window'])}"
    if s["salient"]:
        text += f", {s['sinks']} sinks and {s['salient']} salient tokens"
    else:
        text += f" and {s['sinks']} sinks"
    if s["state"]:
        text += " and a state"
    return text


def dropped_in_words(plan: Plan) -> list[str]:
    """Name the teacher's tensors that the hybrid does not have, by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in plan.weights.dropped.items():
        by_reason.setdefault(reason, []).append(name)
    lines = []
    for reason, (first, *others) in by_reason.items():
        if others:
            first += f" and {len(others)} more"
        lines.append(f"{first}: {reason}")
    return lines


def break_even_in_words(break_even: dict[str, int | None]) -> str:
    """Describe from how many tokens on a hybrid takes less memory than its teacher, weights included."""
    parts = []
    whose = "its cache in"
    for cache, tokens in break_even.items():
        when = "at no length"
        if tokens is not None:
            when = f"from {tokens:,} tokens on"
        parts.append(f"{when} ({whose} {cache})")
        whose = "in"
    return f"weights and cache together are smaller than the teacher's {', '.join(parts)}"


def describe_decided(plan: Plan) -> str:
    """Describe the plan and each value that the user did not give, with the reason, for a dry run."""
    lines = []
    for name, found in plan.decided().items():
        if found["value"] is not None:  # some follow from the placement
            name += f" {found['value']}"
        lines.append(f"decided     {name}: {found['reason']}")
    return "\n".join([describe(plan), *lines])
