"""The plan of a conversion: the hybrid's configuration, a rule for every tensor, and what it will cost."""

import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from .options import ConversionOptions, MixerOptions
from .placement.cache import CONTEXTS, cache_bytes
from .placement.placement import Decision, Placement, Undecided, window_in_words
from .teachers.teacher import Teacher, config_errors, declared_layer_types, hybrid_fields
from .weights.mapping import LayerMapping, fold_out_bias
from .weights.reader import BLOCK_BYTES, Checkpoint, TensorInfo
from .weights.rules import Rule, Source, Stack, canonical_sources, moved
from .weights.students import STUDENTS, layer_letters, mixer_shapes, tensor_shapes
from .weights.writer import human_bytes, output_dtype

EVENLY = "which {} keep their attention is decided by scores during the run; those shown are as many, evenly placed"
UNDECIDED: dict[Undecided, str] = {
    "layers": EVENLY.format("layers"),
    "heads": EVENLY.format("heads"),
    "windows": "how wide each layer's window is, is measured during the run; until then all have the mean width",
}
"""Note on each part of a placement that scores will decide."""


@dataclass(frozen=True)
class TeacherWeights:
    """A teacher whose tensors are found and named as in the hybrid with every layer kept; none of them is read yet."""

    teacher: Teacher
    checkpoint: Checkpoint
    fields: dict[str, Any]
    """Fields that every hybrid's configuration takes over from the teacher's."""
    config: PreTrainedConfig
    """Configuration of the hybrid with every layer kept as attention."""
    sources: dict[str, Source | Stack]
    """Source in the teacher of each tensor of that hybrid."""
    dropped: dict[str, str]
    """Tensors of the teacher that the hybrid does without, and why."""
    notes: tuple[str, ...] = ()
    """Notes on what the hybrid leaves out of the files beside the weights."""

    @classmethod
    def of(cls, teacher: Teacher) -> "TeacherWeights":
        """Read the headers of a teacher's weights and give every tensor its place."""
        checkpoint, layers = teacher.open_weights(), teacher.config.num_hidden_layers
        if layers > len(checkpoint.tensors):  # before anything is built
            raise ValueError(
                f"{teacher.name} says {layers} layers, and its weights have {len(checkpoint.tensors)} tensors."
            )
        embedding, head = "model.embed_tokens.weight", "lm_head.weight"
        with config_errors(f"The configuration of {teacher.name} makes no hybrid"):
            fields, layer_types = hybrid_fields(teacher.config, teacher.family)
        both = {embedding, head} <= set(checkpoint.tensors)
        if fields["tie_word_embeddings"] and both and not teacher.headers_only:
            # as transformers does, which believes the weights
            fields["tie_word_embeddings"] = checkpoint.same_values(embedding, head)
        with config_errors(f"The configuration of {teacher.name} makes no hybrid"):
            config = STUDENTS[teacher.family.student](**copy.deepcopy(fields), layer_types=layer_types)
        sources, dropped = canonical_sources(
            teacher.family, config.num_hidden_layers, checkpoint.tensors, tensor_shapes(config)
        )
        return cls(teacher, checkpoint, fields, config, sources, dropped)

    def windows(self, context: int) -> tuple[int, ...]:
        """Layers that have a window in the teacher which hides tokens within a context; they keep it."""
        width, kinds = self.config.sliding_window, self.config.layer_types
        return tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention" and width < context)

    @property
    def has_out_bias(self) -> bool:
        """True if the attention's output projection has a bias."""
        return "model.layers.0.self_attn.o_proj.bias" in self.sources

    def mixer_rules(self, config: PreTrainedConfig, layer: int, options: ConversionOptions) -> list[Rule]:
        """Make the rules for the tensors of the mixer that takes the place of a layer's attention.

        Args:
            config: the hybrid's configuration, with `layer` replaced.
        """
        prefix = f"model.layers.{layer}.mixer."
        shapes = {f"{prefix}{name}": shape for name, shape in mixer_shapes(config, layer).items()}
        mapping = LayerMapping(config, layer, self.sources, options.mixer.initial_decay, options.seed)
        rules = mapping.rules(shapes)
        hybrid = config.layer_types[layer] == "hybrid"
        if not hybrid and f"{prefix}out_proj.bias" not in shapes and "o_proj.bias" in mapping.attention:
            if self.teacher.family.student != "phimamba":
                raise ValueError(
                    "This teacher has a bias on o_proj; the mixer needs one on out_proj (out_bias: true)."
                )
            target = f"model.layers.{layer}.mlp.fc2.bias"
            rules.append(fold_out_bias(target, self.sources[target], mapping.attention["o_proj.bias"]))
        return rules


class Cost(NamedTuple):
    """Seconds, and bytes of memory of the whole process at its peak."""

    seconds: float
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """Decisions of a conversion, all made before a weight is read."""

    weights: TeacherWeights
    config: PreTrainedConfig
    """Configuration of the hybrid."""
    placement: Placement
    rules: list[Rule]
    """One per tensor of the hybrid, in the order in which they are written."""
    dtype: torch.dtype
    notes: tuple[str, ...] = ()
    """Notes on what a dry run cannot know, and on what of the teacher a state cannot have."""
    alignment_cost: Cost | None = None
    """Estimated cost of aligning on this machine, where there is an estimate."""

    @property
    def teacher(self) -> Teacher:
        """The teacher that is converted."""
        return self.weights.teacher

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
    def bytes_to_write(self) -> int:
        """Size of the hybrid's weights on disk."""
        return self.parameters_after * self.dtype.itemsize

    def summary(self) -> dict[str, Any]:
        """The plan as plain data, for `--dry-run --json`, the card and the console."""
        kinds = Counter(rule.kind for rule in self.rules)
        hybrid, widths = self.placement.hybrid, set(self.placement.windows.values())
        return {
            "teacher": self.teacher.name,
            "revision": self.teacher.revision,
            "teacher_family": self.teacher.family.model_type,
            "student_family": self.config.model_type,
            "mixer": self.config.mixer,
            "state": hybrid is not None and hybrid.state,
            "block": None if hybrid is None else hybrid.block,
            "rank": None if hybrid is None else self.config.hybrid_rank,
            "salient": None if hybrid is None else hybrid.salient,
            "window": None if hybrid is None else hybrid.window if len(widths) == 1 else self.placement.windows,
            "sinks": None if hybrid is None else hybrid.sinks,
            "attention_heads": {i: heads for i, heads in enumerate(self.config.hybrid_full_heads or ()) if heads},
            "layer_types": self.config.layer_types,
            "attention_layers": list(self.placement.attention_layers),
            "mixer_layers": list(self.placement.replaced_layers),
            "dtype": str(self.dtype).removeprefix("torch."),
            "tensors": {kind: kinds[kind] for kind in ("moved", "derived", "initialised")}
            | {"dropped": len(self.weights.dropped)},
            "derived": {rule.target: list(rule.sources) for rule in self.rules if rule.kind == "derived"},
            "initialised": [rule.target for rule in self.rules if rule.kind == "initialised"],
            "dropped": dict(self.weights.dropped),
            "parameters": {"teacher": self.parameters_before, "hybrid": self.parameters_after},
            "bytes_to_write": self.bytes_to_write,
            "state_bytes": cache_bytes(self.config, 0, self.dtype)[1],
            "expected_peak_memory_bytes": self.expected_peak_memory(),
            "expected_alignment": None if self.alignment_cost is None else self.alignment_cost._asdict(),
            "cache_bytes": {
                name: dict(zip(("teacher", "hybrid"), cache_bytes(self.config, length, self.dtype), strict=True))
                for name, length in CONTEXTS.items()
            },
            "notes": list(self.notes),
        }

    def expected_peak_memory(self) -> int:
        """Bytes above the interpreter's own: what reading takes, and a mixer's projections in float32."""
        derived = [4 * math.prod(rule.shape) for rule in self.rules if rule.kind == "derived"]
        return 16 * BLOCK_BYTES + self.weights.checkpoint.buffer_bytes() + 2 * max(derived, default=0)


def hybrid_config(weights: TeacherWeights, placement: Placement, options: ConversionOptions) -> PreTrainedConfig:
    """The hybrid's configuration."""
    hybrid, teacher_types = placement.hybrid, weights.config.layer_types
    windows = placement.windows.keys() & set(weights.windows(options.placement.context))
    assert not windows, f"layers that have a window in the teacher keep it: {windows}"
    for layer, width in placement.windows.items():
        if teacher_types[layer] == "sliding_attention" and width > weights.config.sliding_window:
            raise ValueError(
                f"A window of {width} tokens is wider than the teacher's sliding_window of "
                f"{weights.config.sliding_window}; make it narrower."
            )
    stateless = hybrid is not None and not hybrid.state
    mixer = MixerOptions(kind="none") if stateless else options.mixer
    fields = copy.deepcopy(weights.fields) | mixer_fields(weights.config, mixer)
    fields |= placement.config_fields(teacher_types)
    if hybrid is not None and hybrid.state:
        # the slower half tells of far keys what all do (docs/guide/normalised_read.md)
        fields["hybrid_state_planes"] = max(weights.config.rotary_planes // 2, 1)
    return type(weights.config)(**fields, conversion={"teacher_layer_types": list(teacher_types)})


def mixer_fields(teacher: PreTrainedConfig, mixer: MixerOptions) -> dict[str, Any]:
    """The mixer's part of the hybrid's configuration.

    Args:
        teacher: the configuration of the hybrid with every layer kept as attention.
    """
    head_dim, heads = teacher.head_dim, teacher.num_attention_heads
    default_state = min(16, head_dim) if mixer.kind == "mamba1" else head_dim
    d_state = default_state if mixer.d_state is None else mixer.d_state
    # mamba1 cuts a head into pieces of N channels, and a piece of a rotated head is not a rotated piece
    can_rotate = d_state >= head_dim
    rotary = can_rotate if mixer.rotary is None else mixer.rotary
    if rotary and not can_rotate:
        raise ValueError(
            f"d_state {d_state} is smaller than the head dimension {head_dim}, and rotary embedding needs all of it; "
            "say rotary: false."
        )
    if teacher.qk_norm and mixer.kind != "mamba1" and d_state != head_dim:
        raise ValueError(f"This teacher normalises queries and keys per head, so d_state must be {head_dim}.")
    return {
        "mixer": mixer.kind,
        "mixer_num_heads": heads,
        "mixer_num_kv_heads": heads if mixer.expand_kv_heads else teacher.num_key_value_heads,
        "mixer_head_dim": head_dim,
        "mixer_d_state": d_state,
        "mixer_activation": mixer.activation or "identity",
        "mixer_gate_bias": mixer.gate_bias,
        "mixer_shared_state": mixer.shared_state,
        "mixer_norm": mixer.norm or ("head" if mixer.kind == "mamba2" else "none"),
        "mixer_rotary": rotary,
        "mixer_qk_norm": teacher.qk_norm,
        "mixer_decay_bias": mixer.decay_bias and mixer.kind == "discrete_mamba2",
        "mixer_in_bias": teacher.attention_bias and mixer.kind == "mamba1",
        "mixer_out_bias": mixer.out_bias and mixer.kind != "none",
    }


def make_plan(weights: TeacherWeights, decision: Decision, options: ConversionOptions) -> Plan:
    """Decide everything, reading no weights.

    Raises:
        ValueError: the options, the configuration and the tensors do not fit together.
    """
    placement = decision.placement
    config = hybrid_config(weights, placement, options)
    replaced = tuple(f"model.layers.{layer}.self_attn." for layer in placement.replaced_layers)
    kept = {name: source for name, source in weights.sources.items() if not name.startswith(replaced)}
    rules = {name: moved(name, source) for name, source in kept.items()}
    for layer in placement.replaced_layers:
        rules |= {rule.target: rule for rule in weights.mixer_rules(config, layer, options)}
    used = {name for rule in rules.values() for name in rule.sources}
    unused = set(weights.checkpoint.tensors) - used - set(weights.dropped)
    assert not unused, f"teacher tensors without a place: {sorted(unused)}"
    return Plan(
        weights=weights,
        config=config,
        placement=placement,
        rules=_in_reading_order(rules, weights.checkpoint.tensors),
        dtype=output_dtype(options.output.dtype, weights.checkpoint.tensors),
        notes=(
            *weights.notes,
            *(UNDECIDED[part] for part in decision.undecided),
            *decision.notes,
            *_wide_windows(weights, placement, options),
            *_lost(config),
            *_far(placement, options),
        ),
    )


def minutes(seconds: float) -> str:
    """225.0 -> "3 min 45 s"."""
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


def describe_seconds(plan: Plan) -> str:
    """Describe the time that each stage of a finished conversion took."""
    stages = plan.config.conversion["seconds"]
    parts = ", ".join(f"{stage} {minutes(seconds)}" for stage, seconds in stages.items())
    return f"took {minutes(sum(stages.values()))}: {parts}"


def plan_printer(say: Callable[[str], None]) -> Callable[[Plan], None]:
    """Describes a plan, and where it is described again only the lines that are new."""
    said: set[str] = set()

    def news(plan: Plan) -> None:
        lines = [line for line in describe(plan).splitlines() if line not in said]
        said.update(lines)
        if lines:
            say("\n".join(lines))

    return news


def _wide_windows(weights: TeacherWeights, placement: Placement, options: ConversionOptions) -> list[str]:
    """Notes on windows of the teacher that hide nothing, so that their layers are converted like all others."""
    config = weights.teacher.config
    declared = {i for i, kind in enumerate(declared_layer_types(config)) if kind == "sliding_attention"}
    width, replaced = getattr(config, "sliding_window", None), declared & set(placement.replaced_layers)
    if not replaced:
        return []
    if width >= config.max_position_embeddings:
        return [
            f"sliding_window {width} hides nothing within max_position_embeddings "
            f"{config.max_position_embeddings}, so it counts as none"
        ]
    context = options.placement.context
    return [
        f"sliding_window {width} hides nothing within {context} tokens, so its layers are converted like all others; "
        f"beyond {width} tokens they remember more than the teacher's (a --context above {width} keeps its windows)"
    ]


def _lost(config: PreTrainedConfig) -> list[str]:
    """Notes on parts of the teacher's attention that have no counterpart in a state."""
    if config.attn_logit_softcapping is None or not {"hybrid", "linear_attention"} & set(config.layer_types):
        return []
    kept = f"attn_logit_softcapping {config.attn_logit_softcapping} holds where attention stays, windows included"
    return [kept if config.mixer == "none" else f"{kept}; a state has no scores to cap"]


def _far(placement: Placement, options: ConversionOptions) -> list[str]:
    """Why a hybrid will be far from its teacher, where that follows from the options."""
    hybrid, mixer = placement.hybrid, options.mixer
    if not placement.replaced_layers or mixer.kind == "none":
        return []
    if options.alignment.method == "none":
        return ["nothing is fitted (--align none): this is a start for training, not yet a language model"]
    if hybrid is None and not mixer.export_ready and options.alignment.method == "closed-form":
        return ["mixers alone are far from the teacher until they are trained; --window 32 is much closer"]
    return []


def _in_reading_order(rules: dict[str, Rule], teacher: dict[str, TensorInfo]) -> list[Rule]:
    """The teacher's own order, so that files are read front to back; what has no source stays with its module."""
    position = {name: index for index, name in enumerate(teacher)}
    keys, last = {}, 0
    for target, rule in rules.items():
        last = min((position[name] for name in rule.sources), default=last)
        keys[target] = last
    return sorted(rules.values(), key=lambda rule: keys[rule.target])


def describe(plan: Plan) -> str:
    """The plan in a few lines for the console."""
    s = plan.summary()
    layers = layer_letters(s["layer_types"])
    kept = f", {s['sinks']} sinks and {s['salient']} salient tokens" if s["salient"] else f" and {s['sinks']} sinks"
    state = " and a state" if s["state"] else ""
    window = f"a window of {window_in_words(s['window'])}{kept}{state}" if s["window"] else ""
    replacement = window or (s["mixer"] if s["mixer_layers"] else "every layer kept")
    heads = " ".join(f"{layer}:{','.join(map(str, of))}" for layer, of in s["attention_heads"].items())
    counts = ", ".join(f"{count} {kind}" for kind, count in s["tensors"].items())
    kind = "hybrid" if s["window"] else "mixer"
    lines = [
        f"{s['teacher']} ({s['teacher_family']}) -> {s['student_family']} with {replacement}, {s['dtype']}",
        f"layers      {layers}  ({len(s['attention_layers'])} attention, {len(s['mixer_layers'])} {kind})",
        f"tensors     {counts}",
        f"parameters  {s['parameters']['teacher']:,} -> {s['parameters']['hybrid']:,}",
        f"to write    {human_bytes(s['bytes_to_write'])}; peak memory of writing about "
        f"{human_bytes(s['expected_peak_memory_bytes'])} above the interpreter's own",
    ]
    if (cost := plan.alignment_cost) is not None:
        lines.append(f"to align    about {minutes(cost.seconds)} here, {human_bytes(cost.nbytes)} of memory")
    for context, size in s["cache_bytes"].items():
        share = size["hybrid"] / size["teacher"]
        lines.append(
            f"cache {context:>4}  {human_bytes(size['teacher'])} -> {human_bytes(size['hybrid'])} per sequence "
            f"({share:.1%})"
        )
    if s["mixer"] != "none" and s["mixer_layers"]:
        lines.append(f"state       {human_bytes(s['state_bytes'])} of that for the states, at any length")
    if heads:
        lines.append(f"full heads  {heads}  (layer:heads that keep full attention)")
    for reason, count in Counter(s["dropped"].values()).items():
        names = [name for name, why in s["dropped"].items() if why == reason]
        lines.append(f"dropped     {names[0]}{f' and {count - 1} more' if count > 1 else ''}: {reason}")
    lines += [f"note        {note}" for note in plan.notes]
    return "\n".join(lines)
