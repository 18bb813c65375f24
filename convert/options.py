"""Every option of a conversion: its name, type, default and help are defined here and nowhere else.

The command line, the YAML file, the Python function `convert` and docs/guide/options.md are all made from these
dataclasses. A YAML file has the same sections and names; `CONVERSION_FLAGS` lists the few that the command line
offers, too.
"""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import inspect
import json
import os
import re
import types
import typing
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import docstring_parser
import yaml
from jsonargparse import ArgumentError, ArgumentParser, get_loader
from jsonargparse.typing import ClosedUnitInterval, restricted_number_type

DEFAULT_CACHE = 0.08
SALIENT = 16
MAPPING = "names with values"
LIST = "a list"
SIZE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
LARGEST = 10**12
MAX_YAML_BYTES = 2**20
PositiveInt = restricted_number_type("Count", int, [(">", 0), ("<=", LARGEST)], docstring="a count above 0")
NonNegativeInt = restricted_number_type("CountOrNone", int, [(">=", 0), ("<=", LARGEST)], docstring="a count")
PositiveFloat = restricted_number_type("PositiveNumber", float, [(">", 0), ("<=", 1e9)], docstring="a number above 0")
NonNegativeFloat = restricted_number_type("Number", float, [(">=", 0), ("<=", 1e9)], docstring="a number of 0 or more")
Seed = restricted_number_type("Seed", int, [(">=", -(10**9)), ("<=", 10**9)], docstring="a whole number of 32 bits")
Width = restricted_number_type("Width", int, [(">", 0), ("<=", 2**24)], docstring="a number of tokens")
Expansion = restricted_number_type("Expansion", int, [(">=", 1), ("<=", 64)], docstring="a factor")
Decay = restricted_number_type("Decay", float, [(">", 0), ("<=", 1)], docstring="a number above 0 and at most 1")
ExportTarget = Literal["granitemoehybrid", "bamba"]
Trainable = Literal["all", "all-but-mlp", "mixers", "beyond-window"]
Window = restricted_number_type("Window", int, [(">=", 2), ("<=", 2**24)], docstring="a number of tokens from 2 on")
CacheBit = Literal[16, 8, 6, 4, 2]
Context = restricted_number_type("Context", int, [(">=", 16), ("<=", 2**24)], docstring="a number of tokens")


def default_sequence_length(has_windows: bool, held: int = 0) -> int:
    """Choose the tokens per calibration sequence where the user gives none.

    Args:
        held: tokens that a layer with a window attends to, if they are known before the text is read.
    """
    if not has_windows:
        return 512
    return max(1024, 2 * held)


def evicted_tokens(length: int, window: int, kept: int, block: int = 1) -> int:
    """Count the tokens of a sequence that come to the state of a layer; there are none if this is 0 or less.

    Args:
        window: width of the window, the block of the last token included.
        kept: number of sinks and salient tokens, which stay.
        block: tokens by which the window moves at a time.
    """
    return -(-length // block) * block - window - kept


@dataclass(frozen=True, kw_only=True)
class PlacementOptions:
    """Layers that keep attention, and windows, heads and cache of the others."""

    attention_layers: int | float | list[int] | str | None = None
    """Layers that keep full attention: a list, counted from 0 (1,3,5), a share (0.25), a pattern of A (kept) and M
    (replaced) that repeats over the layers (MMMA), a published choice by name (mamba-in-the-llama-50), `all` or
    `none`. A share keeps the layers that would lose most; with --window it counts only layers that have full attention
    in the teacher. Default: chosen by --cache; without --cache, half of the layers."""
    cache: float | str | None = None
    """Budget for the key/value cache of one sequence of --context tokens: a share of the teacher's cache in bfloat16
    (0.25), or bytes (50MB). It sets which layers and heads keep full attention, and how wide the windows of the others
    are. With --mixer mamba1 or mamba2 it sets only how many layers keep attention. It cannot be combined with a share
    in --attention-layers. Default: 0.08, counting only layers with full attention, unless --attention-layers,
    --window, --attention-heads or --mixer is given, or --align is not closed-form."""
    context: Width = 4096
    """Sequence length, in tokens, that --cache is counted at."""
    window: Window | None = None
    """Width of the sliding window, in tokens, of layers without full attention. These layers also attend to the first
    tokens and to a few older ones that receive much attention; a state of constant size sums up all other tokens.
    Without --cache and --attention-layers, half of the layers keep full attention; --attention-layers none gives every
    layer a window. Mixers mamba1 and mamba2 have no window."""
    block: Width | None = None
    """Number of tokens by which the window moves at a time. The window must be a multiple of it, and at least two
    blocks wide. Default: 16 if the window allows it."""
    sinks: NonNegativeInt = 4
    """Number of first tokens that a layer with a window always attends to."""
    salient: NonNegativeInt | None = None
    """Number of older tokens, those that receive most attention, that a layer with a window still attends to. Default:
    16 if a state is fitted; if --cache sets the windows, a quarter of the tokens for both; otherwise none."""
    rank: NonNegativeInt | None = None
    """Mean rank of the output map, the low-rank matrix that layers with a window and a state add to the teacher's
    output projection; layers with larger maps count more. Default: 32, or less so that all maps add at most 1.5 % to
    the teacher's weights."""
    bits: CacheBit | None = None
    """Bits per number in the cache: 16 (the type that the model is loaded in), 8, 6, 4 or 2. Default: if --cache sets
    the windows, 8 in windows (6 where they are narrow), and 6 for keys and 4 for values of heads with full attention
    (or other numbers, where these fit the teacher better); otherwise 16."""
    attention_heads: str | int | float | dict[int, list[int]] | None = None
    """Heads that keep full attention in layers whose other heads have a window: query heads as layer:head (16:3,18:0),
    a JSON file of them, or a number of key/value heads (8, or a share such as 0.02), of which the best at recalling
    earlier tokens are kept. Needs --window or --cache."""

    def __post_init__(self):
        if isinstance(self.cache, float) and 1000 <= self.cache < float("inf"):  # bytes, which no share can be
            object.__setattr__(self, "cache", str(int(self.cache)))
        heads = self.attention_heads  # a text on the command line, where YAML would read 16:3 as one number
        if isinstance(heads, str) and re.fullmatch(r"\d+|\d*\.\d+", heads.strip()):
            object.__setattr__(self, "attention_heads", float(heads) if "." in heads else int(heads))


@dataclass(frozen=True, kw_only=True)
class MixerOptions:
    """The mixer that takes the place of attention."""

    kind: Literal["discrete_mamba2", "mamba2", "mamba1", "none"] = "discrete_mamba2"
    """Mamba layer, with a state of constant size and no tokens, that replaces layers without a window. By default all
    replaced layers have a window, so none is used. With `none`, layers with a window have no state for tokens that
    have left it; this needs --window or --cache."""
    export_ready: bool = False
    """Replace attention by a Mamba mixer that `convert-to-hybrid export` can write as one of transformers' own
    architectures: mamba2 with a norm per head, SiLU and no rotary embedding."""
    d_state: PositiveInt | None = None
    """State size per head; the head dimension by default, 16 for mamba1."""
    norm: Literal["none", "head", "whole"] | None = None
    """Gated norm before the output projection of mamba2; per head by default."""
    activation: Literal["identity", "silu"] | None = None
    """Activation after the short convolution: identity, the default, keeps the mapping exact; published mamba2 and
    mamba1 have silu."""
    shared_state: bool = False
    """Share one state among the heads that read the same key/value head."""
    gate_bias: bool = True
    """Add a bias that opens the gate; published mamba2 and mamba1 have none."""
    expand_kv_heads: bool = False
    """Give x and B one head per query head instead of one per key/value head."""
    rotary: bool | None = None
    """Keep the teacher's rotary embedding on B and C; by default if the state is large enough for it."""
    decay_bias: bool = True
    """Add a bias to the decay of discrete_mamba2."""
    out_bias: bool = True
    """Add a bias to the output projection."""
    initial_decay: Decay = 0.9
    """Decay per token of every head before alignment."""

    def __post_init__(self):
        if self.export_ready:
            for name, value in {"norm": "head", "activation": "silu", "rotary": False}.items():
                if getattr(self, name) not in (None, value):
                    raise ValueError(f"export_ready needs {name} {value}, not {getattr(self, name)}.")
                object.__setattr__(self, name, value)
            if self.kind not in ("discrete_mamba2", "mamba2"):
                raise ValueError(f"export_ready needs the mixer mamba2, not {self.kind}.")
            object.__setattr__(self, "kind", "mamba2")
        if self.norm is not None and self.kind != "mamba2":
            raise ValueError(f"norm exists for the mamba2 mixer only; the mixer is {self.kind}.")
        if self.shared_state and self.kind in ("mamba1", "none"):
            raise ValueError(f"Mixer {self.kind} has no state that heads could share; choose another mixer.")


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """The closed-form fit of each mixer to the attention that it replaces."""

    decays: tuple[Decay, ...] = (0.5, 0.7, 0.85, 0.95)
    """Candidate decays per token; each layer takes the best."""
    ridges: tuple[NonNegativeFloat, ...] = (1e-4, 1e-3, 1e-2, 1e-1)
    """Candidate ridge strengths, in units of the mean squared feature."""
    refine_steps: NonNegativeInt = 120
    """Number of gradient steps after the closed form, on each mixer by itself."""

    def __post_init__(self):
        for name in ("decays", "ridges"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; give at least one candidate.")


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """Options that the three stages of MOHAWK have in common."""

    tokens: NonNegativeInt = 0
    """Number of training tokens; 0 leaves the stage out."""
    sequences: PositiveInt = 2
    """Number of sequences per step and process."""
    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate of the mixers."""
    warmup: ClosedUnitInterval = 0.1
    """Share of the steps in which the learning rate rises."""
    decay: ClosedUnitInterval = 0.3
    """Share of the steps in which it falls to 0."""
    save_every: NonNegativeInt = 200
    """Number of steps between checkpoints; 0 writes none."""

    def __post_init__(self):
        if self.warmup + self.decay > 1:
            raise ValueError(
                f"warmup {self.warmup} and decay {self.decay} are shares of the steps; they sum to more than 1."
            )


@dataclass(frozen=True, kw_only=True)
class OrientationOptions(StageOptions):
    """MOHAWK stage 1, matrix orientation: each mixer's matrix is turned towards the teacher's attention matrix."""

    tile: PositiveInt = 128
    """Number of matrix rows that are compared at a time."""


@dataclass(frozen=True, kw_only=True)
class HiddenStateOptions(StageOptions):
    """MOHAWK stage 2, hidden-state alignment: each layer's output is trained towards the teacher's."""

    tokens: NonNegativeInt = 100_000
    """Number of training tokens; 0 leaves the stage out."""
    target: Literal["mixer", "block"] = "mixer"
    """Compare the output of the mixer with that of the attention, or the output of the whole block."""
    bf16: bool = False
    """Run matrix products in bfloat16."""


@dataclass(frozen=True, kw_only=True)
class DistillationOptions(StageOptions):
    """MOHAWK stage 3, knowledge distillation end to end."""

    tokens: NonNegativeInt = 100_000
    """Number of training tokens; 0 leaves the stage out."""
    learning_rate: PositiveFloat = 1.5e-4
    """Peak learning rate of the mixers."""
    other_learning_rate: PositiveFloat = 1.5e-5
    """Peak learning rate of everything but the mixers."""
    trainable: Trainable = "all"
    """Parameters to train: all, all but the MLPs, those of the mixers, or (beyond-window) only those that act on
    tokens outside the window, so that the output up to the narrowest window stays exactly as it was."""
    temperature: PositiveFloat = 1.0
    """Temperature of the teacher's and the hybrid's distributions."""
    gradient_checkpointing: bool = False
    """Recompute blocks in the backward pass to save memory."""
    bf16: bool = False
    """Run matrix products in bfloat16."""
    report_to: str = "none"
    """Experiment tracker, as transformers' Trainer names it: none, tensorboard, wandb."""
    recall_share: ClosedUnitInterval = 0.35
    """Share of the training sequences in which random tokens are hidden and asked for."""

    def __post_init__(self):
        super().__post_init__()
        if self.trainable in ("mixers", "beyond-window") and "other_learning_rate" in differences(self):
            raise ValueError(
                f"other_learning_rate has no effect where {self.trainable} alone is trained; leave it out."
            )


@dataclass(frozen=True, kw_only=True)
class AlignmentOptions:
    """Alignment of the mixers with the attention that they replace."""

    method: Literal["none", "closed-form", "mohawk"] = "closed-form"
    """Fit of the replaced layers to the teacher: `closed-form` solves for their new weights by least squares on
    --tokens tokens of --text, without training; `mohawk` then also trains the model in the stages of the MOHAWK paper;
    `none` does neither."""
    text: str = "default"
    """Text to fit on: `default` (in the package), `sampled` (drawn from the teacher), a .jsonl, .txt or
    .parquet file, a folder of them, a Hub data set as NAME:CONFIG:SPLIT, or a .npy file of token ids, which the
    teacher's tokenizer made."""
    column: str = "text"
    """Column of the data set that holds the text."""
    tokens: PositiveInt = 30720
    """Number of tokens of --text that weights are fitted to in closed form."""
    sequence_length: Context | None = None
    """Tokens per sequence; by default 512 for mixers, 1,024 for layers with a window, and 2,048 where a cache budget
    allows windows wider than 341."""
    held_out_sequences: PositiveInt = 4
    """Number of held-out sequences, on which the fits are evaluated."""
    device: str = "cpu"
    """Device for the fit: cpu, cuda."""
    activation_memory: int | str = "4GB"
    """Memory for activations; those that exceed it go to disk."""
    work_dir: str | None = None
    """Folder that keeps the fits, so that an interrupted run resumes; by default OUT.work. The fits are removed once
    OUT is written."""
    fit: FitOptions = field(default_factory=FitOptions)
    matrix_orientation: OrientationOptions = field(default_factory=OrientationOptions)
    hidden_state_alignment: HiddenStateOptions = field(default_factory=HiddenStateOptions)
    distillation: DistillationOptions = field(default_factory=DistillationOptions)

    def __post_init__(self):
        parse_size(self.activation_memory)


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Folder of the hybrid."""

    folder: str | None = None
    """Folder to write the hybrid to."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights that are written; auto keeps the type of each in the source, float32 for a GGUF file."""
    max_shard_size: int | str = "5GB"
    """Size of the largest weights file."""
    overwrite: bool = False
    """Replace the output folder once the new one is complete. A folder that also holds files which this project did
    not write is never replaced."""

    def __post_init__(self):
        parse_size(self.max_shard_size)


@dataclass(frozen=True, kw_only=True)
class PublishedOutputOptions(OutputOptions):
    """Folder of the hybrid, and the repository to which it is uploaded."""

    push_to_hub: str | None = None
    """Hub repository to which the result is uploaded."""
    private: bool = False
    """Make that repository private."""

    def __post_init__(self):
        super().__post_init__()
        if self.private and self.push_to_hub is None:
            raise ValueError("private is for the uploaded repository; it needs push_to_hub.")


@dataclass(frozen=True, kw_only=True)
class ConversionOptions:
    """Turn a pretrained Transformer, the teacher, into a hybrid that needs a fraction of its key/value cache.

    Most heads of the hybrid attend exactly to a window of the latest tokens and to a salient cache: the first tokens
    and a few older ones that receive much attention. A state of constant size sums up all other tokens. A few heads
    keep full attention. The new weights are fitted to the teacher by least squares, without training. With
    --mixer mamba2, layers become Mamba layers instead, which have only a state.
    """

    model: str | None = None
    """Teacher to convert: a Hub id, a local folder, or a GGUF file."""
    revision: str | None = None
    """Branch, tag or commit of a Hub repository."""
    gguf_file: str | None = None
    """GGUF file inside the folder or repository."""
    trust_remote_code: bool = False
    """Run code from the teacher's repository, which its tokenizer may need."""
    seed: Seed = 0
    """Seed for newly initialised tensors and for the order of training text."""
    placement: PlacementOptions = field(default_factory=PlacementOptions)
    mixer: MixerOptions = field(default_factory=MixerOptions)
    alignment: AlignmentOptions = field(default_factory=AlignmentOptions)
    output: PublishedOutputOptions = field(default_factory=PublishedOutputOptions)

    def __post_init__(self):
        placement = self.placement
        alignment = self.alignment
        mixer = self.mixer
        for name, value in (("model", self.model), ("output folder", self.output.folder)):
            if not value:
                raise ValueError(f"No {name} given: convert-to-hybrid MODEL OUT, or in the YAML file.")
        if isinstance(placement.cache, float | int) and not 0 < placement.cache <= 1:
            raise ValueError(f"cache {placement.cache} is no share of the teacher's cache; give 0.25, or 50MB.")
        if isinstance(placement.cache, str):
            parse_size(placement.cache)
        named = self.searches_budget and self.names_layers
        if placement.cache is not None and placement.attention_layers is not None and not named:
            raise ValueError(
                "cache already sets how many layers keep attention; give attention_layers as a list, or drop one."
            )
        if placement.window is None and not self.searches_budget:
            if placement.attention_heads is not None:
                raise ValueError("attention_heads keep full attention beside a window; give one (window: 64).")
            if mixer.kind == "none":
                raise ValueError(
                    "With mixer none a replaced layer has nothing but its window; say how wide it is (window: 256)."
                )
        if placement.window is not None and (self._mixer_options and mixer.kind != "none"):
            raise ValueError(
                f"A mixer has no window beside it: leave out the window, or mixer.{self._mixer_options[0]}."
            )
        if placement.window is not None and placement.block is not None:
            block = placement.block
            if placement.window % block or placement.window < 2 * block:
                near = max(placement.window // block, 2) * block
                raise ValueError(
                    f"window {placement.window} must be a multiple of the block of {block} tokens and two blocks at "
                    f"least; give {near} or {near + block}."
                )
        fitted = alignment.method != "none" and mixer.kind != "none"
        kept = placement.sinks + self.salient
        if fitted and placement.window is not None:
            evicted = evicted_tokens(self.sequence_length, placement.window, kept, placement.block or 1)
            if evicted <= 0:
                raise ValueError(
                    f"A window of {placement.window} and {kept} sinks and salient tokens cover whole calibration "
                    f"sequences of {self.sequence_length} tokens, so that nothing is left to fit a state on; set "
                    "alignment.sequence_length higher, or say --mixer none."
                )
        if alignment.method == "none" and isinstance(placement.attention_heads, int | float):
            raise ValueError(
                "A number of attention_heads is chosen by the alignment; name the heads (16:3,18:0), or align."
            )
        self._refuse_without_effect()

    def _refuse_without_effect(self) -> None:
        """Refuse options that have no effect together with the others."""
        changed = differences(self)
        of_placement = changed.get("placement", {})
        of_alignment = changed.get("alignment", {})
        if self.alignment.method == "none":
            unread = {f"alignment.{name}": "an alignment" for name in of_alignment if name != "method"}
        elif self.alignment.method == "mohawk":
            unread = {}
        else:
            stages = ("matrix_orientation", "hidden_state_alignment", "distillation")
            unread = {f"alignment.{name}": "--align mohawk" for name in stages if name in of_alignment}
        measures_offsets = self.placement.bits not in (None, 16) and self.alignment.method != "none"
        if "context" in of_placement and self.cache is None and not (self.has_windows or measures_offsets):
            unread["placement.context"] = "a cache budget, a window, or --bits below 16 with an alignment"
        if not self.has_windows:
            names = [name for name in ("sinks", "salient", "block", "rank") if name in of_placement]
            unread |= {f"placement.{name}": "a window" for name in names}
        if self.mixer.kind == "none":
            unread |= {f"mixer.{name}": "a mixer" for name in self._mixer_options if name != "kind"}
            if "rank" in of_placement:
                unread["placement.rank"] = "a state"
        if self.has_windows:
            unread |= {f"alignment.fit.{name}": "a mixer" for name in sorted(of_alignment.get("fit", {}))}
        for name, needed in unread.items():
            raise ValueError(f"{name} has no effect without {needed}; leave it out.")

    @property
    def cache(self) -> float | str | None:
        """The cache budget: the one given, or the default if neither layers, windows, heads nor a mixer are given."""
        placement = self.placement
        mixer = self.mixer
        given = (placement.attention_layers, placement.window, placement.attention_heads)
        none_given = given == (None,) * 3 and mixer.kind == MixerOptions.kind
        if placement.cache is None and none_given and self.alignment.method == "closed-form":
            return DEFAULT_CACHE
        return placement.cache

    @property
    def _mixer_options(self) -> list[str]:
        """Names of the mixer's options that differ from their defaults."""
        return sorted(differences(self.mixer).keys() - {"out_bias"})

    @property
    def has_windows(self) -> bool:
        """True if replaced layers have a window, with or without a state; otherwise they are mixers."""
        return self.placement.window is not None or self.searches_budget

    @property
    def salient(self) -> int:
        """Number of tokens that layers with a window attend to after they have left it."""
        if self.placement.salient is not None:
            return self.placement.salient
        if self.alignment.method == "none" or self.mixer.kind == "none" or not self.has_windows:
            return 0
        return SALIENT

    @property
    def names_layers(self) -> bool:
        """True if the layers that keep attention are named; otherwise their share is given, or a budget decides."""
        return not isinstance(self.placement.attention_layers, float | None)

    @property
    def searches_budget(self) -> bool:
        """True if layers, heads and windows are chosen together, by their scores, within a cache budget."""
        windows = not self._mixer_options or self.mixer.kind == "none"
        return self.alignment.method != "none" and windows and self.cache is not None

    @property
    def sequence_length(self) -> int:
        """Tokens per calibration sequence."""
        if self.alignment.sequence_length is not None:
            return self.alignment.sequence_length
        return default_sequence_length(self.has_windows)


def differences(options: Any) -> dict[str, Any]:
    """Collect every option that differs from its default, as nested plain data, for the record."""
    found = {}
    for item in dataclasses.fields(options):
        value = getattr(options, item.name)
        if dataclasses.is_dataclass(value):
            if below := differences(value):
                found[item.name] = below
        elif value != item.default:
            found[item.name] = value
    return found


CONVERSION_FLAGS = {
    "--revision": "revision",
    "--gguf-file": "gguf_file",
    "--trust-remote-code": "trust_remote_code",
    "--attention-layers": "placement.attention_layers",
    "--cache": "placement.cache",
    "--bits": "placement.bits",
    "--context": "placement.context",
    "--window": "placement.window",
    "--attention-heads": "placement.attention_heads",
    "--mixer": "mixer.kind",
    "--export-ready": "mixer.export_ready",
    "--align": "alignment.method",
    "--text": "alignment.text",
    "--tokens": "alignment.tokens",
    "--device": "alignment.device",
    "--dtype": "output.dtype",
    "--overwrite": "output.overwrite",
    "--push-to-hub": "output.push_to_hub",
}
"""Flags that `--help` lists; every other option is set in YAML, or by its dotted name."""


def parse_size(text: str | int) -> int:
    """Bytes in "5GB", "500MB", "2GiB" or a plain number."""
    cleaned = str(text).strip().upper().replace(" ", "")
    unit = next((u for u in sorted(SIZE_UNITS, key=len, reverse=True) if cleaned.endswith(u)), "")
    try:
        size = int(float(cleaned.removesuffix(unit)) * SIZE_UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        share = "; a share of 8 % is 0.08" if cleaned.endswith("%") else ""
        raise ValueError(f"{text!r} is not a size; write for example 5GB or 500MB{share}.")
    return size


@dataclass(frozen=True, kw_only=True)
class MohawkOptions:
    """Train a hybrid that exists already, in stages of the MOHAWK paper, and report what each changed."""

    hybrid: str | None = None
    """Folder of a hybrid made by convert-to-hybrid."""
    teacher: str | None = None
    """Teacher that the hybrid was made from: a Hub id, a local folder, or a GGUF file."""
    revision: str | None = None
    """Branch, tag or commit of the teacher's Hub repository."""
    gguf_file: str | None = None
    """GGUF file inside the teacher's folder or repository."""
    trust_remote_code: bool = False
    """Run code from the teacher's repository, which its tokenizer may need."""
    stages: str | int | list[int] | None = None
    """Stages to run: 1, 2, 3, or several of them (1,2). By default all that have tokens."""
    stage_tokens: PositiveInt | None = None
    """Number of training tokens of each of these stages, in place of the number in the YAML file."""
    seed: Seed = 0
    """Seed for the order of the training text."""
    alignment: AlignmentOptions = field(default_factory=lambda: AlignmentOptions(method="mohawk"))
    output: OutputOptions = field(default_factory=OutputOptions)

    def __post_init__(self):
        for name, value in (("hybrid", self.hybrid), ("teacher", self.teacher), ("output folder", self.output.folder)):
            if not value:
                raise ValueError(f"No {name} given: convert-to-hybrid mohawk HYBRID OUT --teacher MODEL.")
        unread = {"tokens", "fit", "activation_memory"}
        if self.alignment.method != "mohawk":
            unread.add("method")
        for name in sorted(unread & differences(self.alignment).keys()):
            raise ValueError(f"alignment.{name} is for a conversion; the stages of an existing hybrid do not read it.")

    @property
    def chosen_stages(self) -> tuple[int, ...]:
        """The stages named, in order; empty for all that have tokens."""
        given = self.stages if isinstance(self.stages, list) else str(self.stages or "").split(",")
        numbers = [str(number).strip() for number in given if str(number).strip()]
        if wrong := sorted(set(numbers) - {"1", "2", "3"}):
            raise ValueError(f"There is no stage {wrong[0]}; MOHAWK has 1, 2 and 3.")
        return tuple(sorted({int(number) for number in numbers}))


MOHAWK_FLAGS = {
    "--teacher": "teacher",
    "--revision": "revision",
    "--gguf-file": "gguf_file",
    "--trust-remote-code": "trust_remote_code",
    "--stages": "stages",
    "--stage-tokens": "stage_tokens",
    "--text": "alignment.text",
    "--device": "alignment.device",
    "--overwrite": "output.overwrite",
}


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Import a published hybrid (Phi-Mamba, mohawk, Llamba, Mamba in the Llama, M1) as an ordinary checkpoint."""

    model: str | None = None
    """Hub id or folder of a published hybrid."""
    base: str | None = None
    """Model that it was made from, for the tokenizer and for tensors that the checkpoint leaves out."""
    revision: str | None = None
    """Branch, tag or commit of a Hub repository."""
    trust_remote_code: bool = False
    """Run code from the repository, which its tokenizer may need."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of the hybrid's configuration, in place of the values that are derived."""
    output: OutputOptions = field(default_factory=OutputOptions)


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write a hybrid made with --export-ready as one of transformers' own architectures."""

    model: str | None = None
    """Hub id or folder of a hybrid of this project."""
    to: ExportTarget = "granitemoehybrid"
    """Architecture to write; bamba is the one for llama.cpp."""
    expand: Expansion | None = None
    """Width of the mixers as a multiple of the model's width, filled up with heads that are zero; llama.cpp needs
    2."""
    revision: str | None = None
    """Branch, tag or commit of a Hub repository."""
    trust_remote_code: bool = False
    """Run code from the repository, which its tokenizer may need."""
    output: OutputOptions = field(default_factory=OutputOptions)


@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """Put today's code into a hybrid's folder, which then runs with newer versions of transformers."""

    folder: str | None = None
    """Folder of a hybrid that an earlier version of this project wrote. Its weights stay as they are."""


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Describe a hybrid's layers, mixers, sizes, cache and origin, without loading its weights."""

    model: str | None = None
    """Folder or Hub id of a hybrid."""
    revision: str | None = None
    """Branch, tag or commit of a Hub repository."""
    html: str | None = None
    """File to write a page with pictures to, which opens without a network."""


@dataclass(frozen=True, kw_only=True)
class EnvOptions:
    """List this machine's versions of libraries, its GPU kernels, and the code that each part of a model runs on."""


@dataclass(frozen=True, kw_only=True)
class FamiliesOptions:
    """List the teachers that can be converted, and the formats and weights that were tested."""


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """A model that answers, and how."""

    model: str | None = None
    """Folder, Hub id or GGUF file."""
    max_new_tokens: PositiveInt = 256
    """Largest number of tokens of an answer."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 decodes greedily."""
    seed: Seed = 0
    """Seed of the sampling."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights in memory."""
    device: str = "cpu"
    """Device to run on: cpu, cuda."""
    revision: str | None = None
    """Branch, tag or commit of a Hub repository."""
    trust_remote_code: bool = False
    """Run code from the model's repository."""


@dataclass(frozen=True, kw_only=True)
class ChatOptions(AnswerOptions):
    """Chat with a model, whose cache keeps the earlier turns.

    Every line is a turn. `/retry` answers the last one again, `/edit TEXT` answers another in its place, and
    `/result TEXT` gives the result of a function that the model called.
    """

    tools: str | None = None
    """JSON file with a list of functions that the model may call."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(AnswerOptions):
    """Answer a prompt, token by token; on request the teacher answers it, too."""

    prompt: str = ""
    """Text to answer."""
    teacher: str | None = None
    """Model that answers the prompt as well; `recorded` is the teacher that the checkpoint names."""
    max_new_tokens: PositiveInt = 128
    """Largest number of tokens to generate."""
    raw: bool = False
    """Continue the text without the chat template."""


class OptionParser:
    """Reads one options dataclass from a command line, from a YAML file, or from Python values.

    Args:
        options_class: the dataclass.
        flags: what the command line offers, each flag with the dotted name of its field. Every other field can be set
            in the YAML file, or by its dotted name (`--alignment.fit.refine_steps 0`), but `--help` does not list it.
        positionals: the arguments without a flag, each with the dotted name of its field. The last may be a list,
            which takes all that follow or none.
        switches: flags of the command itself, with their help.
    """

    def __init__(
        self,
        options_class: type,
        flags: Mapping[str, str],
        positionals: Mapping[str, str],
        switches: Mapping[str, str] = MappingProxyType({}),
        prog: str = "convert-to-hybrid",
    ):
        self.options_class = options_class
        self.flags = flags
        self.positionals = positionals
        self.switches = switches
        self.prog = prog
        self.options = {option.name: option for option in documented(options_class)}
        self.parser = ArgumentParser(prog=prog, exit_on_error=False, add_help=False)
        self.parser.add_class_arguments(options_class, as_group=False)

    def help(self) -> str:
        """Format the text of `--help`: the flags alone, in the order of `flags`."""
        shown = argparse.ArgumentParser(prog=self.prog, description=inspect.cleandoc(self.options_class.__doc__))
        for metavar, name in self.positionals.items():
            shown.add_argument(metavar, help=self.options[name].help, nargs="?")
        for flag, name in self.flags.items():
            option = self.options[name]
            text = (option.help + _notes(option)).replace("%", "%%")
            if option.default is False:
                shown.add_argument(flag, help=text, action="store_true")
            elif option.kind == MAPPING:
                shown.add_argument(flag, help=text, metavar="NAME=VALUE")
            else:
                shown.add_argument(flag, help=text, metavar=flag[2:].upper())
        if self.flags:
            shown.add_argument("--config", metavar="FILE", help="YAML file with any of the options.")
        for switch, text in self.switches.items():
            shown.add_argument(*switch.split(), action="store_true", help=text)
        return shown.format_help()

    def from_command_line(self, argv: Sequence[str]) -> tuple[Any, dict[str, bool]]:
        """Read the options, and which switches are on.

        Raises:
            ValueError: an unknown option, a value of the wrong kind, an unreadable YAML file, or a contradiction.
        """
        given = []
        config = None
        places = list(self.positionals.values())
        names = {spelling: switch.split()[-1] for switch in self.switches for spelling in switch.split()}
        on = dict.fromkeys(names.values(), False)
        parts = iter(argv)
        listed = []
        for part in parts:
            flag, equals, value = part.partition("=")
            name = self.flags.get(flag, flag[2:])
            if not part.startswith("-"):
                if not places:
                    raise ValueError(f"There is one argument too many: {part!r}.")
                if self.options[places[0]].kind.startswith(LIST):
                    listed.append(part)
                else:
                    given.append(f"--{places.pop(0)}={part}")
            elif part in names:
                on[names[part]] = True
            elif flag != "--config" and name not in self.options:
                known = [*self.flags, *on, "--config", *(f"--{option}" for option in self.options)]
                raise ValueError(f"Unknown option {flag}{_nearest(flag, known)}")
            elif flag in self.flags and self.options[name].default is False and not equals:
                given.append(f"--{name}=true")
            else:
                if not equals:
                    value = next(parts, "--")
                if value.startswith("--"):
                    raise ValueError(f"{flag} needs a value.")
                if flag == "--config":
                    config = value
                elif self.options[name].kind.startswith(LIST) and not value.startswith("["):
                    given.append(f"--{name}=[{value}]")
                elif self.options[name].kind != MAPPING:
                    given.append(f"--{name}={value}")
                elif "=" in value:
                    given.append(f"--{name}.{value}")
                else:
                    raise ValueError(f"{flag} needs NAME=VALUE, not {value!r}.")
        if listed:
            given.append(f"--{places[0]}={json.dumps(listed)}")
        with self._one_line_errors():
            base = self._from_file(config)
        with self._one_line_errors({name: flag for flag, name in self.flags.items()}):
            made = self._made(self.parser.parse_args(given, namespace=base))
        for metavar, name in self.positionals.items():
            if not functools.reduce(getattr, name.split("."), made) and not self.options[name].kind.startswith(LIST):
                raise ValueError(f"No {metavar} given: {self.prog} {' '.join(self.positionals)}.")
        return made, {flag[2:].replace("-", "_"): switch for flag, switch in on.items()}

    def from_values(self, values: Mapping[str, Any], config: str | Path | None = None) -> Any:
        """The options from nested Python values, over those of a YAML file."""
        self._check_names(values)
        with self._one_line_errors():
            base = self._from_file(config)
            return self._made(self.parser.parse_object(dict(values), namespace=base))

    def _from_file(self, path: str | Path | None) -> Any:
        if path is None:
            return None
        path = Path(path).expanduser()
        if not path.is_file():
            raise ValueError(f"{path} does not exist or is no file.")
        if path.stat().st_size > MAX_YAML_BYTES:
            raise ValueError(f"{path} is larger than any file of options.")
        try:
            text = path.read_text()
            depth = 0
            for event in yaml.parse(text):
                depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
                if isinstance(event, yaml.AliasEvent) or depth > 20:  # aliases can multiply without end
                    raise ValueError(f"{path} has YAML aliases (*name) or is nested deeper than any option.")
            found = get_loader("yaml")(text)
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{path} is not valid YAML: {error}") from error
        if found is not None and not isinstance(found, dict):
            raise ValueError(f"{path} must hold options as `name: value`, and sections of them.")
        if pair := re.search(r"(?m)\battention_heads: *(\d+:[0-5]?\d) *(,\s|[#}]|$)", text):
            raise ValueError(f"attention_heads: {pair[1]} needs quotes, because YAML reads it as one number.")
        self._check_names(found or {})
        return self.parser.parse_object(found or {})

    def _check_names(self, values: Mapping[str, Any], section: str = "") -> None:
        """Refuse unknown options, and values in the place of a section of options."""
        sections = {name[:end] for name in self.options for end, letter in enumerate(name) if letter == "."}
        for key, value in values.items():
            name = f"{section}{key}"
            option = self.options.get(name)
            if option is not None:
                if value is None and option.default is not None:
                    raise ValueError(f"{name} must be {option.kind}; leave it out for its default.")
            elif name not in sections:
                raise ValueError(f"Unknown option {name!r}{_nearest(name, [*self.options, *sorted(sections)])}")
            elif isinstance(value, Mapping):
                self._check_names(value, f"{name}.")
            else:
                inside = next(known for known in self.options if known.startswith(f"{name}."))
                raise ValueError(f"{name} is a section of options, such as {inside}; it cannot be {value!r}.")

    def _made(self, found: Any) -> Any:
        found = self.parser.instantiate(found)
        return self.options_class(**{item.name: found[item.name] for item in dataclasses.fields(self.options_class)})

    @contextlib.contextmanager
    def _one_line_errors(self, spelled: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
        """jsonargparse's errors about a value in one line, with the option's name as the user spelled it."""
        try:
            yield
        except ArgumentError as error:
            message = " ".join(str(error).split())
            if match := re.search(r'Parser key "(.+?)":\s*(.*)', message):
                name, text = match.groups()
                given = re.search(r"(?:Given|Got) value: (.*?)(?: Given value|$)", text) or re.search(
                    r"(\S+) does not conform", text
                )
                if name in self.options:
                    message = f"{spelled.get(name, name)} must be {self.options[name].kind}"
                    if given is not None:
                        message += f", not {given[1]}"
                    message += "."
            raise ValueError(message) from error


def _nearest(wrong: str, names: Sequence[str]) -> str:
    """A hint at the known name that is most similar to a wrong one, whatever section it is in."""
    leaves = {re.split(r"[.]|--", name)[-1].replace("-", "_"): name for name in reversed(names)}
    leaf = re.split(r"[.]|--", wrong)[-1].replace("-", "_")
    found = difflib.get_close_matches(leaf, leaves, 1, 0.6)
    if not found:
        return "."
    return f"; did you mean {leaves[found[0]]}?"


class Documented(NamedTuple):
    """An option as it is shown to the user."""

    name: str
    kind: str
    default: Any
    help: str


def _notes(option: Documented) -> str:
    """The kinds and the default of an option, in brackets behind its help."""
    notes = []
    if " or " in option.kind and "a text" not in option.kind and not isinstance(option.default, bool):
        notes.append(option.kind)
    default = option.default
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    if default is not None and default is not False and default not in ("", (), {}):
        notes.append(f"default: {default}")
    if not notes:
        return ""
    return f" ({'; '.join(notes)})"


@functools.cache
def documented(options_class: type, prefix: str = "") -> tuple[Documented, ...]:
    """Every option of a dataclass and of its sections, with the docstring below its field."""
    texts: dict[str, str] = {}
    for cls in reversed(options_class.__mro__[:-1]):
        parsed = docstring_parser.parse_from_object(cls)
        texts |= {item.arg_name: " ".join((item.description or "").split()) for item in parsed.params}
    found = []
    hints = typing.get_type_hints(options_class)
    for item in dataclasses.fields(options_class):
        if dataclasses.is_dataclass(hints[item.name]):
            found += documented(hints[item.name], f"{prefix}{item.name}.")
        else:
            name = f"{prefix}{item.name}"
            default = item.default
            if item.default_factory is not dataclasses.MISSING:
                default = item.default_factory()
            found.append(Documented(name, _kind(hints[item.name]), default, texts.get(item.name, "")))
    return tuple(found)


def _kind(hint: Any) -> str:
    """A type in words."""
    if typing.get_origin(hint) is Literal:
        return " or ".join(str(value) for value in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"{LIST}, each item {_kind(typing.get_args(hint)[0])}"
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        kinds = [_kind(part) for part in typing.get_args(hint) if part is not types.NoneType]
        return " or ".join(kind for kind in kinds if kind != "a whole number" or "a number" not in kinds)
    if expected := getattr(hint, "_expression", None):
        words = {"v": "", ">=": " of at least ", ">": " above ", "<=": " at most "}
        number = "a whole number" if issubclass(hint, int) else "a number"
        words_of_it = re.sub("v|>=|<=|>", lambda sign: words[sign[0]], expected).replace("  ", " ")
        return number + re.sub(r"( and)? ?(of )?at (least|most) +-?\d{9,}(\.0)?", "", words_of_it)  # beyond any use
    if typing.get_origin(hint) is dict:
        return MAPPING
    if typing.get_origin(hint) is list:
        return "a list of whole numbers"
    return {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}.get(hint, str(hint))


@functools.cache
def conversion_parser() -> OptionParser:
    """The parser of a conversion's options."""
    return OptionParser(ConversionOptions, CONVERSION_FLAGS, {})


def make_options(
    model: str | None = None,
    output: str | os.PathLike | None = None,
    /,
    config: str | os.PathLike | None = None,
    **values: Any,
) -> ConversionOptions:
    """The options of a conversion from Python.

    Args:
        model, output: teacher and folder, which may stand in the file or among `values` instead.
        config: a YAML file, over which `values` win.
        values: a flag of the command line by its name (`align="none"`, `window=32`), any other option by its own name
            where no two sections have it (`sinks=2`), or a section as a dictionary (`output={"dtype": "bfloat16"}`).

    Raises:
        ValueError: an unknown option, a value of the wrong kind, or a contradiction.
    """
    parser = conversion_parser()
    leaves = Counter(name.rpartition(".")[2] for name in parser.options)
    place = {name.rpartition(".")[2]: name for name in parser.options if leaves[name.rpartition(".")[2]] == 1}
    place |= {flag[2:].replace("-", "_"): name for flag, name in CONVERSION_FLAGS.items()} | {
        "output": "output.folder"
    }
    by_place = [(name, value) for name, value in (("model", model), ("output", output)) if value is not None]
    nested: dict[str, Any] = {}
    for name, value in [*by_place, *values.items()]:
        is_section = isinstance(value, Mapping) and name != "attention_heads"
        path = name
        if not is_section:
            path = place.get(name, name)
        *sections, leaf = path.split(".")
        inner = functools.reduce(lambda found, section: found.setdefault(section, {}), sections, nested)
        made = plain(value)
        twice = leaf in inner
        if is_section:
            known = inner.get(leaf, {})
            twice = bool(known.keys() & value.keys())
            made = {**known, **made}
        if twice:
            raise ValueError(f"{name} is given twice, by its place, its name or in its section; give one.")
        inner[leaf] = made
    return parser.from_values(nested, config)


def plain(value: Any) -> Any:
    """A Python value as YAML would give it: a path as text, any sequence as a list, numpy's numbers as Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {plain(name): plain(inner) for name, inner in value.items()}
    if getattr(value, "ndim", None) == 0:
        return value.item()
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [plain(inner) for inner in value]
    return value


def options_page() -> str:
    """docs/guide/options.md: every option of a conversion, a table for each section."""
    flags = {name: flag for flag, name in CONVERSION_FLAGS.items()}
    lines = [
        "# Options",
        "",
        "Every option of a conversion. A YAML file (`--config FILE`) takes all of them, in the sections below; the",
        "command line has the flags that are named here, and every other option by its full name",
        "(`--alignment.fit.refine_steps 0`). Flags win over the file. In Python, `convert(model, output, ...)` takes",
        "flags and options by their own names, and sections as dictionaries.",
    ]
    written = None
    for name, kind, default, text in documented(ConversionOptions):
        section, _, leaf = name.rpartition(".")
        if section != written:
            title = "General"
            if section:
                title = f"`{section}`"
            lines += ["", f"## {title}", "", "| option | type | default | |", "|---|---|---|---|"]
            written = section
        shown = f"`{leaf}`"
        if name in flags:
            shown += f" (`{flags[name]}`)"
        lines.append(f"| {shown} | {kind} | {_as_yaml(default)} | {text} |")
    return "\n".join(lines) + "\n"


def _as_yaml(default: Any) -> str:
    """A default as a YAML file has it, in a cell; nothing for None."""
    if default is None:
        return ""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, tuple):
        return f"`{list(default)}`"
    return f"`{default}`"
