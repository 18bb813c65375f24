"""A conversion that keeps within so many bytes of cache.

Without scores (`--align none`, an explicit `--layer-selection`, ...) as many layers stay attention as fit. With scores
everything is open at once: which key/value heads see everything (a layer all of whose heads do stays attention), how
wide the window of the others is, and whether a mixer stands beside it. What a choice costs is the sum of what its
heads cost one by one (`alignment/head_costs.py`), interpolated in the window.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..config import MIXER_ONLY, ConversionConfig, parse_size
from ..plan import choose_attention_layers, replacement_type, student_config
from ..teachers.teacher import Teacher, teacher_layer_types
from ..weights.reader import Checkpoint
from ..weights.writer import human_bytes, output_dtype
from .cache import cache_bytes
from .heads import as_text, count_heads, is_number, named_heads, query_heads

KVHead = tuple[int, int]
"""Layer and key/value head."""
Table = list[list[float]]
"""Nats, by layer and key/value head."""
Size = Callable[[tuple[KVHead, ...], int], int]
"""Bytes of the heads that see everything, and of a window for the others."""
KINDS = ("heads", "layers")
TINY, FIRST_WINDOW = 1e-7, 32
DEFAULTS = {field.name: field.default for field in dataclasses.fields(ConversionConfig)}


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
class Choice:
    """What the layers hold."""

    kept: tuple[KVHead, ...]
    """Key/value heads that see everything."""
    window: int
    has_state: bool
    nbytes: int
    predicted: float
    """Nats of KL and weighted recall loss."""
    in_rounds: bool = False
    """Whether the heads were scored again among themselves."""

    def layers(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Those all of whose heads see everything; `shape` is layers by key/value heads."""
        return tuple(layer for layer in range(shape[0]) if sum(of == layer for of, _ in self.kept) == shape[1])

    def heads(self, shape: tuple[int, int]) -> list[KVHead]:
        """The heads kept in other layers."""
        whole = self.layers(shape)
        return [pair for pair in self.kept if pair[0] not in whole]

    def text(self, shape: tuple[int, int]) -> str:
        """In a line."""
        whole, heads = len(self.layers(shape)), len(self.heads(shape))
        if whole == shape[0]:
            return "every layer stays attention"
        parts = [f"window {self.window}"]
        parts += ["a state beside it"] * self.has_state
        chosen = ", chosen in rounds" if self.in_rounds else ""
        parts += [f"{heads} head{'s' * (heads > 1)} with full attention{chosen}"] * (heads > 0)
        return " + ".join(parts + [f"{whole} layer{'s' * (whole > 1)} of attention"] * (whole > 0))


@dataclass(frozen=True)
class Budget:
    """Bytes for a sequence of `context` tokens, and what the user has decided already."""

    teacher: Teacher
    options: ConversionConfig
    """Without the budget, whose place its `choices` take."""
    nbytes: int
    context: int
    dtype: torch.dtype
    shape: tuple[int, int]
    """Layers, key/value heads."""
    shared: int
    """Query heads per key/value head."""
    fixed_window: int | None
    fixed_heads: str | None
    fixed_layers: tuple[int, ...]

    def states(self) -> tuple[bool, ...]:
        """Whether a mixer beside the window comes into question, and whether none does."""
        options = self.options
        if options.mixer == "none":
            return (False,)
        said = any(getattr(options, name) != DEFAULTS[name] for name in ("mixer", "shared_state", "mixer_sees"))
        return (True,) if said or any(getattr(options, n) != DEFAULTS[n] for n in MIXER_ONLY) else (False, True)

    def states_beside(self, longest: int) -> tuple[bool, ...]:
        """`states`, without a mixer that nobody asked for beside a window too wide to fit one, over `longest`."""
        return (False,) if (self.fixed_window or 0) > longest and False in self.states() else self.states()

    def with_state(self, has_state: bool) -> dict[str, Any]:
        """The options that say so; heads that share a key/value head share a state, which costs nothing measurable."""
        if not has_state:
            return {name: DEFAULTS[name] for name in (*MIXER_ONLY, "shared_state", "mixer_sees")} | {"mixer": "none"}
        shares = self.options.mixer != "mamba1" and not self.options.expand_kv_heads and self.shared > 1
        return {"shared_state": self.options.shared_state or shares}

    def applied(self, choice: Choice) -> ConversionConfig:
        """The options that make this choice."""
        whole = choice.layers(self.shape)
        changes: dict[str, Any] = {"attention_layers": ",".join(map(str, whole)), "layer_pattern": None}
        if len(whole) < self.shape[0]:
            heads = query_heads(choice.heads(self.shape), self.shared)
            changes |= {"window": choice.window, "attention_heads": as_text(heads) or None}
            changes |= self.with_state(choice.has_state)
        return dataclasses.replace(self.options, **changes)

    def sizes(self, has_state: bool) -> Size:
        """Bytes of (heads kept, window)."""
        some = {"attention_layers": "", "layer_pattern": None, "window": 1, "attention_heads": None}
        config = student_config(self.teacher, dataclasses.replace(self.options, **some | self.with_state(has_state)))
        kinds = config.conversion["teacher_layer_types"]

        def nbytes(kept: tuple[KVHead, ...], window: int) -> int:
            choice = Choice(kept, window, has_state, 0, 0.0)
            whole, heads = choice.layers(self.shape), query_heads(choice.heads(self.shape), self.shared)
            config.layer_types = [kinds[i] if i in whole else "hybrid" for i in range(self.shape[0])]
            config.hybrid_full_heads = [list(heads.get(i, ())) for i in range(self.shape[0])]
            config.hybrid_window = window
            return cache_bytes(config, self.context, self.dtype)[1]

        return nbytes

    def what_fits(self, sequence_length: int) -> list[Choice]:
        """Without scores: the window that remains beside some shares of the heads, without and with a state.

        Args:
            sequence_length: tokens of the sequences that a mixer would be fitted on.

        Raises:
            ValueError: nothing keeps within the budget, or nothing of a sequence lies beyond the window asked for.
        """
        sinks = self.options.sinks
        if self.states() == (True,) and (self.fixed_window or 0) + sinks >= sequence_length:
            raise ValueError(
                f"A window of {self.fixed_window} and {sinks} sinks leaves nothing of sequences of {sequence_length} "
                "tokens to fit a mixer on; set sequence_length higher in the alignment file, or say mixer none."
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
                    found.append(Choice(kept, window, has_state, size(kept, window), math.nan))
        if not found:
            raise self.too_little()
        return found

    def free_heads(self) -> list[KVHead]:
        """Those that are to be chosen from."""
        given = set(self.given_heads())
        return [(i, kv) for i in range(self.shape[0]) for kv in range(self.shape[1]) if (i, kv) not in given]

    def too_little(self) -> ValueError:
        """What to say where nothing keeps within the budget."""
        least = min(self.sizes(state)(self.given_heads(), self.fixed_window or 1) for state in self.states())
        return ValueError(
            f"{human_bytes(self.nbytes)} of cache at {self.context} tokens is too little: what was asked for takes "
            f"{human_bytes(least)} at least; give more, or fix less (window, heads, layers, mixer)."
        )

    def counts(self) -> list[int]:
        """How many heads may be chosen, beside those of the layers that are named."""
        total = (self.shape[0] - len(self.fixed_layers)) * self.shape[1]
        if self.fixed_heads is not None and is_number(self.fixed_heads):
            return [count_heads(self.fixed_heads, self.shape[0] * self.shape[1])]
        return [0] if self.fixed_heads is not None else list(range(total + 1))

    def given_heads(self) -> tuple[KVHead, ...]:
        """Those of the layers that are named, and those that are named themselves."""
        given = {(layer, kv) for layer in self.fixed_layers for kv in range(self.shape[1])}
        if self.fixed_heads is not None and not is_number(self.fixed_heads):
            for layer, heads in named_heads(self.fixed_heads, self.shape[0], self.shape[1] * self.shared).items():
                given |= {(layer, head // self.shared) for head in heads}
        return tuple(sorted(given))


def budget_of(options: ConversionConfig, teacher: Teacher, checkpoint: Checkpoint) -> Budget | None:
    """The budget of a conversion that is to choose everything within it; None where it chooses layers, or nothing.

    Raises:
        ValueError: layers or heads that the teacher does not have, or cannot keep.
    """
    if not options.spends_budget:
        return None
    kinds = teacher_layer_types(teacher.config)
    named = options.attention_layers is not None or options.layer_pattern is not None
    if "sliding_attention" in kinds:  # no head may see more than the teacher's own
        if named or options.attention_heads is not None or (options.mixer == "none" and options.window is None):
            raise ValueError(
                "This teacher's own layers see a window, so a budget of cache chooses only how many of them stay; "
                "leave out attention_layers, layer_pattern and attention_heads, and give mixer none a window."
            )
        return None
    fixed = choose_attention_layers(options, len(kinds)) if named else ()
    bare = {"cache_bytes": None, "cache_ratio": None, "context": DEFAULTS["context"], "measure": DEFAULTS["measure"]}
    base = dataclasses.replace(
        options, **bare, attention_layers=None, layer_pattern=None, window=1, attention_heads=None
    )
    dtype = output_dtype(options.dtype, checkpoint.tensors)
    config = student_config(teacher, base)
    whole = cache_bytes(config, options.context, dtype)[0]
    nbytes = parse_size(options.cache_bytes) if options.cache_ratio is None else int(options.cache_ratio * whole)
    return Budget(
        teacher=teacher,
        options=base,
        nbytes=nbytes,
        context=options.context,
        dtype=dtype,
        shape=(config.num_hidden_layers, config.num_key_value_heads),
        shared=config.num_attention_heads // config.num_key_value_heads,
        fixed_window=options.window,
        fixed_heads=options.attention_heads,
        fixed_layers=fixed,
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


def best_choices(budget: Budget, costs: HeadCosts, longest_beside_state: int) -> list[Choice]:
    """The best choice of each kind (a window alone, with heads, with layers; without a state and with), best first.

    Args:
        longest_beside_state: the widest window that a mixer can be fitted beside.

    Raises:
        ValueError: nothing keeps within the budget.
    """
    found: dict[tuple[bool, str], Choice] = {}
    unscored = costs.left_beside_state is None  # a state that nothing speaks for is not worth its bytes
    possible = budget.states_beside(longest_beside_state)
    states = [has_state for has_state in possible if not (has_state and unscored and False in possible)]
    for has_state in states:
        longest = min(budget.context, longest_beside_state) if has_state else budget.context
        size = budget.sizes(has_state)
        for count in budget.counts():
            for kind in KINDS if count % budget.shape[1] == 0 else ("heads",):
                choice = best_of_count(budget, costs, kind, count, has_state, longest, size)
                key = (has_state, kind if count else "window")
                if choice is not None and (key not in found or choice.predicted < found[key].predicted):
                    found[key] = choice
    if not found:
        raise budget.too_little()
    distinct = {(choice.kept, choice.window, choice.has_state): choice for choice in found.values()}
    return sorted(distinct.values(), key=lambda choice: choice.predicted)


def best_of_count(
    budget: Budget, costs: HeadCosts, kind: str, count: int, has_state: bool, longest: int, size: Size
) -> Choice | None:
    """So many of the heads that cost most, and the widest window beside them; None where that is too much."""
    given, window = budget.given_heads(), budget.fixed_window or min(FIRST_WINDOW, longest)
    free = budget.free_heads()
    for _ in range(2):  # which heads cost most depends on the window, which depends on how they are chosen
        kept = tuple(sorted((*given, *ranked_heads(costs.at(window, has_state), free, kind)[:count])))
        window = fitting_window(budget, kept, size, longest)
        if window is None:
            return None
    table, left = costs.at(window, has_state), set(free) - set(kept)
    return Choice(kept, window, has_state, size(kept, window), sum(table[layer][kv] for layer, kv in sorted(left)))


def fitting_window(budget: Budget, kept: tuple[KVHead, ...], size: Size, longest: int) -> int | None:
    """The window asked for, if it fits, or the widest up to `longest` that does; None where none does."""
    if budget.fixed_window is not None:
        return budget.fixed_window if size(kept, budget.fixed_window) <= budget.nbytes else None
    if size(kept, 1) > budget.nbytes:
        return None
    low, high = 1, longest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if size(kept, middle) <= budget.nbytes else (low, middle - 1)
    return low


def budget_report(
    budget: Budget, choices: list[Choice], taken: Choice | None, measured: dict[Choice, dict[str, float]]
) -> dict[str, Any]:
    """The choices as plain data; before anything is scored, none is `taken`."""
    rows = [
        {
            "choice": choice.text(budget.shape),
            "bytes": choice.nbytes,
            "predicted": None if math.isnan(choice.predicted) else choice.predicted,
            "measured": measured.get(choice),
            "taken": choice is taken,
        }
        for choice in choices
    ]
    return {"bytes": budget.nbytes, "context": budget.context, "choices": rows}


def with_layer_budget(options: ConversionConfig, teacher: Teacher, checkpoint: Checkpoint) -> ConversionConfig:
    """The options with the budget turned into the largest share of attention layers that keeps within it.

    Raises:
        ValueError: not even the recurrent states fit.
    """
    if options.cache_bytes is None and options.cache_ratio is None:
        return options
    asked = options
    options = dataclasses.replace(options, cache_bytes=None, cache_ratio=None, attention_ratio=0.0)
    config = student_config(teacher, options)
    dtype, kinds = output_dtype(options.dtype, checkpoint.tensors), config.conversion["teacher_layer_types"]
    whole, least = cache_bytes(config, options.context, dtype)
    budget = parse_size(asked.cache_bytes) if asked.cache_ratio is None else asked.cache_ratio * whole
    for count in range(len(kinds), -1, -1):
        # the layers that keep most are counted, so that whichever are chosen, the budget holds
        kept = sorted(kinds)[:count]
        config.layer_types = [*kept, *[replacement_type(options)] * (len(kinds) - count)]
        if cache_bytes(config, options.context, dtype)[1] <= budget:
            return dataclasses.replace(options, attention_ratio=count / len(kinds))
    raise ValueError(
        f"{human_bytes(int(budget))} of cache is too little: the mixers' states alone take {human_bytes(least)}; give "
        "more or a smaller d_state."
    )
