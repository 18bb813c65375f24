"""Fit what a layer with the normalised read adds to the teacher's weights: salience, mass, and the output map.

All three are linear. The salience of a token is fitted to the log of the attention that the teacher pays to it once it
has left the window. The log mass of the tokens in the state is fitted head by head, each token with the weight that an
error there has in the gate. The output map is then the solution of a ridge regression, shrunk towards the teacher's
own. The teacher's attention is computed a block of queries at a time, so memory grows with L and not with its square.

Shapes: B batch, L length, H query heads, F features of the mass, D model width.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from modeling_llamba.hybrid_mixer import HybridMixer, unpadded
from modeling_llamba.normalised_read import Far
from modeling_llamba.ssd import repeat_groups
from modeling_llamba.window_attention import Near

from ..memory import return_free_memory

QUERIES = 128
"""Queries whose scores against all earlier keys lie in memory at once."""
GRAM_BLOCKS = 4
"""Blocks of columns; of the products of so many, those above the diagonal are not computed."""
SALIENCE_SEQUENCES = 8
"""Sequences on which the salience is regressed: one number per channel."""
FLOOR = 1e-6
MASS_RIDGE = 1e-3
SALIENCE_RIDGE = 1e-2
RIDGES = (1e-2, 1e-1, 1.0, 10.0)
"""Strengths with which the output map is drawn to the teacher's own, in units of the mean squared feature."""
Batch = tuple[torch.Tensor, torch.Tensor]
Rotary = tuple[torch.Tensor, torch.Tensor]


class Seen(NamedTuple):
    """What a layer's attention and state make of some sequences, and the teacher's output (B, L, D)."""

    near: Near
    far: Far
    y: torch.Tensor

    def for_features(self) -> "Seen":
        """Without what only the mass is fitted on."""
        return self._replace(near=self.near._replace(query=None, context=None, leaving=None))


@torch.no_grad()
def fit_read(
    mixer: HybridMixer,
    for_mass: Iterable[Batch],
    others: Iterable[Batch],
    judging: Iterable[Batch],
    rotary: Rotary,
) -> tuple[float, float, float | None]:
    """Fit the mass and the output map in place; heads with full attention keep the teacher's map.

    Args:
        for_mass, others: the layer's inputs and the teacher's outputs (B, L, D). The output map is fitted on both, the
            mass on the former alone: it has few numbers, and to know the true mass takes long.
        judging: others of the kind.

    Returns:
        The relative squared error on `judging` with the theory's mass and the teacher's map, that after the fit, and
        the ridge; None if the theory was best.
    """
    judging, seen_before = [_seen(mixer, u, y, rotary).for_features() for u, y in judging], []

    def once() -> Iterator[tuple[Near, Far]]:
        for u, y in for_mass:
            seen = _seen(mixer, u, y, rotary)
            seen_before.append(seen.for_features())
            yield seen.near, seen.far

    theory, out = mixer.read.mass.clone(), mixer.out_proj
    free = _fitted_columns(mixer)
    total = sum(seen.y[:, mixer.near_tokens :].square().sum().item() for seen in judging)
    total = max(total, torch.finfo(torch.float32).tiny)  # an attention that is zero has no relative error
    mapped = sum(left.square().sum().item() for _, left in (_equations(mixer, seen) for seen in judging)) / total
    fit_mass(mixer, once())
    return_free_memory()
    gram = moment = 0.0
    first = (seen_before.pop() for _ in range(len(seen_before)))  # each is let go after its use
    for seen in itertools.chain(first, (_seen(mixer, u, y, rotary) for u, y in others)):
        F, y = _features(mixer, seen)
        y = y if out.bias is None else y - out.bias
        gram, moment = gram + _gram(F).double(), moment + (F.T @ y).double()
    # of what the map at hand leaves: one product less for each batch than F.T @ (y - F W), and as exact as ridges need
    moment = (moment - gram @ out.weight.double().T)[free]
    gram = gram[free[:, None], free]
    parts = gram.diagonal().unflatten(0, (len(mixer.sizes), -1)).mean(1, keepdim=True)
    scale = parts.expand(-1, len(free) // len(mixer.sizes)).flatten()
    best = mapped, None, theory, None
    judged = [_equations(mixer, seen) for seen in judging]
    for ridge in RIDGES:
        factor, info = torch.linalg.cholesky_ex(gram + torch.diag(ridge * scale))
        if info.item() == 0:
            change = torch.cholesky_solve(moment, factor).float()
            error = sum((left - F[:, free] @ change).square().sum().item() for F, left in judged) / total
            if error < best[0]:
                best = error, ridge, mixer.read.mass.clone(), change
    error, ridge, mass, change = best
    mixer.read.mass.copy_(mass)
    if ridge is not None:
        out.weight[:, free] += change.T
    return mapped, error, ridge


def _seen(mixer: HybridMixer, u: torch.Tensor, y: torch.Tensor, rotary: Rotary) -> Seen:
    near = mixer.attention(u, rotary, unpadded(u))
    return Seen(near, mixer.read.far(near), y)


def _fitted_columns(mixer: HybridMixer) -> torch.Tensor:
    """Columns of the output map that belong to heads without full attention."""
    columns = torch.arange(mixer.out_proj.in_features, device=mixer.out_proj.weight.device)
    head = columns % mixer.attention_size // mixer.attention.head_dim
    return columns[~torch.isin(head, torch.tensor(mixer.attention.full_heads, device=head.device, dtype=head.dtype))]


def _features(mixer: HybridMixer, seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
    """What the output map is given (n, 3 H D), and what the teacher's attention returns (n, D)."""
    start = mixer.near_tokens
    return mixer.read.features(seen.near, seen.far)[:, start:].flatten(0, 1), seen.y[:, start:].flatten(0, 1)


def _equations(mixer: HybridMixer, seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
    """What the output map is given, and what it leaves to be explained."""
    F, y = _features(mixer, seen)
    return F, y - mixer.out_proj(F)


def _gram(F: torch.Tensor) -> torch.Tensor:
    """F^T F of F (n, E), whose blocks above the diagonal are those below it."""
    parts, rows = F.chunk(GRAM_BLOCKS, dim=1), []
    for i, part in enumerate(parts):
        rows.append([part.T @ other for other in parts[: i + 1]])
    return torch.cat(
        [torch.cat([*row, *(rows[j][i].T for j in range(i + 1, len(rows)))], 1) for i, row in enumerate(rows)]
    )


@torch.no_grad()
def fit_salience(mixer: HybridMixer, batches: Iterable[torch.Tensor], rotary: Rotary) -> None:
    """Fit which tokens are seen for good, in place.

    Args:
        batches: the layer's inputs (B, L, D).
    """
    sinks, gram, moment, inputs, targets = mixer.attention.sinks, 0.0, 0.0, [], []
    for u in batches:
        behind = u.shape[1] - mixer.attention.window
        last = behind - behind // 8  # the attention of few queries to a token says little
        if last <= sinks:
            raise ValueError(
                f"Sequences of {u.shape[1]} tokens hardly leave a window of {mixer.attention.window} and {sinks} "
                "sinks, so nothing shows which tokens are salient; set sequence_length higher, or say salient: 0."
            )
        received = attention_received(mixer, u, rotary)
        inputs.append(u[:, sinks:last].flatten(0, 1).double())
        targets.append((received[:, sinks:last] + FLOOR).log().flatten().double())
    centre, level = torch.cat(inputs).mean(0), torch.cat(targets).mean()
    for u, target in zip(inputs, targets, strict=True):
        gram, moment = gram + (u - centre).T @ (u - centre), moment + (u - centre).T @ (target - level)
    penalty = SALIENCE_RIDGE * gram.diagonal().mean() + torch.finfo(torch.float32).tiny
    solution = torch.linalg.solve(gram + penalty * torch.eye(len(gram), device=gram.device), moment)
    mixer.attention.salience.copy_(solution)
    return_free_memory()


def attention_received(mixer: HybridMixer, u: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """The attention to each token (B, L) that has left the window, a mean over the queries, summed over the heads."""
    attention, length = mixer.attention, u.shape[1]
    received = u.new_zeros(u.shape[:2])
    heads = [head for head in range(attention.heads) if head not in attention.full_heads]
    for rows, scores in _scores(mixer, attention(u, rotary, unpadded(u)), heads):
        left = torch.arange(scores.shape[-1], device=u.device) <= rows[:, None] - attention.window
        received[:, : scores.shape[-1]] += (scores.softmax(-1).sum(1) * left).sum(1)
    return received / (length - attention.window - torch.arange(length, device=u.device)).clamp(min=1)


def fit_mass(mixer: HybridMixer, batches: Iterable[tuple[Near, Far]]) -> None:
    """Fit the log mass of the tokens in the state, in place."""
    read, start, gram, moment = mixer.read, mixer.near_tokens, 0.0, 0.0
    for near, far in batches:
        features, mass = read.mass_features(far)[:, start:], far_log_mass(mixer, near)[:, start:]
        gate = torch.sigmoid(mass - near.log_mass[:, start:])
        # an error of the log mass changes the gate by g (1 - g) times it
        weight = (gate * (1 - gate) + FLOOR) * mass.isfinite()
        weighted = features * weight[..., None]
        gram = gram + torch.einsum("blhf,blhg->hfg", weighted, features).double()
        moment = moment + torch.einsum("blhf,blh->hf", weighted, mass.masked_fill(~mass.isfinite(), 0)).double()
    diagonal = gram.diagonal(dim1=1, dim2=2)
    penalty = MASS_RIDGE * diagonal
    penalty[:, :2] *= MASS_RIDGE  # an offset and the number of tokens, which are all but free
    penalty += torch.finfo(torch.float32).tiny
    solution = torch.linalg.solve(gram + torch.diag_embed(penalty), moment + penalty * read.mass.double())
    read.mass.copy_(solution)


def far_log_mass(mixer: HybridMixer, near: Near) -> torch.Tensor:
    """Log-sum-exp of the true scores of the tokens in the state (B, L, H), -inf where there are none."""
    leaving, columns, length = near.leaving, near.context.index.shape[1], near.query.shape[1]
    step = torch.arange(1, length + 1, device=leaving.device).expand_as(leaving)
    # the query before which a column's token enters the state; the last column is for nobody
    entry = leaving.new_full((len(leaving), columns + 1), length)
    entry = entry.scatter(1, leaving.masked_fill(leaving < 0, columns), step)[:, columns - length : columns]
    parts = []
    for rows, scores in _scores(mixer, near, list(range(mixer.attention.heads))):
        entered = entry[:, None, : scores.shape[-1]] <= rows[:, None]
        parts.append(scores.masked_fill(~entered[:, None], -math.inf).logsumexp(-1))
    return torch.cat(parts, dim=2).transpose(1, 2)


def _scores(mixer: HybridMixer, near: Near, heads: list[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The teacher's own scores (B, heads, rows, columns so far) of some queries at a time, and which these are."""
    attention, length = mixer.attention, near.query.shape[1]
    keys = repeat_groups(near.context.keys[:, :, -length:].transpose(1, 2), attention.heads)[:, :, heads]
    keys, queries = keys.transpose(1, 2), near.query[:, :, heads].transpose(1, 2)
    for rows in torch.arange(length, device=keys.device).split(QUERIES):
        so_far = keys[:, :, : rows[-1] + 1].mT
        seen = torch.arange(so_far.shape[-1], device=keys.device) <= rows[:, None]
        yield rows, attention.scores(queries[:, :, rows], so_far, seen)
