"""Search for the placement within a cache budget: score every head, measure the best candidates, take the best."""

import functools
import hashlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..alignment.aligner import Aligner
from ..alignment.distillation.loss import LossWeights, distillation_loss
from ..alignment.divergence import kl_of_hidden
from ..alignment.fit import FitCache
from ..alignment.probes import Probe, needle_probe, plain_tokens
from ..alignment.teacher_model import TeacherModel, replaced
from .budget import Budget, Candidate, HeadCosts, Table, best_candidates, budget_report, longest_beside_state
from .head_scores import final_hidden, gated_heads, gated_layers, integrated_costs
from .layer_scores import MIN_TEACHER_ACCURACY
from .placement import Placement

WINDOWS = (32, 256)
"""Windows at which it is measured what each head costs; others are interpolated."""
POINTS = 2
"""Points of the line between full attention and windows that are integrated over."""


class Recall:
    """A needle far back in prose, and how well it is found again."""

    def __init__(self, teacher: TeacherModel, prose: torch.Tensor, answers: int, seed: int):
        self.teacher, vocabulary = teacher, plain_tokens(teacher.config.vocab_size)
        self.probe: Probe = needle_probe(prose, vocabulary, seed, width=2 * answers)
        self.distance = prose.shape[1] - prose.shape[1] // 8 - 2 * answers
        with torch.no_grad():
            hidden = final_hidden(teacher, self.probe.ids)
            self.of_teacher = self.loss(hidden).item()
            self.counts = self.accuracy(hidden) >= MIN_TEACHER_ACCURACY

    def _logits(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = self.probe.answers.roll(-1, 1).to(hidden.device)
        return self.teacher.model.lm_head(hidden[before]).float(), self.probe.ids[self.probe.answers].to(hidden.device)

    def loss(self, hidden: torch.Tensor) -> torch.Tensor:
        """Nats per answer."""
        return nn.functional.cross_entropy(*self._logits(hidden))

    def accuracy(self, hidden: torch.Tensor) -> float:
        """Share of answers."""
        logits, truth = self._logits(hidden)
        return (logits.argmax(-1) == truth).float().mean().item()


class BudgetSearch:
    """Everything that the search needs: an aligner, two texts, and what was found before."""

    def __init__(self, budget: Budget, aligner: Aligner):
        self.budget, self.aligner, self.progress = budget, aligner, aligner.progress
        self.options = budget.options.placement.search
        self.weight, self.model = self.options.recall_weight, aligner.model
        size = self.options.prose_tokens
        flat = aligner.prose.flatten()
        self.scoring, self.judging = flat[:size][None], flat[size : 2 * size][None]
        aligner.follow(budget.layer(1, has_state=True))
        self.cache: FitCache = aligner.cache(
            aligner.quick,
            prose=hashlib.sha256(flat.numpy().tobytes()).hexdigest(),
            scored={name: getattr(self.options, name) for name in ("recall_weight", "prose_tokens", "answers")},
            sinks=budget.options.placement.sinks,
        )
        self.known: dict[str, Any] = self.cache.load_json("head-costs.json")

    def run(self) -> tuple[Placement, dict[str, Any]]:
        """The best placement, and a report of it and of the alternatives."""
        started = time.perf_counter()
        longest = longest_beside_state(self.budget.options.sequence_length, self.budget.options.placement.sinks)
        costs = self.head_costs(self.budget.states_beside(longest))
        candidates, measured = best_candidates(self.budget, costs, longest), {}
        for i, candidate in enumerate(candidates[: self.options.candidates]):
            self.progress("measuring candidates", i, min(self.options.candidates, len(candidates)))
            measured[candidate] = self.measured(candidate)
        best = min(measured, key=lambda candidate: measured[candidate]["total"]) if measured else candidates[0]
        report = budget_report(self.budget, candidates, best, measured)
        return self.budget.placement(best), report | {"seconds": round(time.perf_counter() - started)}

    def head_costs(self, states: tuple[bool, ...]) -> HeadCosts:
        """The cost of every key/value head at several windows, and what a state takes off where one is considered."""
        windows = self.windows()
        kl = {window: self._kept(f"kl {window}", lambda w=window: self._kl_costs(w)) for window in windows}
        lost = self._kept(f"recall {windows[0]}", self._recall_costs)
        left = None
        if True in states:
            left = self._kept(f"state {windows[0]}", lambda: self._left_beside_state(kl[windows[0]], lost))
        return HeadCosts(kl, lost, left, self.budget.context, self.weight)

    def windows(self) -> list[int]:
        """Where costs are measured: no wider than a quarter of the text."""
        longest = max(1, min(self.options.prose_tokens // 4, self.budget.context - 1))
        return sorted({min(window, longest) for window in WINDOWS})

    def _kept(self, name: str, compute) -> Any:
        if name not in self.known:
            self.known[name] = compute()
            self.cache.save_json("head-costs.json", self.known)
        return self.known[name]

    @functools.cached_property
    def asked(self) -> Recall:
        """The needle that scores, as far back as the text goes: heads that reach 400 tokens need not reach 1,500."""
        return self._recall(self.scoring)

    def _recall(self, prose: torch.Tensor) -> Recall:
        return Recall(self.model, prose, self.options.answers, self.budget.options.seed)

    def kl_loss(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Hidden states after the final norm to the KL to the teacher, on the text that scores."""
        with torch.no_grad():
            reference = final_hidden(self.model, self.scoring).flatten(0, 1)
        head = self.model.model.lm_head

        def loss(hidden: torch.Tensor) -> torch.Tensor:
            hidden = hidden.flatten(0, 1)
            out = distillation_loss(hidden, head, None, lambda span: head(reference[span]), LossWeights(kl_weight=1.0))
            return out.loss / out.tokens

        return loss

    def _points(self, name: str):
        """Keeps the derivatives at each point, so that an interruption costs no more than one."""
        return lambda point, compute: self._kept(f"{name} {point + 1}/{POINTS}", compute)

    def _costs(self, name: str, window: int, ids: torch.Tensor, loss: Callable) -> Table:
        """Costs by layer and key/value head, the query heads of each together."""
        (layers, heads), shared, sinks = self.budget.shape, self.budget.shared, self.budget.options.placement.sinks
        of_heads = integrated_costs(
            self.model, ids, loss, (layers, heads * shared),
            lambda gates: gated_heads(self.model, window, sinks, gates), POINTS, self._points(name),
        )  # fmt: skip
        return of_heads.unflatten(1, (heads, shared)).sum(-1).tolist()

    def _kl_costs(self, window: int) -> list[list[float]]:
        self.progress("scoring heads", self.windows().index(window), len(self.windows()) + 1)
        return self._costs(f"kl {window}", window, self.scoring, self.kl_loss())

    def _recall_costs(self) -> list[list[float]]:
        """None where the teacher itself cannot recall."""
        self.progress("scoring heads", len(self.windows()), len(self.windows()) + 1)
        if not self.asked.counts:
            return [[0.0] * self.budget.shape[1] for _ in range(self.budget.shape[0])]
        window = self.windows()[0]
        return self._costs(f"recall {window}", window, self.asked.probe.ids, self.asked.loss)

    def _left_beside_state(self, kl: list[list[float]], lost: list[list[float]]) -> list[float]:
        """By layer, the cost with a state beside the window over the cost of the window alone."""
        layers, window = list(range(self.budget.shape[0])), self.windows()[0]
        self.aligner.follow(self.budget.layer(window, has_state=True))
        fits = self.aligner.fit(layers, self.aligner.quick)
        mixers = {layer: mixer.eval() for layer, (mixer, _) in fits.items()}

        def costs(name: str, ids: torch.Tensor, loss) -> torch.Tensor:
            return integrated_costs(
                self.model, ids, loss, (len(layers),), lambda gates: gated_layers(self.model, mixers, gates),
                POINTS, self._points(f"{name} beside state"),
            )  # fmt: skip

        with_state, alone = costs("kl", self.scoring, self.kl_loss()), torch.tensor(kl).sum(1)
        if self.asked.counts:
            with_state = with_state + self.weight * costs("recall", self.asked.probe.ids, self.asked.loss)
            alone = alone + self.weight * torch.tensor(lost).sum(1)
        # the share is of small differences where a layer costs next to nothing: no less than none, no more than twice
        return (with_state.clamp_min(0) / alone.clamp_min(1e-6)).clamp(0, 2).tolist()

    def measured(self, candidate: Candidate) -> dict[str, float]:
        """KL and recall loss on text that scored nothing, of a quick fit where there is a state."""
        name = f"measured {candidate.kept} {candidate.window} {candidate.has_state} {self.budget.context}"
        return self._kept(name, lambda: self._measure(candidate))

    @functools.cached_property
    def _judge(self) -> tuple[torch.Tensor, Recall]:
        """What the teacher makes of the text that judges."""
        with torch.no_grad():
            return final_hidden(self.model, self.judging), self._recall(self.judging)

    @torch.no_grad()
    def _measure(self, candidate: Candidate) -> dict[str, float]:
        placement = self.budget.placement(candidate)
        layers = list(placement.replaced_layers)
        self.aligner.follow(self.budget.layer(candidate.window, candidate.has_state), placement)
        if candidate.has_state:
            mixers = {layer: mixer for layer, (mixer, _) in self.aligner.fit(layers, self.aligner.quick).items()}
        else:
            mixers = {layer: self.model.mixer(layer).requires_grad_(False) for layer in layers}
        (reference, recall), lost = self._judge, 0.0
        with replaced(self.model.whole(), mixers):
            hidden = final_hidden(self.model, self.judging)
            if recall.counts and candidate.window < recall.distance:
                lost = max(recall.loss(final_hidden(self.model, recall.probe.ids)).item() - recall.of_teacher, 0.0)
        kl = kl_of_hidden(reference.flatten(0, 1), hidden.flatten(0, 1), self.model.model.lm_head).mean().item()
        lost *= max(1 - candidate.window / self.budget.context, 0.0)
        return {"kl": kl, "recall": lost, "total": kl + self.weight * lost}
