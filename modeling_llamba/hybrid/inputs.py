"""Tuples that a pass hands to a hybrid layer, and the layer to its backend.

Shapes: B batch, L length, D model width, H heads, H' heads with a window, K key/value heads, R heads per key/value
head, P head dim, F planes and other dims, F' slow planes and other slow dims.
"""

from typing import NamedTuple

import torch

from ..model.rotary import Rotary
from .eviction import BlockShape, NewTokens


class HybridInputs(NamedTuple):
    """Places of a pass's tokens in their sequences, the same for all hybrid layers.

    index (B, L): number of each token in its sequence, -1 at padding. start: number of the first token, where rows are
    not packed, hold no padding but behind their last token, and are known to begin with the same number; else None.
    end_alike: False where there may be padding behind the last token of rows with a `start`.
    seq_idx (B, L): sequence of each token in packed rows, else None. sink_rotary: rotary embedding (rotary.py) for
    queries to sinks that are farther away than the teacher was trained for, by kind of rotary embedding until
    `of_layer`; None where none is.
    causal_mask: mask of transformers' for kept heads.
    """

    index: torch.Tensor
    start: int | None = None
    seq_idx: torch.Tensor | None = None
    sink_rotary: dict[str, Rotary] | Rotary | None = None
    causal_mask: torch.Tensor | None = None
    end_alike: bool = True

    def of_layer(self, rope: str) -> "HybridInputs":
        """The inputs of a layer with this kind of rotary embedding."""
        if self.sink_rotary is None:
            return self
        return self._replace(sink_rotary=self.sink_rotary[rope])


def unpadded(hidden_states: torch.Tensor) -> HybridInputs:
    """The inputs for rows (B, L, D) that begin here and hold no padding."""
    index = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    return HybridInputs(index.expand(hidden_states.shape[0], -1), start=0)


class Projected(NamedTuple):
    """Queries, keys and values of all heads, rotated.

    query (B, H, L, P). sink_query: the same for sinks that are too far away, or None. key, value (B, K, L, P).
    salience (B, L) in float32 or wider: +inf at sinks, -inf at padding. key_rows, value_rows: keys and values as a
    cache holds them, for heads with a window alone; the same tensors where nothing is rounded.
    """

    query: torch.Tensor
    sink_query: torch.Tensor | None
    key: torch.Tensor
    value: torch.Tensor
    salience: torch.Tensor
    key_rows: torch.Tensor | None = None
    value_rows: torch.Tensor | None = None

    def tokens(self, index: torch.Tensor) -> NewTokens:
        """Tokens with these numbers (B, L), as a cache takes them."""
        return NewTokens(self.key_rows, self.value_rows, self.salience, index)


class Ranked(NamedTuple):
    """Tokens whose salience is asked for: by it they compete for places in the salient cache.

    hidden_states (B, L, D). weight (D,): their product is the salience; None where no token is salient but sinks.
    inputs: as the layer gets them. sinks: how many tokens, the first of a sequence, stay salient.
    """

    hidden_states: torch.Tensor
    weight: torch.Tensor | None
    inputs: HybridInputs
    sinks: int

    def salience(self) -> torch.Tensor:
        """(B, L) in float32 or wider, +inf at sinks, -inf at padding; a choice, through which no gradient passes."""
        index, start = self.inputs.index, self.inputs.start
        wide = torch.promote_types(self.hidden_states.dtype, torch.float32)
        if self.weight is None:
            salience = torch.full(index.shape, -torch.inf, dtype=wide, device=index.device)
        else:
            salience = (self.hidden_states.detach().to(wide) * self.weight.detach().to(wide)).sum(-1)
        if start is not None and start >= self.sinks:
            return salience
        salience = salience.masked_fill(index < self.sinks, torch.inf)
        if start is None:
            salience = salience.masked_fill(index < 0, -torch.inf)
        return salience


class WindowedHeads(NamedTuple):
    """The heads with a window, as a backend computes them.

    shape: sizes of window, salient cache and state. kv_heads, shared: key/value heads K, and query heads R of each.
    scaling, softcap: of the scores; softcap None for none. sinks (H',): learned scores of attention to no token, or
    None. mass (H', 2 + F' + F): parameters of the log mass of the state; None where there is no state. has_map: True
    if the low-rank map reads features. dropout: share of the probabilities that is dropped.
    """

    shape: BlockShape
    kv_heads: int
    shared: int
    scaling: float
    softcap: float | None
    sinks: torch.Tensor | None
    mass: torch.Tensor | None
    has_map: bool
    dropout: float

    @property
    def groups(self) -> tuple[int, int]:
        """Key/value heads, and query heads of each."""
        return self.kv_heads, self.shared

    @property
    def are_plain(self) -> bool:
        """True for heads with a state, without learned sinks and dropout, which is what kernels compute."""
        return self.mass is not None and self.sinks is None and not self.dropout


def of_heads(t: torch.Tensor, kv_heads: list[int], shared: int = 1) -> torch.Tensor:
    """The heads of some key/value heads, `shared` each, of (B, heads, L, P); cut, as an index would have to be sent to
    the device."""
    return joined([t[:, shared * first : shared * last] for first, last in runs(kv_heads)])


def joined(parts: list[torch.Tensor]) -> torch.Tensor | None:
    """One tensor of parts that follow one another along the second dimension; None for no parts."""
    if not parts:
        return None
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim=1)


def runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Consecutive numbers as ranges: [3, 4, 5, 1] is [(3, 6), (1, 2)]."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = found[-1][0], number + 1
        else:
            found.append((number, number + 1))
    return found


def segment(projected: Projected, inputs: HybridInputs, which: slice, whole: bool) -> tuple[Projected, HybridInputs]:
    """Consecutive tokens of a prompt, read at once."""
    if whole:
        return projected, inputs
    tensors = [None if t is None else t[:, :, which] for t in projected._replace(salience=None)]
    start = None if inputs.start is None else inputs.start + which.start
    part = Projected(*tensors)._replace(salience=projected.salience[:, which])
    return part, HybridInputs(inputs.index[:, which], start, end_alike=inputs.end_alike)
