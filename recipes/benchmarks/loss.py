"""The distillation loss in chunks against logits written out, forward and backward: CPU time and peak memory.

The vocabulary and the width are SmolLM2's.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from convert.alignment.distillation.loss import IGNORED, LossWeights, chunk_loss, distillation_loss

from .measure import Report, Table, in_own_process, interleaved, peak_bytes

WEIGHTS = LossWeights(ce_weight=1.0, kl_weight=1.0)
TOKENS, VOCABULARY, WIDTH = (512, 2048), 49152, 576
CHUNKED, WRITTEN_OUT = "in chunks", "written out"


def naive_loss(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, labels: torch.Tensor, weights: LossWeights
) -> torch.Tensor:
    """The mean loss with all logits (B, L, V) at once and labels (B, L)."""
    keep = labels[:, 1:] != IGNORED
    s, t, y = student_logits[:, :-1][keep], teacher_logits[:, :-1][keep], labels[:, 1:][keep]
    return chunk_loss(s, y, t, weights)[0] / keep.sum()


def steps(tokens: int, vocabulary: int = VOCABULARY, width: int = WIDTH) -> dict[str, Callable[[], float]]:
    """Either way to compute the loss and its gradients on the same inputs; the calls return the loss."""
    torch.manual_seed(0)
    student, teacher = (nn.Linear(width, vocabulary, bias=False) for _ in range(2))
    teacher.requires_grad_(False)
    hidden, of_teacher = torch.randn(1, tokens, width, requires_grad=True), torch.randn(1, tokens, width)
    labels = torch.randint(vocabulary, (1, tokens))
    student.weight.grad, hidden.grad = torch.zeros_like(student.weight), torch.zeros_like(hidden)

    def chunked() -> float:
        out = distillation_loss(
            hidden[0, :-1], student, labels[0, 1:], lambda span: teacher(of_teacher[0, :-1][span]), WEIGHTS
        )
        return _backward(out.loss / out.tokens)

    def written_out() -> float:
        return _backward(naive_loss(student(hidden), teacher(of_teacher), labels, WEIGHTS))

    return {CHUNKED: chunked, WRITTEN_OUT: written_out}


def _backward(loss: torch.Tensor) -> float:
    loss.backward()
    return loss.item()


def _memory_call(name: str, tokens: int) -> tuple[Callable, Callable]:
    return steps(tokens)[name], steps(16)[name]


def measure(output: Path) -> Report:
    """Time and memory for each number of tokens."""
    torch.set_num_threads(1)
    rows = []
    for tokens in TOKENS:
        timings = interleaved(steps(tokens), 3)
        sizes = [in_own_process(peak_bytes, _memory_call, (name, tokens)) / 1e6 for name in (CHUNKED, WRITTEN_OUT)]
        ratios = [timings[CHUNKED].median / timings[WRITTEN_OUT].median, sizes[0] / sizes[1]]
        rows.append([f"{tokens} tokens", *(f"{r:.2f}" for r in ratios), *(f"{size:.0f}" for size in sizes)])
    columns = [f"distillation loss, {VOCABULARY} logits", "time in chunks over written out", "memory, the same",
               "MB in chunks", "MB written out"]  # fmt: skip
    return Report(tables=[Table(columns, rows)])
