"""Retrieval score of each head, for looking up distant tokens, from one pass of the teacher over some text.

Only few heads look up distant tokens ("retrieval heads", arXiv 2404.15574; arXiv 2602.11374 keeps 2 % of them). A
needle of random tokens lies early in prose and comes again at its end. The score of a head is the largest share of
attention from a token of the second needle to the first. It is high for heads that copy the token after the earlier
occurrence (induction heads), and for heads of earlier layers that find the occurrence itself; without the latter the
former fail more often the farther away the needle is. In a dozen heads that share is nearly 1, so a little is added
for the attention to the token after the earlier occurrence. Of the heads that find the occurrence itself all but the
best count half, since one suffices (figures: docs/results/ablations.md). Copying also needs heads that look back by a
step or two; the window is enough for these.
"""

import functools
from typing import NamedTuple

import torch
from torch import nn

from modeling_llamba.model.config_values import RECURRENT

from ..fit.fit import within_memory
from ..fit.probes import needle_probe, plain_tokens
from ..fit.teacher_model import TeacherModel, attention_rows
from ..io.writer import Progress
from .budget import KVHead

ROWS = 4
NEEDLE = 8
"""Tokens of the needle."""
FOLLOWING = 0.04
"""Weight of the attention to the token after the earlier occurrence, beside the largest share to any token."""


@torch.no_grad()
def retrieval_scores(
    teacher: TeacherModel,
    prose: torch.Tensor,
    seed: int = 0,
    progress: Progress = lambda what, done, total: None,
) -> torch.Tensor:
    """Return (layers, heads): attention from the second needle to the first, a mean over rows.

    It is the largest share of a token's attention that goes to the first needle, plus FOLLOWING times the mean share
    that goes to the token after its earlier occurrence; half of that for heads that mostly attend to the occurrence
    itself, except the best.

    Args:
        prose: (B, L) token ids of text, of which the first few are used.
    """
    place = prose.shape[1] // 8
    probe = needle_probe(prose[:ROWS], plain_tokens(teacher.config.vocab_size), seed, NEEDLE, place)
    hidden = teacher.embed(probe.ids)
    scores = []
    same = []
    rows = Rows(len(hidden))
    for layer in range(teacher.num_layers):
        progress("scoring heads, layers", layer, teacher.num_layers)
        scored = functools.partial(_scored, teacher, layer, teacher.block(layer), hidden, place)
        (hidden, attended, at_same, to_needle), rows = within_memory(scored, rows)
        scores.append(attended.mean(0).cpu())
        # more than half of its attention to the needle goes to the earlier occurrence of the same token
        same.append(at_same.mean(0).cpu() > to_needle.mean(0).cpu() / 2)
    progress("scoring heads, layers", teacher.num_layers, teacher.num_layers)
    scores = torch.stack(scores)
    same = torch.stack(same)
    # one head of this kind is enough: what a second one finds, the first found
    best = (scores * same).amax()
    return torch.where(same & (scores < best), scores / 2, scores)


class Rows(NamedTuple):
    """Number of rows that a block of the teacher reads at once."""

    at_once: int

    def smaller(self) -> "Rows | None":
        """Half as many; None where it is one row already."""
        return Rows(self.at_once // 2) if self.at_once > 1 else None


def _scored(
    teacher: TeacherModel, layer: int, block: nn.Module, hidden: torch.Tensor, place: int, rows: Rows
) -> list[torch.Tensor]:
    """Return what `_scored_part` does for all rows, some at a time."""
    parts = [_scored_part(teacher, layer, block, part, place) for part in hidden.split(rows.at_once)]
    return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


def _scored_part(
    teacher: TeacherModel, layer: int, block: nn.Module, hidden: torch.Tensor, place: int
) -> tuple[torch.Tensor, ...]:
    """The block's output for some rows, and of each row and head: its score, and the attention of the second needle's
    tokens to the same tokens and to all of the first needle."""
    output = block(hidden, **teacher.block_inputs(hidden))
    if block.layer_type == RECURRENT:
        none = hidden.new_zeros(len(hidden), teacher.config.num_attention_heads)
        return output, none, none, none
    length = hidden.shape[1]
    u = block.input_layernorm(hidden)
    rotary = teacher.rotary(length, layer)
    ((_, asking),) = attention_rows(block.self_attn, u, rotary, NEEDLE, first=length - NEEDLE)
    found = asking[..., place : place + NEEDLE]  # (rows, heads, NEEDLE, NEEDLE)
    following = found.diagonal(1, -2, -1).mean(-1)
    to_needle = found.sum(-1)
    return output, to_needle.amax(-1) + FOLLOWING * following, found.diagonal(0, -2, -1).mean(-1), to_needle.mean(-1)


def ranked_heads(scores: torch.Tensor, shared: int) -> list[KVHead]:
    """(layer, key/value head) pairs, the one whose best query head has the highest score first.

    Args:
        scores: (layers, heads). shared: query heads per key/value head.
    """
    of_kv = scores.unflatten(1, (-1, shared)).amax(-1)
    pairs = [(layer, kv) for layer in range(of_kv.shape[0]) for kv in range(of_kv.shape[1])]
    return sorted(pairs, key=lambda pair: (-of_kv[pair].item(), pair))
