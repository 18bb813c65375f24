"""A placement that keeps within so many bytes of cache.

Which key/value heads see every token (a layer all of whose heads do stays attention), how wide the window of the others
is, and whether a mixer stands beside it, are chosen together. What a candidate costs is the sum of what its heads cost
one by one (head_scores.py), interpolated in the window.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..options import ConversionOptions, MixerOptions, parse_size
from ..plan import TeacherWeights, hybrid_config
from ..weights.writer import human_bytes, output_dtype
from .cache import cache_bytes
from .placement import Attention, Heads, Hybrid, Placement, everywhere
from .presets import attention_layers, counted_heads, kept_heads, query_heads

KVHead = tuple[int, int]
"""Layer and key/value head."""
Table = list[list[float]]
"""Nats, by layer and key/value head."""
Size = Callable[[tuple[KVHead, ...], int], int]
"""Bytes of the heads that see everything, and of a window for the others."""
KINDS = ("heads", "layers")
TINY, FIRST_WINDOW = 1e-7, 32


@dataclass(frozen=True)
class HeadCosts:
    """What it costs that a head sees a window only; costs add up."""

    kl: dict[int, Table]
    """Nats per token of prose, by window."""
    recall: Table
    """Nats per answer that lies beyond the window."""
    left_beside_state: list[float] | None
    """By layer, the share of these that remains with a state beside the window; None where none was fitted."""
    context: int
    recall_weight: float

    def at(self, window: int, has_state: bool) -> Table:
        """Both together, for a question whose answer lies anywhere in the context."""
        beyond = self.recall_weight * max(1 - window / self.context, 0.0)
        table = []
        for layer, recalls in enumerate(self.recall):
            left = self.left_beside_state[layer] if has_state and self.left_beside_state is not None else 1.0
            row = []
            for kv, recall in enumerate(recalls):
                of_windows = {known: costs[layer][kv] for known, costs in self.kl.items()}
                row.append(left * (interpolated(of_windows, window, self.context) + beyond * max(recall, 0.0)))
            table.append(row)
        return table


def interpolated(costs: dict[int, float], window: int, context: int) -> float:
    """The cost at another window than those measured: a power law between them, then linearly to 0."""
    known = sorted(costs)
    if window >= context:
        return 0.0
    last = known[-1]
    if window >= last or len(known) == 1:
        return max(costs[last], 0.0) * (1.0 if window <= last else (context - window) / (context - last))
    above = next(i for i, w in enumerate(known) if w > window)
    a, b = known[max(above - 1, 0)], known[max(above, 1)]
    low, high = (math.log(max(costs[w], TINY)) for w in (a, b))
    place = math.log(window / a) / math.log(b / a)
    return math.exp(low + place * (high - low))


@dataclass(frozen=True)
class Candidate:
    """What the layers might hold."""

    kept: tuple[KVHead, ...]
    """Key/value heads that see everything."""
    window: int
    has_state: bool
    nbytes: int
    predicted: float
    """Nats of KL and weighted recall loss."""

    def layers(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Layers all of whose heads see everything; `shape` is layers by key/value heads."""
        return tuple(layer for layer in range(shape[0]) if sum(of == layer for of, _ in self.kept) == shape[1])

    def heads(self, shape: tuple[int, int]) -> list[KVHead]:
        """The heads kept in other layers."""
        whole = self.layers(shape)
        return [pair for pair in self.kept if pair[0] not in whole]

    def text(self, shape: tuple[int, int]) -> str:
        """The candidate in a line."""
        whole, heads = len(self.layers(shape)), len(self.heads(shape))
        if whole == shape[0]:
            return "every layer stays attention"
        parts = [f"window {self.window}"]
        parts += ["a state beside it"] * self.has_state
        parts += [f"{heads} head{'s' * (heads > 1)} with full attention"] * (heads > 0)
        return " + ".join(parts + [f"{whole} layer{'s' * (whole > 1)} of attention"] * (whole > 0))


@dataclass(frozen=True)
class Budget:
    """Bytes for one sequence at the context length of the options, and what the user has decided already."""

    weights: TeacherWeights
    options: ConversionOptions

    @cached_property
    def dtype(self) -> torch.dtype:
        """Type of keys and values."""
        return output_dtype(self.options.output.dtype, self.weights.checkpoint.tensors)

    @cached_property
    def nbytes(self) -> int:
        """The cache that a sequence may take."""
        return asked_bytes(self.weights, self.options, self.dtype)

    @property
    def context(self) -> int:
        """Tokens of the sequence."""
        return self.options.placement.context

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and key/value heads per layer."""
        return self.weights.config.num_hidden_layers, self.weights.config.num_key_value_heads

    @property
    def shared(self) -> int:
        """Query heads per key/value head."""
        return self.weights.config.num_attention_heads // self.weights.config.num_key_value_heads

    @cached_property
    def fixed_layers(self) -> tuple[int, ...]:
        """Layers that the user wants to keep attention."""
        asked = self.options.placement.attention_layers
        return () if asked is None else attention_layers(self.shape[0], asked)

    @cached_property
    def fixed_heads(self) -> Heads | int | None:
        """Query heads that the user names, or the number of key/value heads asked for."""
        asked = self.options.placement.attention_heads
        if asked is None:
            return None
        named = kept_heads(asked, self.shape[0], self.shape[1] * self.shared)
        return counted_heads(asked, self.shape[0] * self.shape[1]) if named is None else named

    @property
    def states(self) -> tuple[bool, ...]:
        """Whether a mixer beside the window comes into question, and whether none does."""
        mixer = dataclasses.replace(self.options.mixer, initial_decay=MixerOptions.initial_decay)
        if mixer.kind == "none":
            return (False,)
        if mixer != MixerOptions():
            return (True,)
        return (False, True) if self.options.placement.search.state else (False,)

    def states_beside(self, longest: int) -> tuple[bool, ...]:
        """`states`, without a mixer that nobody asked for beside a window too wide to fit one, over `longest`."""
        too_wide = (self.options.placement.window or 0) > longest
        return (False,) if too_wide and False in self.states else self.states

    def layer(self, window: int, has_state: bool) -> Hybrid:
        """What a replaced layer holds."""
        return Hybrid(window, self.options.placement.sinks, state=has_state)

    def placement(self, candidate: Candidate) -> Placement:
        """What every layer holds in a candidate."""
        base = everywhere(self.layer(candidate.window, candidate.has_state), self.shape[0])
        heads = query_heads(candidate.heads(self.shape), self.shared)
        return base.with_full_heads(heads).keeping(candidate.layers(self.shape))

    def sizes(self, has_state: bool) -> Size:
        """Bytes of (heads kept, window)."""
        config = hybrid_config(self.weights, everywhere(self.layer(1, has_state), self.shape[0]), self.options)

        def nbytes(kept: tuple[KVHead, ...], window: int) -> int:
            placement = self.placement(Candidate(kept, window, has_state, 0, 0.0))
            for name, value in placement.config_fields(self.weights.config.layer_types).items():
                setattr(config, name, value)
            return cache_bytes(config, self.context, self.dtype)[1]

        return nbytes

    def unscored_candidates(self, sequence_length: int) -> list[Candidate]:
        """Without scores: the window that remains beside some shares of the heads, without and with a state.

        Args:
            sequence_length: tokens of the sequences that a mixer would be fitted on.

        Raises:
            ValueError: nothing keeps within the budget, or nothing of a sequence lies beyond the window asked for.
        """
        sinks, window = self.options.placement.sinks, self.options.placement.window
        if self.states == (True,) and (window or 0) + sinks >= sequence_length:
            raise ValueError(
                f"A window of {window} and {sinks} sinks leaves nothing of sequences of {sequence_length} tokens to "
                "fit a mixer on; set alignment.sequence_length higher, or say --mixer none."
            )
        found, given, free, counts = [], self.given_heads(), self.free_heads(), self.counts()
        some = {counts[min(len(counts) - 1, len(free) // share)] for share in (len(free) + 1, 16, 8, 4)}
        beside = longest_beside_state(sequence_length, sinks)
        for has_state in self.states_beside(beside):
            size, longest = self.sizes(has_state), min(self.context, beside) if has_state else self.context
            for count in sorted(some):
                spread = free[:: max(1, len(free) // max(count, 1))][:count]
                kept = tuple(sorted((*given, *spread)))
                window = fitting_window(self, kept, size, longest)
                if window is not None:
                    found.append(Candidate(kept, window, has_state, size(kept, window), math.nan))
        if not found:
            raise self.too_little()
        return found

    def free_heads(self) -> list[KVHead]:
        """The heads that are to be chosen from."""
        given = set(self.given_heads())
        return [(i, kv) for i in range(self.shape[0]) for kv in range(self.shape[1]) if (i, kv) not in given]

    def too_little(self) -> ValueError:
        """What to say where nothing keeps within the budget."""
        window = self.options.placement.window or 1
        least = min(self.sizes(state)(self.given_heads(), window) for state in self.states)
        return ValueError(
            f"{human_bytes(self.nbytes)} of cache at {self.context} tokens is too little: what was asked for takes "
            f"{human_bytes(least)} at least; give more, or fix less (window, heads, layers, mixer)."
        )

    def counts(self) -> list[int]:
        """How many heads may be chosen, beside those of the layers that are named."""
        if isinstance(self.fixed_heads, int):
            return [self.fixed_heads]
        total = (self.shape[0] - len(self.fixed_layers)) * self.shape[1]
        return [0] if self.fixed_heads is not None else list(range(total + 1))

    def given_heads(self) -> tuple[KVHead, ...]:
        """Those of the layers that are named, and those that are named themselves."""
        given = {(layer, kv) for layer in self.fixed_layers for kv in range(self.shape[1])}
        if self.fixed_heads is not None and not isinstance(self.fixed_heads, int):
            for layer, heads in self.fixed_heads.items():
                given |= {(layer, head // self.shared) for head in heads}
        return tuple(sorted(given))


def asked_bytes(weights: TeacherWeights, options: ConversionOptions, dtype: torch.dtype) -> int:
    """Bytes of cache that the option `cache` allows one sequence."""
    asked = options.cache
    assert asked is not None, "nothing was said about the cache"
    if isinstance(asked, str):
        return parse_size(asked)
    config = hybrid_config(weights, everywhere(Attention(), weights.config.num_hidden_layers), options)
    return int(asked * cache_bytes(config, options.placement.context, dtype)[0])


def num_layers_within(weights: TeacherWeights, options: ConversionOptions, replacement: Hybrid | Any) -> int:
    """The largest number of attention layers that keeps within the cache budget.

    Raises:
        ValueError: not even the recurrent states fit.
    """
    kinds, dtype = weights.config.layer_types, output_dtype(options.output.dtype, weights.checkpoint.tensors)
    budget = asked_bytes(weights, options, dtype)
    # the layers that keep most are counted, so that whichever are chosen, the budget holds
    order = sorted(range(len(kinds)), key=lambda i: kinds[i])
    for count in range(len(kinds), -1, -1):
        placement = everywhere(replacement, len(kinds)).keeping(order[:count])
        nbytes = cache_bytes(hybrid_config(weights, placement, options), options.placement.context, dtype)[1]
        if nbytes <= budget:
            return count
    raise ValueError(
        f"{human_bytes(budget)} of cache is too little: the mixers' states alone take {human_bytes(nbytes)}; give "
        "more or a smaller d_state."
    )


def longest_beside_state(sequence_length: int, sinks: int) -> int:
    """The widest window that is chosen beside a mixer: half of a sequence is left to fit the mixer on."""
    return max(1, sequence_length // 2 - sinks)


def ranked_heads(costs: Table, free: list[KVHead], kind: str) -> list[KVHead]:
    """The heads by what they cost, one by one or by whole layers."""
    if kind == "heads":
        return sorted(free, key=lambda pair: (-costs[pair[0]][pair[1]], pair))
    of_layer: dict[int, float] = {}
    for layer, kv in free:
        of_layer[layer] = of_layer.get(layer, 0.0) + costs[layer][kv]
    return sorted(free, key=lambda pair: (-of_layer[pair[0]], pair))


def best_candidates(budget: Budget, costs: HeadCosts, longest_beside_state: int) -> list[Candidate]:
    """The best candidate of each kind (a window alone, with heads, with layers; without a state and with), best first.

    Args:
        longest_beside_state: the widest window that a mixer can be fitted beside.

    Raises:
        ValueError: nothing keeps within the budget.
    """
    found: dict[tuple[bool, str], Candidate] = {}
    unscored = costs.left_beside_state is None  # a state that nothing speaks for is not worth its bytes
    possible = budget.states_beside(longest_beside_state)
    states = [has_state for has_state in possible if not (has_state and unscored and False in possible)]
    for has_state in states:
        longest = min(budget.context, longest_beside_state) if has_state else budget.context
        size = budget.sizes(has_state)
        for count in budget.counts():
            for kind in KINDS if count % budget.shape[1] == 0 else ("heads",):
                candidate = best_of_count(budget, costs, kind, count, has_state, longest, size)
                key = (has_state, kind if count else "window")
                if candidate is not None and (key not in found or candidate.predicted < found[key].predicted):
                    found[key] = candidate
    if not found:
        raise budget.too_little()
    distinct = {(candidate.kept, candidate.window, candidate.has_state): candidate for candidate in found.values()}
    return sorted(distinct.values(), key=lambda candidate: candidate.predicted)


def best_of_count(
    budget: Budget, costs: HeadCosts, kind: str, count: int, has_state: bool, longest: int, size: Size
) -> Candidate | None:
    """So many of the heads that cost most, and the widest window beside them; None where that is too much."""
    given, window = budget.given_heads(), budget.options.placement.window or min(FIRST_WINDOW, longest)
    free = budget.free_heads()
    for _ in range(2):  # which heads cost most depends on the window, which depends on how they are chosen
        kept = tuple(sorted((*given, *ranked_heads(costs.at(window, has_state), free, kind)[:count])))
        window = fitting_window(budget, kept, size, longest)
        if window is None:
            return None
    table, left = costs.at(window, has_state), set(free) - set(kept)
    return Candidate(kept, window, has_state, size(kept, window), sum(table[layer][kv] for layer, kv in sorted(left)))


def fitting_window(budget: Budget, kept: tuple[KVHead, ...], size: Size, longest: int) -> int | None:
    """The window asked for, if it fits, or the widest up to `longest` that does; None where none does."""
    if budget.options.placement.window is not None:
        return (
            budget.options.placement.window if size(kept, budget.options.placement.window) <= budget.nbytes else None
        )
    if size(kept, 1) > budget.nbytes:
        return None
    low, high = 1, longest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if size(kept, middle) <= budget.nbytes else (low, middle - 1)
    return low


def budget_report(
    budget: Budget, candidates: list[Candidate], taken: Candidate | None, measured: dict[Candidate, dict[str, float]]
) -> dict[str, Any]:
    """The candidates as plain data; before anything is scored, none is `taken`."""
    rows = [
        {
            "candidate": candidate.text(budget.shape),
            "bytes": candidate.nbytes,
            "predicted": None if math.isnan(candidate.predicted) else candidate.predicted,
            "measured": measured.get(candidate),
            "taken": candidate is taken,
        }
        for candidate in candidates
    ]
    return {"bytes": budget.nbytes, "context": budget.context, "candidates": rows}
