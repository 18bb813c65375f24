"""Spend a budget of cache: score every head, choose, measure the best choices, take the best."""

import dataclasses
import functools
import hashlib
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..alignment.aligner import ClosedFormAligner
from ..alignment.distillation.loss import LossWeights, distillation_loss
from ..alignment.divergence import kl_of_hidden
from ..alignment.fit import FitCache, Progress
from ..alignment.probes import Probe, needle_probe, plain_tokens
from ..alignment.settings import BUDGET_LENGTH, read_alignment_file
from ..alignment.teacher_model import TeacherModel, replaced
from ..config import ConversionConfig
from ..weights.reader import Checkpoint
from .budget import (
    Budget,
    Choice,
    HeadCosts,
    Table,
    best_choices,
    budget_report,
    fitting_window,
    longest_beside_state,
    ranked_heads,
)
from .head_scores import final_hidden, gated_heads, gated_layers, integrated_costs
from .layer_scores import MIN_TEACHER_ACCURACY

SHRINK = 0.7  # of the heads still in the race, from one round to the next


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
    """Everything that a budget of cache needs: an aligner, two texts, and what was found before.

    Raises:
        ValueError: there is too little text, or nothing keeps within the budget.
    """

    def __init__(self, budget: Budget, checkpoint: Checkpoint, progress: Progress):
        self.budget, self.progress = budget, progress
        settings = read_alignment_file(budget.options.align_config, BUDGET_LENGTH)
        aligner = ClosedFormAligner(
            budget.teacher, budget.options, checkpoint, progress, settings, 2 * settings.budget.prose_tokens
        )
        self.aligner, self.settings = aligner, aligner.settings.budget
        self.weight, self.model = aligner.settings.selection.recall_weight, aligner.model
        size = self.settings.prose_tokens
        flat = aligner.prose.flatten()
        self.scoring, self.judging = flat[:size][None], flat[size : 2 * size][None]
        self.cache: FitCache = aligner.cache(
            aligner.quick,
            prose=hashlib.sha256(flat.numpy().tobytes()).hexdigest(),
            scored={k: v for k, v in dataclasses.asdict(self.settings).items() if k not in ("state", "rounds")},
            sinks=budget.options.sinks,
            recall_weight=self.weight,
        )
        self.known: dict[str, Any] = self.cache.load_json("head-costs.json")

    def run(self, measured: int) -> tuple[ConversionConfig, dict[str, Any]]:
        """The options that make the best choice, and a report of it and the alternatives.

        Args:
            measured: how many of the best predicted choices are measured; the best of these is taken.
        """
        started = time.perf_counter()
        longest = longest_beside_state(self.aligner.settings.sequence_length, self.budget.options.sinks)
        costs = self.head_costs(self.budget.states_beside(longest))
        choices = best_choices(self.budget, costs, longest)
        given = len(self.budget.given_heads())
        some = next(
            (c for c in choices if len(c.kept) > given and not c.has_state and c.heads(self.budget.shape)), None
        )
        if some is not None and measured and self.settings.rounds:
            choices = [self.in_rounds(self.budget, some, costs, self.settings.rounds), *choices]
            measured += 1
        found = {}
        for i, choice in enumerate(choices[:measured]):
            self.progress("measuring choices", i, min(measured, len(choices)))
            found[choice] = self.measured(choice)
        best = min(choices[:measured], key=lambda choice: found[choice]["total"]) if found else choices[0]
        options = self.budget.applied(best)
        self.aligner.follow(options)
        report = budget_report(self.budget, choices, best, found) | {"seconds": round(time.perf_counter() - started)}
        self.aligner.report["budget"] = report
        return options, report

    def head_costs(self, states: tuple[bool, ...] | None = None) -> HeadCosts:
        """Of every key/value head, at several windows, and what a state takes off where one comes into question."""
        windows = self.windows()
        kl = {window: self._kept(f"kl {window}", lambda w=window: self._kl_costs(w)) for window in windows}
        lost = self._kept(f"recall {windows[0]}", self._recall_costs)
        left = None
        asked = self.budget.states() if states is None else states
        if True in asked and (self.settings.state or False not in asked):
            left = self._kept(f"state {windows[0]}", lambda: self._left_beside_state(kl[windows[0]], lost))
        return HeadCosts(kl, lost, left, self.budget.context, self.weight)

    def in_rounds(self, budget: Budget, choice: Choice, costs: HeadCosts, rounds: int) -> Choice:
        """As many heads as a choice keeps, from a larger set that shrinks round by round.

        Along the line from all heads to none, heads that need each other share a cost, and one that others can stand
        in for looks cheap. Among few that are left, each is worth what it does without the rest. Without a state.
        """
        given = set(budget.given_heads())
        count = len(choice.kept) - len(given)
        free = ranked_heads(costs.at(choice.window, False), budget.free_heads(), "heads")
        left = free[: round(count / SHRINK**rounds)]
        for step in range(rounds):
            scores = self._again(given | set(left), choice.window)
            left = sorted(left, key=lambda pair: (-scores[pair[0]][pair[1]], pair))
            left = left[: max(count, round(count / SHRINK ** (rounds - 1 - step)))]
        kept = tuple(sorted((*given, *left)))
        size = budget.sizes(False)
        window = fitting_window(budget, kept, size, budget.context)
        assert window is not None, "as many heads fitted before"
        return Choice(kept, window, False, size(kept, window), math.nan, in_rounds=True)

    def _again(self, kept: set[tuple[int, int]], window: int) -> Table:
        """What it costs that each of the heads kept sees a window as well, when all others do."""
        self.progress("scoring heads again", 0, 1)
        name = f"again {sorted(kept)} {window} {self.budget.context}"
        return self._kept(name, lambda: self._costs_among(kept, window, name))

    def _costs_among(self, kept: set[tuple[int, int]], window: int, name: str) -> Table:
        full = torch.zeros(self.budget.shape)
        for layer, kv in kept:
            full[layer, kv] = 1.0
        total = torch.tensor(self._costs(f"kl {name}", window, self.scoring, self.kl_loss(), full))
        if self.asked.counts:
            lost = self._costs(f"recall {name}", window, self.asked.probe.ids, self.asked.loss, full)
            total = total + self.weight * max(1 - window / self.budget.context, 0.0) * torch.tensor(lost)
        return total.tolist()

    def windows(self) -> list[int]:
        """Where costs are measured: no wider than a quarter of the text."""
        longest = max(1, min(self.settings.prose_tokens // 4, self.budget.context - 1))
        return sorted({min(window, longest) for window in self.settings.windows})

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
        return Recall(self.model, prose, self.settings.answers, self.budget.options.seed)

    def kl_loss(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Hidden states after the final norm to the KL to the teacher, on the text that scores."""
        with torch.no_grad():
            reference = final_hidden(self.model, self.scoring).flatten(0, 1)
        head = self.model.model.lm_head

        def loss(hidden: torch.Tensor) -> torch.Tensor:
            hidden, weights = hidden.flatten(0, 1), LossWeights()
            out = distillation_loss(hidden, head, None, lambda span: head(reference[span]), weights)
            return out.loss / out.tokens

        return loss

    def _points(self, name: str):
        """Keeps the derivatives at each point, so that an interruption costs no more than one."""
        return lambda point, compute: self._kept(f"{name} {point + 1}/{self.settings.points}", compute)

    def _costs(
        self, name: str, window: int, ids: torch.Tensor, loss, full: torch.Tensor | None = None
    ) -> list[list[float]]:
        """By layer and key/value head, the query heads of each together.

        Args:
            full: (layers, key/value heads), 1 for those that see everything where the line begins; all, by default.
        """
        (layers, heads), shared, sinks = self.budget.shape, self.budget.shared, self.budget.options.sinks
        full = torch.ones(layers, heads) if full is None else full
        full = full.repeat_interleave(shared, 1).to(self.model.device)
        of_heads = integrated_costs(
            self.model, ids, loss, full.shape,
            lambda gates: gated_heads(self.model, window, sinks, 1 - full + full * gates),
            self.settings.points, self._points(name),
        )  # fmt: skip
        return of_heads.unflatten(1, (heads, -1)).sum(-1).tolist()

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
        options, layers = self.budget.options, list(range(self.budget.shape[0]))
        window = self.windows()[0]
        self.aligner.follow(dataclasses.replace(options, window=window, **self.budget.with_state(True)))
        fits = self.aligner.fit(layers, self.aligner.quick)
        mixers = {layer: mixer.eval() for layer, (mixer, _) in fits.items()}

        def costs(name: str, ids: torch.Tensor, loss) -> torch.Tensor:
            return integrated_costs(
                self.model, ids, loss, (len(layers),), lambda gates: gated_layers(self.model, mixers, gates),
                self.settings.points, self._points(f"{name} beside state"),
            )  # fmt: skip

        with_state, alone = costs("kl", self.scoring, self.kl_loss()), torch.tensor(kl).sum(1)
        if self.asked.counts:
            with_state = with_state + self.weight * costs("recall", self.asked.probe.ids, self.asked.loss)
            alone = alone + self.weight * torch.tensor(lost).sum(1)
        # the share is of small differences where a layer costs next to nothing: no less than none, no more than twice
        return (with_state.clamp_min(0) / alone.clamp_min(1e-6)).clamp(0, 2).tolist()

    def measured(self, choice: Choice) -> dict[str, float]:
        """KL and recall loss on text that scored nothing, of a quick fit where there is a state."""
        name = f"measured {choice.kept} {choice.window} {choice.has_state} {self.budget.context}"
        return self._kept(name, lambda: self._measure(choice))

    @functools.cached_property
    def _judge(self) -> tuple[torch.Tensor, Recall]:
        """What the teacher makes of the text that judges."""
        with torch.no_grad():
            return final_hidden(self.model, self.judging), self._recall(self.judging)

    @torch.no_grad()
    def _measure(self, choice: Choice) -> dict[str, float]:
        options = self.budget.applied(choice)
        self.aligner.follow(options)
        whole = choice.layers(self.budget.shape)
        layers = [i for i in range(self.budget.shape[0]) if i not in whole]
        if choice.has_state:
            mixers = {layer: mixer for layer, (mixer, _) in self.aligner.fit(layers, self.aligner.quick).items()}
        else:
            mixers = {layer: self.model.mixer(layer).requires_grad_(False) for layer in layers}
        (reference, recall), lost = self._judge, 0.0
        with replaced(self.model.whole(), mixers):
            hidden = final_hidden(self.model, self.judging)
            if recall.counts and choice.window < recall.distance:
                lost = max(recall.loss(final_hidden(self.model, recall.probe.ids)).item() - recall.of_teacher, 0.0)
        kl = kl_of_hidden(reference.flatten(0, 1), hidden.flatten(0, 1), self.model.model.lm_head).mean().item()
        lost *= max(1 - choice.window / self.budget.context, 0.0)
        return {"kl": kl, "recall": lost, "total": kl + self.weight * lost}
