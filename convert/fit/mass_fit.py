"""Fit the log mass of a hybrid layer's state, head by head.

The gate, which follows from the log mass, says how much of what the state returns is mixed into an output. The log
mass is regressed on the true one, each token with the weight that an error there has in the gate. What the state
returns is not what the teacher's attention to the same tokens is: a head whose outputs are much farther from the
teacher's with it than without keeps the mass of theory, if that is nearer.

Shapes: B batch, L length, Q queries, D model width, H' heads with a window, P head dim, X features.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from modeling_llamba.hybrid.block_layout import Layout
from modeling_llamba.hybrid.eviction import State
from modeling_llamba.hybrid.hybrid_attention import HybridAttention
from modeling_llamba.hybrid.inputs import Projected, of_heads
from modeling_llamba.hybrid.prompt import attend_blocks, states_of
from modeling_llamba.hybrid.readout import mass_features, read, readout
from modeling_llamba.kernels.backend import backend_for
from modeling_llamba.mixers.ssd import repeat_groups

from .layer_data import Pieces

# keeps weights above 0 where a gate is shut or wide open
FLOOR = 1e-6
RIDGE = 1e-3
HARM = 2.0
"""A regressed mass harms a head whose squared error is more than this many times that with a gate that is shut."""
MASS_TOKENS = 2**14
"""Tokens on which the mass is fitted, or one batch if that has more: it is a hundred numbers per head."""


class Near(NamedTuple):
    """Softmax attention of the blocks of a layout, as `Blocks` of prompt.py has it, and the states of the blocks."""

    query: torch.Tensor
    output: torch.Tensor
    log_mass: torch.Tensor
    until: torch.Tensor
    state: State


class Gates(NamedTuple):
    """Gates of some queries, and their part in the outputs of their heads.

    features (Q, H', X) of the log mass. near, mass (Q, H'): log masses of softmax attention and, -inf where there is
    none, of the tokens in the state. square, product, rest (Q, H'): |W d|^2, (W d)^T W e and |W e|^2, where d is what
    a gate of 1 changes, e what the teacher's attention would change, and W the head's part of o_proj. All but the
    features, which are large, in float64.
    """

    features: torch.Tensor
    near: torch.Tensor
    mass: torch.Tensor
    square: torch.Tensor
    product: torch.Tensor
    rest: torch.Tensor

    def error(self, mass: torch.Tensor) -> torch.Tensor:
        """Squared error of each head (H',) with this mass (H', X)."""
        gate = torch.sigmoid(torch.einsum("qhx,hx->qh", self.features.double(), mass) - self.near)
        return (self.square * gate.square() - 2 * self.product * gate + self.rest).sum(0)


def attend_near(layer: HybridAttention, projected: Projected) -> tuple[Near, Layout]:
    """Softmax attention of the blocks behind the window, their states, and their layout."""
    layout = Layout.behind_window(layer.shape, projected.key)
    backend = backend_for(projected.query, layer.config.backend)
    blocks = attend_blocks(backend, layer.heads(), projected, None, layout)
    state = states_of(blocks, None, layout)[0]
    return Near(blocks.query, blocks.output, blocks.log_mass, blocks.until, state), layout


def fit_mass(
    layer: HybridAttention,
    seen: Iterable[tuple[torch.Tensor, Near, Projected, Layout]],
    queries: int = Pieces().queries,
) -> None:
    """Fit the log mass of the state, in place.

    Args:
        seen: inputs (B, L, D) of the layer, and the others that follow from them.
    """
    gates = [gates_of(layer, *each, queries) for each in seen]
    theory = layer.mass.double()
    regressed = regress(gates, theory)
    error = error_of(gates, regressed)
    shut = sum(part.rest.sum(0) for part in gates)
    harms = (error > HARM * shut) & (error_of(gates, theory) < error)
    layer.mass.copy_(torch.where(harms[:, None], theory, regressed))


def error_of(gates: list[Gates], mass: torch.Tensor) -> torch.Tensor:
    """Squared error of each head (H',) with this mass (H', X)."""
    return sum(part.error(mass) for part in gates)


def gates_of(
    layer: HybridAttention, u: torch.Tensor, near: Near, projected: Projected, layout: Layout, queries: int
) -> Gates:
    """Measure the gates of the queries behind the window."""

    def by_token(t: torch.Tensor) -> torch.Tensor:
        return layout.to_tokens(layout.in_order(t)).flatten(0, 1)

    heads = layer.heads()
    log_mass, far = (t.flatten(0, 1) for t in attend_far(layer, projected, near, layout, queries))
    wide_open = torch.full_like(near.log_mass, torch.finfo(near.log_mass.dtype).min)
    returned, _ = read(near.query, near.output, wide_open, readout(heads, near.state))
    output = by_token(near.output)
    of_near = by_token(near.log_mass)
    d = by_token(returned) - output
    e = torch.sigmoid(log_mass - of_near)[..., None] * (far - output)
    if layer.gate_proj is not None:  # the teacher's own gates, after its attention
        gates = layer.head_gates(u[:, layer.shape.window :]).transpose(1, 2)
        gates = of_heads(gates, layer.windowed, layer.shared).transpose(1, 2).flatten(0, 1)
        d, e = d * gates, e * gates
    gram = _gram_of_heads(layer)

    weighed_d, weighed_e = (torch.einsum("nhp,hpq->nhq", t, gram) for t in (d, e))
    square = (weighed_d * d).sum(-1)
    product = (weighed_d * e).sum(-1)
    rest = (weighed_e * e).sum(-1)
    features = by_token(mass_features(heads, near.query, near.state))
    return Gates(features, *(t.double() for t in (of_near, log_mass, square, product, rest)))


def _gram_of_heads(layer: HybridAttention) -> torch.Tensor:
    """W^T W (H', P, P) of the heads with a window, W (D, P): the head's part of o_proj."""
    weight = layer.o_proj.weight.unflatten(1, (-1, layer.shared, layer.head_dim))[:, layer.windowed].flatten(1, 2)
    return torch.einsum("dhp,dhq->hpq", weight, weight)


def regress(gates: list[Gates], theory: torch.Tensor) -> torch.Tensor:
    """Regress the true log mass on its features; returns the mass (H', X)."""
    gram = 0.0
    moment = 0.0
    for part in gates:
        features = part.features.double()
        is_there = part.mass.isfinite()
        true = torch.sigmoid(part.mass - part.near)
        # an error of the log mass changes the gate by g (1 - g) times it; a state that is empty has none
        weight = (true * (1 - true) + FLOOR) * is_there
        weighted = features * weight[..., None]
        gram = gram + torch.einsum("qhx,qhy->hxy", weighted, features)
        # an infinite mass has weight 0, but 0 times infinity would be nan
        moment = moment + torch.einsum("qhx,qh->hx", weighted, part.mass.masked_fill(~is_there, 0))
    penalty = RIDGE * gram.diagonal(dim1=1, dim2=2)
    penalty[:, :2] *= RIDGE  # an offset and the number of tokens, which are all but free
    penalty += torch.finfo(torch.float32).tiny
    # drawn not to zero but to the mass that the layer has so far (`theory_mass`)
    return torch.linalg.solve_ex(gram + torch.diag_embed(penalty), moment + penalty * theory).result


def attend_far(
    layer: HybridAttention, projected: Projected, near: Near, layout: Layout, queries: int = Pieces().queries
) -> tuple[torch.Tensor, torch.Tensor]:
    """The teacher's attention to the tokens in the state: log-sum-exp of the scores (B, L', H'), -inf where there are
    none, and output (B, L', H', P), of no meaning there; L' queries are behind the window."""
    start = layer.shape.window
    length = projected.query.shape[2]
    until = near.until[:, layer.shape.places :]
    block = torch.arange(length, device=until.device) // layer.shape.block
    value = repeat_groups(projected.value.transpose(1, 2), projected.query.shape[1]).transpose(1, 2)
    masses = []
    outputs = []
    for rows, scores in scores_from(layer, projected.query, projected.key, start, queries):
        evicted = until[:, None, : scores.shape[-1]] <= block[rows][:, None]
        scores = scores.masked_fill(~evicted[:, None], -math.inf)
        masses.append(scores.logsumexp(-1))
        # the least score instead of -inf, so that no token at all is no nan
        shares = scores.clamp(min=torch.finfo(scores.dtype).min).softmax(-1)
        outputs.append(shares.to(value.dtype) @ value[:, :, : scores.shape[-1]])
        del scores, shares  # before the next ones are computed
    return torch.cat(masses, dim=2).transpose(1, 2), torch.cat(outputs, dim=2).transpose(1, 2)


def scores_from(
    layer: HybridAttention, query: torch.Tensor, key: torch.Tensor, start: int, queries: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the teacher's own scores (B, H', rows, keys so far), some queries at a time from number `start` on, with
    the queries' numbers."""
    heads = query.shape[1]
    length = query.shape[2]
    key = repeat_groups(key.transpose(1, 2), heads).transpose(1, 2)
    number = torch.arange(length, device=key.device)
    for first in range(start, length, queries):
        rows, so_far = number[first : first + queries], min(first + queries, length)
        scores = (query[:, :, rows] @ key[:, :, :so_far].mT).float() * layer.scaling
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        yield rows, scores.masked_fill(number[:so_far] > rows[:, None], -math.inf)
