"""Which tokens a layer goes on seeing after they have left the window: those whose salience is highest so far.

In many layers nearly all attention beyond the window goes to a few tokens that every head looks at, sinks in the
middle of a text. A layer has R places for them. A token that leaves the window competes with the tokens that hold a
place; the one with the lowest salience goes on to the state. So a token is in the window, in a place, or in the state,
and each step sends at most one token to the state. The salience of a token is a linear function of the layer's input
at that token, and never changes.

Tokens are named by their columns, -1 where there is none. Shapes: B batch, R places, T steps, one token leaving the
window at each, M = R + T candidates.
"""

from typing import NamedTuple

import torch


class Competition(NamedTuple):
    """What came of some steps.

    seen (B, M, T) bool: which candidate, who held a place before or entered since, holds one at each step, before
    anybody leaves. leaving (B, T): who goes on to the state after each step. held
    (B, R): who holds a place after the last step.
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
        held: (B, R). entering: (B, T), after each step. salience: (B, columns).
        seq_idx: in packed rows, the sequence of each column, and that of the queries at each step and at the next
            (B, T + 1). Tokens compete with those of their own sequence; those of other sequences than the query's are
            neither seen nor sent to the state.
    """
    places, steps = held.shape[1], entering.shape[1]
    candidates = torch.cat([held, entering], dim=1)
    columns, order = candidates.clamp(min=0), torch.arange(places + steps, device=held.device)
    exists = (candidates >= 0)[..., None]
    score = salience.gather(1, columns)
    tied = (score[:, None] == score[..., None]) & (order[None] < order[:, None])
    above = ((score[:, None] > score[..., None]) | tied) & exists.mT  # [b, m, k]: k ranks above m
    mine = None
    if seq_idx is not None:
        of_candidate = seq_idx[0].gather(1, columns)
        above = above & (of_candidate[:, None] == of_candidate[..., None])
        mine = of_candidate[..., None] == seq_idx[1][:, None]
    rank = above[..., :places].sum(-1, keepdim=True) + above[..., places:].cumsum(-1)
    own_step = order[:, None] - places
    step = torch.arange(steps, device=held.device)
    after = (rank < places) & exists & (own_step <= step)
    before = torch.cat([exists & (own_step < 0), after[..., :-1]], dim=-1)
    lost = (before | (exists & (own_step == step))) & ~after
    holding = after[..., -1]
    if mine is not None:
        before, lost, holding = before & mine[..., :-1], lost & mine[..., 1:], holding & mine[..., -1]
    leaving = torch.where(lost.any(1), candidates.gather(1, lost.int().argmax(1)), -1)
    stays = holding.int().argsort(dim=1, descending=True, stable=True)[:, :places]
    kept = torch.where(holding.gather(1, stays), candidates.gather(1, stays), -1)
    return Competition(before, leaving, kept)
