"""KL(teacher || student) = sum_v p_v (log p_v - log q_v), in nats, over the vocabulary, per position.

Shapes: L length, D model width, V vocabulary.
"""

from collections.abc import Callable

import torch

CHUNK_TOKENS = 256
Head = Callable[[torch.Tensor], torch.Tensor]
"""Function from states after the final norm (..., D) to logits (..., V)."""


def kl_of_log_probs(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) in nats for log-probabilities (..., V) -> (...)."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def kl_of_logits(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """KL(teacher || student) in nats for logits (..., V) -> (...)."""
    return kl_of_log_probs(teacher.float().log_softmax(-1), student.float().log_softmax(-1))


@torch.no_grad()
def kl_of_hidden(teacher: torch.Tensor, student: torch.Tensor, head: Head) -> torch.Tensor:
    """Per-token KL (L,) from final hidden states (L, D) that one head turns into logits, a chunk at a time."""
    # made at once: a small tensor of each chunk, between large ones, would keep freed memory from being used again
    kl = torch.empty(len(teacher), device=teacher.device)
    for of_token, t, s in zip(*(column.split(CHUNK_TOKENS) for column in (kl, teacher, student)), strict=True):
        of_token[:] = kl_of_logits(head(t), head(s))
    return kl
