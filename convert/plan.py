"""The plan of a conversion: the student's configuration, a rule for every tensor, and what it will cost."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from .config import ConversionConfig
from .placement.cache import CONTEXTS, cache_bytes
from .placement.heads import count_heads, is_number, named_heads, query_heads
from .placement.presets import parse_attention_layers, pattern_attention_layers, uniform_attention_layers
from .teachers import TeacherFamily
from .teachers.teacher import Teacher, hybrid_fields
from .weights.mapping import LayerMapping, fold_out_bias
from .weights.reader import BLOCK_BYTES, Checkpoint, TensorInfo
from .weights.rules import Rule, canonical_sources, moved
from .weights.students import MIXER_LAYERS, STUDENTS, layer_letters, tensor_shapes
from .weights.writer import human_bytes, output_dtype


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before a weight is read."""

    teacher: Teacher
    config: PreTrainedConfig
    """The student's."""
    rules: list[Rule]
    """One per tensor of the student, in the order they are written."""
    dropped: dict[str, str]
    dtype: torch.dtype
    parameters_before: int
    read_buffer_bytes: int
    budget: dict[str, Any] | None = None
    """What a budget of cache allowed, and which choice was taken."""
    notes: tuple[str, ...] = ()
    """What a dry run cannot know."""

    @property
    def parameters_after(self) -> int:
        """Of the student."""
        return sum(math.prod(rule.shape) for rule in self.rules)

    def summary(self) -> dict[str, Any]:
        """The plan as plain data, for `--dry-run --json`, the card and the console."""
        kinds = Counter(rule.kind for rule in self.rules)
        layers = self.config.layer_types
        return {
            "teacher": self.teacher.name,
            "revision": self.teacher.revision,
            "teacher_family": self.teacher.family.model_type,
            "student_family": self.config.model_type,
            "mixer": self.config.mixer,
            "window": self.config.hybrid_window,
            "sinks": self.config.hybrid_sinks if self.config.hybrid_window else None,
            "attention_heads": {i: heads for i, heads in enumerate(self.config.hybrid_full_heads or ()) if heads},
            "layer_types": layers,
            "attention_layers": [i for i, kind in enumerate(layers) if kind not in MIXER_LAYERS],
            "mixer_layers": [i for i, kind in enumerate(layers) if kind in MIXER_LAYERS],
            "dtype": str(self.dtype).removeprefix("torch."),
            "tensors": {kind: kinds[kind] for kind in ("moved", "derived", "initialised")}
            | {"dropped": len(self.dropped)},
            "derived": {rule.target: list(rule.sources) for rule in self.rules if rule.kind == "derived"},
            "initialised": [rule.target for rule in self.rules if rule.kind == "initialised"],
            "dropped": dict(self.dropped),
            "parameters": {"teacher": self.parameters_before, "hybrid": self.parameters_after},
            "bytes_to_write": sum(math.prod(rule.shape) for rule in self.rules) * self.dtype.itemsize,
            "state_bytes": cache_bytes(self.config, 0, self.dtype)[1],
            "expected_peak_memory_bytes": self.expected_peak_memory(),
            "cache_bytes": {
                name: dict(zip(("teacher", "hybrid"), cache_bytes(self.config, length, self.dtype), strict=True))
                for name, length in CONTEXTS.items()
            },
            "notes": list(self.notes),
        } | ({} if self.budget is None else {"budget": self.budget})

    def expected_peak_memory(self) -> int:
        """Bytes above the interpreter's own: what reading takes, and a mixer's projections in float32."""
        derived = [4 * math.prod(rule.shape) for rule in self.rules if rule.kind == "derived"]
        return 16 * BLOCK_BYTES + self.read_buffer_bytes + 2 * max(derived, default=0)


def choose_attention_layers(options: ConversionConfig, num_layers: int) -> tuple[int, ...]:
    """The layers that stay attention, by whichever option names them."""
    if options.attention_layers is not None:
        return parse_attention_layers(num_layers, options.attention_layers)
    if options.layer_pattern is not None:
        return pattern_attention_layers(num_layers, options.layer_pattern)
    ratio = 0.5 if options.attention_ratio is None else options.attention_ratio
    return uniform_attention_layers(num_layers, ratio)


def attention_budget(options: ConversionConfig, num_layers: int) -> int:
    """How many layers stay attention when scores choose them: as many as would by even placement."""
    return len(choose_attention_layers(options, num_layers))


def student_config(teacher: Teacher, options: ConversionConfig) -> PreTrainedConfig:
    """The hybrid's configuration.

    Raises:
        ValueError: an option that this teacher or mixer cannot have.
    """
    config, family = teacher.config, teacher.family
    fields, teacher_types = hybrid_fields(config, family)
    if "sliding_window" in fields and options.window is not None and options.window > config.sliding_window:
        raise ValueError(f"window {options.window} is larger than the teacher's own, {config.sliding_window}.")
    kept = choose_attention_layers(options, config.num_hidden_layers)
    fields["layer_types"] = [kind if i in kept else replacement_type(options) for i, kind in enumerate(teacher_types)]
    config_class = STUDENTS[family.student][0]
    has_bias = fields.get("attention_bias", family.student == "phimamba")
    fields |= mixer_fields(options, fields, has_bias)
    fields["hybrid_full_heads"] = full_heads(options, fields, teacher_types)
    return config_class(**fields, conversion={"teacher_layer_types": teacher_types})


def full_heads(options: ConversionConfig, fields: dict[str, Any], teacher_types: list[str]) -> list[list[int]] | None:
    """Query heads with full attention, for each layer.

    Where they are only counted, the first ones stand for those that will be chosen: their bytes are the same. A named
    head whose layer keeps all its attention is kept with it.

    Raises:
        ValueError: a layer or head that there is not, more than there are, or one that sees a window in the teacher.
    """
    if options.attention_heads is None:
        return None
    kinds, heads = fields["layer_types"], fields["num_attention_heads"]
    if "sliding_attention" in teacher_types:
        raise ValueError("attention_heads would see everything where this teacher's own see a window; leave them out.")
    replaced = [i for i, kind in enumerate(kinds) if kind == "hybrid"]
    kv_heads = fields["num_key_value_heads"] or heads
    if is_number(options.attention_heads):
        count = count_heads(options.attention_heads, len(kinds) * kv_heads)
        pairs = [(layer, kv) for layer in replaced for kv in range(kv_heads)]
        if count > len(pairs):
            raise ValueError(
                f"attention_heads {options.attention_heads} is {count} key/value heads; the replaced layers have "
                f"{len(pairs)}."
            )
        chosen = query_heads(pairs[:count], heads // kv_heads)
    else:
        chosen = named_heads(options.attention_heads, len(kinds), heads)
    return [list(chosen.get(layer, ())) if layer in replaced else [] for layer in range(len(kinds))]


def replacement_type(options: ConversionConfig) -> str:
    """The type of layer that takes the place of attention."""
    return "linear_attention" if options.window is None else "hybrid"


def mixer_fields(options: ConversionConfig, fields: dict[str, Any], has_bias: bool) -> dict[str, Any]:
    """The mixer's part of the configuration.

    Raises:
        ValueError: the state size cannot go with the rotary embedding or the norms of this teacher.
    """
    head_dim, heads = fields["head_dim"], fields["num_attention_heads"]
    default_state = min(16, head_dim) if options.mixer == "mamba1" else head_dim
    d_state = default_state if options.d_state is None else options.d_state
    # mamba1 cuts a head into pieces of N channels, and a piece of a rotated head is not a rotated piece
    can_rotate = d_state >= head_dim
    rotary = can_rotate if options.rotary is None else options.rotary
    qk_norm = fields.get("qk_norm")
    if rotary and not can_rotate:
        raise ValueError(
            f"d_state {d_state} is smaller than the head dimension {head_dim}, and rotary embedding needs all of it; "
            "say --no-rotary."
        )
    if qk_norm and options.mixer != "mamba1" and d_state != head_dim:
        raise ValueError(f"This teacher normalises queries and keys per head, so d_state must be {head_dim}.")
    expanded = options.expand_kv_heads
    return {
        "mixer": options.mixer,
        "mixer_num_heads": heads,
        "mixer_num_kv_heads": heads if expanded else fields["num_key_value_heads"] or heads,
        "mixer_head_dim": head_dim,
        "mixer_d_state": d_state,
        "mixer_activation": options.activation,
        "mixer_gate_bias": options.gate_bias,
        "mixer_shared_state": options.shared_state,
        "mixer_norm": options.norm or ("head" if options.mixer == "mamba2" else "none"),
        "mixer_rotary": rotary,
        "mixer_qk_norm": qk_norm,
        "mixer_decay_bias": options.decay_bias and options.mixer == "discrete_mamba2",
        "mixer_in_bias": has_bias and options.mixer == "mamba1",
        "mixer_out_bias": options.out_bias and options.mixer != "none",
        "mixer_sees": options.mixer_sees,
        "hybrid_window": options.window,
        "hybrid_sinks": options.sinks,
    }


def make_plan(teacher: Teacher, options: ConversionConfig, checkpoint: Checkpoint) -> Plan:
    """Decide everything, reading no weights.

    Raises:
        ValueError: the options, the configuration and the tensors do not fit together.
    """
    config = student_config(teacher, options)
    all_attention = config.__class__(
        **config.to_dict()
        | {
            "layer_types": config.conversion["teacher_layer_types"],
            "hybrid_full_heads": None,
            "conversion": None,
        }
    )
    attention_shapes, shapes = tensor_shapes(all_attention), tensor_shapes(config)
    family, num_layers = teacher.family, config.num_hidden_layers
    sources, dropped = canonical_sources(family, num_layers, checkpoint.tensors, attention_shapes)
    rules = {name: moved(name, sources[name]) for name in shapes if name in sources}
    for layer, kind in enumerate(config.layer_types):
        if kind in MIXER_LAYERS:
            mixer_shapes = {n: s for n, s in shapes.items() if n.startswith(f"model.layers.{layer}.mixer.")}
            mapping = LayerMapping(config, layer, sources, options.initial_decay, options.seed)
            rules |= {rule.target: rule for rule in mapping.rules(mixer_shapes)}
            if f"{mapping.prefix}mixer.out_proj.bias" not in shapes and "o_proj.bias" in mapping.attention:
                rules |= _folded_bias(family, layer, sources)
    assert rules.keys() == shapes.keys(), sorted(rules.keys() ^ shapes.keys())
    used = {name for rule in rules.values() for name in rule.sources}
    unused = set(checkpoint.tensors) - used - set(dropped)
    assert not unused, f"teacher tensors without a place: {sorted(unused)}"
    return Plan(
        teacher=teacher,
        config=config,
        rules=_in_reading_order(rules, checkpoint.tensors),
        dropped=dropped,
        dtype=output_dtype(options.dtype, checkpoint.tensors),
        read_buffer_bytes=checkpoint.buffer_bytes(),
        parameters_before=sum(math.prod(checkpoint.tensors[name].shape) for name in used),
    )


def _folded_bias(family: TeacherFamily, layer: int, sources) -> dict[str, Rule]:
    if family.student != "phimamba":
        raise ValueError("This teacher has a bias on o_proj; it needs a bias on out_proj (leave out --no-out-bias).")
    target = f"model.layers.{layer}.mlp.fc2.bias"
    return {target: fold_out_bias(target, sources[target], sources[f"model.layers.{layer}.self_attn.o_proj.bias"])}


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
    mixer = f"{s['mixer']} beside a" if s["mixer"] != "none" else "a"
    replacement = f"{mixer} window of {s['window']} and {s['sinks']} sinks" if s["window"] else s["mixer"]
    heads = " ".join(f"{layer}:{','.join(map(str, of))}" for layer, of in s["attention_heads"].items())
    counts = ", ".join(f"{count} {kind}" for kind, count in s["tensors"].items())
    kind = "mixer" if s["mixer"] != "none" else "window"
    lines = [
        f"{s['teacher']} ({s['teacher_family']}) -> {s['student_family']} with {replacement}, {s['dtype']}",
        f"layers      {layers}  ({len(s['attention_layers'])} attention, {len(s['mixer_layers'])} {kind})",
        f"tensors     {counts}",
        f"parameters  {s['parameters']['teacher']:,} -> {s['parameters']['hybrid']:,}",
        f"to write    {human_bytes(s['bytes_to_write'])}; peak memory of writing about "
        f"{human_bytes(s['expected_peak_memory_bytes'])} above the interpreter's own",
    ]
    for context, size in s["cache_bytes"].items():
        share = size["hybrid"] / size["teacher"]
        lines.append(
            f"cache {context:>4}  {human_bytes(size['teacher'])} -> {human_bytes(size['hybrid'])} per sequence "
            f"({share:.1%})"
        )
    if s["mixer"] != "none":
        lines.append(f"state       {human_bytes(s['state_bytes'])} of that for the mixers, at any length")
    if heads:
        lines.append(f"full heads  {heads}  (layer:heads beside the window that see everything)")
    if plan.budget is not None:
        lines.append(describe_budget(plan.budget))
    for name, reason in s["dropped"].items():
        lines.append(f"dropped     {name}: {reason}")
    lines += [f"note        {note}" for note in plan.notes]
    return "\n".join(lines)


def describe_budget(report: dict[str, Any]) -> str:
    """The choices that keep within a budget, what was predicted and measured of each."""
    lines = [f"budget      {human_bytes(report['bytes'])} at {report['context']} tokens"]
    for row in report["choices"]:
        figures = [] if row["predicted"] is None else [f"predicted {row['predicted']:.4f}"]
        figures += [] if row["measured"] is None else [f"measured {row['measured']['total']:.4f}"]
        mark = "->" if row["taken"] else "  "
        lines.append(f"  {mark} {row['choice']} ({human_bytes(row['bytes'])}) {', '.join(figures)}".rstrip())
    scored = any(row["predicted"] is not None for row in report["choices"])
    unscored = "scores decide when this is run; layers, parameters and cache above are those of the first"
    lines.append(f"  {'nats of KL and weighted recall loss' if scored else unscored}")
    return "\n".join(lines)
