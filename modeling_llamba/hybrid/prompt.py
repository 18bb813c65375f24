"""The tokens of a prompt through a hybrid layer; hybrid_attention.py has the equations and the order of the work.

Shapes: B batch, L length, H' heads with a window, K key/value heads, R heads per key/value head, P head dim, N state,
E block, S places, T columns, M mixed blocks, J groups of blocks.
"""

from typing import NamedTuple

import torch

from ..kernels.softmax import merged
from .block_layout import Layout
from .eviction import Held, State, advance, decoded, open_block, open_blocks
from .inputs import HybridInputs, Projected, WindowedHeads, joined, segment
from .near import attend_sinks, beside_learned_sinks


class Blocks(NamedTuple):
    """Softmax attention of the blocks of a layout, and what their states are made of.

    query, output (B, J, K, M/J, R, E, P). log_mass (B, J, K, M/J, R, E): Z. keys, values (B, K, T, P), salience
    (B, T): the columns. holders (B, M, S): those that hold a place while each block is open, -1 in empty places. until
    (B, T): the first block to which a column is visible neither in a window nor in a place.
    """

    query: torch.Tensor
    output: torch.Tensor
    log_mass: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    salience: torch.Tensor
    holders: torch.Tensor
    until: torch.Tensor


def read_prompt(
    backend, heads: WindowedHeads, projected: Projected, inputs: HybridInputs, layer
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The heads' outputs (B, L, H', P) and the features (B, L', 3 H' P) of the last L' tokens, None for L' = 0.

    Long prompts are gone through a segment at a time.

    Args:
        layer: of the cache, to go on from and to update; or None.
    """
    shape = heads.shape
    held = None if layer is None else layer.held
    length = projected.query.shape[2]
    outputs = []
    features = []
    size = length if inputs.seq_idx is not None else backend.segment_length(heads, projected, inputs)
    # a compiled graph is for a number of segments; range(0, length, size) would make it one for this length
    for first in [n * size for n in range(-(-length // size))]:
        part, of_part = segment(projected, inputs, slice(first, first + size), whole=size >= length)
        keeps = layer is not None or first + size < length
        output, of_features, after = backend.mix(heads, part, of_part, opened(shape, held, part, of_part), keeps)
        outputs.append(output)
        if of_features is not None:
            features.append(of_features)
        if after is not None:
            held = after
        elif keeps:
            tokens = part.tokens(of_part.index)
            held = advance(Held.empty(shape, tokens) if held is None else held, tokens, shape)
    if layer is not None:
        layer.keep(held, projected.tokens(inputs.index))
    return joined(outputs), joined(features)


def rounded(heads: WindowedHeads, projected: Projected) -> Projected:
    """Projections whose keys and values are rounded as a cache holds them; gradients pass unchanged."""
    key = heads.shape.key_rounding.round(projected.key, projected.key_rows)
    value = heads.shape.value_rounding.round(projected.value, projected.value_rows)
    return projected._replace(key=key, value=value)


def opened(shape, held: Held | None, projected: Projected, inputs: HybridInputs) -> Held | None:
    """State of the layer while the block of the first token is open; None in rows that are known to begin here."""
    if held is None:
        if inputs.start == 0 or inputs.seq_idx is not None:
            return None
        return Held.empty(shape, projected.tokens(inputs.index))
    if inputs.start is None:
        return open_blocks(held, shape, held.seen)
    if inputs.start % shape.block == 0 and inputs.start >= shape.window:
        return open_block(held, shape)
    return held


def layout_of(shape, projected: Projected, inputs: HybridInputs, held: Held | None) -> Layout:
    """The blocks of a segment that are mixed."""
    if held is None and inputs.start == 0:
        return Layout.behind_window(shape, projected.key)
    if inputs.seq_idx is not None:
        return Layout.packed(shape, inputs.index, inputs.seq_idx)
    if inputs.start is None:
        return Layout.gathered(shape, held, inputs.index)
    return Layout.continued(shape, held, projected.key, inputs.start)


def attend_blocks(backend, heads: WindowedHeads, projected: Projected, held: Held | None, layout: Layout) -> Blocks:
    """Softmax attention of the blocks of a layout."""
    past_keys = past_values = past_salience = None
    if held is not None:
        past_keys, past_values = decoded(heads.shape, *held[:2], projected.key.dtype)
        past_salience = held.salience
    keys, values = layout.columns(past_keys, projected.key), layout.columns(past_values, projected.value)
    salience = layout.salience(past_salience, projected.salience)
    holders, until = backend.choose_columns(layout, salience)
    query = layout.queries(projected.query, heads.groups)
    visible = until
    sinks = None
    if projected.sink_query is not None:
        visible = layout.without_sinks(until, salience)
        sink_query = layout.queries(projected.sink_query, heads.groups)
        sinks = attend_sinks(heads, sink_query, keys, values, salience, holders, layout)
    near = backend.attend_groups(heads, query, keys, values, holders, visible, layout)
    if sinks is not None:
        near = merged(near, sinks)
    near = beside_learned_sinks(heads, near, heads_axis=2)
    return Blocks(query, *near, keys, values, salience, holders, until)


def states_of(blocks: Blocks, held: Held | None, layout: Layout) -> tuple[State, torch.Tensor]:
    """The states of the blocks (B, J, K, M/J, .), and their sums (B, M, K, P + 1, N + 1)."""
    sums = layout.states(held, blocks.keys, blocks.values, blocks.holders)
    return State(*(layout.by_group(t) for t in State.of(sums))), sums
