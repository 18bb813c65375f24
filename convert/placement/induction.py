"""Which heads copy from distant tokens: an induction score per head, from one pass of the teacher.

Few heads serve recall (arXiv 2602.11374 keeps 2 % of them). Where a sequence of random tokens repeats, a head that
serves recall looks at the token that followed the last time. Its score is the attention that it pays there. Heads that
look back by a step or two, which recall needs as well, are served by the window.
"""

import torch

from ..alignment.mohawk.orientation import attention_rows
from ..alignment.probes import copy_probe, plain_tokens
from ..alignment.teacher_model import TeacherModel
from ..weights.writer import Progress
from .budget import KVHead

ROWS = 2
LENGTH = 400
"""Random tokens before they repeat."""
TILE = 128


@torch.no_grad()
def induction_scores(
    teacher: TeacherModel,
    seed: int = 0,
    length: int = LENGTH,
    progress: Progress = lambda what, done, total: None,
) -> torch.Tensor:
    """(layers, heads): the mean attention on the token that is to be copied next.

    Args:
        length: random tokens before they repeat, at most half of the positions that the teacher knows.
    """
    length = min(length, teacher.config.max_position_embeddings // 2)
    probe = copy_probe(plain_tokens(teacher.config.vocab_size), ROWS, length, seed)
    hidden, scores = teacher.embed(probe.ids), []
    inputs = teacher.block_inputs(hidden)
    asking = torch.arange(length, 2 * length - 1)  # the last token has nothing to predict
    for layer in range(teacher.num_layers):
        progress("scoring heads", layer, teacher.num_layers)
        block = teacher.block(layer)
        u = block.input_layernorm(hidden)
        on_source = []
        for rows, probabilities in attention_rows(block.self_attn, u, teacher.rotary(2 * length, layer), TILE):
            mine = asking[(asking >= rows.start) & (asking < rows.stop)]
            on_source.append(probabilities[:, :, mine - rows.start, mine + 1 - length])
        scores.append(torch.cat(on_source, -1).mean((0, -1)).cpu())
        hidden = block(hidden, **inputs)
    progress("scoring heads", teacher.num_layers, teacher.num_layers)
    return torch.stack(scores)


def ranked_heads(scores: torch.Tensor, shared: int) -> list[KVHead]:
    """(layer, key/value head) pairs, the one whose best query head has the highest score first.

    Args:
        scores: (layers, heads). shared: query heads per key/value head.
    """
    of_kv = scores.unflatten(1, (-1, shared)).amax(-1)
    pairs = [(layer, kv) for layer in range(of_kv.shape[0]) for kv in range(of_kv.shape[1])]
    return sorted(pairs, key=lambda pair: (-of_kv[pair].item(), pair))
