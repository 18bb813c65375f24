"""Hybrid layers whose every part matters, attention to rows in float64, and the distance of what they give."""

import torch
from torch import nn

from modeling_llamba import LlambaConfig
from modeling_llamba.hybrid.hybrid_attention import HybridAttention
from modeling_llamba.hybrid.inputs import HybridInputs
from modeling_llamba.hybrid.rounding import Rounding
from modeling_llamba.model.rotary import rotary_embedding

HIDDEN = 32
ROPE = {"rope_type": "default", "rope_theta": 1e4}
PARTIAL = {"partial_rotary_factor": 0.4}


@torch.no_grad()
def randomised(module: nn.Module) -> nn.Module:
    """The module with weights large enough that a leak shows."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.weight.normal_(0, part.in_features**-0.5)
        if isinstance(part, HybridAttention):
            for projection in (part.q_proj, part.k_proj):
                projection.weight.mul_(1.5)
            if part.salience is not None:
                part.salience.normal_()
            if part.key_offset is not None:
                part.key_offset.normal_()
            if part.mass is not None:
                part.mass.add_(0.2 * torch.randn_like(part.mass))
    return module


def relative_error(got, expected):
    """The worst of any token."""
    got, expected = (t.double().cpu() for t in (got, expected))
    return ((got - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-6)).max().item()


def make_layer(dtype: torch.dtype = torch.float32, **options) -> HybridAttention:
    """A layer whose every part matters."""
    sizes = dict(
        vocab_size=7, hidden_size=HIDDEN, intermediate_size=8, num_hidden_layers=1, num_attention_heads=6,
        num_key_value_heads=3, head_dim=8, max_position_embeddings=512, layer_types=["hybrid"], hybrid_window=4,
        hybrid_block=2, hybrid_sinks=2, hybrid_salient=3, hybrid_rank=4, rope_parameters=ROPE,
    )  # fmt: skip
    config = LlambaConfig(**sizes | options)
    config._attn_implementation = "sdpa" if config.attn_logit_softcapping is None else "eager"
    return randomised(HybridAttention(config, 0)).eval().to(dtype)


def rotary_of(layer, index, reach):
    """cos and sin for every token, and those for its look at sinks, or None."""
    embedding, positions = rotary_embedding(layer.config).to(index.device), index.clamp(min=0)
    like = layer.q_proj.weight
    return embedding(like, positions), None if reach is None else embedding(like, positions.clamp(max=reach))


def in_parts(layer, hidden_states, parts, cache, reach=None):
    """The layer's outputs for a part of the prompt (B, L, hidden) at a time; reach: the farthest a sink may be."""
    device = hidden_states.device
    index = torch.arange(hidden_states.shape[1], device=device).expand(len(hidden_states), -1)
    rotary, sink_rotary = rotary_of(layer, index, reach)
    first = 0
    for length in parts:
        now = slice(first, first + length)
        far = None if sink_rotary is None else tuple(t[:, now] for t in sink_rotary)
        inputs = HybridInputs(index[:, now], first, sink_rotary=far)
        if layer.kept:
            columns = torch.arange(now.stop, device=device)
            later = columns > columns[now, None]
            least = torch.finfo(hidden_states.dtype).min
            inputs = inputs._replace(causal_mask=later.to(hidden_states.dtype)[None, None] * least)
        yield layer(hidden_states[:, now], tuple(t[:, now] for t in rotary), inputs, cache)
        first = now.stop


def attention_to_rows(query, rows, bits, bias, scale, softcap):
    """Attention (B, 1, H, P) of queries (B, H, 1, P) to what rows of keys and of values hold, in float64.

    Args:
        bias: (B, T), or None.
    """
    roundings = Rounding.of_pair(list(bits), query.shape[-1])
    shared = query.shape[1] // rows[0].shape[1]
    keys, values = (
        rounding.decode(t, torch.float64).double().repeat_interleave(shared, 1)
        for rounding, t in zip(roundings, rows, strict=True)
    )
    scores = query.double() @ keys.mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias[:, None, None].double()
    return (scores.softmax(-1) @ values).transpose(1, 2)


def attention_to_pages(attend_to_pages, bits, dtype, device, dim=64, shared=3, lengths=(1, 16, 77, 300), spare=0):
    """What a function returns for requests of several lengths, whose pages lie in any order, and the expected.

    What is in no request's rows is 255 in every byte, which is no number in 16 and 32 bits.

    Args:
        spare: pages of each request behind those that its longest needs.
    """
    kv_heads, block = 2, 16
    roundings = Rounding.of_pair(list(bits), dim)
    most = -(-max(lengths) // block) + spare
    table = torch.randperm(len(lengths) * most, device=device).view(len(lengths), most) + 1
    widths = [rounding.width(dtype) for rounding in roundings]
    first = 32
    ends = [first + block * kv_heads * sum(widths[:i]) for i in range(3)]
    pages = torch.full((table.numel() + 1, ends[2] + 16), 255, dtype=torch.uint8, device=device)
    query = torch.randn(len(lengths), kv_heads * shared, 1, dim, device=device).to(dtype)
    rows = []
    for rounding, start, end in zip(roundings, ends, ends[1:], strict=False):
        vectors = torch.randn(len(lengths), kv_heads, max(lengths), dim, device=device).to(dtype)
        rows.append(rounding.encode(vectors).contiguous() if rounding.rounds else vectors)
        in_bytes = rows[-1].transpose(1, 2).contiguous().flatten(2).view(torch.uint8)
        for b, length in enumerate(lengths):
            for t in range(length):
                place = pages[table[b, t // block], start:end].view(block, -1)
                place[t % block] = in_bytes[b, t]
    scale = 2 * dim**-0.5
    output = attend_to_pages(
        query, pages, tuple(ends[:2]), kv_heads, table, torch.tensor(lengths, device=device), block, scale, 0.0,
        roundings,
    )  # fmt: skip
    hidden = torch.arange(max(lengths), device=device) >= torch.tensor(lengths, device=device)[:, None]
    bias = torch.zeros(hidden.shape, device=device).masked_fill(hidden, -torch.inf)
    return output, attention_to_rows(query, rows, bits, bias, scale, None)


def rows_in_room(t, rounding, room=40):
    """Rows (B, K, T, W) as a cache holds them that grows in place: a part of more."""
    rows = rounding.encode(t)
    whole = rows.new_full((*rows.shape[:2], rows.shape[2] + room, rows.shape[3]), 7)
    whole[:, :, : rows.shape[2]] = rows
    return whole[:, :, : rows.shape[2]]
