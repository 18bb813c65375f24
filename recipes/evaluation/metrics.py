"""KL, perplexity and top-1 agreement per token: over a text, and by position in powers of two.

A position is where a prediction is made: the one at t has seen t + 1 tokens. Intervals are 1.96 standard errors over
sequences, since the tokens of one sequence depend on each other; of exponentials by the delta method.

Shapes: B batch, L length, D model width, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache

from convert.fit.divergence import CHUNK_TOKENS, kl_of_logits
from modeling_llamba.compatibility import CACHE_NAME
from modeling_llamba.model.causal_lm import finish_logits

FIRST_EDGE = 16
SHORTEST = 8
Advance = Callable[[int], None]
Figures = dict[str, float | None]


class Reader(NamedTuple):
    """A causal language model in two steps, so that the logits of a long text never exist all at once.

    states: token ids (B, L) to (B, L, D); that of a model alone takes a cache, too, to go on from and to fill.
    head: any of them (L, D) to logits (L, V).
    """

    states: Callable[..., torch.Tensor]
    head: Callable[[torch.Tensor], torch.Tensor]


class PerToken(NamedTuple):
    """One figure per prediction, in nats; without a teacher, only `nats`.

    kl, agrees: (B, L). nats, teacher_nats: (B, L - 1), of the token that follows.
    """

    nats: torch.Tensor
    kl: torch.Tensor | None = None
    agrees: torch.Tensor | None = None
    teacher_nats: torch.Tensor | None = None

    def between(self, start: int, stop: int) -> "PerToken":
        """The predictions at positions [start, stop)."""
        return PerToken(*(None if column is None else column[:, start:stop] for column in self))


@torch.no_grad()
def reader(model: nn.Module) -> Reader:
    """The model's body and head where they make its logits; elsewhere the logits themselves."""
    body = model.base_model
    head = model.get_output_embeddings()
    probe = torch.arange(SHORTEST, device=model.device)[None] % model.config.vocab_size
    if body is not model and head is not None:

        def finished(states: torch.Tensor) -> torch.Tensor:
            return finish_logits(head(states), model.config)

        def states(ids: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
            return body(ids, **_holding(cache)).last_hidden_state

        apart = finished(states(probe))
        # some models do more between body and head, so it is tried before it is believed
        if torch.allclose(apart.float(), model(probe, use_cache=False).logits.float(), rtol=1e-2, atol=1e-2):
            return Reader(states, finished)
    return Reader(lambda ids, cache=None: model(ids, **_holding(cache)).logits, lambda logits: logits)


def remembered(own: Reader) -> Reader:
    """A reader that reads each text once."""
    known: dict[bytes, torch.Tensor] = {}

    def states(ids: torch.Tensor) -> torch.Tensor:
        key = ids.cpu().numpy().tobytes()
        if key not in known:
            known[key] = own.states(ids)
        return known[key]

    return Reader(states, own.head)


def _holding(cache: Cache | None) -> dict[str, Any]:
    """Keyword arguments of a model that goes on from a cache, or has none."""
    return {"use_cache": False} if cache is None else {"use_cache": True, CACHE_NAME: cache}


@torch.no_grad()
def per_token(
    model: Reader, teacher: Reader | None, ids: torch.Tensor, batch_size: int, advance: Advance = lambda done: None
) -> PerToken:
    """Every figure of every token of ids (B, L), of which `batch_size` sequences are read at once.

    Args:
        advance: called with the number of sequences that are done.
    """
    parts = []
    done = 0
    for batch in ids.split(batch_size):
        parts.append(_of_batch(model, teacher, batch))
        done += len(batch)
        advance(done)
    found = PerToken(*(None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)))
    if not all(values.isfinite().all() for values in found if values is not None):
        raise ValueError("Logits are not finite on this text; try --dtype float32, or check the weights.")
    return found


def _of_batch(model: Reader, teacher: Reader | None, ids: torch.Tensor) -> PerToken:
    # the last token's successor is made up, so that all have one; its figures are dropped below
    following = torch.cat([ids[:, 1:], ids[:, :1]], 1).flatten()
    states = [reader.states(ids).flatten(0, 1) for reader in (model, teacher) if reader is not None]
    # made at once: a small tensor of each chunk, between large ones, would keep freed memory from being used again
    found = torch.empty(4, ids.numel())
    columns = (found.T, following, *states)
    for of_token, y, s, *t in zip(*(column.split(CHUNK_TOKENS) for column in columns), strict=True):
        logits = model.head(s)
        of_token[:, 0] = nn.functional.cross_entropy(logits.float(), y, reduction="none")
        if t:
            reference = teacher.head(t[0])
            of_token[:, 1] = kl_of_logits(reference, logits)
            of_token[:, 2] = logits.argmax(-1) == reference.argmax(-1)
            of_token[:, 3] = nn.functional.cross_entropy(reference.float(), y, reduction="none")
    nats, kl, agrees, teacher_nats = found.view(4, *ids.shape)
    if teacher is None:
        return PerToken(nats[:, :-1])
    return PerToken(nats[:, :-1], kl, agrees, teacher_nats[:, :-1])


def half_width(values: torch.Tensor) -> float | None:
    """1.96 standard errors of the mean of independent values (B,); None of a single one."""
    if len(values) == 1:
        return None
    return 1.96 * values.double().std().item() / math.sqrt(len(values))


def mean(values: Sequence[float]) -> float | None:
    """Mean of some numbers; None of none."""
    if not values:
        return None
    return sum(values) / len(values)


def figures(found: PerToken) -> Figures:
    """Means over all tokens, each with the half width of its interval; None for what needs a teacher."""
    ratio = None
    if found.kl is not None:
        ratio = found.nats - found.teacher_nats
    columns = {"kl": found.kl, "perplexity": found.nats, "teacher_perplexity": found.teacher_nats,
               "perplexity_ratio": ratio, "agreement": found.agrees}  # fmt: skip
    values: Figures = {}
    for name, column in columns.items():
        if column is None:
            value = width = None
        else:
            value = column.double().mean().item()
            width = half_width(column.mean(1))
            if "perplexity" in name:
                value = math.exp(value)
                if width is not None:  # the interval of an exponential, to first order
                    width = value * width
        values |= {name: value, f"{name}_interval": width}
    return values


def edges(length: int) -> list[int]:
    """0, 16, 32, 64, ... and the length."""
    found = [0]
    while (edge := max(2 * found[-1], FIRST_EDGE)) < length:
        found.append(edge)
    return [*found, length]


def by_position(found: PerToken) -> list[dict[str, Any]]:
    """Figures of each range of positions [start, stop)."""
    bounds = edges(found.nats.shape[1] + 1)
    return [
        {"start": start, "stop": stop} | figures(found.between(start, stop))
        for start, stop in zip(bounds, bounds[1:], strict=False)
        if start < found.nats.shape[1]  # the last position has nothing to predict
    ]
