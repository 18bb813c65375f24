"""A step: one token, or a few of one block, through a hybrid layer, by PyTorch's operations.

Shapes: B batch, L length, H' heads with a window, K key/value heads, R heads per key/value head, P head dim.
"""

import torch
from transformers.utils import is_torchdynamo_compiling

from ..kernels.softmax import hiding
from .eviction import State, decoded
from .inputs import HybridInputs, Projected, WindowedHeads
from .near import attend_held_sinks, attend_of, beside_learned_sinks
from .readout import read, readout


def is_early(heads: WindowedHeads, inputs: HybridInputs) -> bool:
    """True while the state is empty, as is known without a look at it."""
    return inputs.start is not None and inputs.start < heads.shape.window


def take_step(
    heads: WindowedHeads, projected: Projected, inputs: HybridInputs, layer
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Do what `read_prompt` does for L tokens of one block, which are written into the cache's layer in place."""
    shape = heads.shape
    query = projected.query
    first, last, hidden = layer.write(projected.tokens(inputs.index), inputs.start)
    held = layer.held
    by_head = query.unflatten(1, heads.groups)  # (B, K, R, L, P)
    query = by_head.flatten(2, 3)
    bias = None
    if hidden is not None:
        bias = hiding(hidden, query.dtype).repeat(1, heads.shared, 1)[:, None]
    # queries and outputs are rotated as the rounding rotates keys and values, since the cache is much larger
    rows = (t[:, :, first:last] for t in held[:2])
    keys, values = decoded(shape, *rows, query.dtype, rotated=True)
    early = is_early(heads, inputs)
    if projected.sink_query is not None and not early:
        sink_query = projected.sink_query.unflatten(1, heads.groups).flatten(2, 3)
        output, log_mass = attend_held_sinks(heads, query, sink_query, keys, values, held, bias)
    else:
        output, log_mass = attend_of(heads, shape.key_rounding.rotate(query), keys, values, bias)
    output = shape.value_rounding.rotate(output)
    near = output.view(by_head.shape), log_mass.view(by_head.shape[:-1])
    output, log_mass = beside_learned_sinks(heads, near, heads_axis=1)
    features = None
    if heads.mass is not None and not early:
        if layer.readout is None or is_torchdynamo_compiling():
            layer.readout = readout(heads, State.of(held.state))
        output, features = read(by_head, output, log_mass, layer.readout)
        features = features.flatten(1, 2).transpose(1, 2).flatten(2)
    return output.flatten(1, 2).transpose(1, 2), features
