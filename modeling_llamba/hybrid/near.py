"""Softmax attention of the heads with a window to the columns of window, sinks and salient tokens.

Shapes: B batch, L length, H' heads with a window, K key/value heads, R heads per key/value head, P head dim, E block,
C columns of the window, S places, T columns, M mixed blocks, J groups of blocks, Q queries.
"""

import torch
from torch.nn import functional as F

from ..kernels.softmax import Near, attend, causal_attend, hiding, merged
from .block_layout import Layout
from .eviction import Held, gather_columns
from .inputs import WindowedHeads


def attend_of(heads: WindowedHeads, query, keys, values, bias: torch.Tensor | None) -> Near:
    """`attend` with the scores of these heads."""
    return attend(query, keys, values, bias, heads.scaling, heads.softcap, heads.dropout)


def attend_causally(heads: WindowedHeads, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """(B, L, H', P) of rows that begin here."""
    if heads.softcap is None and heads.sinks is None:
        output = F.scaled_dot_product_attention(
            query, key, value, dropout_p=heads.dropout, is_causal=True, scale=heads.scaling,
            enable_gqa=heads.shared > 1,
        )  # fmt: skip
        return output.transpose(1, 2)
    near = causal_attend(query, key, value, heads.scaling, heads.softcap, heads.dropout)
    output, log_mass = (t.unflatten(2, (heads.shared, query.shape[2])) for t in near)
    return beside_learned_sinks(heads, (output, log_mass), heads_axis=1)[0].flatten(1, 2).transpose(1, 2)


def beside_learned_sinks(heads: WindowedHeads, near: Near, heads_axis: int) -> Near:
    """Attention, outputs (..., P) and log-sum-exps Z (...), to a learned sink of each head too: a score, no value.

    Args:
        heads_axis: axis of the key/value heads; that of the query heads of each is the last but one of Z.
    """
    if heads.sinks is None:
        return near
    output, log_mass = near
    sinks = heads.sinks.view(heads.groups)
    shape = [1] * log_mass.ndim
    shape[heads_axis], shape[-2] = sinks.shape
    with_sinks = torch.logaddexp(log_mass, sinks.view(shape).to(log_mass.dtype))
    return output * (log_mass - with_sinks).exp()[..., None].to(output.dtype), with_sinks


def attend_sinks(
    heads: WindowedHeads, query, keys, values, salience: torch.Tensor, holders: torch.Tensor, layout: Layout
) -> Near:
    """Attention of queries (B, J, K, M/J, R, E, P), rotated for it, to the sinks that have left the window.

    Args:
        salience: (B, T), of the columns of keys and values. holders: (B, M, S), the columns that hold a place.
    """
    holders = holders[..., : heads.shape.sinks].unflatten(1, (-1, layout.group))  # (B, J, M/J, S)
    absent = salience.gather(1, holders.clamp(min=0).flatten(1)).view(holders.shape) < torch.inf
    absent = absent | (holders < 0)
    keys, values = (gather_columns(t, holders.clamp(min=0)).permute(0, 2, 1, 3, 4, 5) for t in (keys, values))
    bias = hiding(absent, query.dtype)
    shape = query.shape
    output, log_mass = attend_of(heads, query.flatten(4, 5), keys, values, bias[:, :, None, :, None])
    return output.view(shape), log_mass.view(shape[:-1])


def attend_held_sinks(heads: WindowedHeads, query, sink_query, keys, values, held: Held, bias) -> Near:
    """Attention of queries (B, K, Q, P) of one block to keys and values as they are stored, where the sinks, in the
    first places, are attended to by queries of their own.

    Args:
        bias: (B, 1, Q, S + C), or None where all places are held, the first by sinks.
    """
    sinks = heads.shape.sinks
    query, sink_query = (heads.shape.key_rounding.rotate(t) for t in (query, sink_query))
    if bias is None:
        near = attend_of(heads, query, keys[:, :, sinks:], values[:, :, sinks:], None)
        far = attend_of(heads, sink_query, keys[:, :, :sinks], values[:, :, :sinks], None)
        return merged(near, far)
    is_sink = (held.salience[:, :sinks] == torch.inf)[:, None, None]
    # the least number and not -inf: a query to which all columns are hidden would get no numbers
    others = bias.expand(len(keys), -1, -1, -1).clone()
    others[..., :sinks] = others[..., :sinks].masked_fill(is_sink, torch.finfo(query.dtype).min)
    near = attend_of(heads, query, keys, values, others)
    far = attend_of(heads, sink_query, keys[:, :, :sinks], values[:, :, :sinks], hiding(~is_sink, query.dtype))
    return merged(near, far)
