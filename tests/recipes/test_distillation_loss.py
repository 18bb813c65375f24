"""The chunked loss against the one anybody would write, values and gradients, in float64."""

import math
import typing

import pytest
import torch
from torch import nn

from convert.train.distillation import loss as module
from convert.train.distillation.loss import (
    IGNORED,
    Divergence,
    LossWeights,
    add_distillation_head,
    distillation_loss,
    divergence,
)
from tests.helpers.hybrids import make_hybrid
from tests.helpers.teachers import make_teacher, random_ids

WEIGHTS = [
    LossWeights(),
    LossWeights(ce_weight=1.0, kl_weight=0.1),
    LossWeights(ce_weight=1.0, kl_weight=0.0),
    LossWeights(ce_weight=0.5, divergence="reverse"),
    LossWeights(divergence="js", temperature=2.0),
    LossWeights(divergence="reverse", temperature=0.5),
]


def naive_loss(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, labels: torch.Tensor, weights: LossWeights
) -> torch.Tensor:
    """The mean loss written out, with all logits (B, L, V) at once and labels (B, L)."""
    keep = labels[:, 1:] != IGNORED
    s, t, y = student_logits[:, :-1][keep], teacher_logits[:, :-1][keep], labels[:, 1:][keep]
    of_teacher, of_student = ((logits / weights.temperature).softmax(-1) for logits in (t, s))
    terms = textbook_divergence(weights.divergence, of_teacher, of_student).sum()
    ce = nn.functional.cross_entropy(s, y, reduction="sum")
    loss = weights.ce_weight * ce + weights.kl_weight * weights.temperature**2 * terms
    return loss / keep.sum()


def textbook_divergence(kind: str, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Divergence (...) between the teacher's probabilities p (..., V) and the student's q."""
    if kind == "js":
        m = (p + q) / 2
        return (textbook_divergence("forward", p, m) + textbook_divergence("forward", q, m)) / 2
    if kind == "reverse":
        p, q = q, p
    return (p * (p / q).log()).sum(-1)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 128 * 17)


def example(bias: bool):
    torch.manual_seed(1)
    heads = [nn.Linear(n, 128, bias=bias).double() for n in (12, 20)]  # a teacher may be wider
    hidden = [torch.randn(2, 50, n, dtype=torch.float64) for n in (12, 20)]
    labels = random_ids(2, 50).masked_fill(torch.rand(2, 50) < 0.4, IGNORED)
    return heads, hidden, labels


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_values_and_gradients_equal_the_naive_ones(weights, bias):
    (head, teacher_head), (hidden, teacher_hidden), labels = example(bias)
    results = []
    for chunked in (True, False):
        leaf = hidden.clone().requires_grad_()
        head.zero_grad()
        if chunked:
            counts = labels[:, 1:] != IGNORED
            of_teacher = teacher_hidden[:, :-1][counts]
            out = distillation_loss(
                leaf[:, :-1][counts], head, labels[:, 1:][counts], lambda s, t=of_teacher: teacher_head(t[s]), weights
            )
            assert out.tokens == counts.sum()  # several chunks
            assert len(counts.nonzero()) > 3 * 17
            loss = out.loss / out.tokens
        else:
            loss = naive_loss(head(leaf), teacher_head(teacher_hidden).detach(), labels, weights)
        loss.backward()
        results.append([loss.detach(), leaf.grad, *(p.grad.clone() for p in head.parameters())])
    for ours, naive in zip(*results, strict=True):
        torch.testing.assert_close(ours, naive, rtol=1e-10, atol=1e-12)
    assert all(p.grad is None for p in teacher_head.parameters())


def test_divergences_are_those_of_the_textbook():
    p, q = (torch.randn(5, 7, dtype=torch.float64).softmax(-1) for _ in range(2))
    for kind in typing.get_args(Divergence):
        torch.testing.assert_close(divergence(kind, p.log(), q.log()), textbook_divergence(kind, p, q))
    assert divergence("js", p.log(), p.log()).abs().max() < 1e-12


def test_a_divergence_that_has_no_formula_is_not_computed_as_another():
    p = torch.full((3,), -math.log(3))
    for kind in typing.get_args(Divergence):
        assert divergence(kind, p, p) == 0
    with pytest.raises(AssertionError, match="l2"):
        divergence("l2", p, p)


@pytest.mark.parametrize("family", ("llamba", "phimamba"))
def test_a_model_with_the_head_gives_the_loss_and_is_otherwise_what_it_was(family):
    student, teacher = make_hybrid(family), make_teacher("llama-gqa").double()
    ids = random_ids(2, 24)
    labels = ids.clone()
    labels[:, :9] = IGNORED
    before = student(ids).logits
    expected = naive_loss(before, teacher(ids).logits, labels, LossWeights(ce_weight=1.0))
    add_distillation_head(student)
    torch.testing.assert_close(student(ids).logits, before)

    def signal(counts):
        hidden = teacher.model(ids).last_hidden_state[:, :-1][counts]
        return lambda span: teacher.lm_head(hidden[span])

    out = student(input_ids=ids, labels=labels, distillation=(signal, LossWeights(ce_weight=1.0)))
    torch.testing.assert_close(out.loss / out.tokens, expected, rtol=1e-5, atol=1e-6)
    assert out.tokens == 2 * 15


def test_no_counting_token_is_a_loss_of_zero_that_can_be_differentiated():
    head, hidden = nn.Linear(4, 128), torch.randn(0, 4, requires_grad=True)
    out = distillation_loss(hidden, head, torch.zeros(0, dtype=torch.long), None, LossWeights(1.0, 0.0))
    out.loss.backward()
    assert out.loss == 0
    assert head.weight.grad.abs().max() == 0


def test_evaluation_keeps_no_gradient():
    head, hidden = nn.Linear(4, 128), torch.randn(40, 4)
    with torch.no_grad():
        out = distillation_loss(hidden, head, torch.zeros(40, dtype=torch.long), None, LossWeights(1.0, 0.0))
    assert not out.loss.requires_grad
    torch.testing.assert_close(out.loss, nn.functional.cross_entropy(head(hidden), torch.zeros(40).long()) * 40)


@pytest.mark.parametrize(
    "options, expected",
    [
        (dict(ce_weight=-1.0), "must not be negative"),
        (dict(ce_weight=0.0, kl_weight=0.0), "nor both zero"),
        (dict(temperature=0.0), "temperature must be positive"),
        (dict(divergence="l2"), "forward, reverse or js"),
    ],
)
def test_weights_that_cannot_be(options, expected):
    with pytest.raises(ValueError, match=expected):
        LossWeights(**options)
