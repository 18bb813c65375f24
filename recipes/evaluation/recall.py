"""Recall of a model, by length and by distance: copying, associative recall, a needle and a passkey in text.

The first three are of random tokens (convert/fit/probes.py), which no knowledge helps to guess; the passkey is
said in words. An answer is right where the likeliest token is the true one, given the true tokens before it.
"""

import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from convert.fit.divergence import CHUNK_TOKENS
from convert.fit.probes import Probe, associative_probe, copy_probe, needle_probe, plain_tokens
from convert.fit.text import beginning_of_text

from .metrics import Reader

NEEDLE = 8
DIGITS = 5
TOLD = " The pass key is {key}. Remember it: {key} is the pass key."
ASKED = " What is the pass key? The pass key is"


class Question(NamedTuple):
    """A probe and how far back its answers lie.

    distance: tokens between what was said and what is asked; None where it differs from answer to answer.
    begin: number of tokens before the probe that the tokenizer begins a text with.
    """

    name: str
    length: int
    distance: int | None
    probe: Probe
    whole: bool = False
    """True if an answer counts only where all of its tokens are right."""
    begin: int = 0


def questions(
    prose: torch.Tensor, tokenizer: Any, vocabulary_size: int, depths: list[float], seed: int
) -> list[Question]:
    """Make all probes of one length. They begin as the tokenizer begins a text.

    Args:
        prose: (B, L) token ids of text: as many questions of each kind, in which needle and passkey are hidden.
        depths: where, from 0 (the beginning) to 1 (right before the question).
    """
    rows, length = prose.shape
    vocabulary = plain_tokens(vocabulary_size)
    first = beginning_of_text(tokenizer)
    begin = len(first)
    half = (length - begin) // 2
    pairs = (length - begin) // 4
    copied = copy_probe(vocabulary, rows, half, seed)
    associative = associative_probe(vocabulary, rows, pairs, seed)
    found = [
        Question("copy", length, half, _after(first, copied), begin=begin),
        Question("associative", length, None, _after(first, associative), begin=begin),
    ]
    for depth in depths:
        place = begin + round(depth * (length - begin - 2 * NEEDLE))
        probe = needle_probe(prose, vocabulary, seed, NEEDLE, place)
        found.append(Question("needle", length, length - NEEDLE - place, probe))
    for depth in depths:
        probe, distance = passkey_probe(prose, tokenizer, depth, seed)
        found.append(Question("passkey", length, distance, probe, whole=True))
    return found


def needle_distances(length: int, distances: Sequence[int]) -> list[int]:
    """The distances (in tokens) that fit a row of this length, or half a row where none does."""
    most = length - NEEDLE * len(distances)
    return [distance for distance in distances if distance <= most] or [length // 2]


def needles_probe(prose: torch.Tensor, vocabulary: range, distances: list[int], seed: int) -> Probe:
    """Hide a needle at each distance, and ask for all of them at the end, the nearest first.

    Args:
        prose: (B, L) token ids of text, which needles and questions replace in place of L's own tokens.
    """
    ids = prose.clone()
    answers = torch.zeros_like(ids, dtype=torch.bool)
    first_question = prose.shape[1] - NEEDLE * len(distances)
    for i, distance in enumerate(distances):
        question = first_question + NEEDLE * i
        end = question + NEEDLE
        one = needle_probe(ids[:, :end], vocabulary, seed + i, NEEDLE, question - distance)
        ids[:, :end] = one.ids
        answers[:, :end] |= one.answers
    return Probe(ids, answers)


def _after(first: list[int], probe: Probe) -> Probe:
    """A probe after the tokens that begin a text."""
    rows = len(probe.ids)
    begin = len(first)
    ids = torch.tensor(first, dtype=torch.long).expand(rows, begin)
    return Probe(torch.cat([ids, probe.ids], 1), torch.nn.functional.pad(probe.answers, (begin, 0)))


def passkey_probe(prose: torch.Tensor, tokenizer: Any, depth: float, seed: int) -> tuple[Probe, int]:
    """Tell a five-digit number somewhere in text and ask for it at the end; the probe, and the tokens between."""
    rows = []
    marks = []
    distances = []
    length = prose.shape[1]
    begin = len(beginning_of_text(tokenizer))
    for i, text in enumerate(prose.tolist()):
        key = "".join(random.Random(f"{seed} {i}").choices("123456789", k=DIGITS))
        told, asked, answer = (
            tokenizer(words, add_special_tokens=False).input_ids for words in (TOLD.format(key=key), ASKED, f" {key}")
        )
        around = length - len(told) - len(asked) - len(answer)
        if around < begin or not answer:
            raise ValueError(f"The passkey's words take {length - around} tokens; recall lengths must be longer.")
        place = begin + round(depth * (around - begin))
        rows.append(text[:place] + told + text[place:around] + asked + answer)
        marks.append([False] * (length - len(answer)) + [True] * len(answer))
        distances.append(length - len(answer) - len(asked) - place)
    return Probe(torch.tensor(rows), torch.tensor(marks)), round(sum(distances) / len(distances))


@torch.no_grad()
def hits(model: Reader, probe: Probe, batch_size: int, device: torch.device) -> torch.Tensor:
    """(B, L) bool: which of the tokens that are asked for the model predicts; False elsewhere."""
    found = torch.zeros_like(probe.answers)
    for start in range(0, len(probe.ids), batch_size):
        rows = slice(start, start + batch_size)
        ids = probe.ids[rows].to(device)
        answers = probe.answers[rows].to(device)
        before = torch.cat([answers[:, 1:], torch.zeros_like(answers[:, :1])], 1)
        # logits are made where an answer is predicted alone, one position before it
        states = model.states(ids)[before]
        said = ids.new_empty(len(states))  # made at once, as in metrics.py
        for of_token, s in zip(said.split(CHUNK_TOKENS), states.split(CHUNK_TOKENS), strict=True):
            of_token[:] = model.head(s).argmax(-1)
        found[rows][probe.answers[rows]] = (said == ids[answers]).cpu()
    return found


def scores(question: Question, model: torch.Tensor, teacher: torch.Tensor | None = None) -> list[dict[str, Any]]:
    """Accuracy over all answers and, where their distances differ, also by distance in powers of two.

    Args:
        model, teacher: (B, L) of each as `hits` gives it.
    """
    answers = question.probe.answers
    groups = {question.distance: question.probe.answers}
    if question.distance is None:
        upper = 2 ** torch.ceil(torch.log2(_distances(question).clamp(min=1).double())).long()
        groups |= {distance: answers & (upper == distance) for distance in sorted(set(upper[answers].tolist()))}
    rows = []
    for distance, asked in groups.items():
        ours, error, samples = _score(model, asked, question.whole)
        theirs = teacher_error = None
        if teacher is not None:
            theirs, teacher_error, _ = _score(teacher, asked, question.whole)
        row = {"probe": question.name, "length": question.length, "distance": distance, "samples": samples}
        row |= {"model": ours, "teacher": theirs, "model_error": error, "teacher_error": teacher_error}
        rows.append(row)
    return rows


def relative_recall(rows: list[dict[str, Any]]) -> float | None:
    """Ratio of the model's recall to the teacher's, a mean over all probes; None if the teacher recalls nothing."""
    # the rows hold associative recall twice: over all distances, which counts, and by distance
    counted = [row for row in rows if row["probe"] != "associative" or row["distance"] is None]
    total = sum(row["teacher"] for row in counted)
    if not total:
        return None
    return sum(row["model"] for row in counted) / total


def _score(found: torch.Tensor, answers: torch.Tensor, whole: bool) -> tuple[float, float | None, int]:
    """Mean accuracy over sequences, which are independent, its standard error, and the number of sequences."""
    asked = answers.any(1)
    right, total = ((t[asked] & answers[asked]).sum(1).double() for t in (found, answers))
    of_row = right / total
    if whole:
        of_row = (right == total).double()
    error = None
    if len(of_row) > 1:
        error = of_row.std().item() / math.sqrt(len(of_row))
    return of_row.mean().item(), error, len(of_row)


def _distances(question: Question) -> torch.Tensor:
    """(B, L): distance from each answer of an associative probe back to where its value was given first."""
    probe = question.probe
    begin = question.begin
    distances = torch.zeros_like(probe.ids)
    for row, (ids, answers) in enumerate(zip(probe.ids.tolist(), probe.answers.tolist(), strict=True)):
        value_of: dict[int, int] = {}
        for place in range(begin, begin + (len(ids) - begin) // 2, 2):
            value_of.setdefault(ids[place], place + 1)
        for place, asked in enumerate(answers):
            if asked:
                distances[row, place] = place - value_of[ids[place - 1]]
    return distances
