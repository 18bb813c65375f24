"""KL to the teacher per token, without ever holding two arrays of B x L x vocabulary.

KL(teacher || student) = sum_v p_v (log p_v - log q_v), in nats, over the vocabulary, per position.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 256


def kl_of_logits(teacher: torch.Tensor, student: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """KL(teacher || student) in nats for logits (..., V) -> (...)."""
    p, q = ((logits.float() / temperature).log_softmax(-1) for logits in (teacher, student))
    return (p.exp() * (p - q)).sum(-1)


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


def distillation_loss(
    teacher_hidden: torch.Tensor,
    student_hidden: torch.Tensor,
    teacher_head: nn.Module,
    student_head: nn.Module,
    keep: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Mean KL(teacher || student) over the tokens kept, differentiable in the student, chunked and recomputed.

    The gradient equals that of the cross entropy to the teacher's distribution (MOHAWK stage 3), whose value differs
    by the teacher's entropy; KL is 0 at the goal.

    Args:
        teacher_hidden, student_hidden: (T, D) after the final norm. keep: (T,) bool, or None for all.
        temperature: divides both logits; the loss is multiplied by its square, so gradients keep their size.

    Raises:
        ValueError: the heads have different vocabularies.
    """
    if teacher_head.weight.shape[0] != student_head.weight.shape[0]:
        raise ValueError(
            f"The teacher has {teacher_head.weight.shape[0]} tokens and the student {student_head.weight.shape[0]}; "
            "distillation needs one vocabulary."
        )
    if keep is not None:
        teacher_hidden, student_hidden = teacher_hidden[keep], student_hidden[keep]

    def chunk_sum(t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits = teacher_head(t)
        return kl_of_logits(logits, student_head(s), temperature).sum()

    total = student_hidden.new_zeros((), dtype=torch.float32)
    for t, s in zip(teacher_hidden.split(CHUNK_TOKENS), student_hidden.split(CHUNK_TOKENS), strict=True):
        total = total + checkpoint(chunk_sum, t, s, use_reentrant=False)
    return total * temperature**2 / max(len(student_hidden), 1)
