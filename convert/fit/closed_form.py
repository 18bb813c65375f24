"""Fit one mixer to the attention it replaces: a linear solve, a short list of decays, and a refinement.

Given everything before it, out_proj (with its bias) is the solution of a ridge regression of the attention's output on
the mixer's features, shrunk towards the out_proj at hand (the teacher's own, at first). The decay is chosen from a
list, and every choice, the ridge strength included, is judged on sequences kept out of the fit. What enters
nonlinearly (B, C, x, the gate, the convolution, input-dependent decays) is refined by a fixed number of gradient
steps on the same cached activations, after which out_proj is solved once more.

Shapes: S sequences, L length, D model width, E features before out_proj.
"""

import copy
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from modeling_llamba.hybrid_attention import HybridAttention

from ..io.mapping import set_decay
from ..options import FitOptions
from .hybrid_fit import RIDGES, SALIENCE_SEQUENCES, Pieces, fit_hybrid, fit_salience, set_map

TINY = 1e-30  # an attention that is zero has no relative error
DECAY_SEQUENCES = 8
REFINE_SEQUENCES = 2  # per gradient step
REFINE_LEARNING_RATE = 2e-3  # at its peak


@dataclass(frozen=True)
class LayerFit:
    """Errors that a fit reached: they are ||mixer(u) - y||^2 / ||y||^2 on the held-out sequences."""

    decay: float | None
    """The decay chosen; None where the mixer has no parameter for it."""
    ridge: float | None
    """The ridge chosen; None where out_proj was best left as it was."""
    mapped: float
    """With the weights mapped and nothing fitted."""
    solved: float
    """After the closed form."""
    refined: float
    """At the end."""
    by_rank: dict[int, float] | None = None
    """Errors at the end of the fit of a hybrid layer, by the rank of its output map."""

    @classmethod
    def of_record(cls, record: dict) -> "LayerFit":
        """A fit that was written as JSON, whose names are texts."""
        by_rank = record.pop("by_rank")
        return cls(**record, by_rank=by_rank and {int(rank): error for rank, error in by_rank.items()})


class Unread(NamedTuple):
    """Errors and choices of a fit as numbers on its device; the first is 0 where activations were not finite."""

    numbers: torch.Tensor
    as_fit: Callable[..., LayerFit]
    """Makes a report of the other numbers."""

    def read(self) -> LayerFit:
        """Wait for the device, and report.

        Raises:
            ValueError: the activations are not finite, or there is no fit with a finite error.
        """
        finite, *numbers = self.numbers.tolist()
        if not finite:
            raise ValueError(
                "The teacher's activations contain NaN or infinity on this text; its weights are damaged."
            )
        return self.as_fit(*numbers)


@dataclass
class LayerData:
    """One layer's inputs u and targets y (S, L, D), the last `held_out` sequences for judging."""

    u: torch.Tensor
    y: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor]
    held_out: int
    pieces: Pieces = Pieces()
    finite: torch.Tensor | None = None
    """True, on the device, if all numbers of u and y are finite; None before they were checked."""

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


def fit_layer(mixer: nn.Module, data: LayerData, settings: FitOptions, seed: int = 0) -> tuple[nn.Module, Unread]:
    """Fit a mapped mixer that stands alone to (u, y).

    Returns:
        The fitted mixer and its errors. A step that does not lower the held-out error is taken back.
    """
    with torch.no_grad():
        mapped = held_out_error(mixer, data)
        decay, mixer = best_decay(mixer, data.fewer(DECAY_SEQUENCES), settings)
        solved, ridge = solve_out_proj(mixer, data, settings.ridges)
    refined = solved
    if settings.refine_steps:
        candidate = copy.deepcopy(mixer)
        with torch.enable_grad():  # whatever the caller does around us
            refine(candidate.requires_grad_(True), data, settings, seed)
        with torch.no_grad():
            # the steps moved the features, so the best out_proj for them is another one
            error, _ = solve_out_proj(candidate, data, settings.ridges)
            take_if(error < solved, mixer, candidate)
            refined = torch.minimum(error, solved)
    numbers = torch.stack([t.double() for t in (data.is_finite(), decay, ridge, mapped, solved, refined)])

    def as_fit(decay: float, ridge: float, mapped: float, solved: float, refined: float) -> LayerFit:
        if not math.isfinite(solved):
            raise ValueError(
                "No decay gives a finite error: the normal equations are singular or the features overflow."
            )
        found = (*settings.decays, None)[int(decay)]
        return LayerFit(found, (None, *settings.ridges)[int(ridge)], mapped, solved, refined)

    return mixer.requires_grad_(False), Unread(numbers, as_fit)


@torch.no_grad()
def take_if(better: torch.Tensor, mixer: nn.Module, other: nn.Module) -> None:
    """Give a mixer the other's parameters, in place, where `better` is true; the host need not know."""
    for ours, theirs in zip(mixer.state_dict().values(), other.state_dict().values(), strict=True):
        ours.copy_(torch.where(better, theirs, ours))


@torch.no_grad()
def fit_hybrid_layer(layer: HybridAttention, data: LayerData) -> Unread:
    """Fit a hybrid layer to (u, y) in place: salience, mass, and an output map of the highest rank judged.

    Raises:
        ValueError: the sequences are hardly longer than the window.
    """
    if layer.salience is not None:
        inputs = (data.batch(rows)[0] for rows in data.in_batches(data.fitting()[:SALIENCE_SEQUENCES]))
        fit_salience(layer, inputs, data.rotary, data.pieces.queries)
    finite = data.is_finite().double()
    if layer.mass is None:
        numbers = torch.stack([finite, held_out_error(layer, data)])
        return Unread(numbers, lambda error: LayerFit(None, None, error, error, error))
    fitting = data.in_batches(data.fitting())
    judging = data.in_batches(data.judging())
    fit = fit_hybrid(layer, data.batch, fitting[::2], fitting[1::2], judging, data.rotary, data.pieces)
    set_map(layer, fit.down, fit.up)

    def as_fit(mapped: float, best: float, *errors: float) -> LayerFit:
        error = min(errors)
        if math.isinf(error):
            raise ValueError(
                "The normal equations of the output map are singular: the features are all zero or not finite."
            )
        ridge = (*RIDGES, None)[int(best)]
        return LayerFit(None, ridge, mapped, error, error, dict(zip(fit.ranks, errors, strict=True)))

    numbers = torch.cat([torch.stack([finite, fit.mapped, fit.best.double()]), fit.errors])
    return Unread(numbers, as_fit)


@torch.no_grad()
def best_decay(mixer: nn.Module, data: LayerData, settings: FitOptions) -> tuple[torch.Tensor, nn.Module]:
    """The number of the decay with the lowest held-out error, and a copy of the mixer with it; -1 and the mixer itself
    where none can be set or none gives a finite error."""
    device = data.rotary[0].device
    best_error = torch.full((), math.inf, dtype=torch.float64, device=device)
    best = torch.full((), -1, device=device)
    best_mixer = mixer
    for number, decay in enumerate(settings.decays):
        # `set_decay` and the solution write in place, and every decay begins with what was mapped
        candidate = copy.deepcopy(mixer)
        if not set_decay(candidate, decay):
            break
        # nothing to compare, so the solve is left to the caller
        if len(settings.decays) == 1:
            return best.zero_(), candidate
        error, _ = solve_out_proj(candidate, data, settings.ridges)
        better = error < best_error
        if best_mixer is mixer:
            best_mixer = copy.deepcopy(mixer)
        take_if(better, best_mixer, candidate)
        best = torch.where(better, number, best)
        best_error = torch.minimum(error, best_error)
    return best, best_mixer


def features(mixer: nn.Module, u: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Compute the input (B, L, E) of the mixer's out_proj."""
    seen = []
    handle = mixer.out_proj.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    try:
        mixer(u, rotary)
    finally:
        handle.remove()
    return seen[0]


@torch.no_grad()
def solve_out_proj(mixer: nn.Module, data: LayerData, ridges: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Put the best out_proj (and bias) into the mixer, in place.

    Ridge regression with normal equations in float64: min ||F W - Y||^2 + r ||W - W0||^2 with W0 the out_proj at hand
    and r the ridge times the mean squared feature; the bias is hardly shrunk. The ridge is the one with the lowest
    held-out error; W0 itself is a candidate.

    Returns:
        The held-out relative error, and the number of the ridge among (None, *ridges), None for W0. Both stay on the
        device.
    """
    out = mixer.out_proj
    gram, moment = normal_equations(mixer, data)
    prior = _augmented(out)
    squares = gram.diagonal()[: out.in_features]
    scale = squares.mean().expand_as(squares)
    # kept, since every ridge is judged on the same features
    judged = [_pair(mixer, data, rows) for rows in data.in_batches(data.judging())]
    best = prior
    # no error is less than NaN, so that no candidate could take its place
    best_error = _error_of(prior, judged).nan_to_num(math.inf)
    choice = torch.zeros((), dtype=torch.long, device=best.device)
    for number, ridge in enumerate(ridges, start=1):
        # a bias has no reason to be small; what is left of the penalty keeps the matrix regular
        bias = 1e-6 * scale.mean().expand(len(gram) - out.in_features)
        penalty = ridge * torch.cat([scale, bias])
        # reports a failure instead of raising it, so that a larger ridge gets its turn
        factor, info = torch.linalg.cholesky_ex(gram + torch.diag(penalty))
        candidate = torch.cholesky_solve(moment + penalty[:, None] * prior, factor)
        error = _error_of(candidate, judged).masked_fill(info != 0, math.inf).nan_to_num(math.inf)
        # chosen on the device, which the host need not wait for
        better = error < best_error
        best = torch.where(better, candidate, best)
        choice = torch.where(better, number, choice)
        best_error = torch.minimum(error, best_error)
    out.weight.copy_(best[: out.in_features].T)
    if out.bias is not None:
        out.bias.copy_(best[out.in_features])
    return best_error, choice


def normal_equations(mixer: nn.Module, data: LayerData) -> tuple[torch.Tensor, torch.Tensor]:
    """F^T F (E', E') and F^T Y (E', D) in float64 over the fitting sequences; E' = E + 1 with a bias."""
    gram = moment = 0.0
    for rows in data.in_batches(data.fitting()):
        F, y = _pair(mixer, data, rows)
        gram = gram + F.T @ F
        moment = moment + F.T @ y
    return gram, moment


def _pair(mixer: nn.Module, data: LayerData, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
    u, y = data.batch(rows)
    # products of features have the square of their condition number, too much for float32
    F = features(mixer, u, data.rotary).flatten(0, 1).double()
    if mixer.out_proj.bias is not None:
        F = torch.cat([F, F.new_ones(len(F), 1)], 1)
    return F, y.flatten(0, 1).double()


def _augmented(out: nn.Linear) -> torch.Tensor:
    """(E or E + 1, D) in float64: the weight transposed, the bias as its last row."""
    weight = out.weight.detach().double().T
    return weight if out.bias is None else torch.cat([weight, out.bias.detach().double()[None]])


def _error_of(weights: torch.Tensor, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    error = sum(((F @ weights - y) ** 2).sum() for F, y in pairs)
    return error / sum((y**2).sum() for _, y in pairs).clamp_min(TINY)


@torch.no_grad()
def held_out_error(mixer: nn.Module, data: LayerData) -> torch.Tensor:
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


def refine(mixer: nn.Module, data: LayerData, settings: FitOptions, seed: int) -> None:
    """A fixed number of AdamW steps on the mixer, in place, on its squared error."""
    generator = torch.Generator().manual_seed(seed)
    squares = [data.batch(rows)[1].pow(2).mean().double() * len(rows) for rows in data.in_batches(data.fitting())]
    # the loss becomes relative to the targets, so that one learning rate fits every layer
    scale = (len(data.fitting()) / sum(squares).clamp_min(TINY)).float()
    trained = [parameter for parameter in mixer.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=REFINE_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0)
    steps = settings.refine_steps
    order = []
    for step in range(steps):
        warm = (step + 1) / (0.1 * steps)
        left = 1 - step / steps
        optimizer.param_groups[0]["lr"] = REFINE_LEARNING_RATE * min(1.0, warm) * left
        if len(order) < REFINE_SEQUENCES:
            order = torch.randperm(len(data.fitting()), generator=generator).tolist()
        rows = order[:REFINE_SEQUENCES]
        order = order[REFINE_SEQUENCES:]
        u, y = data.batch(rows)
        loss = (mixer(u, data.rotary) - y).pow(2).mean() * scale
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
