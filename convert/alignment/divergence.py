"""KL(teacher || student) = sum_v p_v (log p_v - log q_v), in nats, over the vocabulary, per position."""

import torch
from torch import nn

CHUNK_TOKENS = 256


def kl_of_log_probs(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) in nats for log-probabilities (..., V) -> (...)."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def kl_of_logits(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """KL(teacher || student) in nats for logits (..., V) -> (...)."""
    return kl_of_log_probs(teacher.float().log_softmax(-1), student.float().log_softmax(-1))


@torch.no_grad()
def kl_of_hidden(
    teacher_hidden: torch.Tensor,
    student_hidden: torch.Tensor,
    student_head: nn.Module,
    teacher_head: nn.Module | None = None,
) -> torch.Tensor:
    """Per-token KL (T,) from final hidden states (T, D), a chunk at a time; one head unless two are given."""
    teacher_head = teacher_head or student_head
    chunks = zip(teacher_hidden.split(CHUNK_TOKENS), student_hidden.split(CHUNK_TOKENS), strict=True)
    return torch.cat([kl_of_logits(teacher_head(t), student_head(s)) for t, s in chunks])


@torch.no_grad()
def mean_kl(student: nn.Module, teacher: nn.Module, ids: torch.Tensor, batch: int = 2) -> float:
    """Mean KL(teacher || student) in nats over the next-token predictions of token ids (S, L), L - 1 of each row."""
    total = 0.0
    for rows in ids.to(next(student.parameters()).device).split(batch):
        of_teacher, of_student = (
            m.model(rows, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1) for m in (teacher, student)
        )
        total += kl_of_hidden(of_teacher, of_student, student.lm_head, teacher.lm_head).sum().item()
    return total / ids[:, 1:].numel()
