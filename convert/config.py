"""What a conversion is told: one dataclass, filled from a YAML file and from flags."""

import dataclasses
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .placement.heads import is_number

ALIGNMENTS = ("none", "closed-form", "mohawk")
SELECTIONS = ("uniform", "kl", "kl+recall")
MIXERS = ("discrete_mamba2", "mamba2", "mamba1", "none")
DTYPES = ("auto", "float32", "bfloat16", "float16")
ACTIVATIONS = ("identity", "silu")
NORMS = ("none", "head", "whole")
SEES = ("beyond", "all")
# options of a conversion whose result one of transformers' own architectures can hold: `export`
EXPORT_READY = {"mixer": "mamba2", "norm": "head", "activation": "silu", "rotary": False}
# what these say goes without effect where there is no mixer
MIXER_ONLY = (
    "d_state",
    "activation",
    "gate_bias",
    "expand_kv_heads",
    "rotary",
    "decay_bias",
    "out_bias",
)
LAYER_CHOICES = {"attention_layers", "attention_ratio", "cache_bytes", "cache_ratio", "layer_pattern"}
# a layer that these name stays attention within a budget of cache; the budget chooses the rest
NAMED_LAYERS, BUDGETS = {"attention_layers", "layer_pattern"}, {"cache_bytes", "cache_ratio"}
# where nothing is said about what the layers hold, or how it is found, so much of the teacher's cache is spent as well
# as the scores know how (docs/hybrid_layers.md)
DEFAULT_CACHE_RATIO = 0.25
CONTENTS = LAYER_CHOICES | {
    "attention_heads", "export_ready", "layer_selection", "low_memory", "mixer", "mixer_sees", "norm", "shared_state",
    "sinks", "window", *MIXER_ONLY,
}  # fmt: skip
# what these say goes without effect when nothing is aligned
ALIGNMENT_ONLY = (
    "align_config",
    "calibration_dataset",
    "calibration_column",
    "calibration_config",
    "calibration_split",
    "calibration_tokens",
    "activation_memory",
    "low_memory",
    "work_dir",
)
SIZE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, kw_only=True)
class ConversionConfig:
    """Options of one conversion; the YAML keys are the field names."""

    model: str
    """Hub id, local folder, or GGUF file."""
    output: str
    """Folder to write the hybrid to."""
    revision: str | None = None
    """Branch, tag or commit of a Hub repository."""
    gguf_file: str | None = None
    """Name of a GGUF file inside the folder or repository."""
    trust_remote_code: bool = False
    """Run code from the teacher's repository (its tokenizer may need it)."""
    attention_layers: str | None = None
    """Layers that stay attention: "1,3,5", or a published choice by name."""
    attention_ratio: float | None = None
    """Share of layers that stay attention; 0.5 where no choice of layers is given, but something else about them."""
    cache_bytes: str | None = None
    """Instead of a share of layers: what a sequence's cache may take, such as 50MB. Layers, heads, window and state
    are then chosen together; with layer_selection, or without alignment, as many attention layers as fit."""
    cache_ratio: float | None = None
    """The same as a share of the teacher's cache; 0.25 where a closed-form conversion is told nothing about layers."""
    context: int = 4096
    """Tokens of the sequence that cache_bytes and cache_ratio speak of."""
    measure: int = 3
    """How many of the best choices within a budget are measured before one is taken; 0 trusts the scores."""
    layer_selection: str | None = None
    """Which layers stay attention: uniform (evenly placed), kl (those that cost most to replace) or kl+recall (the
    same, recall probes counted); kl+recall by default when the mixers are aligned, else uniform."""
    layer_pattern: str | None = None
    """M (mixer) and A (attention), repeated over the layers, such as MA or MMMA."""
    window: int | None = None
    """Tokens that the replaced layers still see by softmax attention, beside their mixer; none by default."""
    sinks: int = 4
    """First tokens that they see whatever the distance, beside the window."""
    attention_heads: str | None = None
    """Heads of the replaced layers that keep full attention beside the window: layer:head pairs, a JSON file, or how
    many key/value heads (a number, or a share such as 0.02), chosen by how much they serve recall."""
    mixer_sees: str | None = None
    """Beside a window, what the mixer sees: beyond (what is neither in the window nor a sink; the default) or all."""
    mixer: str = "discrete_mamba2"
    """Matrix mixer of the replaced layers; none leaves a window and sinks alone."""
    d_state: int | None = None
    """State size per head (N); the head dimension by default, 16 for mamba1."""
    norm: str | None = None
    """Gated norm before out_proj of the mamba2 mixer; "head" by default."""
    activation: str = "identity"
    """After the short convolution: "identity", which keeps the mapping exact, or "silu", as published mamba2 and
    mamba1 have it."""
    shared_state: bool = False
    """One decay, and with it one state, for all heads that share a key/value head: a smaller state."""
    gate_bias: bool = True
    """A bias that opens the gate; published mamba2 and mamba1 have none, and their gate starts at random."""
    expand_kv_heads: bool = False
    """Give x and B one head per query head, as the published checkpoints have it."""
    rotary: bool | None = None
    """Keep the teacher's rotary embedding on B and C; on by default where the mixer can hold it."""
    decay_bias: bool = True
    """A bias that sets how long the memory of a discrete_mamba2 head is."""
    out_bias: bool = True
    """A bias on out_proj."""
    export_ready: bool = False
    """A mixer that transformers' own architectures hold: mamba2 with a norm per head, SiLU and no rotary embedding."""
    initial_decay: float = 0.9
    """Decay per token of every head before alignment, in (0, 1]."""
    align: str = "closed-form"
    """How the mixers are fitted to the teacher after the weights are mapped: none, closed-form, or mohawk
    (closed-form, then the stages of the alignment file)."""
    align_config: str | None = None
    """YAML file with the settings of the alignment."""
    calibration_dataset: str = "default"
    """Text to align on: default (ships with the package), sampled (drawn from the teacher), a .jsonl, .txt or .parquet
    file, a folder of them, or a Hub data set."""
    calibration_column: str = "text"
    """Column of the data set that holds the text."""
    calibration_config: str | None = None
    """Configuration (subset) of a Hub data set."""
    calibration_split: str = "train"
    """Split of a Hub data set."""
    calibration_tokens: int = 30720
    """Tokens of closed-form alignment."""
    activation_memory: str = "4GB"
    """Memory for activations; what exceeds it goes to disk."""
    low_memory: bool = False
    """Hold one block of the teacher at a time; layers are then not selected by score."""
    work_dir: str | None = None
    """Folder that keeps fits until the result is safe, and scores, so that an interrupted alignment goes on; by
    default OUT.work, which is removed once the result is safe."""
    dtype: str = "auto"
    """Type of the weights written; auto keeps the teacher's."""
    device: str = "cpu"
    """Where alignment runs."""
    max_shard_size: str = "5GB"
    """Largest weights file."""
    seed: int = 0
    """Of the tensors the teacher says nothing about."""
    overwrite: bool = False
    """Replace OUT if it exists, once the new checkpoint is complete."""
    push_to_hub: str | None = None
    """Repository to upload the result to."""
    private: bool = False
    """Make that repository private."""

    def __post_init__(self):
        for name, allowed in (
            ("mixer", MIXERS),
            ("align", ALIGNMENTS),
            ("dtype", DTYPES),
            ("norm", (None, *NORMS)),
            ("activation", ACTIVATIONS),
            ("mixer_sees", (None, *SEES)),
            ("layer_selection", (None, *SELECTIONS)),
        ):
            if getattr(self, name) not in allowed:
                values = ", ".join(str(value) for value in allowed if value is not None)
                raise ValueError(f"{name} must be one of {values}; got {getattr(self, name)!r}.")
        chosen = sorted(n for n in LAYER_CHOICES if getattr(self, n) is not None)
        both = len(chosen) == 2 and NAMED_LAYERS.intersection(chosen) and BUDGETS.intersection(chosen)
        if len(chosen) > 1 and not (both and self.spends_budget):
            raise ValueError(f"{' and '.join(chosen)} contradict each other; give one of them.")
        if self.cache_ratio is not None and not 0 < self.cache_ratio <= 1:
            raise ValueError(f"cache_ratio is a share of the teacher's cache, in (0, 1], not {self.cache_ratio}.")
        if not 0 < self.initial_decay <= 1:
            raise ValueError(f"initial_decay must lie in (0, 1], not {self.initial_decay}.")
        if self.d_state is not None and self.d_state < 1:
            raise ValueError(f"d_state must be positive, not {self.d_state}.")
        self._check_window()
        if self.export_ready:
            for name, value in EXPORT_READY.items():
                if getattr(self, name) != value:
                    raise ValueError(f"export_ready needs {name} {value}, not {getattr(self, name)}.")
        if self.norm is not None and self.mixer != "mamba2":
            raise ValueError(f"norm exists for the mamba2 mixer only; the mixer is {self.mixer}.")
        if self.shared_state and self.mixer in ("mamba1", "none"):
            raise ValueError(f"mixer {self.mixer} has no state that heads could share; choose another mixer.")
        if self.shared_state and self.expand_kv_heads:
            warnings.warn("shared_state has no effect with expand_kv_heads: no head shares its x and B.", stacklevel=4)
        if self.private and self.push_to_hub is None:
            raise ValueError("private says who may see the uploaded repository; it needs push_to_hub.")
        parse_size(self.max_shard_size)
        parse_size(self.activation_memory)
        if self.cache_bytes is not None:
            parse_size(self.cache_bytes)
        self._check_alignment()

    @property
    def spends_budget(self) -> bool:
        """Whether a budget of cache chooses layers, heads, window and state together, for which they are scored."""
        by_layers = self.align == "none" or self.low_memory or self.layer_selection is not None or self.export_ready
        return not by_layers and (self.cache_bytes is not None or self.cache_ratio is not None)

    def _check_window(self) -> None:
        if self.window is None and not self.spends_budget:
            for name, value in (("sinks", self.sinks != 4), ("mixer_sees", self.mixer_sees is not None)):
                if value:
                    warnings.warn(f"{name} has no effect without window.", stacklevel=5)
            if self.attention_heads is not None:
                raise ValueError("attention_heads stand beside a window; give one (window: 64).")
            if self.mixer == "none":
                raise ValueError("mixer none leaves a window and sinks; say how wide it is (window: 256).")
        elif self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1, not {self.window}; leave it out for none.")
        if self.sinks < 0:
            raise ValueError(f"sinks cannot be negative: {self.sinks}.")
        if self.mixer == "none":
            defaults = {field.name: field.default for field in dataclasses.fields(self)}
            for name in MIXER_ONLY:
                if getattr(self, name) != defaults[name]:
                    warnings.warn(f"{name} has no effect without a mixer.", stacklevel=5)
        if self.mixer == "none" and self.mixer_sees is not None:
            raise ValueError("mixer none sees nothing; leave out mixer_sees, or choose another mixer.")
        if self.window is not None and self.mixer == "mamba1" and self.mixer_sees == "beyond":
            raise ValueError("mamba1 beside a window sees everything; say mixer_sees all, or choose another mixer.")

    def _check_alignment(self) -> None:
        """Options that contradict the alignment, or have no effect without one."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        if self.calibration_tokens < 1 or self.context < 1:
            raise ValueError("calibration_tokens and context must be positive.")
        by_score = self.layer_selection in ("kl", "kl+recall")
        if by_score and self.align == "none":
            raise ValueError(f"layer_selection {self.layer_selection} scores fitted mixers; it needs an alignment.")
        if by_score and self.low_memory:
            raise ValueError(
                f"layer_selection {self.layer_selection} needs the whole teacher in memory; leave out low_memory or "
                "say layer_selection uniform."
            )
        if self.layer_selection is not None and (self.attention_layers is not None or self.layer_pattern is not None):
            raise ValueError("layer_selection chooses the layers; attention_layers and layer_pattern name them.")
        if self.context != defaults["context"] and self.cache_bytes is None and self.cache_ratio is None:
            warnings.warn("context has no effect without cache_bytes or cache_ratio.", stacklevel=4)
        if self.measure < 0:
            raise ValueError(f"measure cannot be negative: {self.measure}.")
        if self.measure != defaults["measure"] and not self.spends_budget:
            warnings.warn("measure has no effect: no budget of cache chooses here.", stacklevel=4)
        counted = self.attention_heads is not None and is_number(self.attention_heads)
        if counted and self.align == "none":
            raise ValueError("attention_heads by number are chosen by the alignment; name them (16:3,18:0), or align.")
        if self.align != "none":
            if self.initial_decay != defaults["initial_decay"]:
                warnings.warn("initial_decay has no effect: alignment chooses the decay (fit: decays).", stacklevel=4)
            return
        if self.device != "cpu":
            warnings.warn("device has no effect without alignment: mapping weights is disk-bound.", stacklevel=4)
        for name in ALIGNMENT_ONLY:
            if getattr(self, name) != defaults[name]:
                warnings.warn(f"{name} has no effect without alignment.", stacklevel=4)

    def options(self) -> dict[str, Any]:
        """Every option that is not its default, for the record."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}


def parse_size(text: str | int) -> int:
    """Bytes in "5GB", "500MB", "2GiB" or a plain number.

    Raises:
        ValueError: not a positive size.
    """
    cleaned = str(text).strip().upper().replace(" ", "")
    unit = next((u for u in sorted(SIZE_UNITS, key=len, reverse=True) if cleaned.endswith(u)), "")
    try:
        size = int(float(cleaned.removesuffix(unit)) * SIZE_UNITS.get(unit, 1))
    except ValueError:
        size = 0
    if size <= 0:
        raise ValueError(f"{text!r} is not a size; write for example 5GB or 500MB.")
    return size


def read_config_file(path: str | Path) -> dict[str, Any]:
    """The options in a YAML file.

    Raises:
        ValueError: the file is not there, is not a mapping, or has a key that is no option.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"Config file {path} does not exist.")
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"Config file {path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"Config file {path} must hold `option: value` lines.")
    known = {field.name for field in dataclasses.fields(ConversionConfig)}
    values = {str(key).replace("-", "_"): value for key, value in values.items()}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"Unknown key {unknown[0]!r} in {path}; known keys: {', '.join(sorted(known))}.")
    if isinstance(values.get("attention_layers"), list | int):
        layers = values["attention_layers"]
        values["attention_layers"] = ",".join(str(i) for i in (layers if isinstance(layers, list) else [layers]))
    heads = values.get("attention_heads")
    if isinstance(heads, int | float) and not isinstance(heads, bool):
        if isinstance(heads, int) and heads >= 60:  # YAML reads 16:3 as a time of day
            raise ValueError(f"attention_heads reads as {heads} in {path}; put it in quotes.")
        values["attention_heads"] = str(heads)
    return values


def make_config(config_file: str | Path | None = None, **flags: Any) -> ConversionConfig:
    """Options from a YAML file and from flags; a flag that is not None wins.

    Raises:
        ValueError: unknown or contradictory options, or no model or output.
    """
    values = {} if config_file is None else read_config_file(config_file)
    flags = {name: value for name, value in flags.items() if value is not None}
    if LAYER_CHOICES & flags.keys():  # a choice of layers on the command line replaces the file's, of whatever kind
        named = {"attention_layers", "layer_pattern"} & flags.keys()
        replaced = LAYER_CHOICES | ({"layer_selection"} if named else set())
        values = {name: value for name, value in values.items() if name not in replaced}
    values |= flags
    if values.get("export_ready"):
        values = EXPORT_READY | values
    for name in ("model", "output"):
        if not values.get(name):
            raise ValueError(f"No {name} given: convert-to-hybrid MODEL OUT, or `{name}:` in the config file.")
    if values.get("align", "closed-form") == "closed-form" and not CONTENTS & values.keys():
        values["cache_ratio"] = DEFAULT_CACHE_RATIO
    known = {field.name: field for field in dataclasses.fields(ConversionConfig)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"Unknown option {unknown[0]!r}; known options: {', '.join(sorted(known))}.")
    for name, value in values.items():
        _check_type(name, value, known[name].type)
    return ConversionConfig(**values)


def _check_type(name: str, value: Any, annotation: Any) -> None:
    """YAML turns a typo into another type silently; say so."""
    if annotation is float or annotation == float | None:
        annotation = annotation | int
    is_bool_for_number = isinstance(value, bool) and annotation not in (bool, bool | None)
    if is_bool_for_number or not isinstance(value, annotation):
        raise ValueError(f"{name} must be {annotation}, got {value!r}.".replace("<class '", "").replace("'>", ""))
