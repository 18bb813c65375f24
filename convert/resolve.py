"""Every value that a conversion uses, decided once from the options and the teacher.

Most options are None unless the user gives them. Their values follow from other options and from the teacher; they
are decided here, with the reason, and no later step reads the options again. Some values wait for the sizes of a
placement: the length of calibration rows, the bits of windows and the number of salient tokens, which `follow_windows`
decides (scores/budget.py), and which of several bits full attention has (scores/decide.py).
"""

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig

from modeling_llamba.model.config_values import ATTENTION_ALONE, RECURRENT

from .io.writer import output_dtype
from .layout.cache import layer_bytes, teacher_bytes
from .layout.config import mixer_fields
from .layout.placement import CacheBits, Heads, Hybrid, Layer, Mixer
from .layout.presets import attention_layers, counted_heads, kept_heads
from .options import AlignmentOptions, ConversionOptions, PublishedOutputOptions, differences, parse_size
from .teachers.teacher import public_name
from .teachers.weights import TeacherWeights

BLOCK = 16
"""Number of tokens by which windows move, if their width allows it."""
FULL_BITS, WINDOW_BITS = (6, 4), 8
"""Bits of keys and of values in full attention, and of both in windows, if a budget decides. Far keys need more than
values, and near tokens more than far ones (docs/results/bits.md). Narrow windows have fewer (scores/budget.py)."""
OTHER_FULL_BITS = (4, 4), (8, 4), (8, 8)
"""Bits in full attention that a run compares with FULL_BITS by the layers' errors; keys have 8 only if layers keep all
of their attention."""
SHARE = 0.5
"""Share of the layers that keep attention if the user gives neither layers nor a share."""


@dataclass(frozen=True)
class Resolved:
    """Every value that a conversion uses; it holds no tensor and reads no file."""

    choice: Literal["teacher", "budget", "name", "share"]
    """Way in which the layers that keep attention are chosen: "teacher" (every layer has a window already, so none is
    replaced), "budget" (with heads and windows, within a cache budget), "name" (the user lists them) or "share" (a
    share of the layers, or as many as a cache budget has room for beside mixers)."""
    has_windows: bool
    """True if replaced layers have a window, with or without a state; otherwise they are mixers."""
    layers: tuple[int, ...] | None
    """Layers that the user names to keep attention; None if none are named."""
    share: float | None
    """Share of the replaceable layers that keep attention; None if it does not decide."""
    heads: Heads | None
    """Query heads that the user names to keep full attention; None if at most a number is given."""
    num_heads: int | None
    """Number of key/value heads to choose besides those named; None if the user gave no heads."""
    bounded: tuple[int, ...]
    """Layers whose cache does not grow in the teacher, with a window that hides tokens within the context or with a
    state; beside windows they stay as they are."""
    context: int
    """Tokens for which the cache is counted."""
    cache_bytes: int | None
    """Bytes of cache that a sequence may take; None if there is no budget."""
    window: int | None
    """Width of the windows; None if a budget chooses it or there are none."""
    block: int | None
    """Number of tokens by which windows move; None without windows."""
    sinks: int
    salient: int
    rank: int | None
    """Mean rank of the output maps; None if it is as high as a share of the teacher's weights allows."""
    bits: CacheBits
    """Bits of a number in the cache."""
    other_bits: tuple[CacheBits, ...]
    """Bits that are used instead if the layers' errors are smaller with them; empty if there is nothing to choose."""
    mixer: dict[str, Any]
    """Fields of the hybrid's configuration that say what the mixers are."""
    initial_decay: float
    export_ready: bool
    alignment: AlignmentOptions
    """Settings of the alignment, with the length of its sequences filled in."""
    trust_remote_code: bool
    seed: int
    dtype: torch.dtype
    """Type of the weights that are written."""
    output: PublishedOutputOptions
    said: dict[str, Any]
    """Options that the user set, for the record in the hybrid's configuration; they hold no paths of this machine."""
    reasons: dict[str, str]
    """Reason for each value that the user did not give."""

    @property
    def sequence_length(self) -> int:
        """Tokens per calibration sequence."""
        assert self.alignment.sequence_length is not None
        return self.alignment.sequence_length

    @property
    def has_state(self) -> bool:
        """True if replaced layers have a state, of a mixer or beside a window."""
        return self.mixer["mixer"] != "none"

    @property
    def replacement(self) -> Layer:
        """A mixer, or a hybrid layer with the window that the user gave."""
        if self.window is None:
            return Mixer()
        return self.hybrid_layer(self.window)

    def hybrid_layer(self, window: int) -> Hybrid:
        """Return a hybrid layer with a window of this width; its kept heads and the rank of its map are set later."""
        assert self.block is not None
        return Hybrid(window, self.block, self.sinks, state=self.has_state, salient=self.salient)

    def decided(self) -> dict[str, dict[str, Any]]:
        """Return the values that the user did not give, each with its reason, as plain data."""
        values = vars(self) | self.mixer
        values |= {"sequence_length": self.sequence_length, "dtype": str(self.dtype).removeprefix("torch.")}
        values |= {"bits": str(self.bits)}
        return {name: {"value": values[name], "reason": reason} for name, reason in self.reasons.items()}


def resolve(options: ConversionOptions, weights: TeacherWeights) -> Resolved:
    """Decide every value that follows from the options and the teacher.

    Raises:
        ValueError: layers or heads that the teacher does not have, or windows where it has its own everywhere.
    """
    placement = options.placement
    config = weights.config
    own = weights.bounded(placement.context)
    in_all = len(own) == config.num_hidden_layers
    refuse_windows_everywhere(options, weights, in_all)
    dtype = output_dtype(options.output.dtype, weights.checkpoint.tensors)
    choice, layers, share = _kept_layers(options, config.num_hidden_layers, in_all)
    keeps_all = share == 1 or (layers is not None and len(layers) == config.num_hidden_layers)
    alone = RECURRENT in config.layer_types or any(getattr(config, name) for name in ATTENTION_ALONE)
    if not (options.has_windows or keeps_all) and alone:
        raise ValueError(
            "This teacher has norms on its values, gates or learned sinks on its attention, or layers with a state of "
            "their own, which mixers cannot follow; give a window or a cache."
        )
    heads, num_heads = _kept_heads(options, weights, own)
    alignment = dataclasses.replace(options.alignment, sequence_length=options.sequence_length)
    rank = placement.rank
    bits, other_bits = _bits(options, choice, config)
    if rank is None and alignment.method == "none":
        rank = 0
    resolved = Resolved(
        choice=choice,
        has_windows=options.has_windows,
        layers=layers,
        share=share,
        heads=heads,
        num_heads=num_heads,
        bounded=own,
        context=placement.context,
        cache_bytes=_cache_bytes(options, weights, bits),
        window=placement.window,
        block=_block(options),
        sinks=placement.sinks,
        salient=options.salient,
        rank=rank,
        bits=bits,
        other_bits=other_bits,
        mixer=mixer_fields(config, options.mixer, alignment.method != "none"),
        initial_decay=options.mixer.initial_decay,
        export_ready=options.mixer.export_ready,
        alignment=alignment,
        trust_remote_code=options.trust_remote_code,
        seed=options.seed,
        dtype=dtype,
        output=options.output,
        said=_options_given(options, heads),
        reasons={},
    )
    return dataclasses.replace(resolved, reasons=_reasons(resolved, options, config))


def refuse_windows_everywhere(options: ConversionOptions, weights: TeacherWeights, in_all: bool) -> None:
    """Refuse windows that are asked for where every layer of the teacher has its own."""
    asked = options.placement.window, options.placement.attention_heads, options.placement.cache
    if in_all and options.has_windows and asked != (None,) * 3:
        raise ValueError(
            f"Every layer of this teacher has a window of {weights.config.sliding_window} tokens, so its cache is of "
            "constant size already; leave out window, attention_heads and cache, or replace layers by mixers "
            "(attention_layers: 0.5)."
        )


def block_of(window: int) -> int:
    """Return the largest power of two up to BLOCK that divides the window into two blocks or more; 1 if none does."""
    block = BLOCK
    while block > 1 and (window % block or window < 2 * block):
        block //= 2
    return block


def _kept_layers(
    options: ConversionOptions, num_layers: int, in_all: bool
) -> tuple[Literal["teacher", "budget", "name", "share"], tuple[int, ...] | None, float | None]:
    """Return the `choice`, `layers` and `share` of `Resolved`."""
    asked = options.placement.attention_layers
    if options.has_windows and in_all:
        return "teacher", None, None
    named = None
    if options.names_layers:
        named = attention_layers(num_layers, asked)
    if options.searches_budget:
        return "budget", named, None
    if named is not None:
        return "name", named, None
    if options.cache is not None:
        return "share", None, None
    if asked is None:
        return "share", None, SHARE
    return "share", None, asked


def _kept_heads(
    options: ConversionOptions, weights: TeacherWeights, own: tuple[int, ...]
) -> tuple[Heads | None, int | None]:
    """Return the `heads` and `num_heads` of `Resolved`."""
    asked = options.placement.attention_heads
    config = weights.config
    if asked is None:
        return None, None
    heads = kept_heads(asked, config.num_hidden_layers, config.num_attention_heads)
    if heads is None:
        return None, counted_heads(asked, config.num_hidden_layers * config.num_key_value_heads)
    refuse_heads_of(own, heads)
    return heads, 0


def refuse_heads_of(bounded: Collection[int], heads: Heads) -> None:
    """Refuse kept heads in layers whose cache does not grow in the teacher, which stay as they are."""
    if hidden := sorted(heads.keys() & set(bounded)):
        raise ValueError(
            f"attention_heads names heads of layer {hidden[0]}, which has a sliding window or a state in the teacher; "
            f"leave out those of {'layers' if len(hidden) > 1 else 'layer'} {', '.join(map(str, hidden))}."
        )


def _bits(
    options: ConversionOptions, choice: str, config: PreTrainedConfig
) -> tuple[CacheBits, tuple[CacheBits, ...]]:
    """Return `bits` and `other_bits` of `Resolved`: few if a budget decides the contents of the cache."""
    asked = options.placement.bits
    if asked is not None:
        return CacheBits((asked, asked), (asked, asked)), ()
    if choice != "budget":
        return CacheBits(), ()
    bits = few_bits(math.gcd(*config.head_widths))
    # without a state windows are all of one width, so that no errors are measured
    if bits.full != FULL_BITS or options.mixer.kind == "none":
        return bits, ()
    return bits, tuple(dataclasses.replace(bits, full=full) for full in OTHER_FULL_BITS)


def few_bits(head_dim: int) -> CacheBits:
    """Return the bits of a number in the cache if a budget decides: as few as heads of multiples of this size
    allow."""
    if head_dim % 2:
        return CacheBits()
    window = (WINDOW_BITS, WINDOW_BITS)
    if head_dim % 16:
        return CacheBits(window, window)
    return CacheBits(FULL_BITS, window)


def _cache_bytes(options: ConversionOptions, weights: TeacherWeights, bits: CacheBits) -> int | None:
    """Count the bytes of cache that one sequence may take.

    A share that the user gives is taken of the bytes of all layers with attention, and the bytes of the teacher's
    states are added. The default share is taken of layers with full attention alone, and the bytes of the teacher's
    own windows are added, too, in the hybrid's bits.
    """
    asked = options.cache
    if asked is None:
        return None
    if isinstance(asked, str):
        return parse_size(asked)
    config = weights.config
    context = options.placement.context
    bounded = weights.bounded(context)
    kinds = [config.layer_types[i] for i in bounded]
    if options.placement.cache is not None or len(bounded) == config.num_hidden_layers:
        kinds = [kind for kind in kinds if kind == RECURRENT]
    own = sum(layer_bytes(config, kind, context) for kind in kinds)
    held = sum(layer_bytes(config, kind, context, bits=list(bits.window)) for kind in kinds)
    return int(held + asked * (teacher_bytes(config, context) - own))


def _block(options: ConversionOptions) -> int | None:
    """Choose the number of tokens by which windows move: if a budget chooses the windows, an eighth of the widest at
    most."""
    placement = options.placement
    if not options.has_windows:
        return None
    if placement.block is not None:
        return placement.block
    if placement.window is not None:
        return block_of(placement.window)
    longest = min(placement.context, options.sequence_length // 2)
    return min(BLOCK, 2 ** max(longest // 8, 1).bit_length() // 2)


def _options_given(options: ConversionOptions, heads: Heads | None) -> dict[str, Any]:
    """Collect the options that differ from their defaults, without names of this machine and of the output."""
    alignment = dataclasses.replace(options.alignment, work_dir=None)
    said = differences(dataclasses.replace(options, alignment=alignment))
    if isinstance(options.placement.attention_heads, str):  # it may be a path of this machine
        said["placement"]["attention_heads"] = heads
    if "text" in said.get("alignment", {}):
        said["alignment"]["text"] = public_name(options.alignment.text)
    return {name: value for name, value in said.items() if name not in ("model", "output")}


def _reasons(resolved: Resolved, options: ConversionOptions, config: PreTrainedConfig) -> dict[str, str]:
    """Return the reason for each value that the user did not give.

    Args:
        config: the configuration of the hybrid with every layer kept as attention.
    """
    placement = options.placement
    fitted = resolved.alignment.method != "none"
    of_type = {}
    if options.output.dtype == "auto":
        of_type = {"dtype": "the type of each weight in the teacher; float32 for a GGUF file"}
    if resolved.choice == "teacher":
        own = f"every layer has a window of {config.sliding_window} tokens in the teacher and keeps it"
        return {"choice": own} | of_type
    if resolved.layers is not None and len(resolved.layers) == config.num_hidden_layers:
        return of_type
    reasons = {}
    if resolved.choice == "budget":
        reasons["choice"] = "layers, heads and windows are chosen together within the cache"
        if placement.bits is None:
            reasons["bits"] = "far keys need more than values, near tokens more than far ones"
            if resolved.other_bits:
                reasons["bits"] += "; a run compares the errors with other bits in full attention"
    if resolved.share is not None and placement.attention_layers is None:
        reasons["share"] = "half of the layers by default, since neither layers nor a share was given"
    if isinstance(options.cache, float | int):
        share = f"{options.cache:.4g} of the teacher's cache in bfloat16"
        reasons["cache_bytes"] = f"{share} at {resolved.context:,} tokens"
    if placement.cache is None and options.cache is not None:
        beside = ""
        if resolved.bounded:
            beside = " (and the bytes of its own windows or states)"
        said = "by default, since nothing was said about layers, window, heads or mixer"
        reasons["cache_bytes"] += f"{beside} {said}"
    if resolved.has_windows:
        reasons |= _reasons_of_windows(resolved, options)
        kind = "layers with a window"
    else:
        reasons |= _reasons_of_mixer(resolved, options)
        kind = "mixers"
    if fitted and options.alignment.sequence_length is None:
        reasons["sequence_length"] = f"the default for {kind}"
    return reasons | of_type


def _reasons_of_windows(resolved: Resolved, options: ConversionOptions) -> dict[str, str]:
    placement = options.placement
    fitted = resolved.alignment.method != "none"
    reasons = {}
    if resolved.bounded:
        kinds = f"states, and windows that hide tokens within {resolved.context:,}"
        reasons["bounded"] = f"layers of the teacher whose cache does not grow stay: {kinds}"
    if placement.block is None and resolved.window is None:
        reasons["block"] = f"{BLOCK} by default, and an eighth of the widest window at most"
    elif placement.block is None:
        reasons["block"] = f"the largest power of two up to {BLOCK} that divides the window into two blocks or more"
    if placement.salient is None:
        reasons["salient"] = "no state is fitted"
        if resolved.salient:
            reasons["salient"] = "the default if a state is fitted"
    if placement.rank is None and resolved.has_state:
        reasons["rank"] = "no state is fitted"
        if fitted:
            reasons["rank"] = "as high as a share of the teacher's weights allows"
    return reasons


def _reasons_of_mixer(resolved: Resolved, options: ConversionOptions) -> dict[str, str]:
    mixer = options.mixer
    reasons = {}
    if mixer.d_state is None:
        reasons["mixer_d_state"] = "the head dimension"
        if mixer.kind == "mamba1":
            reasons["mixer_d_state"] = "the default of mamba1"
    if mixer.rotary is None:
        size = "smaller than a head"
        if resolved.mixer["mixer_rotary"]:
            size = "as large as a head"
        reasons["mixer_rotary"] = f"the state is {size}"
    if mixer.norm is None:
        reasons["mixer_norm"] = f"the default of {mixer.kind}"
    if mixer.activation is None:
        reasons["mixer_activation"] = "the default, which keeps the mapping exact"
    if mixer.export_ready:
        needed = ("mixer", "mixer_norm", "mixer_activation", "mixer_rotary")
        reasons |= dict.fromkeys(needed, "export_ready needs it")
    return reasons
