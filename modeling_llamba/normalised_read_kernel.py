"""One token of a layer with the normalised read as one Triton kernel: what a GPU would spend on over a hundred
launches is one.

For a single token a row that nobody wants a gradient of, `mix_one` is all of the layer between its projections but
norms and rotary embedding: attention to window, sinks and salient tokens, their competition, the read, and what the
cache remembers. `read_one` is the read alone, `NormalisedRead.forward`, for a window that is kept elsewhere. The
equations are those of window_attention.py, salient_tokens.py and normalised_read.py, in float32, and their PyTorch
operations are what runs wherever this does not.

Shapes: B batch, H query heads, K key/value heads, R = H // K, D head dim, N of them in the slow part of keys, E and F
the planes and dimensions that are not rotated in the slow part and in all, n columns; W window, S sinks, P places of
salient tokens.
"""

import re

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # then `can_run` says no
    triton = None

TILE = 4096  # numbers of the state at a time, 16 of each thread: more of them fill its registers at D = 128
WARPS = 8
MOST_HEADS = 64  # bits of `full_heads`


def can_run(on_cuda: bool, dtype: torch.dtype, heads: int, window: int) -> bool:
    """Whether the kernels run here, for a state of this type and a layer of so many query heads and columns."""
    return triton is not None and on_cuda and dtype == torch.float32 and heads <= MOST_HEADS and window > 1


def tile_of(height: int, width: int) -> tuple[int, int]:
    """Rows and columns that are read at a time, powers of two, of a matrix this high and wide."""
    columns = max(triton.next_power_of_2(width), 16)
    return min(max(triton.next_power_of_2(height), 16), TILE // columns), columns


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
    slow_planes: int,
    full_heads: list[int],
) -> torch.Tensor:
    """The features of one token, from a state that then takes up the token that leaves the window.

    Args:
        state: (B, K, D + 1, N + 1) in float32, changed in place.
        query, output: (B, 1, H, D). log_mass: (B, 1, H). What the attention to the window found; see `Near`.
        keys, values: (B, K, n, D). leaving: (B, 1), the column that goes to the state after this token, or -1.
        mass: (H, 2 + E + F). log_decay: (K,). planes: those of two dimensions each; slow_planes: of these, the
            last, in the slow part.
        scale: of the scores. full_heads: those with full attention, whose gate is 0.

    Returns:
        (B, 1, 3 H D) in the dtype of `output`.
    """
    batch, _, heads, D = query.shape
    kv_heads, slow = state.shape[1], state.shape[-1] - 1
    assert state.is_contiguous() and keys.stride() == values.stride() and keys.stride(-1) == 1
    features = output.new_empty(batch, 1, 3 * heads * D)
    bits = sum(1 << head for head in full_heads)
    with torch.cuda.device(state.device):  # Triton launches on the current one
        read_one_kernel[(batch * kv_heads,)](
            state, query.contiguous(), output.contiguous(), log_mass.contiguous(), keys, values, leaving,
            mass.contiguous(), log_decay, features, *keys.stride()[:3], leaving.stride(0), bits, scale,
            kv_heads, heads // kv_heads, D, slow, planes, slow_planes, *tile_of(D, slow), tile_of(D, D)[1],
            num_warps=WARPS,
        )  # fmt: skip
    return features


# an operator of its own, so that torch.compile does not look into it; named after the file, of which every checkpoint
# brings its own
@torch.library.custom_op(
    re.sub(r"\W", "_", __name__, flags=re.ASCII) + "::mix_one",
    mutates_args=("state", "keys", "values", "salience", "place_index", "latest"),
)
def mix_one(
    state: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    salience: torch.Tensor,
    place_index: torch.Tensor,
    latest: torch.Tensor,
    query: torch.Tensor,
    sink_query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    new_salience: torch.Tensor | None,
    index: torch.Tensor,
    of_full: torch.Tensor | None,
    mass: torch.Tensor,
    log_decay: torch.Tensor,
    scale: float,
    softcap: float,
    planes: int,
    slow_planes: int,
    full_heads: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the attention of one token finds, and the features of its read; state and ring then hold the token.

    Args:
        state: as for `read_one`. keys, values, salience, place_index, latest: the `Ring` of window_attention.py.
        query, sink_query, new_key, new_value, new_salience: `Projected`, of one token. index: (B, 1) of it in its
            sequence, nowhere that of padding. softcap: of the scores, 0 for none.
        of_full: (B, 1, heads, D) of the heads with full attention. The others: see `read_one`.

    Returns:
        (B, 1, H, D) and (B, 1, 3 H D) in the dtype of the query.
    """
    batch, heads, _, D = query.shape
    kv_heads, places = place_index.shape[1:]
    window = salience.shape[-1] - places
    slow, (slots, dims) = state.shape[-1] - 1, tile_of(D, D)
    ring = keys, values, salience, place_index, latest
    assert all(t.is_contiguous() for t in (state, *ring)) and len(index) == batch
    output, features = query.new_empty(batch, 1, heads, D), query.new_empty(batch, 1, 3 * heads * D)
    log_mass = torch.empty(batch, heads, dtype=torch.float32, device=state.device)
    new = [query if t is None else t.contiguous() for t in (query, sink_query, new_key, new_value, new_salience)]
    sinks = keys.shape[2] - places - window
    bits = sum(1 << head for head in full_heads)
    with torch.cuda.device(state.device):
        mix_one_kernel[(batch * kv_heads,)](
            state, *ring, *new, index,
            query if of_full is None else of_full.contiguous(), mass.contiguous(), log_decay,
            output, log_mass, features, index.stride(0), bits, len(full_heads), scale, softcap,
            kv_heads, heads // kv_heads, D, slow, planes, slow_planes, sinks, places, window,
            *(triton.next_power_of_2(max(n, 1)) for n in (sinks, places)), *tile_of(D, slow), slots, dims,
            num_warps=WARPS,
        )  # fmt: skip
    return output, features


@mix_one.register_fake
def _(state, *inputs):
    query = inputs[5]
    batch, heads, _, D = query.shape
    return query.new_empty(batch, 1, heads, D), query.new_empty(batch, 1, 3 * heads * D)


if triton is not None:

    @triton.jit
    def read_far(
        state, query, output, log_mass, key_at, value_at, entering, mass, log_decay, features,
        b, kv, full_heads, scale,
        K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
        PLANES: tl.constexpr, SLOW_PLANES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
        DIMS: tl.constexpr,
    ):  # fmt: skip
        """The R query heads of one row and key/value head read the state, which then takes up a token.

        key_at, value_at: where it lies. entering: how many numbers of either there are, D, or 0 where nobody enters.
        """
        state += (b * K + kv).to(tl.int64) * (D + 1) * (N + 1)
        d, slow = tl.arange(0, DIMS), tl.arange(0, COLUMNS)
        in_d, in_slow = d < D, slow < N
        # dimensions of the slow part: of its planes the first halves, the second, and what is not rotated
        of_slow = slow + tl.where(slow < SLOW_PLANES, 1, 2) * (PLANES - SLOW_PLANES)
        last_row = state + D * (N + 1)  # [n, sum of k']
        count, key_sum = tl.load(last_row), tl.load(last_row + 1 + slow, mask=in_slow, other=0.0)
        least = tl.maximum(count, 1.0)
        key_mean = key_sum / least
        part = tl.where(d < PLANES, d, d - PLANES)  # both dimensions of a plane have one number
        slow_part = tl.where(slow < SLOW_PLANES, slow, slow - SLOW_PLANES)
        enters = slow < tl.where(entering > 0, N, 0)
        key = tl.load(key_at + of_slow, mask=enters, other=0.0).to(tl.float32)
        decay = tl.exp(tl.minimum(tl.load(log_decay + kv).to(tl.float32), 0.0))

        for first in range(0, D, ROWS):
            row = first + tl.arange(0, ROWS)
            in_row = row < D
            of_row = state + row * (N + 1)  # [sum of v, S]
            cells, in_tile = of_row[:, None] + 1 + slow[None, :], in_row[:, None] & in_slow[None, :]
            value_sum = tl.load(of_row, mask=in_row, other=0.0)
            S = tl.load(cells, mask=in_tile, other=0.0)
            value_mean = value_sum / least
            for r in range(R):
                head = kv * R + r
                at = (b * K * R + head) * D
                whole = tl.load(query + at + d, mask=in_d, other=0.0).to(tl.float32) * scale
                q = tl.load(query + at + of_slow, mask=in_slow, other=0.0).to(tl.float32) * scale
                mass_of = mass + head * (2 + N - SLOW_PLANES + D - PLANES)
                alpha = tl.load(mass_of + 2 + slow_part, mask=in_slow, other=0.0).to(tl.float32)
                beta = tl.load(mass_of + 2 + N - SLOW_PLANES + part, mask=in_d, other=0.0).to(tl.float32)
                far = tl.load(mass_of).to(tl.float32) + tl.load(mass_of + 1).to(tl.float32) * tl.log(least)
                far += tl.sum(q * alpha * key_mean) + tl.sum(whole * beta * whole)
                gate = tl.sigmoid(far - tl.load(log_mass + b * K * R + head).to(tl.float32))
                gate = tl.where((count > 0.5) & (((full_heads.to(tl.int64) >> head) & 1) == 0), gate, 0.0)
                tilt = tl.sum(S * q[None, :], axis=1) / least - value_mean * tl.sum(q * key_mean)
                near = tl.load(output + at + row, mask=in_row, other=0.0).to(tl.float32)
                into = features + 3 * b * K * R * D + head * D + row
                tl.store(into, (1.0 - gate) * near, mask=in_row)
                tl.store(into + K * R * D, gate * value_mean, mask=in_row)
                tl.store(into + 2 * K * R * D, gate * tilt, mask=in_row)
            value = tl.load(value_at + row, mask=row < entering, other=0.0).to(tl.float32)
            tl.debug_barrier()  # several threads may have read what one of them writes
            tl.store(of_row, decay * value_sum + value, mask=row < entering)
            taken = (row < entering)[:, None] & in_slow[None, :]
            tl.store(cells, decay * S + value[:, None] * key[None, :], mask=taken)
        tl.store(last_row, decay * count + 1.0, mask=entering > 0)
        tl.store(last_row + 1 + slow, decay * key_sum + key, mask=enters)

    @triton.jit(do_not_specialize=["full_heads"])
    def read_one_kernel(
        state, query, output, log_mass, keys, values, leaving, mass, log_decay, features,
        batch_stride, head_stride, column_stride, leaving_stride, full_heads, scale,
        K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
        PLANES: tl.constexpr, SLOW_PLANES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
        DIMS: tl.constexpr,
    ):  # fmt: skip
        """One row of the batch and one key/value head, with the R query heads that share it."""
        b, kv = tl.program_id(0) // K, tl.program_id(0) % K
        leaves = tl.load(leaving + b * leaving_stride).to(tl.int64)
        token = b.to(tl.int64) * batch_stride + kv * head_stride + leaves * column_stride
        read_far(
            state, query, output, log_mass, keys + token, values + token, tl.where(leaves >= 0, D, 0), mass, log_decay,
            features, b, kv, full_heads, scale, K, R, D, N, PLANES, SLOW_PLANES, ROWS, COLUMNS, DIMS,
        )  # fmt: skip

    @triton.jit(do_not_specialize=["full_heads", "n_full"])
    def mix_one_kernel(
        state, keys, values, salience, place_index, latest,
        query, sink_query, new_key, new_value, new_salience, index, of_full,
        mass, log_decay, output, log_mass, features, index_stride, full_heads, n_full, scale, softcap,
        K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
        PLANES: tl.constexpr, SLOW_PLANES: tl.constexpr,
        S: tl.constexpr, P: tl.constexpr, W: tl.constexpr, SINK_TILE: tl.constexpr, PLACE_TILE: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr, DIMS: tl.constexpr,
    ):  # fmt: skip
        """One row of the batch and one key/value head, with the R query heads that share it."""
        b, kv = tl.program_id(0) // K, tl.program_id(0) % K
        cells = tl.program_id(0).to(tl.int64) * (S + P + W) * D
        keys += cells
        values += cells
        salience += tl.program_id(0) * (P + W)
        place_index += tl.program_id(0) * P
        now = tl.load(index + b * index_stride).to(tl.int32)
        d = tl.arange(0, DIMS)
        in_d = d < D

        # the new token takes its column, and that of a sink if it is one
        column = S + P + now % W
        key = tl.load(new_key + (b * K + kv) * D + d, mask=in_d, other=0.0)
        value = tl.load(new_value + (b * K + kv) * D + d, mask=in_d, other=0.0)
        tl.store(keys + column * D + d, key, mask=in_d)
        tl.store(values + column * D + d, value, mask=in_d)
        as_sink = tl.where(now < S, D, 0)
        tl.store(keys + now * D + d, key, mask=d < as_sink)
        tl.store(values + now * D + d, value, mask=d < as_sink)
        tl.store(latest + b, now, mask=kv == 0)
        if P:
            tl.store(salience + P + now % W, tl.load(new_salience + b))
        tl.debug_barrier()

        for r in range(R):
            head = kv * R + r
            at = (b * K * R + head) * D
            highest, total, near = -1e30, 0.0, tl.zeros([DIMS], tl.float32)
            if S:
                q = tl.load(sink_query + at + d, mask=in_d, other=0.0).to(tl.float32)
                sink = tl.arange(0, SINK_TILE)
                arrived = (sink < S) & (sink <= now)
                highest, total, near = attend(
                    keys, values, sink, arrived, q, d, in_d, highest, total, near, scale, softcap, D
                )
            q = tl.load(query + at + d, mask=in_d, other=0.0).to(tl.float32)
            for first in range(0, P + W, SLOTS):
                slot = first + tl.arange(0, SLOTS)
                # what the ring holds of every token since `now - W`
                whose = now - (now - (slot - P) + W) % W
                if P:
                    whose = tl.where(
                        slot < P, tl.load(place_index + slot, mask=slot < P, other=-1).to(tl.int32), whose
                    )
                seen = (slot < P + W) & (whose >= S)
                highest, total, near = attend(
                    keys, values, S + slot, seen, q, d, in_d, highest, total, near, scale, softcap, D
                )
            near /= total
            before = tl.arange(0, 64)  # heads: a bit for each
            full = (full_heads.to(tl.int64) >> before) & 1
            nth = tl.sum(tl.where(before < head, full, 0)).to(tl.int32)
            is_full = tl.sum(tl.where(before == head, full, 0)).to(tl.int32)
            theirs = tl.load(of_full + (b * n_full + nth) * D + d, mask=d < is_full * D, other=0.0).to(tl.float32)
            tl.store(output + at + d, tl.where(is_full > 0, theirs, near), mask=in_d)
            tl.store(log_mass + b * K * R + head, highest + tl.log(total))
        tl.debug_barrier()  # as the read takes up what other threads found

        # who leaves the window competes for a place, and the loser goes on to the state
        last = now - W + 1
        leaves, left = tl.where(last >= S, 1, 0), (now + 1) % W
        going, victim, own, wins = tl.where(leaves > 0, S + P + left, -1), 0, 0.0, 0
        if P:
            place = tl.arange(0, PLACE_TILE)
            of_place = tl.load(salience + place, mask=place < P, other=float("inf"))
            since = tl.load(place_index + place, mask=place < P, other=-1).to(tl.int32)
            own, lowest = tl.load(salience + P + left), tl.min(of_place)
            youngest = tl.max(tl.where(of_place == lowest, since, -2))  # of equals the earlier one stays
            victim = tl.max(tl.where((of_place == lowest) & (since == youngest), place, -1))
            wins = tl.where(own > lowest, leaves, 0)
            going = tl.where(wins > 0, tl.where(youngest >= 0, S + victim, -1), going)
        token = going.to(tl.int64) * D
        read_far(
            state, query, output, log_mass, keys + token, values + token, tl.where(going >= 0, D, 0), mass, log_decay,
            features, b, kv, full_heads, scale, K, R, D, N, PLANES, SLOW_PLANES, ROWS, COLUMNS, DIMS,
        )  # fmt: skip
        if P:
            tl.debug_barrier()
            moved = d < tl.where(wins > 0, D, 0)
            key = tl.load(keys + (S + P + left) * D + d, mask=moved, other=0.0)
            value = tl.load(values + (S + P + left) * D + d, mask=moved, other=0.0)
            tl.store(keys + (S + victim) * D + d, key, mask=moved)
            tl.store(values + (S + victim) * D + d, value, mask=moved)
            tl.store(salience + victim, own, mask=wins > 0)
            tl.store(place_index + victim, last, mask=wins > 0)

    @triton.jit
    def attend(keys, values, slot, seen, q, d, in_d, highest, total, near, scale, softcap, D: tl.constexpr):
        """Some more columns in a softmax: its highest score, the sum of exponentials and that of values."""
        cells, in_tile = slot[:, None] * D + d[None, :], seen[:, None] & in_d[None, :]
        k = tl.load(keys + cells, mask=in_tile, other=0.0).to(tl.float32)
        score = tl.sum(k * q[None, :], axis=1) * scale
        if softcap > 0:
            score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)  # tanh
        above = tl.maximum(highest, tl.max(tl.where(seen, score, -1e30)))
        share = tl.where(seen, tl.exp(score - above), 0.0)
        v = tl.load(values + cells, mask=in_tile, other=0.0).to(tl.float32)
        shrink = tl.exp(highest - above)
        return above, total * shrink + tl.sum(share), near * shrink + tl.sum(share[:, None] * v, axis=0)
