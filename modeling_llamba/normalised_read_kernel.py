"""One token of the normalised read as one Triton kernel: what a GPU would spend on some fifty launches is one.

`read_one` is `NormalisedRead.forward` for a single token a row that nobody wants a gradient of. The equations are
those of normalised_read.py, in float32, and its PyTorch operations are what runs wherever this does not.

Shapes: B batch, H query heads, K key/value heads, R = H // K, D head dim, F planes and dimensions that are not
rotated, n columns.
"""

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # then `can_read_one` says no
    triton = None

TILE = 4096  # numbers of the state at a time, 16 of each thread: more of them fill its registers at D = 128
WARPS = 8
MOST_HEADS = 64  # bits of `full_heads`


def can_read_one(on_cuda: bool, dtype: torch.dtype, heads: int) -> bool:
    """Whether the kernel runs here, for a state of this type and a layer of so many query heads."""
    return triton is not None and on_cuda and dtype == torch.float32 and heads <= MOST_HEADS


def tile_of(head_dim: int) -> tuple[int, int]:
    """Rows and columns of the state that are read at a time, powers of two."""
    columns = max(triton.next_power_of_2(head_dim), 16)
    return min(columns, TILE // columns), columns


def read_one(
    state: torch.Tensor,
    query: torch.Tensor,
    output: torch.Tensor,
    log_mass: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    leaving: torch.Tensor,
    mass: torch.Tensor,
    log_decay: torch.Tensor,
    scale: float,
    planes: int,
    full_heads: list[int],
) -> torch.Tensor:
    """The features of one token, from a state that then takes up the token that leaves the window.

    Args:
        state: (B, K, D + 1, D + 1) in float32, changed in place.
        query, output: (B, 1, H, D). log_mass: (B, 1, H). What the attention to the window found; see `Near`.
        keys, values: (B, K, n, D). leaving: (B, 1), the column that goes to the state after this token, or -1.
        mass: (H, 2 + 2 F). log_decay: (K,). planes: those of two dimensions each.
        scale: of the scores. full_heads: those with full attention, whose gate is 0.

    Returns:
        (B, 1, 3 H D) in the dtype of `output`.
    """
    batch, _, heads, D = query.shape
    kv_heads = state.shape[1]
    rows, columns = tile_of(D)
    assert state.is_contiguous() and keys.stride() == values.stride() and keys.stride(-1) == 1
    features = output.new_empty(batch, 1, 3 * heads * D)
    bits = sum(1 << head for head in full_heads)
    with torch.cuda.device(state.device):  # Triton launches on the current one
        read_one_kernel[(batch * kv_heads,)](
            state, query.contiguous(), output.contiguous(), log_mass.contiguous(), keys, values, leaving,
            mass.contiguous(), log_decay, features, *keys.stride()[:3], leaving.stride(0), bits, scale,
            kv_heads, heads // kv_heads, D, planes, rows, columns, num_warps=WARPS,
        )  # fmt: skip
    return features


if triton is not None:

    @triton.jit(do_not_specialize=["full_heads"])
    def read_one_kernel(
        state, query, output, log_mass, keys, values, leaving, mass, log_decay, features,
        batch_stride, head_stride, column_stride, leaving_stride, full_heads, scale,
        K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, PLANES: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """One row of the batch and one key/value head, with the R query heads that share it."""
        b, kv = tl.program_id(0) // K, tl.program_id(0) % K
        state += tl.program_id(0).to(tl.int64) * (D + 1) * (D + 1)
        d = tl.arange(0, COLUMNS)
        in_d = d < D
        last_row = state + D * (D + 1)  # [n, sum of k]
        count, key_sum = tl.load(last_row), tl.load(last_row + 1 + d, mask=in_d, other=0.0)
        least = tl.maximum(count, 1.0)
        key_mean = key_sum / least
        part = tl.where(d < PLANES, d, d - PLANES)  # both dimensions of a plane have one number

        leaves = tl.load(leaving + b * leaving_stride).to(tl.int64)
        entering = tl.where(leaves >= 0, D, 0)  # numbers of the token's key and value: none if there is none
        token = b.to(tl.int64) * batch_stride + kv * head_stride + leaves * column_stride
        key = tl.load(keys + token + d, mask=d < entering, other=0.0).to(tl.float32)
        decay = tl.exp(tl.minimum(tl.load(log_decay + kv).to(tl.float32), 0.0))

        for first in range(0, D, ROWS):
            row = first + tl.arange(0, ROWS)
            in_row = row < D
            of_row = state + row * (D + 1)  # [sum of v, S]
            cells, in_tile = of_row[:, None] + 1 + d[None, :], in_row[:, None] & in_d[None, :]
            value_sum = tl.load(of_row, mask=in_row, other=0.0)
            S = tl.load(cells, mask=in_tile, other=0.0)
            value_mean = value_sum / least
            for r in range(R):
                head = kv * R + r
                at = (b * K * R + head) * D
                q = tl.load(query + at + d, mask=in_d, other=0.0).to(tl.float32) * scale
                mass_of = mass + head * (2 + 2 * (D - PLANES))
                alpha = tl.load(mass_of + 2 + part, mask=in_d, other=0.0).to(tl.float32)
                beta = tl.load(mass_of + 2 + D - PLANES + part, mask=in_d, other=0.0).to(tl.float32)
                far = tl.load(mass_of).to(tl.float32) + tl.load(mass_of + 1).to(tl.float32) * tl.log(least)
                far += tl.sum(q * (alpha * key_mean + beta * q))
                gate = tl.sigmoid(far - tl.load(log_mass + b * K * R + head).to(tl.float32))
                gate = tl.where((count > 0.5) & (((full_heads.to(tl.int64) >> head) & 1) == 0), gate, 0.0)
                tilt = tl.sum(S * q[None, :], axis=1) / least - value_mean * tl.sum(q * key_mean)
                near = tl.load(output + at + row, mask=in_row, other=0.0).to(tl.float32)
                into = features + 3 * b * K * R * D + head * D + row
                tl.store(into, (1.0 - gate) * near, mask=in_row)
                tl.store(into + K * R * D, gate * value_mean, mask=in_row)
                tl.store(into + 2 * K * R * D, gate * tilt, mask=in_row)
            value = tl.load(values + token + row, mask=row < entering, other=0.0).to(tl.float32)
            tl.debug_barrier()  # several threads may have read what one of them writes
            tl.store(of_row, decay * value_sum + value, mask=row < entering)
            taken = (row < entering)[:, None] & in_d[None, :]
            tl.store(cells, decay * S + value[:, None] * key[None, :], mask=taken)
        tl.store(last_row, decay * count + 1.0, mask=entering > 0)
        tl.store(last_row + 1 + d, decay * key_sum + key, mask=d < entering)
