"""The hybrid layer and the recurrences of the mixers as their equations say, one token after the other in float64:
slow, and the ground truth.

In the hybrid layer, lists of tokens stand for the window, the salient cache and the evicted; nothing is kept as sums.
See hybrid_attention.py, ssd.py and selective_scan.py for the equations and the letters.

Shapes: B batch, L length, D model width, H heads, K key/value heads, G groups, U states, P head dim, N state, I inner
width, T columns.
"""

import math

import torch

from ..mixers.ssd import repeat_groups, reset_at_boundaries
from ..model.rotary import Rotary, rotate_keys, rotate_queries
from ..model.sequences import sequence_starts
from .hybrid_attention import HybridAttention


@torch.no_grad()
def naive_hybrid_attention(
    layer: HybridAttention, hidden_states: torch.Tensor, rotary: Rotary, sink_rotary: Rotary | None = None
) -> torch.Tensor:
    """The layer's output for one sequence.

    Args:
        layer: in float64.
        hidden_states: (L, D). rotary, sink_rotary: as in rotary.py, without B; the second for queries to sinks.

    Returns:
        (L, D).
    """
    shape, shared, P = layer.shape, layer.shared, layer.head_dim
    length = len(hidden_states)
    q, k, v = (project(hidden_states).view(length, -1, P) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
    if layer.q_norm is not None:
        q, k = layer.q_norm(q[None])[0], layer.k_norm(k[None])[0]
    if layer.v_norm is not None:
        v = layer.v_norm(v)
    far_q = rotate_queries(q, sink_rotary or rotary)
    q, k = rotate_queries(q, rotary), rotate_keys(k, rotary)
    if layer.key_offset is not None:
        k[:, layer.kept] -= layer.key_offset  # scores lack q . offset then, which changes no softmax
    k, v = _as_held(layer, k, 0), _as_held(layer, v, 1)
    salience = None if layer.salience is None else hidden_states @ layer.salience.double()
    outputs = []
    for t in range(length):
        sinks, salient, evicted = _left(shape, salience, t)
        window = [j for j in range(t + 1) if j not in {*sinks, *salient, *evicted}]
        y, features = [], []
        for head in range(q.shape[1]):
            keys, values = k[:, head // shared], v[:, head // shared]
            if head // shared in layer.kept:
                scores = _scores(layer, q[t, head], keys[: t + 1])
                y.append(_attend(layer, head, scores, values[: t + 1])[0])
                continue
            to_sinks = _scores(layer, far_q[t, head], keys[sinks])
            scores = torch.cat([to_sinks, _scores(layer, q[t, head], keys[salient + window])])
            near, near_mass = _attend(layer, head, scores, values[sinks + salient + window])
            if not evicted or layer.mass is None:
                y.append(near)
                features += [torch.zeros(P, dtype=near.dtype)] * 3
                continue
            number = layer.windowed.index(head // shared) * shared + head % shared
            mean, tilt, log_mass = _read(layer, number, q[t, head] * layer.scaling, keys[evicted], values[evicted])
            gate = torch.sigmoid(log_mass - near_mass)
            y.append(near + gate * (mean + tilt - near))
            features += [gate * near, gate * mean, gate * (mean + tilt)]
        if layer.gate_proj is not None:
            gates = torch.sigmoid(layer.gate_proj(hidden_states[t])).view(-1, P)
            windowed = [head for head in range(len(y)) if head // shared in layer.windowed]
            y = [gate * of_head for gate, of_head in zip(gates, y, strict=True)]
            features = [gates[windowed[i // 3]] * f for i, f in enumerate(features)]
        out = layer.o_proj(torch.cat(y))
        if layer.down is not None:
            out = out + layer.up(layer.down(torch.cat(features)))
        outputs.append(out)
    return torch.stack(outputs)


def _as_held(layer: HybridAttention, vectors: torch.Tensor, which: int) -> torch.Tensor:
    """Keys (0) or values (1), (L, K, P), rounded as those of a cache are (rounding.py); gradients pass unchanged."""
    heads = []
    for head in range(vectors.shape[1]):
        config = layer.config
        bits = config.full_attention_bits if head in layer.kept else config.window_bits
        if isinstance(bits, list):
            bits = bits[which]
        heads.append(vectors[:, head])
        if bits < 16:
            rounded = torch.stack([_rounded(vector, bits) for vector in vectors[:, head].detach()])
            heads[-1] = vectors[:, head] + rounded - vectors[:, head].detach()
    return torch.stack(heads, dim=1)


def _rounded(vector: torch.Tensor, bits: int) -> torch.Tensor:
    """One vector (P,) rounded to so many bits in the basis of a Hadamard matrix."""
    size = len(vector)
    part = size & -size  # the largest power of two that divides it
    signs = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(part)] for i in range(part)])
    rotation = torch.block_diag(*[signs.double() / part**0.5] * (size // part))
    group = size if bits > 4 else math.gcd(size, 32)
    largest = 2 ** (bits - 1) - 1
    shift = 2 ** (8 - bits)
    found = []
    for numbers in (rotation @ vector).split(group):
        scale = shift * (numbers.abs().max() / (largest * shift)).clamp(min=2**-14 / shift).half().double()
        found += [scale * min(max((number / scale).round(), -largest), largest) for number in numbers]
    return rotation @ torch.stack(found)


def _left(shape, salience: torch.Tensor | None, t: int) -> tuple[list[int], list[int], list[int]]:
    """The sinks, the salient and the evicted of the tokens that have left the window of token t."""
    left = list(range(max(t // shape.block - shape.whole_blocks, 0) * shape.block))
    sinks, others = left[: shape.sinks], left[shape.sinks :]
    if salience is None:
        return sinks, [], others
    ranked = sorted(others, key=lambda j: (-salience[j].item(), j))
    places = shape.places - shape.sinks
    return sinks, sorted(ranked[:places]), sorted(ranked[places:])


def _scores(layer: HybridAttention, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Scores (T,) of one query (P,) with keys (T, P)."""
    scores = keys @ query * layer.scaling
    if layer.softcap is None:
        return scores
    return layer.softcap * torch.tanh(scores / layer.softcap)


def _attend(layer: HybridAttention, head: int, scores: torch.Tensor, values: torch.Tensor):
    """Attention by scores (T,) to values (T, P), and its log mass; a learned sink has a score, and no value."""
    if layer.sinks is not None:
        scores = torch.cat([scores, layer.sinks[head : head + 1]])
    return scores.softmax(0)[: len(values)] @ values, scores.logsumexp(0)


def _read(layer: HybridAttention, head: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor):
    """The mean of v, the tilt C q' and the log mass of evicted tokens, of their keys and values (T, P)."""
    planes, slow_planes = layer.shape.slow
    rest = list(range(2 * planes, layer.head_dim))
    slow = [*range(planes - slow_planes, planes), *range(2 * planes - slow_planes, 2 * planes), *rest]
    slow_keys, slow_query = keys[:, slow], query[slow]
    key_mean, value_mean = slow_keys.mean(0), values.mean(0)
    covariance = (values - value_mean).T @ (slow_keys - key_mean) / len(keys)
    features = [query.new_tensor(1.0), query.new_tensor(float(len(keys))).log()]
    products = slow_query * key_mean
    features += [products[f] + products[f + slow_planes] for f in range(slow_planes)]
    features += list(products[2 * slow_planes :])
    squares = query * query
    features += [squares[f] + squares[f + planes] for f in range(planes)]
    features += list(squares[2 * planes :])
    return value_mean, covariance @ slow_query, layer.mass[head] @ torch.stack(features)


def ssd_recurrence(
    x: torch.Tensor,
    log_a: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence, one token after the other in float64: slow, and the judge of every other path.

    Args:
        x: (B, L, G, P). log_a: (B, L, U). B: (B, L, G, N). C: (B, L, H, N).
        initial_state: (B, U, P, N) or None for zero. seq_idx: (B, L) or None.

    Returns:
        y (B, L, H, P) and the final state (B, U, P, N), both float64.
    """
    U, H = log_a.shape[-1], C.shape[2]
    x, B = repeat_groups(x.double(), U), repeat_groups(B.double(), U)
    log_a = reset_at_boundaries(log_a.double(), seq_idx)
    C = C.double()
    if initial_state is None:
        state = x.new_zeros(x.shape[0], U, x.shape[-1], B.shape[-1])
    else:
        state = initial_state.double()
    y = []
    for t in range(x.shape[1]):
        state = log_a[:, t].exp()[..., None, None] * state + x[:, t, :, :, None] * B[:, t, :, None, :]
        y.append((state.repeat_interleave(H // U, dim=1) * C[:, t, :, None, :]).sum(-1))
    return torch.stack(y, dim=1), state


def selective_recurrence(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence, one token after the other in float64: the judge of `selective_scan`.

    Args:
        x, dt: (B, L, I), dt >= 0. A: (I, N), negative. B, C: (B, L, G, N).
        initial_state: (B, I, N) or None. seq_idx: (B, L) or None.

    Returns:
        y (B, L, I) and the final state (B, I, N), both float64.
    """
    x, dt, A, B, C = (t.double() for t in (x, dt, A, B, C))
    channels, per_group = x.shape[-1], x.shape[-1] // B.shape[2]
    state = x.new_zeros(x.shape[0], channels, A.shape[-1]) if initial_state is None else initial_state.double()
    starts = None if seq_idx is None else sequence_starts(seq_idx)
    y = []
    for t in range(x.shape[1]):
        if starts is not None:
            state = state.masked_fill(starts[:, t, None, None], 0.0)
        Bt, Ct = (g[:, t].repeat_interleave(per_group, dim=1) for g in (B, C))
        state = (dt[:, t, :, None] * A).exp() * state + (dt[:, t] * x[:, t])[..., None] * Bt
        y.append((state * Ct).sum(-1))
    return torch.stack(y, dim=1), state
