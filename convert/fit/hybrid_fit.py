"""Fit what a hybrid layer adds to the teacher's weights: the salience, the log mass, and the low-rank output map.

The salience of a token is fitted to the log of the attention that the teacher pays to it once it has left the window.
The log mass is that of mass_fit.py. The output map is a reduced-rank ridge regression of what the teacher's own o_proj
leaves unexplained: the ridge's solution, cut to the directions of the output in which it explains most. The teacher's
attention is computed a block of queries at a time, so memory grows with L and not with its square.

Shapes: B batch, L length, D model width, H' heads with a window, P head dim, X features.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from modeling_llamba.hybrid.block_layout import Layout
from modeling_llamba.hybrid.hybrid_attention import HybridAttention
from modeling_llamba.hybrid.inputs import Projected, unpadded
from modeling_llamba.hybrid.prompt import rounded
from modeling_llamba.hybrid.readout import read, readout
from modeling_llamba.model.attention import probabilities
from modeling_llamba.model.rotary import Rotary

from ..memory import return_free_memory
from ..options import evicted_tokens
from .key_offset import fit_key_offset
from .layer_data import LayerData, LayerFit, Pieces, Unread, held_out_error
from .mass_fit import MASS_TOKENS, Near, attend_near, fit_mass, scores_from

GRAM_BLOCKS = 4
"""Number of blocks of columns of a Gram matrix; the products above its diagonal are not computed."""
SALIENCE_SEQUENCES = 8
"""Sequences on which the salience is regressed: one number per channel."""
# keeps logarithms finite where no attention is left
FLOOR = 1e-6
SALIENCE_RIDGE = 1e-2
RIDGES = (1e-2, 1e-1, 1.0, 10.0)
"""Strengths with which the output map is drawn to zero, in units of the mean squared feature."""
RANKS = (0, 8, 16, 24, 32, 48, 64, 80, 96, 128)
"""Ranks of the output map that are evaluated."""
Batch = tuple[torch.Tensor, torch.Tensor]


class HybridFit(NamedTuple):
    """Result of the fit of a hybrid layer, all of it on the device.

    down (rank, X), up (D, rank): a low-rank map of the highest rank evaluated, whose first r rows and columns are the
    map of rank r. mapped (): held-out relative squared error of the layer with the mass of keys that are all alike
    (`theory_mass`) and no output map. best (): number of the ridge, -1 if the rank is 0. ranks, errors: ranks
    evaluated, and the error of each, infinite if no ridge has a solution.
    """

    down: torch.Tensor
    up: torch.Tensor
    mapped: torch.Tensor
    best: torch.Tensor
    errors: torch.Tensor
    ranks: list[int]


class Seen(NamedTuple):
    """Features and residuals of a layer at the tokens behind the window of some sequences.

    features (n, X). residual (n, D): the teacher's output less o_proj of the heads' outputs.
    """

    features: torch.Tensor
    residual: torch.Tensor


@torch.no_grad()
def fit_hybrid_layer(layer: HybridAttention, data: LayerData) -> Unread:
    """Fit a hybrid layer to (u, y) in place: the offset of keys, salience, mass, and an output map.

    Raises:
        ValueError: the sequences are hardly longer than the window.
    """
    fit_key_offset(layer, data)
    if layer.salience is not None:
        inputs = (data.batch(rows)[0] for rows in data.in_batches(data.fitting()[:SALIENCE_SEQUENCES]))
        fit_salience(layer, inputs, data.rotary, data.pieces.queries)
    finite = data.is_finite().double()
    if layer.mass is None:
        numbers = torch.stack([finite, held_out_error(layer, data)])
        return Unread(numbers, lambda error: LayerFit(None, None, error, error, error))
    fitting = data.in_batches(data.fitting())
    judging = data.in_batches(data.judging())
    enough = max(MASS_TOKENS // (data.u.shape[1] * data.pieces.sequences), 1)
    for_mass = fitting[::2][:enough]
    others = fitting[1::2] + fitting[::2][enough:]
    fit = fit_hybrid(layer, data.batch, for_mass, others, judging, data.rotary, data.pieces)
    set_map(layer, fit.down, fit.up)

    def as_fit(mapped: float, best: float, *errors: float) -> LayerFit:
        error = min(errors)
        if math.isinf(error):
            raise ValueError(
                "The normal equations of the output map are singular: the features are all zero or not finite."
            )
        ridge = (*RIDGES, None)[int(best)]
        return LayerFit(None, ridge, mapped, error, error, dict(zip(fit.ranks, errors, strict=True)))

    numbers = torch.cat([torch.stack([finite, fit.mapped, fit.best.double()]), fit.errors])
    return Unread(numbers, as_fit)


@torch.no_grad()
def fit_hybrid(
    layer: HybridAttention,
    batch: Callable[[range], Batch],
    for_mass: list[range],
    others: list[range],
    judging: list[range],
    rotary: Rotary,
    pieces: Pieces,
) -> HybridFit:
    """Fit the mass, in place, and the output map.

    Args:
        batch: the layer's inputs and the teacher's outputs (B, L, D) in some sequences.
        for_mass, others: sequences. The output map is fitted on both, the mass on the former alone: it has few
            parameters, and the true mass takes long to compute.
        judging: held-out sequences.
    """
    judging = [(u, y, *_projected(layer, u, rotary)) for u, y in map(batch, judging)]
    start = layer.shape.window
    total = sum(y[:, start:].square().sum().double() for _, y, *_ in judging)
    total = total.clamp(min=torch.finfo(torch.float32).tiny)  # an attention that is zero has no relative error

    def residuals() -> list[Seen]:
        return [_seen(layer, u, y, *projected) for u, y, *projected in judging]

    mapped = _squares(residuals()) / total
    waiting = []  # activations of the fit of the mass, until the map is fitted on them

    def of_mass() -> Iterator[tuple[torch.Tensor, Near, Projected, Layout]]:
        for u, y in map(batch, for_mass):
            projected, of_kept = _projected(layer, u, rotary)
            near, layout = attend_near(layer, projected)
            if pieces.kept:
                waiting.append((u, y, projected, of_kept, near, layout))
            yield u, near, projected, layout

    fit_mass(layer, of_mass(), pieces.queries)
    return_free_memory()
    if layer.down is None:
        none = layer.mass.new_zeros(0, 0)
        no_ridge = torch.full_like(mapped, -1)
        return HybridFit(none, none, mapped, no_ridge, (_squares(residuals()) / total)[None], [0])
    first = (_mixed(layer, *waiting.pop()) for _ in range(len(waiting)))  # each is freed after its use
    computed = map(batch, others if pieces.kept else [*for_mass, *others])
    rest = (_seen(layer, u, y, *_projected(layer, u, rotary)) for u, y in computed)
    gram = moment = 0.0
    for seen in itertools.chain(first, rest):
        gram = gram + _gram(seen.features).double()
        moment = moment + (seen.features.T @ seen.residual).double()
    down, up, best, errors, ranks = _best_map(gram, moment, residuals(), total)
    return HybridFit(down, up, mapped, best, errors, ranks)


def _squares(seen: list[Seen]) -> torch.Tensor:
    return sum(part.residual.square().sum().double() for part in seen)


def _best_map(
    gram: torch.Tensor, moment: torch.Tensor, judged: list[Seen], total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """The output map by reduced-rank ridge regression, with the best ridge: all of `HybridFit` but `mapped`."""
    scale = gram.diagonal().mean()
    rank = min(max(RANKS), moment.shape[1], moment.shape[0])
    ranks = [r for r in RANKS if r <= rank]
    solutions = []
    explained = []
    singular = []
    for ridge in RIDGES:
        factor, info = torch.linalg.cholesky_ex(gram + torch.diag((ridge * scale).expand(len(gram))))
        solutions.append(torch.cholesky_solve(moment, factor))
        # reduced-rank regression: the best map of rank r keeps the r main directions of the fitted outputs
        explained.append(solutions[-1].T @ (gram @ solutions[-1]))
        singular.append((info != 0) | ~explained[-1].isfinite().all())
        explained[-1].masked_fill_(singular[-1], 0)
    del factor
    # all at once, since each call makes the host wait for its status
    energies, directions = torch.linalg.eigh(torch.stack(explained))
    found = []
    for solution, energy, main in zip(solutions, energies, directions, strict=True):
        # eigh sorts upwards; turned round, the first r columns are the map of rank r
        main = main[:, -rank:].flip(1)
        # the middle of the map as large as a unit vector, so that a step of training moves both parts alike
        size = (energy[-rank:].flip(0).clamp(min=0) / gram.diagonal().sum()).sqrt().clamp(min=1e-12)
        down = ((solution @ main) / size.sqrt()).T.float()
        up = (main * size.sqrt()).float()
        errors = torch.stack([_error(judged, down[:r], up[:, :r]) / total for r in ranks])
        found.append((down, up, errors))
    downs, ups, errors = (torch.stack(parts) for parts in zip(*found, strict=True))
    errors = errors.masked_fill(torch.stack(singular)[:, None], math.inf).nan_to_num(math.inf)
    best = errors.amin(1).argmin()
    down, up, errors = (parts.index_select(0, best[None])[0] for parts in (downs, ups, errors))
    return down, up, best, errors, ranks


def _error(judged: list[Seen], down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return sum((seen.residual - seen.features @ down.T @ up.T).square().sum().double() for seen in judged)


def set_map(layer: HybridAttention, down: torch.Tensor, up: torch.Tensor) -> None:
    """Give a layer this output map, in place; none if its rank is 0."""
    if len(down) == 0:
        layer.down = layer.up = None
        return
    # no weights are drawn that the next line replaces
    with torch.device("meta"):
        layer.down, layer.up = (nn.Linear(w.shape[1], w.shape[0], bias=False) for w in (down, up))
    layer.down.weight, layer.up.weight = (nn.Parameter(w.contiguous(), requires_grad=False) for w in (down, up))


def cut_map(layer: HybridAttention, rank: int) -> None:
    """Cut a layer's output map down to a rank, in place."""
    if layer.down is not None:
        set_map(layer, layer.down.weight[:rank].detach(), layer.up.weight[:, :rank].detach())


def ranks_within(errors: dict[int, dict[int, float]], sizes: dict[int, int], budget: int) -> dict[int, int]:
    """The rank of each layer for the least sum of held-out errors, with output maps of `budget` weights at most.

    Args:
        errors: by layer and rank. sizes: weights of one rank, by layer.
    """
    ranks = dict.fromkeys(errors, 0)
    left = budget
    while True:
        # a step may jump over ranks that gain nothing by themselves
        steps = [
            ((of_rank[ranks[layer]] - error) / cost, layer, rank, cost)
            for layer, of_rank in errors.items()
            for rank, error in of_rank.items()
            if 0 < (cost := (rank - ranks[layer]) * sizes[layer]) <= left
        ]
        gain, layer, rank, cost = max(steps, default=(0.0, 0, 0, 0))
        if gain <= 0:
            return ranks
        left -= cost
        ranks[layer] = rank


def _projected(layer: HybridAttention, u: torch.Tensor, rotary: Rotary) -> tuple[Projected, torch.Tensor | None]:
    """Queries, keys and values of the heads with a window, and the kept heads' outputs."""
    shape = layer.shape
    if evicted_tokens(u.shape[1], shape.window, shape.places, shape.block) <= 0:
        raise ValueError(
            f"Sequences of {u.shape[1]} tokens are all within the window ({shape.window}) or among the {shape.places} "
            "sinks and salient tokens, so there is nothing to fit; set sequence_length higher."
        )
    projected = layer.project(u, rotary, unpadded(u))
    of_kept = None
    if layer.kept:
        of_kept = layer.attend_kept(projected, None, None)
    return rounded(layer.heads(), layer.select_windowed(projected)), of_kept


def _seen(
    layer: HybridAttention, u: torch.Tensor, y: torch.Tensor, projected: Projected, of_kept: torch.Tensor | None
) -> Seen:
    return _mixed(layer, u, y, projected, of_kept, *attend_near(layer, projected))


def _mixed(layer: HybridAttention, u, y, projected, of_kept, near: Near, layout: Layout) -> Seen:
    start = layer.shape.window
    output, features = read(near.query, near.output, near.log_mass, readout(layer.heads(), near.state))
    output, features = (layout.to_tokens(layout.in_order(t)) for t in (output, features))
    of_kept = None if of_kept is None else of_kept[:, start:]
    output, of_kept, features = layer.gated(u[:, start:], output, of_kept, features.flatten(2))
    explained = layer.project_out(output, of_kept, None)
    return Seen(features.flatten(0, 1), (y[:, start:] - explained).flatten(0, 1))


def _gram(F: torch.Tensor) -> torch.Tensor:
    """F^T F of F (n, X), whose blocks above the diagonal are those below it."""
    parts = F.chunk(GRAM_BLOCKS, dim=1)
    rows = []
    for i, part in enumerate(parts):
        rows.append([part.T @ other for other in parts[: i + 1]])
    return torch.cat(
        [torch.cat([*row, *(rows[j][i].T for j in range(i + 1, len(rows)))], 1) for i, row in enumerate(rows)]
    )


@torch.no_grad()
def fit_salience(
    layer: HybridAttention, batches: Iterable[torch.Tensor], rotary: Rotary, queries: int = Pieces().queries
) -> None:
    """Fit the weight vector of the salience, in place: the tokens with the highest keep a place.

    Args:
        batches: the layer's inputs (B, L, D).
    """
    sinks = layer.shape.sinks
    gram = 0.0
    moment = 0.0
    inputs = []
    targets = []
    for u in batches:
        behind = u.shape[1] - layer.shape.window
        last = behind - behind // 8  # attention from few queries is a poor estimate
        if last <= sinks:
            raise ValueError(
                f"Sequences of {u.shape[1]} tokens hardly leave a window of {layer.shape.window} and {sinks} sinks, "
                "so nothing shows which tokens are salient; set sequence_length higher, or salient: 0."
            )
        received = attention_received(layer, u, rotary, queries)
        inputs.append(u[:, sinks:last].flatten(0, 1).double())
        targets.append((received[:, sinks:last] + FLOOR).log().flatten().double())
    # centred in place of an intercept, which the salience has not: a constant changes no order of tokens
    centre = torch.cat(inputs).mean(0)
    level = torch.cat(targets).mean()
    for u, target in zip(inputs, targets, strict=True):
        gram = gram + (u - centre).T @ (u - centre)
        moment = moment + (u - centre).T @ (target - level)
    # the least float keeps inputs that are all alike solvable
    penalty = SALIENCE_RIDGE * gram.diagonal().mean() + torch.finfo(torch.float32).tiny
    # the penalty makes the matrix regular, so the status of the solution need not be copied from the device
    solution = torch.linalg.solve_ex(gram + penalty * torch.eye(len(gram), device=gram.device), moment).result
    layer.salience.copy_(solution)
    return_free_memory()


def attention_received(
    layer: HybridAttention, u: torch.Tensor, rotary: Rotary, queries: int = Pieces().queries
) -> torch.Tensor:
    """Return the attention to each token (B, L) that has left the window, summed over heads, a mean over queries."""
    shape = layer.shape
    length = u.shape[1]
    received = u.new_zeros(u.shape[:2])
    block = torch.arange(length, device=u.device) // shape.block
    projected = rounded(layer.heads(), layer.select_windowed(layer.project(u, rotary, unpadded(u))))
    sinks = layer.sinks_of(layer.windowed)
    for rows, scores in scores_from(layer, projected.query, projected.key, 0, queries):
        left = block[: scores.shape[-1]] < block[rows, None] - shape.whole_blocks
        received[:, : scores.shape[-1]] += (probabilities(scores, sinks).sum(1) * left).sum(1)
    # the first query that finds the token outside of its window
    leaves = (block + shape.whole_blocks + 1) * shape.block
    return received / (length - leaves).clamp(min=1)
