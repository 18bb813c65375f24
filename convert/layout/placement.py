"""Placement of a hybrid: the kind of each layer, with its window, kept heads and rank, stored in config.json.

It comes from the user's options, from a published preset or from scores (decide.py), and can be read back from the
hybrid's configuration.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Literal

from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Attention:
    """The layer keeps what it is in the teacher: attention, its sliding window included, or a state."""


@dataclass(frozen=True)
class Mixer:
    """A mixer takes the place of attention."""


@dataclass(frozen=True)
class Hybrid:
    """Attention to a window, to sinks and to salient tokens, with or without a state of all other tokens."""

    window: int
    """Width of the window in tokens, a multiple of `block`."""
    block: int
    """Tokens by which the window moves."""
    sinks: int
    """Number of first tokens that are always attended to."""
    full_heads: tuple[int, ...] = ()
    """Query heads that keep full attention: all that share a key/value head, or none of them."""
    state: bool = True
    """True if a state stands for the tokens that have left the window."""
    salient: int = 0
    """Number of tokens that are attended to after they have left the window."""
    rank: int = 0
    """Rank of the map that is added to the teacher's output projection; before the fit, the mean of all layers."""
    planes: int | None = None
    """Rotary planes of a key that the state keeps, the slowest ones; None for half of them."""


@dataclass(frozen=True)
class CacheBits:
    """Bits of a number in the cache, of keys and of values; 16 stands for the model's own type."""

    full: tuple[int, int] = (16, 16)
    """Bits in full attention, kept heads included."""
    window: tuple[int, int] = (16, 16)
    """Bits in windows: those of hybrid layers and those that the teacher has itself."""

    @property
    def rounds(self) -> bool:
        """True if anything is rounded."""
        return min(*self.full, *self.window) < 16

    def config_fields(self) -> dict[str, int | list[int]]:
        """The fields of the hybrid's configuration that store these bits."""
        pairs = {"full_attention_bits": self.full, "window_bits": self.window}
        return {name: keys if keys == values else [keys, values] for name, (keys, values) in pairs.items()}

    def __str__(self) -> str:
        parts = []
        for where, (keys, values) in (("full attention", self.full), ("windows", self.window)):
            bits = f"{keys} for keys and {values} for values"
            if keys == values:
                bits = f"{keys}"
            parts.append(f"{bits} in {where}")
        return ", ".join(parts)


Layer = Attention | Mixer | Hybrid
Heads = Mapping[int, Sequence[int]]
"""Query heads by layer."""


@dataclass(frozen=True)
class Placement:
    """One entry per layer, and the bits of the cache. Hybrid layers may differ in windows, kept heads and ranks."""

    layers: tuple[Layer, ...]
    bits: CacheBits = CacheBits()

    def __post_init__(self):
        hybrids = (layer for layer in self.layers if isinstance(layer, Hybrid))
        shared = {dataclasses.replace(layer, full_heads=(), window=0, rank=0) for layer in hybrids}
        assert len(shared) <= 1, f"hybrid layers differ in more than windows, heads and ranks: {shared}"

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that keep all of their attention."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer, Attention))

    @property
    def replaced_layers(self) -> tuple[int, ...]:
        """Layers that hold a mixer or a window instead."""
        return tuple(i for i, layer in enumerate(self.layers) if not isinstance(layer, Attention))

    @property
    def hybrid(self) -> Hybrid | None:
        """The first hybrid layer, which differs from others in heads, window and rank alone; or None."""
        return next((layer for layer in self.layers if isinstance(layer, Hybrid)), None)

    @property
    def full_heads(self) -> dict[int, tuple[int, ...]]:
        """Query heads with attention to all tokens, by hybrid layer that has any."""
        layers = enumerate(self.layers)
        return {i: layer.full_heads for i, layer in layers if isinstance(layer, Hybrid) and layer.full_heads}

    def keeping(self, attention_layers: Collection[int]) -> "Placement":
        """Return a placement with attention in these layers, too."""
        return self._with_layers(Attention() if i in attention_layers else x for i, x in enumerate(self.layers))

    def _with_layers(self, layers: Iterable[Layer]) -> "Placement":
        return dataclasses.replace(self, layers=tuple(layers))

    def _with_fields(self, name: str, values: Mapping[int, Any]) -> "Placement":
        """Return a placement with other values of a field, by hybrid layer."""
        layers = list(self.layers)
        for i, value in values.items():
            layers[i] = dataclasses.replace(layers[i], **{name: value})
        return self._with_layers(layers)

    def with_full_heads(self, heads: Heads) -> "Placement":
        """Return a placement with other kept heads; heads of layers that are not hybrid are left out."""
        return self._with_fields("full_heads", {i: tuple(heads.get(i, ())) for i in self.windows})

    @property
    def windows(self) -> dict[int, int]:
        """Widths of the windows, by hybrid layer."""
        return {i: layer.window for i, layer in enumerate(self.layers) if isinstance(layer, Hybrid)}

    def with_windows(self, windows: Mapping[int, int]) -> "Placement":
        """Return a placement with windows of these widths in these hybrid layers."""
        return self._with_fields("window", windows)

    def weights_of_a_rank(self, config: PreTrainedConfig) -> dict[int, int]:
        """Number of weights that one more rank adds to the output map of each layer with a window and a state."""
        heads = config.num_attention_heads
        # down reads three vectors of every head with a window, up writes one of the model's width
        return {
            i: 3 * config.head_dim * (heads - len(self.full_heads.get(i, ()))) + config.hidden_size
            for i in self.windows
        }

    def with_ranks(self, ranks: Mapping[int, int]) -> "Placement":
        """Return a placement with output maps of these ranks in these hybrid layers."""
        return self._with_fields("rank", ranks)

    def config_fields(self, teacher_layer_types: Sequence[str]) -> dict[str, Any]:
        """The fields of the hybrid's configuration that store it."""
        kinds = {Mixer: "linear_attention", Hybrid: "hybrid"}
        hybrid = self.hybrid
        number = range(len(self.layers))
        heads = [list(self.full_heads.get(i, ())) for i in number]
        layers = zip(self.layers, teacher_layer_types, strict=True)
        fields = {
            "layer_types": [kinds.get(type(layer), teacher) for layer, teacher in layers],
            "hybrid_full_heads": None,
        } | self.bits.config_fields()
        if any(heads):
            fields["hybrid_full_heads"] = heads
        if hybrid is not None:
            # one number where all layers agree, so that most configurations stay short
            window: int | list[int] = hybrid.window
            if len(set(self.windows.values())) > 1:
                window = [self.windows.get(i, 0) for i in number]
            ranks = {i: self.layers[i].rank for i in self.windows}
            rank: int | list[int] = hybrid.rank
            if len(set(ranks.values())) > 1:
                rank = [ranks.get(i, 0) for i in number]
            fields |= {
                "hybrid_window": window,
                "hybrid_block": hybrid.block,
                "hybrid_sinks": hybrid.sinks,
                "hybrid_salient": hybrid.salient,
                "hybrid_rank": rank,
            }
        return fields

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "Placement":
        """The placement that a hybrid's configuration stores."""
        hybrid = Hybrid(
            0,
            config.hybrid_block,
            config.hybrid_sinks,
            state=config.mixer != "none",
            salient=config.hybrid_salient,
            planes=_planes(config),
        )
        layers: list[Layer] = []
        for i, (kind, full) in enumerate(
            zip(config.layer_types, config.hybrid_full_heads or repeat(()), strict=False)
        ):
            if kind == "hybrid":
                own = {"window": config.window_of(i), "full_heads": tuple(full), "rank": config.rank_of(i)}
                layers.append(dataclasses.replace(hybrid, **own))
            elif kind == "linear_attention":
                layers.append(Mixer())
            else:
                layers.append(Attention())
        return cls(tuple(layers), CacheBits(_pair(config.full_attention_bits), _pair(config.window_bits)))


def _pair(bits: int | list[int]) -> tuple[int, int]:
    """Bits of keys and of values, from a field of the configuration."""
    if isinstance(bits, int):
        return bits, bits
    keys, values = bits
    return keys, values


Undecided = Literal["layers", "heads", "windows", "bits", "planes"]


@dataclass(frozen=True)
class Decision:
    """A placement, and how it was found."""

    placement: Placement
    undecided: tuple[Undecided, ...] = ()
    """Parts of the placement that scores choose in a run, if none were computed; evenly placed ones stand in."""
    notes: tuple[str, ...] = ()
    """Notes for the user on unexpected choices."""

    @property
    def needs_scores(self) -> bool:
        """True if scores would choose other layers, heads, windows or bits."""
        return bool(self.undecided)


def everywhere(layer: Layer, num_layers: int, bits: CacheBits = CacheBits()) -> Placement:
    """Put one kind of layer everywhere."""
    return Placement((layer,) * num_layers, bits)


def _planes(config: PreTrainedConfig) -> int | None:
    """Planes of a hybrid layer, from the configuration, which says None for all of them."""
    planes = config.hybrid_state_planes or config.rotary_planes
    return None if config.mixer == "none" or planes == half_of_planes(config) else planes


def half_of_planes(config: PreTrainedConfig) -> int:
    """Half of the rotary planes of a key; all of them where there is one."""
    return max(config.rotary_planes // 2, 1)


def window_in_words(window: int | Mapping[int, int]) -> str:
    """A summary's window: "213", or "31 to 496 (213 on average)"."""
    if isinstance(window, int):
        return f"{window}"
    widths = window.values()
    return f"{min(widths)} to {max(widths)} ({round(sum(widths) / len(widths))} on average)"
