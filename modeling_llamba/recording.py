"""Passes that can be taken back: how a draft is verified without a copy of the state for each token.

A recurrent state cannot be cropped. While a cache records, its states stay where they were at the checkpoint, the last
token known to be right, and the layers note what the passes since then fed them: a mixer its x, B and decay and the
inputs of its short convolution, attention its keys and values, as ever. `accept` then moves the checkpoint: each row
replays as many tokens into its state as were right, and the rest is dropped: multi-step verification as in Wang et
al. 2024, The Mamba in the Llama. A token recorded takes P + N + 1 numbers per head; a state is P N of them.

    record(cache)
    logits = model(drafted, past_key_values=cache).logits      # one pass, or several
    accept(cache, [3, 1])                                      # row 0 keeps three tokens, row 1 one

Rows that keep different numbers of tokens are set flush right, so that the cache is always that of a batch padded on
the left.

Shapes: B batch, R tokens recorded, P head dim, N state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from .hybrid_cache import cache_length, crop_rows, ending_at, note_length

# besides, layers that have an `accept` of their own: WindowLayer, which each copy of these files defines anew
CROPPED = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer)


@dataclass
class Recorded:
    """What a mixer was fed since the checkpoint.

    conv: (B, channels, kernel + R) inputs of the short convolution. inputs: what `advance` replays, (B, delay + R, .),
    all zero where nothing shall happen. advance: state and inputs to the state after them, perhaps in place.
    """

    conv: torch.Tensor | None = None
    inputs: tuple[torch.Tensor, ...] | None = None
    advance: Callable[..., torch.Tensor] | None = None

    def add(self, new: tuple[torch.Tensor, ...], before: tuple[torch.Tensor, ...] | None = None):
        """Note further inputs, behind `before` if they are the first; all there are, (B, delay + R, ...) each."""
        old = self.inputs if self.inputs is not None else before
        self.inputs = new if old is None else tuple(torch.cat(pair, dim=1) for pair in zip(old, new, strict=True))
        return self.inputs


def recorded_by(cache: Cache | None, layer_idx: int) -> Recorded | None:
    """Where the mixer of a layer notes its inputs; None where no cache records."""
    return None if cache is None else getattr(cache.layers[layer_idx], "recorded", None)


def record(cache: Cache) -> None:
    """From here on passes can be taken back, until `stop_recording`.

    Raises:
        ValueError: the cache is empty, or some layer of it is of a kind that cannot be taken back.
    """
    for layer in cache.layers:
        if type(layer) not in CROPPED and not hasattr(layer, "accept"):
            raise ValueError(f"A cache with a {type(layer).__name__} cannot take passes back; use a dynamic cache.")
    if not cache_length(cache):
        raise ValueError("The cache is empty; run the model over the prompt before recording.")
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            layer.recorded = Recorded()
        elif isinstance(layer, DynamicSlidingWindowLayer):
            layer.record_past = True
    cache.checkpoint = cache_length(cache)


@torch.no_grad()
def accept(cache: Cache, counts: Sequence[int], drop: int = 0) -> None:
    """Keep the first counts[row] of the tokens recorded, forget the others, and go on recording from there.

    Args:
        counts: one per row, each at most the number of tokens recorded. The cache grows by the largest; rows with
            fewer have that much more padding on their left.
        drop: this many columns on the left, which hold padding only, are dropped.
    """
    tokens = cache_length(cache) - cache.checkpoint
    assert 0 <= min(counts) and max(counts) <= tokens, f"{list(counts)} of {tokens} recorded tokens"
    length = cache.checkpoint + max(counts) - drop
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            _replay(layer, counts)
        if hasattr(layer, "accept"):
            layer.accept(tokens, counts, length)
        elif isinstance(layer, DynamicLayer):
            crop_rows(layer, tokens, counts, length)
    note_length(cache, length)
    cache.checkpoint = length


def stop_recording(cache: Cache) -> None:
    """Passes are final again; what was recorded and not accepted is forgotten."""
    rows = next(len(t) for layer in cache.layers for t in tensors_of(layer))
    accept(cache, [0] * rows)
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            layer.recorded = None
        elif isinstance(layer, DynamicSlidingWindowLayer):
            layer.record_past = False


def recorded_bytes(cache: Cache) -> int:
    """Bytes the mixers hold for taking passes back, beyond their states."""
    records = [r for layer in cache.layers if (r := getattr(layer, "recorded", None)) is not None]
    tensors = [t for r in records for t in (r.conv, *(r.inputs or ())) if t is not None]
    return sum(t.numel() * t.element_size() for t in tensors)


def cache_nbytes(cache: Cache) -> int:
    """Bytes a cache holds, what it records apart."""
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in tensors_of(layer))


def tensors_of(layer) -> list[torch.Tensor]:
    """The tensors a cache layer carries from call to call."""
    if hasattr(layer, "accept"):
        found = layer.tensors()
    elif isinstance(layer, LinearAttentionLayer):
        found = [*layer.conv_states.values(), *layer.recurrent_states.values()]
    else:
        found = [layer.keys, layer.values]
    return [t for t in found if t is not None]


def _replay(layer: LinearAttentionLayer, counts: Sequence[int]) -> None:
    """Advance the recurrent state by the accepted inputs, and the conv state and what waits for the state with it."""
    noted, layer.recorded = layer.recorded, Recorded()
    if noted.conv is None:
        return
    kernel = layer.conv_states[0].shape[-1]
    layer.conv_states[0].copy_(ending_at(noted.conv, [kernel + count for count in counts], kernel, axis=2))
    if max(counts):
        inputs = [t[:, : max(counts)] for t in noted.inputs]
        if min(counts) < max(counts):
            kept = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
            inputs = [t * kept.to(t).view(*kept.shape, *[1] * (t.ndim - 2)) for t in inputs]
        state = layer.recurrent_states[0]
        advanced = noted.advance(state, *inputs)
        if advanced is not state:
            state.copy_(advanced)
    leaving = getattr(layer, "leaving", None)
    if leaving is not None:
        delay = leaving[0].shape[1]
        layer.leaving = tuple(ending_at(t, [delay + n for n in counts], delay, axis=1).clone() for t in noted.inputs)
