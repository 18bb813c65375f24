"""How alignment is done, beyond the command line: the contents of `--align-config FILE.yaml`."""

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from .closed_form import FitSettings

# tokens of a sequence, where a budget may put a wide window before a state: what lies beyond has to be long
BUDGET_LENGTH = 1024


@dataclass(frozen=True, kw_only=True)
class SelectionSettings:
    """How layers are scored."""

    recall_weight: float = 0.3
    """Nats of KL that a nat of recall loss counts for, in kl+recall."""
    rounds: int = 3
    """Layers are chosen in so many steps, and scored anew after each, given those chosen; 1 scores each alone."""
    prose_sequences: int = 2
    """Sequences of prose that measure KL, not used for fitting."""
    probe_length: int = 96
    """Random tokens of the copy probe before they repeat."""
    refine_steps: int = 0
    """Gradient steps of the fit that is scored; the final fit has its own."""

    def __post_init__(self):
        for name in ("rounds", "prose_sequences", "probe_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")


@dataclass(frozen=True, kw_only=True)
class BudgetSettings:
    """How heads are scored where a budget of cache chooses."""

    windows: tuple[int, ...] = (32, 256)
    """Windows at which it is measured what each head costs; others are interpolated."""
    points: int = 2
    """Of the line between full attention and windows that is integrated over."""
    rounds: int = 0
    """Times that heads are scored again among those still in the race, the others seeing a window. Where it was
    measured it lowered KL, and recall on other text (docs/hybrid_layers.md)."""
    prose_tokens: int = 2048
    """Length of the text that scores heads, and of another that judges the best choices."""
    answers: int = 256
    """Tokens to be recalled from far away, per text."""
    state: bool = True
    """Whether a mixer beside the window comes into question where no option of it says so. To know, one is fitted in
    every layer; beside heads with full attention it is worth its bytes (docs/hybrid_layers.md)."""

    def __post_init__(self):
        for name in ("points", "answers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.rounds < 0:
            raise ValueError(f"rounds cannot be negative: {self.rounds}.")
        if not self.windows or min(self.windows) < 1:
            raise ValueError(f"windows must be at least 1, not {self.windows}.")
        if self.prose_tokens - self.prose_tokens // 8 < 4 * self.answers:  # the needle begins an eighth of the way
            raise ValueError(f"prose_tokens {self.prose_tokens} has no room for two times {self.answers} answers.")


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """One stage of MOHAWK."""

    tokens: int = 0
    """Training tokens; 0 leaves the stage out."""
    sequences: int = 2
    """Sequences per step and process."""
    learning_rate: float = 1e-3
    """Peak, of the mixers."""
    warmup: float = 0.1
    """Share of the steps that warm up (WSD: warm-up, stable, decay)."""
    decay: float = 0.3
    """Share of the steps that decay to 0."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to it, per layer in stages 1 and 2."""
    weight_decay: float = 0.0
    """Of matrices."""
    save_every: int = 200
    """Steps between checkpoints; 0 writes none on the way."""
    report_to: str = "none"
    """Where figures go besides the log file: none, tensorboard, wandb, ... as the Trainer has it."""

    def __post_init__(self):
        for name in ("sequences", "learning_rate", "max_grad_norm"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}.")
        if self.tokens < 0 or self.save_every < 0:
            raise ValueError("tokens and save_every cannot be negative.")
        if not (self.warmup >= 0 and self.decay >= 0 and self.warmup + self.decay <= 1):
            raise ValueError(
                f"warmup {self.warmup} and decay {self.decay} are shares of the steps; together at most 1."
            )


@dataclass(frozen=True, kw_only=True)
class OrientationSettings(StageSettings):
    """Stage 1: matrix orientation."""

    tile: int = 128
    """Rows of the matrices compared at a time."""


@dataclass(frozen=True, kw_only=True)
class HiddenStateSettings(StageSettings):
    """Stage 2: hidden-state alignment."""

    target: Literal["mixer", "block"] = "mixer"
    """Compare the mixer's output with the attention's, or the whole block's output."""
    bf16: bool = False
    """Run matrix products in bfloat16 (the recurrence and the loss stay in float32)."""


@dataclass(frozen=True, kw_only=True)
class DistillationSettings(StageSettings):
    """Stage 3: knowledge distillation, end to end."""

    other_learning_rate: float = 0.0
    """Peak, of everything but the mixers; 0 freezes it."""
    temperature: float = 1.0
    """Of both distributions."""
    train_mlp: bool = True
    """Whether MLPs take part, at other_learning_rate."""
    gradient_checkpointing: bool = False
    """Recompute blocks in the backward pass, for memory."""
    bf16: bool = False
    """Run matrix products in bfloat16 (the recurrence and the loss stay in float32)."""
    recall_share: float = 0.0
    """Share of the training sequences that hold a needle of random tokens and ask for it, which text seldom does."""

    window_dropout: float = 0.0
    """Chance that a sequence does without the windows beside its mixers at first, falling to 0 half way: it keeps the
    mixers in use."""

    def __post_init__(self):
        super().__post_init__()
        for name in ("recall_share", "window_dropout"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie between 0 and 1, not {getattr(self, name)}.")


@dataclass(frozen=True, kw_only=True)
class AlignmentSettings:
    """Everything in an alignment file; the keys are the field names."""

    sequence_length: int = 512
    """Tokens per calibration and training sequence; 1,024 where a budget of cache is spent and nothing is said."""
    held_out_sequences: int = 4
    """Calibration sequences that judge instead of fit."""
    start: Literal["teacher", "mohawk", "mamba-in-llama"] = "teacher"
    """Mixers begin mapped from the teacher and solved in closed form; or as MOHAWK's random mixer with identity
    convolution and open gate; or mapped with Mamba in the Llama's random remainder."""
    fit: FitSettings = field(default_factory=FitSettings)
    selection: SelectionSettings = field(default_factory=SelectionSettings)
    budget: BudgetSettings = field(default_factory=BudgetSettings)
    matrix_orientation: OrientationSettings = field(default_factory=OrientationSettings)
    hidden_state_alignment: HiddenStateSettings = field(default_factory=lambda: HiddenStateSettings(tokens=100_000))
    distillation: DistillationSettings = field(
        default_factory=lambda: DistillationSettings(tokens=100_000, learning_rate=3e-4, other_learning_rate=3e-5)
    )

    def __post_init__(self):
        if self.sequence_length < 16:
            raise ValueError(f"sequence_length must be at least 16, not {self.sequence_length}.")
        if self.held_out_sequences < 1:
            raise ValueError("held_out_sequences must be at least 1: something has to judge the fit.")


def read_alignment_file(
    path: str | Path | None, sequence_length: int = AlignmentSettings.sequence_length
) -> AlignmentSettings:
    """The settings in a YAML file; the defaults where there is none.

    Args:
        sequence_length: what holds where the file does not say.

    Raises:
        ValueError: the file is not there or not valid, or a key or a type is wrong.
    """
    if path is None:
        return AlignmentSettings(sequence_length=sequence_length)
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"Alignment file {path} does not exist.")
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"Alignment file {path} is not valid YAML: {' '.join(str(error).split())}") from error
    if isinstance(values, dict):
        values = {"sequence_length": sequence_length} | values
    return from_mapping(AlignmentSettings, values, str(path))


def from_mapping(cls: type, values: Any, where: str) -> Any:
    """A settings dataclass from a mapping, nested ones included.

    Raises:
        ValueError: not a mapping, an unknown key, or a value of the wrong type.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{where} must hold `key: value` lines.")
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(map(str, values)) - set(hints))
    if unknown:
        raise ValueError(f"Unknown key {unknown[0]!r} in {where}; known keys: {', '.join(sorted(hints))}.")
    return cls(**{name: _value(hints[name], value, f"{where}: {name}") for name, value in values.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return from_mapping(hint, value, where)
    if typing.get_origin(hint) is Literal:
        if value not in typing.get_args(hint):
            raise ValueError(f"{where} must be one of {', '.join(typing.get_args(hint))}, not {value!r}.")
        return value
    if typing.get_origin(hint) is tuple:
        items = value if isinstance(value, list) else [value]
        return tuple(_value(typing.get_args(hint)[0], item, where) for item in items)
    if isinstance(hint, types.UnionType):
        hint = next(h for h in typing.get_args(hint) if h is not type(None))
    if isinstance(value, str) and hint is float:  # YAML reads 1e-3 as a text
        try:
            value = float(value)
        except ValueError:
            pass
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ValueError(f"{where} must be {hint.__name__}, not {value!r}.")
    return value
