"""Which tokens a layer goes on seeing after they have left the window: those whose salience is highest so far.

In many layers nearly all attention beyond the window goes to a few tokens that every head looks at, sinks in the
middle of a text. A layer has R places for them. A token that leaves the window competes with the tokens that hold a
place; the one with the lowest salience goes on to the state. So a token is in the window, in a place, or in the state,
and each step sends at most one token to the state. The salience of a token is a linear function of the layer's input
at that token, and never changes.

Tokens are named by their columns, -1 where there is none. Shapes: B batch, R places, T steps, one token leaving the
window at each, M = R + T candidates; (B, ...) is also (B, N, ...), for N blocks of steps side by side.
"""

from typing import NamedTuple

import torch
from torch.nn import functional as F


class Competition(NamedTuple):
    """What came of some steps.

    seen (B, ..., M, T) bool: which candidate, who held a place before or entered since, holds one at each step, before
    anybody leaves. leaving (B, ..., T): who goes on to the state after each step. held (B, ..., R): who holds a place
    after the last step, the most salient first.
    """

    seen: torch.Tensor
    leaving: torch.Tensor
    held: torch.Tensor


@torch.no_grad()
def compete(
    held: torch.Tensor,
    entering: torch.Tensor,
    salience: torch.Tensor,
    seq_idx: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Competition:
    """Let tokens that leave the window compete for the places; of equals the earlier one stays.

    Args:
        held: (B, ..., R). entering: (B, ..., T), after each step. salience: (B, columns).
        seq_idx: in packed rows, the sequence of each column, and that of the queries at each step and at the next
            (B, ..., T + 1). Tokens compete with those of their own sequence; those of other sequences than the query's
            are neither seen nor sent to the state.
    """
    places, steps = held.shape[-1], entering.shape[-1]
    candidates = torch.cat([held, entering], dim=-1)
    order = torch.arange(places + steps, device=held.device)
    exists = (candidates >= 0)[..., None]
    score = _of(salience, candidates)
    tied = (score[..., None, :] == score[..., None]) & (order[None] < order[:, None])
    above = ((score[..., None, :] > score[..., None]) | tied) & exists.mT  # [b, m, k]: k ranks above m
    mine = None
    if seq_idx is not None:
        of_candidate = _of(seq_idx[0], candidates)
        above = above & (of_candidate[..., None, :] == of_candidate[..., None])
        mine = of_candidate[..., None] == seq_idx[1][..., None, :]
    rank = above[..., :places].sum(-1, keepdim=True) + above[..., places:].cumsum(-1)
    own_step = order[:, None] - places
    step = torch.arange(steps, device=held.device)
    after = (rank < places) & exists & (own_step <= step)
    before = torch.cat([exists & (own_step < 0), after[..., :-1]], dim=-1)
    lost = (before | (exists & (own_step == step))) & ~after
    holding = after[..., -1]
    if mine is not None:
        before, lost, holding = before & mine[..., :-1], lost & mine[..., 1:], holding & mine[..., -1]
    leaving = torch.where(lost.any(-2), candidates.gather(-1, lost.int().argmax(-2)), -1)
    order = score.masked_fill(~holding, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    stays = order[..., :places]
    kept = torch.where(holding.gather(-1, stays), candidates.gather(-1, stays), -1)
    return Competition(before, leaving, kept)


@torch.no_grad()
def compete_once(exists: torch.Tensor, salience: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`compete` for a single step, where the holders are the first R columns and who enters is the next.

    Args:
        exists, salience: (B, R + 1).

    Returns:
        leaving (B, 1) and held (B, R).
    """
    order = salience.masked_fill(~exists, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    columns = torch.where(exists.gather(1, order), order, -1)
    return columns[:, -1:], columns[:, :-1]


@torch.no_grad()
def holders_before(
    held: torch.Tensor,
    entering: torch.Tensor,
    salience: torch.Tensor,
    seq_idx: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Who holds a place when each of N blocks begins (B, N, R), in about log N rounds for all blocks at once.

    Whoever loses a place never gets one again, so the holders are the most salient of all who have entered, and those
    of two stretches of text the most salient of the holders of each.

    Args:
        held: (B, R), when the first begins. entering: (B, N, T). salience, seq_idx: as in `compete`; the sequences
            are numbered in their order.
    """
    places, blocks = held.shape[1], entering.shape[1]
    if blocks == 1:
        return held[:, None]

    def most_salient(candidates: torch.Tensor) -> torch.Tensor:
        exists = candidates >= 0
        if seq_idx is not None:  # those of the last sequence, as the others are over
            of_candidate = _of(seq_idx[0], candidates).masked_fill(~exists, -1)
            exists = exists & (of_candidate == of_candidate.amax(-1, keepdim=True))
        score = _of(salience, candidates).masked_fill(~exists, -torch.inf)
        best = score.argsort(dim=-1, descending=True, stable=True)[..., :places]
        return candidates.masked_fill(~exists, -1).gather(-1, best)

    entering = F.pad(entering[:, :-1], (0, max(places - entering.shape[2], 0)), value=-1)
    best, reach = torch.cat([held[:, None], most_salient(entering)], dim=1), 1
    while reach < blocks:
        earlier = F.pad(best[:, :-reach], (0, 0, reach, 0), value=-1)
        best, reach = most_salient(torch.cat([earlier, best], dim=-1)), 2 * reach
    if seq_idx is not None:
        best = best.masked_fill(_of(seq_idx[0], best) != seq_idx[1][..., :1], -1)
    return best


def _of(t: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """t (B, columns) at columns (B, ...), the first where there is none."""
    return t.gather(1, columns.clamp(min=0).flatten(1)).view(columns.shape)
