"""Recall probes: sequences whose marked tokens can only be known by looking back.

KL on prose is blind to recall: a hybrid can lose all in-context copying at no cost in perplexity. The probes are made
of random tokens, so that no knowledge helps, and need no data.
"""

from typing import NamedTuple

import torch

RECALL_EVERY = 6
SHORTEST_NEEDLE = 8


class Probe(NamedTuple):
    """ids (B, L), and answers (B, L) bool: which tokens must be recalled."""

    ids: torch.Tensor
    answers: torch.Tensor


def plain_tokens(vocabulary_size: int) -> range:
    """Token ids that probes are made of: neither special tokens nor the rarest."""
    return range(vocabulary_size // 50, vocabulary_size - vocabulary_size // 5)


def copy_probe(vocabulary: range, rows: int, length: int, seed: int) -> Probe:
    """`length` random tokens, then the same again; the second half, but for its first token, is to be recalled."""
    first = _random(vocabulary, rows, length, seed)
    answers = torch.zeros(rows, 2 * length, dtype=torch.bool)
    answers[:, length + 1 :] = True
    return Probe(torch.cat([first, first], 1), answers)


def associative_probe(vocabulary: range, rows: int, pairs: int, seed: int) -> Probe:
    """Key and value tokens in pairs, then every key again in another order with its value: recall the values."""
    tokens = _random(vocabulary, rows, 2 * pairs, seed).view(rows, pairs, 2)
    order = torch.stack([torch.randperm(pairs, generator=_generator(seed + 1 + i)) for i in range(rows)])
    asked = tokens.gather(1, order[..., None].expand(-1, -1, 2)).flatten(1)
    answers = torch.zeros(rows, 4 * pairs, dtype=torch.bool)
    answers[:, 2 * pairs + 1 :: 2] = True
    return Probe(torch.cat([tokens.flatten(1), asked], 1), answers)


def needle_probe(prose: torch.Tensor, vocabulary: range, seed: int, width: int = 8, place: int | None = None) -> Probe:
    """A needle of random tokens early in prose; at the end its first half again: recall the second half.

    Args:
        prose: (B, L) token ids of text, which the needle and the question replace in place of L's own tokens.
        width: tokens of the needle. place: where it begins; an eighth of the way by default.
    """
    rows, length = prose.shape
    needle = _random(vocabulary, rows, width, seed)
    ids = prose.clone()
    place = length // 8 if place is None else place
    ids[:, place : place + width] = needle
    ids[:, -width:] = needle
    answers = torch.zeros_like(ids, dtype=torch.bool)
    answers[:, -width // 2 :] = True
    return Probe(ids, answers)


def with_recall(ids: torch.Tensor, vocabulary: range, seed: int, begin: int = 0) -> torch.Tensor:
    """Change every sixth row of text (B, L), counted from the last, so that it asks for recall.

    Such rows become random tokens that are said twice and, alternately, get needles that are hidden in them.

    A fit on prose alone unlearns what few heads are for, since prose hardly asks for it.

    Args:
        begin: number of first tokens that stay, such as BOS.
    """
    changed = ids.clone()
    text = ids[:, begin:]
    half = text.shape[1] // 2
    # from the last, since held-out rows are the last: however few, they ask for recall as well
    for turn, i in enumerate(range(len(ids) - 1, -1, -RECALL_EVERY)):
        if turn % 2:
            changed[i : i + 1, begin:] = with_needles(text[i : i + 1], 1.0, vocabulary, seed + i)
        else:
            changed[i, begin : begin + 2 * half] = copy_probe(vocabulary, 1, half, seed + i).ids[0]
    return changed


def with_needles(ids: torch.Tensor, share: float, vocabulary: range, seed: int) -> torch.Tensor:
    """Hide needles of random tokens in a share of the rows of text (B, L) and ask for them in their last quarter.

    Such a row holds one needle of L / 4 tokens, or two half as long, and so on to needles of 8 tokens: each anywhere
    in its own stretch of the text, and all asked for in another order. Short ones teach to look up, long ones to copy.
    """
    generator = _generator(seed)
    length = ids.shape[1]
    changed = ids.clone()
    for i in torch.randperm(len(ids), generator=generator)[: round(share * len(ids))].tolist():
        halvings = max(length // 4 // SHORTEST_NEEDLE, 1).bit_length()
        count = 2 ** int(torch.randint(halvings, (), generator=generator))
        width = length // 4 // count
        needles = _random(vocabulary, 1, count * width, seed + 1 + i).view(count, width)
        stretch = (length - count * width) // count
        for j, needle in enumerate(needles):
            place = j * stretch + int(torch.randint(stretch - width + 1, (), generator=generator))
            changed[i, place : place + width] = needle
        changed[i, length - count * width :] = needles[torch.randperm(count, generator=generator)].flatten()
    return changed


def _random(vocabulary: range, rows: int, length: int, seed: int) -> torch.Tensor:
    """Tokens without repetition within a row where the vocabulary allows it."""
    if len(vocabulary) < length:
        return torch.randint(vocabulary.start, vocabulary.stop, (rows, length), generator=_generator(seed))
    draws = [torch.randperm(len(vocabulary), generator=_generator(seed + 7919 * i))[:length] for i in range(rows)]
    return vocabulary.start + torch.stack(draws)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
