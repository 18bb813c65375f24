"""Which heads fetch what is far away: how much of its attention a head puts on the token to be copied.

Recall sits in a few heads (arXiv 2602.11374 keeps 2 % of them). One pass of the teacher over a copy probe finds them:
where the sequence repeats, a head that serves recall looks at what followed the last time. Heads that look back by a
step or two, which recall needs as well, are served by the window.
"""

import torch

from ..alignment.mohawk.orientation import attention_rows
from ..alignment.probes import copy_probe, plain_tokens
from ..alignment.teacher_model import TeacherModel
from .placement import Heads
from .presets import query_heads

ROWS = 2
TILE = 128


@torch.no_grad()
def retrieval_scores(teacher: TeacherModel, window: int, seed: int = 0) -> torch.Tensor:
    """(layers, heads): the mean attention on the token that is to be copied next, from beyond the window.

    Args:
        window: tokens that are near; the probe repeats after more than that.
    """
    distance = max(2 * window, 64)
    probe = copy_probe(plain_tokens(teacher.config.vocab_size), ROWS, distance, seed)
    hidden, scores = teacher.embed(probe.ids), []
    inputs = teacher.block_inputs(hidden)
    asking = torch.arange(distance, 2 * distance - 1)  # the last token has nothing to predict
    for layer in range(teacher.num_layers):
        block = teacher.block(layer)
        u = block.input_layernorm(hidden)
        on_source = []
        for rows, probabilities in attention_rows(block.self_attn, u, teacher.rotary(2 * distance), TILE):
            mine = asking[(asking >= rows.start) & (asking < rows.stop)]
            on_source.append(probabilities[:, :, mine - rows.start, mine + 1 - distance])
        scores.append(torch.cat(on_source, -1).mean((0, -1)).cpu())
        hidden = block(hidden, **inputs)
    return torch.stack(scores)


def choose_heads(teacher: TeacherModel, replaced: list[int], window: int, count: int, seed: int) -> tuple[Heads, list]:
    """The query heads of `count` key/value heads of the replaced layers that serve recall most, and all scores."""
    config = teacher.config
    shared = config.num_attention_heads // config.num_key_value_heads
    scores = retrieval_scores(teacher, window, seed)
    heads = query_heads(best_kv_heads(scores, replaced, count, shared), shared)
    return heads, [[round(score, 4) for score in of_layer] for of_layer in scores.tolist()]


def best_kv_heads(scores: torch.Tensor, layers: list[int], count: int, shared: int) -> list[tuple[int, int]]:
    """The `count` (layer, key/value head) pairs of `layers` with the best head among the `shared` that read each."""
    of_kv = scores.unflatten(1, (-1, shared)).amax(-1)
    pairs = [(layer, kv) for layer in layers for kv in range(of_kv.shape[1])]
    return sorted(pairs, key=lambda pair: (-of_kv[pair].item(), pair))[:count]
