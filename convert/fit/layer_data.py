"""Activations of one layer, how a fit reads them, and its report.

Shapes: B batch, L length, D model width.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from modeling_llamba.hybrid.hybrid_attention import HybridAttention
from modeling_llamba.model.rotary import Rotary

TINY = 1e-30  # an attention that is zero has no relative error
FEWEST_QUERIES = 16


@dataclass(frozen=True)
class LayerFit:
    """Errors that a fit reached: they are ||mixer(u) - y||^2 / ||y||^2 on the held-out sequences."""

    decay: float | None
    """The decay chosen; None where the mixer has no parameter for it."""
    ridge: float | None
    """The ridge chosen; None where out_proj was best left as it was."""
    mapped: float
    """Error with mapped weights, before the closed form; of a hybrid layer with its salience, and the mass of keys
    that are all alike."""
    solved: float
    """Error after the closed form."""
    refined: float
    """Error after gradient steps; a hybrid layer has none, so that it is `solved`."""
    by_rank: dict[int, float] | None = None
    """Errors at the end of the fit of a hybrid layer, by the rank of its output map."""

    @classmethod
    def of_record(cls, record: dict) -> "LayerFit":
        """Read the errors of a fit from JSON, where ranks are texts."""
        by_rank = record.pop("by_rank")
        return cls(**record, by_rank=by_rank and {int(rank): error for rank, error in by_rank.items()})


class Unread(NamedTuple):
    """Errors and choices of a fit as numbers on its device; the first is 0 where activations were not finite."""

    numbers: torch.Tensor
    as_fit: Callable[..., LayerFit]
    """Function from the numbers after the first to the errors of the fit."""

    def read(self) -> LayerFit:
        """Wait for the device and return the errors of the layer's fit.

        Raises:
            ValueError: the activations are not finite, or there is no fit with a finite error.
        """
        finite, *numbers = self.numbers.tolist()
        if not finite:
            raise ValueError(
                "The teacher's activations contain NaN or infinity on this text; its weights are damaged."
            )
        return self.as_fit(*numbers)


class Pieces(NamedTuple):
    """Sizes of the batches of a fit: sequences, queries per block of scores, and True if the activations of the fit of
    the mass are kept for the fit of the output map instead of computed again."""

    sequences: int = 2
    queries: int = 128
    kept: bool = True

    def smaller(self) -> "Pieces | None":
        """Return the next sizes that take less memory; None after the smallest."""
        if self.kept:
            return self._replace(kept=False)
        if self.sequences > 1:
            return self._replace(sequences=self.sequences // 2)
        return self._replace(queries=self.queries // 2) if self.queries > FEWEST_QUERIES else None


@dataclass
class LayerData:
    """One layer's inputs u and targets y (B, L, D), the last `held_out` sequences for judging."""

    u: torch.Tensor
    y: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor]
    held_out: int
    pieces: Pieces = Pieces()
    finite: torch.Tensor | None = None
    """True, on the device, if all numbers of u and y are finite; None before they were checked."""
    mean_rotary: Rotary | None = None
    """Means of the rotary embedding over a context (`TeacherModel.mean_rotary`), for offsets of keys."""

    def fewer(self, fitting: int) -> "LayerData":
        """Keep at most so many of the sequences to fit on."""
        rows = fitting + self.held_out
        return dataclasses.replace(self, u=self.u[-rows:], y=self.y[-rows:])

    def fitting(self) -> range:
        """Indices of the sequences to fit on."""
        return range(len(self.u) - self.held_out)

    def judging(self) -> range:
        """Indices of the sequences to judge on."""
        return range(len(self.u) - self.held_out, len(self.u))

    def in_batches(self, rows: range) -> list[range]:
        """Divide these sequences into as many at a time as lie in memory at once."""
        return [rows[i : i + self.pieces.sequences] for i in range(0, len(rows), self.pieces.sequences)]

    def batch(self, rows: list[int] | range) -> tuple[torch.Tensor, torch.Tensor]:
        """u and y of some sequences in float32 on the mixer's device."""
        device = self.rotary[0].device
        # slices, which the device reads itself: it may not have come to writing them yet
        slices = [slice(rows.start, rows.stop)] if isinstance(rows, range) else [slice(i, i + 1) for i in rows]
        u, y = (
            torch.cat([part[which].to(device, non_blocking=True) for which in slices]).float()
            for part in (self.u, self.y)
        )
        return u, y

    def is_finite(self) -> torch.Tensor:
        """True, on the device, where no number is NaN or infinite."""
        if self.finite is not None:
            return self.finite
        parts = [rows.isfinite().all() for part in (self.u, self.y) for rows in part.split(self.pieces.sequences)]
        return torch.stack(parts).all().to(self.rotary[0].device)


def on_host(t: torch.Tensor) -> torch.Tensor:
    """A tensor on the host, which is there once the device has been waited for."""
    if not t.is_cuda:
        return t
    here = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
    return here.copy_(t, non_blocking=True)


@torch.no_grad()
def held_out_error(mixer: Callable, data: LayerData) -> torch.Tensor:
    """||mixer(u) - y||^2 / ||y||^2 over the sequences kept out of the fit, of a hybrid layer behind its window; one
    number, on the device."""
    error = 0.0
    total = 0.0
    # tokens whose whole past lies in the window come out exact, and would dilute the error
    start = mixer.shape.window if isinstance(mixer, HybridAttention) else 0
    for rows in data.in_batches(data.judging()):
        u, y = data.batch(rows)
        error = error + ((mixer(u, data.rotary) - y)[:, start:] ** 2).sum().double()
        total = total + (y[:, start:] ** 2).sum().double()
    return error / total.clamp_min(TINY)
