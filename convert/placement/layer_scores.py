"""What replacing layers costs: KL to the teacher on prose, and recall lost on probes."""

from dataclasses import dataclass

import torch
from torch import nn

from ..alignment.divergence import kl_of_hidden
from ..alignment.probes import Probe, associative_probe, copy_probe, needle_probe, plain_tokens
from ..alignment.teacher_model import TeacherModel, replaced

MIN_TEACHER_ACCURACY = 0.2


@dataclass(frozen=True)
class Marks:
    """KL (nats per token of prose) and, per probe, the loss (nats per answer) and accuracy."""

    kl: float
    loss: dict[str, float]
    accuracy: dict[str, float]


class Examination:
    """Prose and probes that every candidate model sits, against the teacher's own marks.

    Args:
        prose: (B, L) token ids that were not used for fitting.
        probe_length: random tokens of the copy probe before they repeat.
    """

    def __init__(self, teacher: TeacherModel, prose: torch.Tensor, seed: int = 0, probe_length: int = 96):
        self.teacher, self.prose = teacher, prose
        vocabulary = plain_tokens(teacher.config.vocab_size)
        self.probes: dict[str, Probe] = {
            "copy": copy_probe(vocabulary, 2, probe_length, seed),
            "associative": associative_probe(vocabulary, 2, probe_length // 4, seed),
            "needle": needle_probe(prose, vocabulary, seed),
        }
        states = self._states({})
        self.reference = self._final(states["prose"])
        self.teacher_marks = self._marks(states)
        self.counted = [
            name for name, accuracy in self.teacher_marks.accuracy.items() if accuracy >= MIN_TEACHER_ACCURACY
        ]
        self._base: dict[str, list[torch.Tensor]] = {}

    def recall_cost(self, marks: Marks) -> float:
        """Loss above the teacher's, mean over all answers of the probes that the teacher itself can answer, or 0."""
        answers = {name: int(self.probes[name].answers.sum()) for name in self.counted}
        extra = sum((marks.loss[name] - self.teacher_marks.loss[name]) * count for name, count in answers.items())
        return extra / max(sum(answers.values()), 1)

    @torch.no_grad()
    def base(self, mixers: dict[int, nn.Module]) -> Marks:
        """Examine the teacher with `mixers` in place, and remember every block's input for `with_layer`."""
        self._mixers = dict(mixers)
        self._base = self._states(mixers)
        return self._marks(self._base)

    @torch.no_grad()
    def with_layer(self, layer: int, mixer: nn.Module) -> Marks:
        """Examine the base with one more layer replaced: only the blocks from there on are run."""
        states = {}
        for part, inputs in self._base.items():
            with replaced(self.teacher.model, self._mixers | {layer: mixer}):
                states[part] = [*inputs[:layer], *self._run(inputs[layer], layer)]
        return self._marks(states)

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
    def _marks(self, states: dict[str, list[torch.Tensor]]) -> Marks:
        head = self.teacher.model.lm_head
        kl = kl_of_hidden(self.reference.flatten(0, 1), self._final(states["prose"]).flatten(0, 1), head).mean().item()
        loss, accuracy = {}, {}
        for name, probe in self.probes.items():
            # only the positions before an answer need the head
            hidden, before = self._final(states[name]), probe.answers.roll(-1, 1)
            nats, hits = _loss_and_hits(head(hidden[before]), probe.ids[probe.answers].to(hidden.device))
            loss[name], accuracy[name] = nats.mean().item(), hits.mean().item()
        return Marks(kl, loss, accuracy)


def _loss_and_hits(logits: torch.Tensor, truth: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy in nats and hits of logits (T, V) against tokens (T,)."""
    nats = nn.functional.cross_entropy(logits.float(), truth, reduction="none")
    return nats, (logits.argmax(-1) == truth).float()
