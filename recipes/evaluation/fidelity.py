"""How close a hybrid is to its teacher: likelihood, by position, generation and recall.

KL and perplexity on short text flatter anything local, so they stand beside KL by position on long text, a copy
probe, and what greedy decoding makes of the same prompts.
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from convert.alignment.divergence import CHUNK_TOKENS, kl_of_logits
from convert.alignment.fit import write_beside
from convert.alignment.probes import copy_probe, plain_tokens
from convert.alignment.text import documents, token_rows

FinalHidden = Callable[[torch.Tensor], torch.Tensor]
"""Token ids (B, L) to hidden states after the final norm (B, L, D)."""

PROMPTS = (
    "What is the capital of France?",
    "Why is the sky blue? Answer in one sentence.",
    "Write a short letter to a friend about a walk in the woods.",
    "List three uses of copper.",
    "My name is Miriam and I live in Oslo. What is my name, and where do I live?",
    "Explain to a child what a bank does.",
)
EDGES = (0, 256, 512, 1024, 2048, 4096, 8192)


@dataclass
class Yardstick:
    """The texts, and what the teacher makes of them.

    Args:
        model: the teacher, with `model` and `lm_head`.
        short, long: token ids (S, L) of validation text.
    """

    model: nn.Module
    tokenizer: Any
    short: torch.Tensor
    long: torch.Tensor
    new_tokens: int = 48
    copied: int = 150
    reference: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        self.copy = copy_probe(plain_tokens(self.model.config.vocab_size), 4, self.copied, seed=11)
        hidden = self.final_hidden(self.model)
        self.reference = {"short": self._through(hidden, self.short), "long": self._through(hidden, self.long)}
        self.teacher = self._scores(hidden) | self._generation(self.model)

    @staticmethod
    def final_hidden(model: nn.Module) -> FinalHidden:
        """A model's hidden states after the final norm."""
        return lambda ids: model.model(ids, use_cache=False).last_hidden_state

    def measure(self, hidden: FinalHidden, model: nn.Module | None = None) -> dict[str, Any]:
        """Figures of a student, given its hidden states and, for generation, the model itself."""
        figures = self._scores(hidden)
        figures["perplexity_ratio"] = figures["perplexity"] / self.teacher["perplexity"]
        figures["copy_of_teacher"] = figures["copy"] / max(self.teacher["copy"], 1e-9)
        return figures if model is None else figures | self.generation(model)

    def generation(self, model: nn.Module) -> dict[str, Any]:
        """What a student makes of the prompts, and how much of it the teacher does alike."""
        figures = self._generation(model)
        pairs = zip(figures["continuations"], self.teacher["continuations"], strict=True)
        return figures | {"greedy_agreement": _mean([common_prefix(a, b) / max(len(a), len(b)) for a, b in pairs])}

    @torch.no_grad()
    def _through(self, hidden: FinalHidden, ids: torch.Tensor) -> torch.Tensor:
        rows = max(1, 2048 // ids.shape[1])
        return torch.cat([hidden(batch) for batch in ids.split(rows)])

    @torch.no_grad()
    def _scores(self, hidden: FinalHidden) -> dict[str, Any]:
        kl, agrees, nats = self._compare(self._through(hidden, self.short), self.reference["short"], self.short)
        per_row = kl.mean(1)
        figures = {
            "kl": kl.mean().item(),
            "kl_95": 1.96 * per_row.std().item() / math.sqrt(len(per_row)),
            "top1": agrees.mean().item(),
            "perplexity": math.exp(nats.mean().item()),
        }
        kl, _, _ = self._compare(self._through(hidden, self.long), self.reference["long"], self.long)
        figures["kl_by_position"] = {
            f"{a}-{b}": kl[:, a:b].mean().item() for a, b in zip(EDGES, EDGES[1:], strict=False) if b <= kl.shape[1]
        }
        states = self._through(hidden, self.copy.ids)[:, :-1][self.copy.answers[:, 1:]]
        truth = self.copy.ids[self.copy.answers]
        hits = [self.model.lm_head(s).argmax(-1) == t for s, t in _chunks(states, truth)]
        figures["copy"] = torch.cat(hits).float().mean().item()
        return figures

    @torch.no_grad()
    def _compare(self, student: torch.Tensor, teacher: torch.Tensor, ids: torch.Tensor):
        """Per token (S, L): KL, whether the likeliest tokens agree, nats of the true next token (S, L - 1)."""
        parts, head = [], self.model.lm_head
        following = torch.cat([ids[:, 1:], ids[:, :1]], 1).flatten()
        for s, t, y in _chunks(student.flatten(0, 1), teacher.flatten(0, 1), following):
            of_student, of_teacher = head(s), head(t)
            parts.append(
                (
                    kl_of_logits(of_teacher, of_student),
                    (of_teacher.argmax(-1) == of_student.argmax(-1)).float(),
                    nn.functional.cross_entropy(of_student.float(), y, reduction="none"),
                )
            )
        kl, agrees, nats = (torch.cat(column).view(ids.shape) for column in zip(*parts, strict=True))
        return kl, agrees, nats[:, :-1]

    @torch.no_grad()
    def _generation(self, model: nn.Module) -> dict[str, Any]:
        chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        continuations = []
        for chat in chats:
            inputs = self.tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            drawn = model.generate(**inputs, do_sample=False, max_new_tokens=self.new_tokens)
            continuations.append(drawn[0, inputs["input_ids"].shape[1] :].tolist())
        return {
            "continuations": continuations,
            "answers": [self.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in continuations],
            "repetition": _mean([repetition(tokens) for tokens in continuations]),
        }


def _chunks(*tensors: torch.Tensor):
    return zip(*(tensor.split(CHUNK_TOKENS) for tensor in tensors), strict=True)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def common_prefix(a: list[int], b: list[int]) -> int:
    """Equal leading tokens."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def repetition(tokens: list[int], n: int = 4) -> float:
    """Share of n-grams that occurred before."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def text_rows(path: str | Path, tokenizer: Any, length: int, count: int, skip: int = 0) -> torch.Tensor:
    """(count, length) token ids of a text, after the first `skip` rows."""
    return token_rows(documents(str(path)), tokenizer, length, skip + count, str(path))[skip:]


def summary(figures: dict[str, Any]) -> str:
    """One line."""
    positions = " ".join(f"{k}: {v:.3f}" for k, v in figures["kl_by_position"].items())
    generation = ""
    if "greedy_agreement" in figures:
        generation = f", greedy {figures['greedy_agreement']:.2f}, repetition {figures['repetition']:.2f}"
    return (
        f"KL {figures['kl']:.3f} ± {figures['kl_95']:.3f}, perplexity x{figures['perplexity_ratio']:.2f}, top-1 "
        f"{figures['top1']:.3f}, copy {figures['copy']:.3f}{generation}; by position {positions}"
    )


def append(path: Path, record: dict[str, Any]) -> None:
    """Add a record to a JSON-lines file."""
    with open(path, "a") as file:
        file.write(json.dumps(record) + "\n")


def check_same_run(folder: Path, arguments: argparse.Namespace, of_a_call: tuple[str, ...]) -> None:
    """Results of other texts, lengths or settings are not to stand in one table; notes what these are.

    Args:
        folder: where the results are; made if need be.
        of_a_call: arguments that say what to measure this time, not how.

    Raises:
        ValueError: the folder holds another run's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    told = {key: str(value) for key, value in vars(arguments).items() if key not in of_a_call}
    path = folder / "arguments.json"
    if path.is_file() and json.loads(path.read_text()) != told:
        raise ValueError(f"{folder} holds a run with other arguments; choose another folder.")
    write_beside(path, lambda partial: partial.write_text(json.dumps(told, indent=2) + "\n"))
