"""The loss of distillation: ce_weight x CE to the labels + kl_weight x divergence from the teacher, per token, masked.

Both terms need logits over the vocabulary, the largest tensors of a training step. Here they exist a few million
elements at a time: each chunk's gradient is taken while its logits are there, so that neither logits nor anything of
their size is kept for the backward pass.

Shapes: B batch, L length, D model width, V vocabulary.
"""

import functools
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Literal, NamedTuple

import torch
from torch import nn

from modeling_llamba.model.causal_lm import finish_logits

from ...fit.divergence import kl_of_log_probs

CHUNK_ELEMENTS = 2**23
IGNORED = -100
STATISTICS = ("ce", "kl", "agreement")

Divergence = Literal["forward", "reverse", "js"]


@dataclass(frozen=True)
class LossWeights:
    """The weights of the loss's two terms, and which divergence is the second."""

    ce_weight: float = 0.0
    kl_weight: float = 1.0
    divergence: Divergence = "forward"
    """forward is KL(teacher || student), reverse is KL(student || teacher), js the Jensen-Shannon divergence."""
    temperature: float = 1.0
    """Divides both models' logits in the divergence, which is multiplied by its square (Hinton et al. 2015)."""

    def __post_init__(self):
        if min(self.ce_weight, self.kl_weight) < 0 or self.ce_weight + self.kl_weight == 0:
            raise ValueError(
                f"ce_weight {self.ce_weight} and kl_weight {self.kl_weight} must not be negative, nor both zero."
            )
        if self.temperature <= 0:
            raise ValueError(f"temperature must be positive, not {self.temperature}.")
        if self.divergence not in typing.get_args(Divergence):
            *others, last = typing.get_args(Divergence)
            raise ValueError(f"divergence must be {', '.join(others)} or {last}, not {self.divergence!r}.")


class DistillationOutput(NamedTuple):
    """Sums over the tokens that count."""

    loss: torch.Tensor
    """The weighted sum, differentiable."""
    statistics: torch.Tensor
    """Sums of CE (nats), forward KL (nats), and of tokens whose likeliest next token is the teacher's."""
    tokens: torch.Tensor
    """Number of tokens that counted."""


def divergence(kind: Divergence, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Divergence in nats between the teacher's log-probabilities log_p (..., V) and the student's log_q -> (...)."""
    if kind == "forward":
        return kl_of_log_probs(log_p, log_q)
    if kind == "reverse":
        return kl_of_log_probs(log_q, log_p)
    if kind == "js":
        middle = torch.logaddexp(log_p, log_q) - math.log(2)
        return (kl_of_log_probs(log_p, middle) + kl_of_log_probs(log_q, middle)) / 2
    typing.assert_never(kind)


def wide(values: torch.Tensor) -> torch.Tensor:
    """The values in float32 if they are in half precision, else as they are."""
    if values.dtype in (torch.float16, torch.bfloat16):
        return values.float()
    return values


def chunk_loss(
    logits: torch.Tensor, labels: torch.Tensor | None, teacher: torch.Tensor | None, weights: LossWeights
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of the loss and of the statistics for logits (L, V), labels (L,) and the teacher's logits (L, V)."""
    log_q = wide(logits).log_softmax(-1)
    ce = kl = agreement = loss = log_q.new_zeros(())
    if labels is not None:
        ce = -log_q.gather(-1, labels[:, None]).sum()
    if weights.ce_weight:  # 0 times an infinite cross entropy would be nan
        loss = weights.ce_weight * ce
    if teacher is not None:
        log_p1 = wide(teacher).log_softmax(-1)
        tempered = log_p1, log_q
        if weights.temperature != 1:
            tempered = ((values / weights.temperature).log_softmax(-1) for values in tempered)
        if weights.kl_weight:
            terms = divergence(weights.divergence, *tempered).sum()
            loss = loss + weights.kl_weight * weights.temperature**2 * terms
        with torch.no_grad():
            # reported at temperature 1 and forward, whatever is trained, so that runs compare
            kl = kl_of_log_probs(log_p1, log_q).sum()
            agreement = (logits.argmax(-1) == teacher.argmax(-1)).sum().to(kl.dtype)
    return loss, torch.stack([ce.detach(), kl, agreement])


class _ChunkedLoss(torch.autograd.Function):
    """Takes each chunk's gradient in the forward pass, where its logits are."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, teacher_of, weights, finish, differentiate):
        # logits take more memory than all else: a chunk of tokens has the same bytes whatever the vocabulary
        size = max(CHUNK_ELEMENTS // weight.shape[0], 16)
        total = wide(hidden.new_zeros(()))
        statistics = wide(hidden.new_zeros(3))
        wanted = [differentiate and t is not None and t.requires_grad for t in (hidden, weight, bias)]
        differentiate = any(wanted)
        # sums over many chunks, in float32 at least
        grads = [
            torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) if want else None
            for t, want in zip((hidden, weight, bias), wanted, strict=True)
        ]
        for start in range(0, len(hidden), size):
            span = slice(start, start + size)
            teacher = teacher_of(span) if teacher_of is not None else None
            with torch.set_grad_enabled(differentiate):
                logits = nn.functional.linear(hidden[span].detach(), weight.detach(), bias).detach()
                # a leaf: only its gradient is needed, from which those of states and head are made below
                logits.requires_grad_(differentiate)
                loss, sums = chunk_loss(finish(logits), None if labels is None else labels[span], teacher, weights)
                if differentiate:
                    (grad,) = torch.autograd.grad(loss, logits)
            total += loss.detach()
            statistics += sums
            if wanted[0]:
                grads[0][span] = grad @ weight.to(grad.dtype)
            if wanted[1]:
                grads[1] += grad.T @ hidden[span].to(grad.dtype)
            if wanted[2]:
                grads[2] += grad.sum(0)
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(statistics)
        return total, statistics

    @staticmethod
    def backward(ctx, grad_total, _):
        return *(None if g is None else g * grad_total.to(g.dtype) for g in ctx.saved_tensors), *[None] * 5


def distillation_loss(
    hidden: torch.Tensor,
    head: nn.Module,
    labels: torch.Tensor | None,
    teacher_of: Callable[[slice], torch.Tensor] | None,
    weights: LossWeights,
    finish: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits,
) -> DistillationOutput:
    """Sums over tokens of the loss and its parts, differentiable in `hidden` and the head.

    Args:
        hidden: (L, D) states after the final norm at the tokens whose successor is predicted.
        head: linear layer from states to the vocabulary.
        labels: (L,) next tokens; None where the cross entropy is of no interest.
        teacher_of: function from a span of the L tokens to the teacher's logits (L, V) there; None without teacher.
        finish: what the model makes of its head's output: scaled, capped.
    """
    weight = head.weight
    bias = getattr(head, "bias", None)
    if isinstance(weight, torch.distributed.tensor.DTensor):  # FSDP2
        weight = weight.full_tensor()
        if bias is not None:
            bias = bias.full_tensor()
    differentiate = torch.is_grad_enabled()
    loss, statistics = _ChunkedLoss.apply(hidden, weight, bias, labels, teacher_of, weights, finish, differentiate)
    return DistillationOutput(loss, statistics, torch.tensor(len(hidden), device=hidden.device))


def add_hidden_output(teacher: nn.Module) -> None:
    """Let `teacher(..., hidden_only=True)` return the states after the final norm (B, L, D).

    It goes through the model's own forward, because that is where FSDP gathers the weights that lie in no block.
    """
    original = teacher.forward

    @functools.wraps(type(teacher).forward)
    def forward(self, *args, hidden_only=False, **kwargs):
        if not hidden_only:
            return original(*args, **kwargs)
        return self.base_model(*args, use_cache=False, **kwargs).last_hidden_state

    teacher.forward = MethodType(forward, teacher)


def head_of(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function from hidden states to logits; its weights are gathered once where FSDP2 has spread them."""
    head = model.get_output_embeddings()
    if not isinstance(head.weight, torch.distributed.tensor.DTensor):
        return lambda hidden: finish_logits(head(hidden), model.config)
    weight = head.weight.full_tensor()
    bias = head.bias
    if bias is not None:
        bias = bias.full_tensor()
    return lambda hidden: finish_logits(nn.functional.linear(hidden, weight.to(hidden.dtype), bias), model.config)


def add_distillation_head(model: nn.Module) -> None:
    """Let `model(..., labels=labels, distillation=(signal, weights))` return a `DistillationOutput`.

    The loss is computed inside the forward pass, so that no use of the head is hidden from wrappers (DDP, FSDP).
    Without the argument the model is what it was. `signal` gives, for the (B, L) mask of counting positions, the
    function `teacher_of` of `distillation_loss`.
    """
    original = model.forward

    @functools.wraps(type(model).forward)
    def forward(self, *args, distillation=None, **kwargs):
        if distillation is None:
            return original(*args, **kwargs)
        signal, weights = distillation
        labels = kwargs.pop("labels")
        _ = kwargs.pop("use_cache", None)
        hidden = self.base_model(*args, use_cache=False, **kwargs).last_hidden_state[:, :-1]
        following = labels[:, 1:].to(hidden.device)
        counts = following != IGNORED
        teacher_of = None
        if signal is not None:
            teacher_of = signal(counts)
        head = self.get_output_embeddings()
        finish = functools.partial(finish_logits, config=self.config)
        return distillation_loss(hidden[counts], head, following[counts], teacher_of, weights, finish)

    model.forward = MethodType(forward, model)
