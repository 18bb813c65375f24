"""What replacing layers costs: KL to the teacher on prose, and recall lost on probes."""

import dataclasses
import hashlib
import time
from dataclasses import dataclass

import torch
from torch import nn

from modeling_llamba.hybrid_model import finish_logits

from ..alignment.aligner import Aligner
from ..alignment.divergence import kl_of_hidden
from ..alignment.fit import FitCache
from ..alignment.probes import Probe, associative_probe, copy_probe, needle_probe, plain_tokens
from ..alignment.teacher_model import TeacherModel, replaced
from ..weights.writer import Progress

MIN_TEACHER_ACCURACY = 0.2
RECALL_WEIGHT = 0.3
"""Nats of KL that a nat of recall loss counts for."""
ROUNDS = 3
"""How often layers are chosen; those that remain are scored again after each, since costs alone do not add up."""
PROBE_LENGTH = 96
"""Random tokens of the copy probe before they repeat."""


@dataclass(frozen=True)
class Scores:
    """KL (nats per token of prose) and, per probe, the loss (nats per answer) and accuracy."""

    kl: float
    loss: dict[str, float]
    accuracy: dict[str, float]


class LayerEvaluator:
    """Scores candidate models on prose and probes, against the teacher's own scores.

    Args:
        prose: (B, L) token ids that were not used for fitting.
    """

    def __init__(self, teacher: TeacherModel, prose: torch.Tensor, seed: int = 0):
        self.teacher, self.prose = teacher, prose
        vocabulary = plain_tokens(teacher.config.vocab_size)
        self.probes: dict[str, Probe] = {
            "copy": copy_probe(vocabulary, 2, PROBE_LENGTH, seed),
            "associative": associative_probe(vocabulary, 2, PROBE_LENGTH // 4, seed),
            "needle": needle_probe(prose, vocabulary, seed),
        }
        states = self._states({})
        self.reference = self._final(states["prose"])
        self.teacher_scores = self._scores(states)
        self.counted = [
            name for name, accuracy in self.teacher_scores.accuracy.items() if accuracy >= MIN_TEACHER_ACCURACY
        ]
        self._base: dict[str, list[torch.Tensor]] = {}

    def recall_cost(self, scores: Scores) -> float:
        """Loss above the teacher's, mean over all answers of the probes that the teacher itself can answer, or 0."""
        answers = {name: int(self.probes[name].answers.sum()) for name in self.counted}
        extra = sum((scores.loss[name] - self.teacher_scores.loss[name]) * count for name, count in answers.items())
        return extra / max(sum(answers.values()), 1)

    @torch.no_grad()
    def base(self, mixers: dict[int, nn.Module]) -> Scores:
        """Score the teacher with `mixers` in place, and remember every block's input for `with_layer`."""
        self._mixers = dict(mixers)
        self._base = self._states(mixers)
        return self._scores(self._base)

    @torch.no_grad()
    def with_layer(self, layer: int, mixer: nn.Module) -> Scores:
        """Score the base with one more layer replaced: only the blocks from there on are run."""
        states = {}
        for part, inputs in self._base.items():
            with replaced(self.teacher.model, self._mixers | {layer: mixer}):
                states[part] = [*inputs[:layer], *self._run(inputs[layer], layer)]
        return self._scores(states)

    def _states(self, mixers: dict[int, nn.Module]) -> dict[str, list[torch.Tensor]]:
        ids = {"prose": self.prose} | {name: probe.ids for name, probe in self.probes.items()}
        return {part: self._through(mixers, rows) for part, rows in ids.items()}

    @torch.no_grad()
    def _through(self, mixers: dict[int, nn.Module], ids: torch.Tensor) -> list[torch.Tensor]:
        """Every block's input, and the last block's output."""
        with replaced(self.teacher.whole(), mixers):
            return self._run(self.teacher.embed(ids), 0)

    def _run(self, hidden: torch.Tensor, start: int) -> list[torch.Tensor]:
        states = [hidden]
        inputs = self.teacher.block_inputs(hidden)
        for block in self.teacher.model.model.layers[start:]:
            states.append(block(states[-1], **inputs))
        return states

    def _final(self, states: list[torch.Tensor]) -> torch.Tensor:
        return self.teacher.model.model.norm(states[-1])

    @torch.no_grad()
    def _scores(self, states: dict[str, list[torch.Tensor]]) -> Scores:
        model = self.teacher.model

        def head(hidden: torch.Tensor) -> torch.Tensor:
            return finish_logits(model.lm_head(hidden), model.config)

        kl = kl_of_hidden(self.reference.flatten(0, 1), self._final(states["prose"]).flatten(0, 1), head).mean().item()
        loss, accuracy = {}, {}
        for name, probe in self.probes.items():
            # only the positions before an answer need the head
            hidden, before = self._final(states[name]), probe.answers.roll(-1, 1)
            logits, truth = head(hidden[before]), probe.ids[probe.answers].to(hidden.device)
            loss[name] = nn.functional.cross_entropy(logits.float(), truth, reduction="none").mean().item()
            accuracy[name] = (logits.argmax(-1) == truth).float().mean().item()
        return Scores(kl, loss, accuracy)


@dataclass(frozen=True)
class LayerScore:
    """What replacing one layer costs: KL in nats per token, and recall loss in nats per answer."""

    kl: float
    recall: float

    def total(self, recall_weight: float) -> float:
        """The two in one figure. Gains in recall count as 0, since they would otherwise make up for a loss in KL."""
        return self.kl + recall_weight * max(self.recall, 0.0)


def score_layers(
    mixers: dict[int, nn.Module],
    evaluator: LayerEvaluator,
    base: tuple[int, ...],
    cache: FitCache,
    progress: Progress = lambda what, done, total: None,
) -> dict[int, LayerScore]:
    """What replacing each further layer costs when `base` is replaced already."""
    known = cache.load_json("scores.json")
    keys = {layer: f"{','.join(map(str, base))}|{layer}" for layer in mixers if layer not in base}
    if any(key not in known for key in keys.values()):
        before = evaluator.base({layer: mixers[layer] for layer in base})
        for done, (layer, key) in enumerate(keys.items()):
            progress("scoring layers", done, len(keys))
            if key in known:
                continue
            scores = evaluator.with_layer(layer, mixers[layer])
            recall = evaluator.recall_cost(scores) - evaluator.recall_cost(before)
            known[key] = {"kl": scores.kl - before.kl, "recall": recall}
            cache.save_json("scores.json", known)
        progress("scoring layers", len(keys), len(keys))
    return {layer: LayerScore(**known[key]) for layer, key in keys.items()}


def select_layers(
    mixers: dict[int, nn.Module],
    evaluator: LayerEvaluator,
    num_replaced: int,
    recall_weight: float,
    rounds: int,
    cache: FitCache,
    progress: Progress = lambda what, done, total: None,
) -> tuple[tuple[int, ...], dict[int, LayerScore]]:
    """The layers to replace, cheapest first in each round, and the scores of the first round.

    Args:
        recall_weight: nats of KL that a nat of recall loss counts for; 0 selects by KL alone.
    """
    chosen: list[int] = []
    first: dict[int, LayerScore] = {}
    for step in range(rounds):
        target = round(num_replaced * (step + 1) / rounds)
        scores = score_layers(mixers, evaluator, tuple(sorted(chosen)), cache, progress)
        first = first or scores
        ranked = sorted(scores, key=lambda layer: (scores[layer].total(recall_weight), layer))
        chosen += ranked[: target - len(chosen)]
    return tuple(sorted(chosen)), first


def choose_layers(aligner: Aligner, count: int, recall_weight: float) -> tuple[int, ...]:
    """`count` layers that keep attention, by what replacing each costs after a quick fit."""
    num_layers, started = aligner.model.num_layers, time.perf_counter()
    prose = hashlib.sha256(aligner.prose.numpy().tobytes()).hexdigest()
    cache = aligner.cache(aligner.quick, prose=prose)
    name = f"chosen-{count}-{recall_weight}.json"
    found = cache.load_json(name)
    if not found:
        fits = aligner.fit(list(range(num_layers)), aligner.quick)
        mixers = {layer: mixer for layer, (mixer, _) in fits.items()}
        evaluator = LayerEvaluator(aligner.model, aligner.prose, aligner.options.seed)
        replaced, scores = select_layers(
            mixers, evaluator, num_layers - count, recall_weight, ROUNDS, cache, aligner.progress
        )
        found = {
            "replaced": list(replaced),
            "layer_scores": {layer: dataclasses.asdict(score) for layer, score in sorted(scores.items())},
            "probes_counted": evaluator.counted,
            "selection_seconds": round(time.perf_counter() - started),
        }
        cache.save_json(name, found)
    aligner.report |= {key: value for key, value in found.items() if key != "replaced"}
    return tuple(i for i in range(num_layers) if i not in found["replaced"])
