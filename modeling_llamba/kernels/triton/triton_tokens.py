"""Tokens before attention, by one Triton kernel in place of sixteen launches: rotated queries and keys, and the
salience of each token.

Shapes: B batch, L length, D model width, H heads, K key/value heads, P head dim.
"""

import torch
import triton
import triton.language as tl

from ...hybrid.inputs import Ranked
from ...model.rotary import Rotary
from .triton_rounding import on_device_of

TILE = 2048
"""Numbers that a program reads at once."""


def can_rotate(query: torch.Tensor, key: torch.Tensor, rotary: Rotary) -> bool:
    """Return True for tensors of one type and a rotary embedding without a factor on queries."""
    types = {t.dtype for t in (query, key, *rotary)}
    return len(rotary) == 2 and len(types) == 1 and query.stride(-1) == key.stride(-1) == 1


def rotate(
    query: torch.Tensor, key: torch.Tensor, rotary: Rotary, ranked: Ranked | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rotated queries (B, H, L, P) and keys (B, K, L, P), to the last bit those of PyTorch's operations, and the
    salience (B, L) of `ranked`."""
    batch, heads, length, P = query.shape
    kv_heads, rotary_dim = key.shape[1], rotary[0].shape[-1]
    new_query, new_key = query.new_empty(query.shape), key.new_empty(key.shape)
    cos, sin = (t.expand(batch, -1, -1) for t in rotary)
    dims = triton.next_power_of_2(P)
    rows = max(TILE // dims, 1)
    salience = weight = None
    hidden_states, index, sinks, width = query, cos, 0, 1  # which nothing reads
    if ranked is not None:
        hidden_states, weight, index, sinks = ranked.hidden_states, ranked.weight, ranked.inputs.index, ranked.sinks
        width = hidden_states.shape[-1]
        salience = torch.empty(batch, length, dtype=torch.float32, device=query.device)
        if hidden_states.stride(-1) != 1:
            hidden_states = hidden_states.contiguous()
    with on_device_of(query):
        rotate_kernel[(triton.cdiv(length, rows), batch, heads + kv_heads + (ranked is not None))](
            query, key, cos, sin, new_query, new_key, hidden_states, weight, index, salience, length, sinks,
            *query.stride()[:3], *key.stride()[:3], *cos.stride()[:2], *sin.stride()[:2], *hidden_states.stride()[:2],
            *index.stride()[:2], ranked is not None, weight is not None, heads, kv_heads, P, rotary_dim // 2, width,
            dims, rows, enable_fp_fusion=False,  # products are rounded before they are added, as PyTorch's are
        )  # fmt: skip
    return new_query, new_key, salience


@triton.jit
def rotate_head(
    source, target, cos, sin, token, exists, token_stride, cos_token, sin_token,
    P: tl.constexpr, HALF: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Rotate some tokens of one head."""
    d = tl.arange(0, DIMS)[None, :]
    partner = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))
    in_tile = exists[:, None] & (d < P)
    in_planes = exists[:, None] & (d < 2 * HALF)
    row = source + token[:, None] * token_stride
    x = tl.load(row + d, mask=in_tile, other=0.0)
    other = tl.load(row + partner, mask=in_planes, other=0.0)
    c = tl.load(cos + token[:, None] * cos_token + d, mask=in_planes, other=0.0)
    s = tl.load(sin + token[:, None] * sin_token + d, mask=in_planes, other=0.0)
    dtype = x.dtype
    along = (x.to(tl.float32) * c.to(tl.float32)).to(dtype).to(tl.float32)
    across = (other.to(tl.float32) * s.to(tl.float32)).to(dtype).to(tl.float32)
    turned = (along + tl.where(d < HALF, -across, across)).to(dtype)
    tl.store(target + token[:, None] * P + d, tl.where(d < 2 * HALF, turned, x), mask=in_tile)


@triton.jit(do_not_specialize=["length"])
def rotate_kernel(
    query, key, cos, sin, new_query, new_key, hidden_states, weight, index, salience, length, sinks,
    query_row, query_head, query_token, key_row, key_head, key_token, cos_row, cos_token, sin_row, sin_token,
    hidden_row, hidden_token, index_row, index_token, RANKS: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    DIMS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate one head of the queries or keys of some tokens of a row, or rank these tokens."""
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    exists = token < length
    b, head = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    cos += b * cos_row
    sin += b * sin_row
    if head < H:
        rotate_head(query + b * query_row + head * query_head, new_query + (b * H + head) * length * P, cos, sin,
                    token, exists, query_token, cos_token, sin_token, P, HALF, DIMS)  # fmt: skip
    elif head < H + K:
        kv = head - H
        rotate_head(key + b * key_row + kv * key_head, new_key + (b * K + kv) * length * P, cos, sin,
                    token, exists, key_token, cos_token, sin_token, P, HALF, DIMS)  # fmt: skip
    elif RANKS:
        rank = tl.full([ROWS], float("-inf"), tl.float32)
        if HAS_WEIGHT:
            sums = tl.zeros([ROWS, DIMS], tl.float32)
            for first in range(0, WIDTH, DIMS):
                i = first + tl.arange(0, DIMS)
                x = tl.load(hidden_states + b * hidden_row + token[:, None] * hidden_token + i[None, :],
                            mask=exists[:, None] & (i < WIDTH)[None, :], other=0.0)  # fmt: skip
                w = tl.load(weight + i, mask=i < WIDTH, other=0.0)
                sums += x.to(tl.float32) * w.to(tl.float32)[None, :]
            rank = tl.sum(sums, axis=1)
        number = tl.load(index + b * index_row + token * index_token, mask=exists, other=0)
        rank = tl.where(number < sinks, float("inf"), rank)
        rank = tl.where(number < 0, float("-inf"), rank)
        tl.store(salience + b * length + token, rank, mask=exists)
