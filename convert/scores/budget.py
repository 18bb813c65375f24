"""Choose a placement whose cache fits into a given number of bytes.

Every layer with full attention gets a window with sinks and salient tokens, and a state; the key/value heads that
serve recall and their layers most keep full attention. Heads take HEADS_SHARE of the bytes that states leave, and the
windows take the rest. All windows have one width here; `layer_costs` then gives each layer its own. Values that the
user has fixed (window, heads, layers, no state) stay, and the others take the bytes that are left. Layers that have a
window in the teacher stay as they are.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from ..io.writer import human_bytes
from ..layout.cache import CACHE_DTYPE, cache_bytes, pair_bytes, state_bytes, teacher_bytes, windowed_heads
from ..layout.config import hybrid_config
from ..layout.placement import Attention, CacheBits, Hybrid, Layer, Mixer, Placement, everywhere
from ..layout.presets import query_heads
from ..options import evicted_tokens
from ..resolve import WINDOW_BITS, Resolved
from ..teachers.weights import TeacherWeights

KVHead = tuple[int, int]
"""Layer and key/value head."""
HEADS_SHARE = 0.7
"""Share of the budget, states apart, that is spent on kept heads."""
WIDE = 1 / 3
"""Share of a calibration sequence from which on windows are wide, so that sequences are lengthened: at windows of 288
tokens longer sequences gained nothing, at 368 most (docs/results/calibration.md)."""
NARROW = 128
"""Tokens of a narrow window: at 4 % of the cache windows are narrow, at 6 % not."""
NARROW_BITS = 6, 6
"""Bits of keys and of values in narrow windows: at 4 % of SmolLM2's cache wider windows are worth more than exact ones
(docs/results/bits.md)."""
SALIENT_SHARE = 1 / 4
"""Share of salient tokens among those that a window and its salient cache hold, sinks apart. At 8 % the errors of
Qwen2.5-Coder-0.5B's layers after the fit are 0.43 in sum with 64 salient tokens, and 0.57 with 16 and windows that are
wider by 48 (docs/results/ablations.md)."""
STATES_SHARE, LEAST_PLANES = 1 / 6, 8
"""Share of the budget that states may take before fewer rotary planes of a key are tried, and the fewest planes. With
states of an eighth of SmolLM2's budget a quarter of the planes, which are 8, was worse (docs/results/ablations.md)."""
GOLDEN_RATIO = (1 + 5**0.5) / 2
"""Number whose multiples fall evenly between whole numbers, however many there are."""
LONG_SEQUENCE = 2048
"""Tokens of a lengthened calibration sequence, twice the default: longer ones would leave too few to fit on."""


def follow_windows(weights: TeacherWeights, resolved: Resolved) -> Resolved:
    """Return the decisions with what depends on the width of the windows that the budget allows.

    That is the length of calibration sequences, the bits of windows, and the number of salient tokens.

    Raises:
        ValueError: no placement fits into the budget.
    """
    if resolved.choice != "budget" or resolved.window is not None:
        return resolved
    # bits first, as a budget may hold windows in few bits alone; sequences bound windows, and so a share of them
    for decide in (round_narrow_windows, lengthen_sequences, keep_more_salient):
        resolved = decide(weights, resolved)
    return resolved


def _hybrid_within(budget: "Budget") -> Hybrid | None:
    """Return a hybrid layer with the widest window that the budget allows; None if it allows all attention.

    The width depends on how many heads are kept, and hardly on which: any are taken.
    """
    free = [pair for pair in budget.every_head if pair not in budget.given_heads]
    return budget.placements(free)[0].hybrid


def lengthen_sequences(weights: TeacherWeights, resolved: Resolved) -> Resolved:
    """Return the decisions with longer calibration sequences where the budget allows wide windows.

    A state is fitted on the tokens that have left a window, and a window covers half of a sequence at most. Sequences
    keep the length that the user gave, and are no longer than the context or the teacher's own limit.
    """
    if "sequence_length" not in resolved.reasons:
        return resolved
    alignment = resolved.alignment
    # as many sequences are fitted on as are held out, or more
    enough = alignment.tokens // (2 * alignment.held_out_sequences)
    longest = min(resolved.context, weights.config.max_position_embeddings, enough)
    hybrid = _hybrid_within(Budget(weights, resolved))
    if hybrid is None or hybrid.window <= WIDE * resolved.sequence_length or longest < LONG_SEQUENCE:
        return resolved
    alignment = dataclasses.replace(alignment, sequence_length=LONG_SEQUENCE)
    reason = "windows are wider than a third of the default for layers with a window"
    return dataclasses.replace(resolved, alignment=alignment, reasons=resolved.reasons | {"sequence_length": reason})


def round_narrow_windows(weights: TeacherWeights, resolved: Resolved) -> Resolved:
    """Return the decisions with fewer bits in windows that the budget leaves narrow, unless the user gives bits.

    The teacher's own windows would have them, too, however wide these are: beside any, nothing is changed.
    """
    follows = "bits" in resolved.reasons and resolved.other_bits and not resolved.bounded
    if not follows or not _leaves_narrow_windows(weights, resolved):
        return resolved
    bits, *others = (dataclasses.replace(bits, window=NARROW_BITS) for bits in (resolved.bits, *resolved.other_bits))
    reason = f"{resolved.reasons['bits']}; windows have fewer, since in {WINDOW_BITS} bits they would be narrow"
    reasons = resolved.reasons | {"bits": reason}
    return dataclasses.replace(resolved, bits=bits, other_bits=tuple(others), reasons=reasons)


def _leaves_narrow_windows(weights: TeacherWeights, resolved: Resolved) -> bool:
    budget = Budget(weights, resolved)
    try:
        hybrid = _hybrid_within(budget)
    except ValueError:  # not even the narrowest fit
        return True
    # a short calibration sequence bounds windows, too, and more bytes would not widen them
    return hybrid is not None and hybrid.window <= NARROW and hybrid.window < budget.longest_window


def keep_more_salient(weights: TeacherWeights, resolved: Resolved) -> Resolved:
    """Return the decisions with a share of the windows' tokens for salient ones, unless the user gives a number."""
    if "salient" not in resolved.reasons or not resolved.salient:
        return resolved
    hybrid = _hybrid_within(Budget(weights, resolved))
    if hybrid is None:
        return resolved
    tokens = hybrid.window + hybrid.salient
    # whole blocks, as windows are
    salient = int(tokens * SALIENT_SHARE) // hybrid.block * hybrid.block
    if salient <= resolved.salient:
        return resolved
    reason = "a quarter of the tokens that the budget has for windows and salient tokens"
    return dataclasses.replace(resolved, salient=salient, reasons=resolved.reasons | {"salient": reason})


@dataclass(frozen=True)
class Budget:
    """Bytes for one sequence at the context length, and the values that the user has fixed.

    Without a cache budget it still says which heads are given and which there are: `nbytes`, `placement`, `columns`
    and `layers_within` need one.
    """

    weights: TeacherWeights
    resolved: Resolved
    planes: int | None = None
    """Rotary planes of a key in the states; None for half of them."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of layers, and of key/value heads in each."""
        return self.weights.config.num_hidden_layers, self.weights.config.num_key_value_heads

    @property
    def shared(self) -> int:
        """Query heads per key/value head."""
        return self.weights.config.num_attention_heads // self.weights.config.num_key_value_heads

    @property
    def every_head(self) -> list[KVHead]:
        """All key/value heads: the first of every layer, then the second of every layer, and so on.

        Layers are in an order of which any beginning is evenly spread.
        """
        layers, kv_heads = self.shape
        spread = sorted(range(layers), key=lambda layer: (layer * GOLDEN_RATIO) % 1)
        return [(layer, kv) for kv in range(kv_heads) for layer in spread]

    @cached_property
    def teacher_nbytes(self) -> int:
        """Bytes of cache that a sequence takes in the teacher."""
        return teacher_bytes(self.weights.config, self.resolved.context)

    @property
    def nbytes(self) -> int:
        """Bytes of cache that a sequence may take."""
        assert self.resolved.cache_bytes is not None, "nothing was said about the cache"
        return self.resolved.cache_bytes

    def layers_within(self, replacement: Layer, free: list[int]) -> int:
        """The largest number of the layers `free` that may keep their attention, as all others do."""
        kinds = self.weights.config.layer_types
        others = set(range(len(kinds))).difference(free)
        # the layers that keep most are counted, so that whichever are chosen, the budget holds
        order = sorted(free, key=lambda i: kinds[i])
        for count in range(len(free), -1, -1):
            placement = everywhere(replacement, len(kinds), self.resolved.bits).keeping({*others, *order[:count]})
            nbytes = self._bytes_of(placement)
            if nbytes <= self.nbytes:
                return count
        least, less = "windows alone take", "a narrower window"
        if isinstance(replacement, Mixer):
            least, less = "the mixers' states alone take", "a smaller d_state"
        raise ValueError(
            f"{human_bytes(self.nbytes)} of cache is too little: {least} {human_bytes(nbytes)}; give more or {less}."
        )

    @cached_property
    def given_heads(self) -> tuple[KVHead, ...]:
        """Key/value heads that the user names, those of named layers included."""
        given = {(layer, kv) for layer in self.resolved.layers or () for kv in range(self.shape[1])}
        named = self.resolved.heads or {}
        given |= {(layer, head // self.shared) for layer, of_layer in named.items() for head in of_layer}
        return tuple(sorted(given))

    @cached_property
    def longest_window(self) -> int:
        """The widest window that leaves half of a calibration sequence to fit a state on; without a state, any."""
        context = self.resolved.context
        length = self.resolved.sequence_length
        if self.resolved.has_state:
            kept = self.resolved.sinks + self.resolved.salient
            context = min(context, length // 2, evicted_tokens(length, 0, kept, self.block) - 1)
        return max(context // self.block, 2) * self.block

    @property
    def block(self) -> int:
        """Number of tokens by which a window moves at a time."""
        assert self.resolved.block is not None, "there are no windows"
        return self.resolved.block

    @property
    def narrowest_window(self) -> int:
        """The narrowest window, of two blocks."""
        return 2 * self.block

    def placements(self, ranked: list[KVHead]) -> list[Placement]:
        """The largest placement within the budget for each number of bits that full attention may have.

        Args:
            ranked: as in `placement`.

        Raises:
            ValueError: the budget is too small in any number of bits.
        """
        found = []
        refused = None
        for bits in (self.resolved.bits, *self.resolved.other_bits):
            budget = dataclasses.replace(self, resolved=dataclasses.replace(self.resolved, bits=bits))
            try:
                found.append(budget.placement(ranked))
            except ValueError as error:
                refused = refused or error
        if not found:
            raise refused
        return found

    def with_fewer_planes(self, placement: Placement) -> "Budget | None":
        """Return this budget for states with half as many rotary planes, which leave more for heads and windows.

        None where states take little of the placement's bytes, nothing would take theirs, or keys have few planes.
        """
        planes = self.weights.config.rotary_planes // 4
        if planes < LEAST_PLANES or placement.hybrid is None or placement.hybrid.window >= self.longest_window:
            return None
        config = hybrid_config(self.weights, placement, self.resolved.mixer)
        states = sum(state_bytes(config, layer) for layer in placement.windows)
        if states <= STATES_SHARE * self.nbytes:
            return None
        return dataclasses.replace(self, planes=planes)

    def placement(self, ranked: list[KVHead]) -> Placement:
        """The largest placement within the budget.

        Args:
            ranked: key/value heads that are not given, the one to keep first in front.

        Raises:
            ValueError: the budget is too small for any window, or for the values that the user has fixed.
        """
        resolved = self.resolved
        ranked = [pair for pair in ranked if pair[0] not in resolved.bounded]
        # enough for all that the teacher keeps, so nothing is replaced, and rounded only if the user says so
        if resolved.window is None and resolved.num_heads is None and self.nbytes >= self.teacher_nbytes:
            bits = resolved.bits if "bits" in resolved.said.get("placement", {}) else CacheBits()
            return everywhere(Attention(), self.shape[0], bits)
        count = resolved.num_heads
        if count is None:
            count = self._most_heads(ranked, resolved.window or self.narrowest_window, self._heads_budget())
        window = resolved.window
        if window is None:
            window = self._widest_window(ranked[:count])
        if window < self.narrowest_window or self._bytes(ranked[:count], window) > self.nbytes:
            least = self._bytes(ranked[: resolved.num_heads or 0], resolved.window or self.narrowest_window)
            raise ValueError(
                f"{human_bytes(self.nbytes)} of cache at {resolved.context} tokens is too little: what was asked for "
                f"takes {human_bytes(least)} at least; give more, or fix less (window, heads, layers, mixer)."
            )
        if resolved.num_heads is None and resolved.window is None and window == self.longest_window:
            # the window is as wide as it may be: heads take what is left; the search finds too few where a kept head
            # takes fewer bytes than such a window
            count = max(count, self._most_heads(ranked, window, self.nbytes))
        return self._placed(ranked[:count], window)

    def _most_heads(self, ranked: list[KVHead], window: int, limit: float) -> int:
        """Count the heads that may be kept beside windows of this width."""
        return self._most(lambda count: self._bytes(ranked[:count], window), limit, len(ranked))

    def _widest_window(self, kept: list[KVHead]) -> int:
        """Width of the widest window beside these heads; below `narrowest_window` if the budget holds none."""

        def bytes_of(blocks: int) -> int:
            return self._bytes(kept, max(self.block * blocks, self.narrowest_window))

        return self.block * self._most(bytes_of, self.nbytes, self.longest_window // self.block)

    def windows_alone(self) -> Placement:
        """Windows of one width in all layers, and no kept heads; narrow unless a width is given."""
        window = self.resolved.window
        if window is None:
            eighth = self.resolved.sequence_length // 8 // self.block * self.block
            window = min(max(eighth, self.narrowest_window), self.longest_window)
        return everywhere(self._layer(window), self.shape[0], self.resolved.bits).keeping(self.resolved.bounded)

    def windowed_heads(self, placement: Placement) -> dict[int, int]:
        """Key/value heads that have a window, by layer."""
        config = hybrid_config(self.weights, placement, self.resolved.mixer)
        return {layer: windowed_heads(config, layer) for layer in placement.windows}

    def columns(self, placement: Placement) -> int:
        """Count the tokens that all windows may hold together within the budget, one for each key/value head.

        `spread_windows` distributes them over the layers.
        """
        heads = self.windowed_heads(placement)
        narrow = dict.fromkeys(placement.windows, self.narrowest_window)
        bytes_of = self._bytes_of(placement.with_windows(narrow))
        # a token takes a key and a value in each head and one salience, here as if each head had one
        window_bits = placement.bits.config_fields()["window_bits"]
        per_column = pair_bytes(self.weights.config, window_bits, CACHE_DTYPE) + 4
        return self.narrowest_window * sum(heads.values()) + max(self.nbytes - bytes_of, 0) // per_column

    def _heads_budget(self) -> float:
        if self.resolved.window is not None:
            return self.nbytes
        without = self._bytes([], self.narrowest_window)
        return without + HEADS_SHARE * (self.nbytes - without)

    def _layer(self, window: int) -> Hybrid:
        return dataclasses.replace(self.resolved.hybrid_layer(window), planes=self.planes)

    def _placed(self, kept: list[KVHead], window: int) -> Placement:
        heads = (*self.given_heads, *kept)
        whole = [layer for layer in range(self.shape[0]) if sum(of == layer for of, _ in heads) == self.shape[1]]
        base = everywhere(self._layer(window), self.shape[0], self.resolved.bits)
        heads_kept = base.with_full_heads(query_heads(list(heads), self.shared))
        return heads_kept.keeping({*whole, *self.resolved.bounded})

    def _bytes(self, kept: list[KVHead], window: int) -> int:
        return self._bytes_of(self._placed(kept, window))

    def _bytes_of(self, placement: Placement) -> int:
        if not placement.replaced_layers:
            return self.teacher_nbytes
        config = hybrid_config(self.weights, placement, self.resolved.mixer)
        return cache_bytes(config, self.resolved.context)[1]

    @staticmethod
    def _most(bytes_of: Callable[[int], int], limit: float, highest: int) -> int:
        """Return the largest number up to `highest` whose bytes, which grow with it, are within the limit."""
        low = 0
        high = highest
        while low < high:
            middle = (low + high + 1) // 2
            if bytes_of(middle) <= limit:
                low = middle
            else:
                high = middle - 1
        return low
