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
from dataclasses import dataclass

import torch
from torch import nn

from modeling_llamba.hybrid_attention import HybridAttention

from ..io.mapping import set_decay
from ..options import FitOptions
from .hybrid_fit import SALIENCE_SEQUENCES, Pieces, fit_hybrid, fit_salience, set_map

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


@dataclass
class LayerData:
    """One layer's inputs u and targets y (S, L, D), the last `held_out` sequences for judging."""

    u: torch.Tensor
    y: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor]
    held_out: int
    pieces: Pieces = Pieces()

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
        index = torch.as_tensor(rows)
        u, y = (sent(part[index], device).float() for part in (self.u, self.y))
        return u, y


def sent(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on a device, for which the host does not wait."""
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t.to(device)


def fit_layer(mixer: nn.Module, data: LayerData, settings: FitOptions, seed: int = 0) -> tuple[nn.Module, LayerFit]:
    """Fit a mapped mixer that stands alone to (u, y).

    Returns:
        The fitted mixer and its errors. A step that does not lower the held-out error is taken back.

    Raises:
        ValueError: the activations are not finite, or no candidate gives a finite error.
    """
    check_finite(data)
    with torch.no_grad():
        mapped = held_out_error(mixer, data)
        decay, mixer = best_decay(mixer, data.fewer(DECAY_SEQUENCES), settings)
        solved, ridge = solve_out_proj(mixer, data, settings.ridges)
    if not math.isfinite(solved):
        raise ValueError("No decay gives a finite error: the normal equations are singular or the features overflow.")
    refined = solved
    if settings.refine_steps:
        candidate = copy.deepcopy(mixer)
        with torch.enable_grad():  # whatever the caller does around us
            refine(candidate.requires_grad_(True), data, settings, seed)
        with torch.no_grad():
            # the steps moved the features, so the best out_proj for them is another one
            error, _ = solve_out_proj(candidate, data, settings.ridges)
        if error < solved:
            refined = error
            mixer = candidate
    return mixer.requires_grad_(False), LayerFit(decay, ridge, mapped, solved, refined)


def check_finite(data: LayerData) -> None:
    """Refuse activations with NaN or infinity."""
    if not all(torch.isfinite(rows).all() for part in (data.u, data.y) for rows in part.split(data.pieces.sequences)):
        raise ValueError("The teacher's activations contain NaN or infinity on this text; its weights are damaged.")


@torch.no_grad()
def fit_hybrid_layer(layer: HybridAttention, data: LayerData) -> LayerFit:
    """Fit a hybrid layer to (u, y) in place: salience, mass, and an output map of the highest rank judged.

    Raises:
        ValueError: the activations are not finite, or the sequences hardly longer than the window.
    """
    check_finite(data)
    if layer.salience is not None:
        inputs = (data.batch(rows)[0] for rows in data.in_batches(data.fitting()[:SALIENCE_SEQUENCES]))
        fit_salience(layer, inputs, data.rotary, data.pieces.queries)
    if layer.mass is None:
        error = held_out_error(layer, data)
        return LayerFit(None, None, error, error, error)
    fitting = data.in_batches(data.fitting())
    judging = data.in_batches(data.judging())
    parts = (fitting[::2], fitting[1::2], judging)
    mapped, fitted = fit_hybrid(layer, data.batch, *parts, data.rotary, data.pieces)
    error = min(fitted.errors.values())
    set_map(layer, fitted.down, fitted.up)
    return LayerFit(None, fitted.ridge, mapped, error, error, fitted.errors)


@torch.no_grad()
def best_decay(mixer: nn.Module, data: LayerData, settings: FitOptions) -> tuple[float | None, nn.Module]:
    """The decay with the lowest held-out error, and a copy of the mixer with it; None where it cannot be set."""
    best_error = math.inf
    best = None
    best_mixer = mixer
    for decay in settings.decays:
        candidate = copy.deepcopy(mixer)
        if not set_decay(candidate, decay):
            break
        # nothing to compare, so the solve is left to the caller
        if len(settings.decays) == 1:
            return decay, candidate
        error, _ = solve_out_proj(candidate, data, settings.ridges)
        if error < best_error:
            best_error = error
            best = decay
            best_mixer = candidate
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
def solve_out_proj(mixer: nn.Module, data: LayerData, ridges: tuple[float, ...]) -> tuple[float, float | None]:
    """Put the best out_proj (and bias) into the mixer, in place.

    Ridge regression with normal equations in float64: min ||F W - Y||^2 + r ||W - W0||^2 with W0 the out_proj at hand
    and r the ridge times the mean squared feature; the bias is hardly shrunk. The ridge is the one with the lowest
    held-out error; W0 itself is a candidate.

    Returns:
        The held-out relative error, and the ridge, None if W0 was best.
    """
    out = mixer.out_proj
    gram, moment = normal_equations(mixer, data)
    prior = _augmented(out)
    squares = gram.diagonal()[: out.in_features]
    scale = squares.mean().expand_as(squares)
    # kept, since every ridge is judged on the same features
    judged = [_pair(mixer, data, rows) for rows in data.in_batches(data.judging())]
    candidates = [prior]
    found = [_error_of(prior, judged)]
    for ridge in ridges:
        # a bias has no reason to be small; what is left of the penalty keeps the matrix regular
        bias = 1e-6 * scale.mean().expand(len(gram) - out.in_features)
        penalty = ridge * torch.cat([scale, bias])
        # reports a failure instead of raising it, so that a larger ridge gets its turn
        factor, info = torch.linalg.cholesky_ex(gram + torch.diag(penalty))
        candidates.append(torch.cholesky_solve(moment + penalty[:, None] * prior, factor))
        found.append(_error_of(candidates[-1], judged).masked_fill(info != 0, math.inf))
    errors = torch.stack(found).nan_to_num(math.inf).tolist()  # the device is waited for here alone
    best_error = min(errors)
    best = candidates[errors.index(best_error)]
    best_ridge = (None, *ridges)[errors.index(best_error)]
    out.weight.copy_(best[: out.in_features].T)
    if out.bias is not None:
        out.bias.copy_(best[out.in_features])
    return best_error, best_ridge


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
def held_out_error(mixer: nn.Module, data: LayerData) -> float:
    """||mixer(u) - y||^2 / ||y||^2 over the sequences kept out of the fit, of a hybrid layer behind its window."""
    error = 0.0
    total = 0.0
    # tokens whose whole past lies in the window come out exact, and would dilute the error
    start = mixer.shape.window if isinstance(mixer, HybridAttention) else 0
    for rows in data.in_batches(data.judging()):
        u, y = data.batch(rows)
        error = error + ((mixer(u, data.rotary) - y)[:, start:] ** 2).sum().double()
        total = total + (y[:, start:] ** 2).sum().double()
    return (error / total.clamp_min(TINY)).item()


def refine(mixer: nn.Module, data: LayerData, settings: FitOptions, seed: int) -> None:
    """A fixed number of AdamW steps on the mixer, in place, on its squared error."""
    generator = torch.Generator().manual_seed(seed)
    squares = [data.batch(rows)[1].pow(2).mean().double() * len(rows) for rows in data.in_batches(data.fitting())]
    # the loss becomes relative to the targets, so that one learning rate fits every layer
    scale = len(data.fitting()) / sum(squares).clamp_min(TINY).item()
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
