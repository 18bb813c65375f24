"""Softmax attention that returns its log-sum-exp, by which two parts of the columns are put together.

PyTorch's fused function computes it where there is one that returns the log-sum-exp: on a CPU, without a gradient.

Shapes: B batch, L length, H heads, K key/value heads, P head dim, T columns, Q queries.
"""

import torch
from torch.nn import functional as F
from transformers.utils import is_torchdynamo_compiling

Near = tuple[torch.Tensor, torch.Tensor]
"""Outputs (..., P) of attention, and log-sum-exps (...) of its scores."""
FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def fuses(*tensors: torch.Tensor) -> bool:
    """True where PyTorch's fused function attends to these tensors."""
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return tensors[0].device.type == "cpu" and not recorded and not is_torchdynamo_compiling()


def hiding(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Make a bias on scores that is 0, and the least number of the type where `hidden` is True."""
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)


def causal_bias(query: torch.Tensor) -> torch.Tensor:
    """(L, L) for queries (B, H, L, P): 0 where one attends, else the least number of their type."""
    later = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool, device=query.device).triu(1)
    return hiding(later, query.dtype)


def merged(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to two sets of columns together, from that to either: outputs (..., P) and log-sum-exps (...)."""
    log_mass = torch.logaddexp(one[1], other[1])
    parts = (output * (mass - log_mass).exp()[..., None].to(output.dtype) for output, mass in (one, other))
    return sum(parts), log_mass


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    scaling: float,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Near:
    """Softmax attention (..., Q, P) with its log-sum-exp (..., Q), for queries (..., Q, P), keys and values
    (..., T, P), and a bias (..., Q, T), which is the least number where nothing is attended to."""
    if softcap is None and not dropout and fuses(query, keys, values):
        lead = query.shape[:-3]
        shape = query.shape
        query, keys = (t.to(values.dtype) for t in (query, keys))  # autocast leaves them unlike
        if bias is not None:
            bias = bias.to(values.dtype)
        if len(lead) != 1:
            query, keys, values = (t.expand(*lead, *t.shape[-3:]).flatten(0, -4) for t in (query, keys, values))
            if bias is not None:
                bias = bias.expand(*lead, *bias.shape[-3:]).flatten(0, -4)
        output, log_mass = FUSED(query, keys, values, attn_mask=bias, scale=scaling)
        if len(lead) == 1:  # one token saves the calls of views that would change nothing
            return output, log_mass
        return output.view(shape), log_mass.view(shape[:-1])
    scores = (query @ keys.mT).to(torch.promote_types(query.dtype, torch.float32)) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    log_mass = scores.logsumexp(-1)
    # a query to which all is hidden gets zeros, and not NaN, which would enter the cache
    least = log_mass.clamp(min=torch.finfo(log_mass.dtype).min)
    probabilities = F.dropout((scores - least[..., None]).exp().to(values.dtype), dropout)
    return probabilities @ values, log_mass


def causal_attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Near:
    """`attend` for queries (B, H, L, P), each to the keys and values (B, K, L, P) of its token and of those before it,
    grouped by key/value head: (B, K, H / K * L, P)."""
    shared = query.shape[1] // keys.shape[1]
    if softcap is None and not dropout and fuses(query, keys, values):
        keys, values = (t.repeat_interleave(shared, dim=1) for t in (keys, values))
        near = FUSED(query, keys, values, 0.0, True, scale=scaling)
        return tuple(t.unflatten(1, (-1, shared)).flatten(2, 3) for t in near)
    bias = causal_bias(query).repeat(shared, 1)[None, None]
    return attend(query.unflatten(1, (-1, shared)).flatten(2, 3), keys, values, bias, scaling, softcap, dropout)
