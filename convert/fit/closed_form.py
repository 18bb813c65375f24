"""Fit one mixer to the attention it replaces: a linear solve, a short list of decays, and a refinement.

Given everything before it, out_proj (with its bias) is the solution of a ridge regression of the attention's output on
the mixer's features, shrunk towards the out_proj at hand (the teacher's own, at first). The decay is chosen from a
list, and every choice, the ridge strength included, is judged on sequences kept out of the fit. What enters
nonlinearly (B, C, x, the gate, the convolution, input-dependent decays) is refined by a fixed number of gradient
steps on the same cached activations, after which out_proj is solved once more.

Shapes: B batch, L length, D model width, I inner width, X features.
"""

import copy
import math

import torch
from torch import nn

from ..hybrids.mapping import set_decay
from ..options import FitOptions
from .layer_data import TINY, LayerData, LayerFit, Unread, held_out_error

DECAY_SEQUENCES = 8
REFINE_SEQUENCES = 2  # per gradient step
REFINE_LEARNING_RATE = 2e-3  # at its peak


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
    """Give a mixer the other's parameters, in place, where `better` is true, without waiting for the device."""
    for ours, theirs in zip(mixer.state_dict().values(), other.state_dict().values(), strict=True):
        ours.copy_(torch.where(better, theirs, ours))


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
    """Compute the input (B, L, I) of the mixer's out_proj."""
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
    """F^T F (X, X) and F^T Y (X, D) in float64 over the fitting sequences; X = I + 1 with a bias."""
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
    """(I or I + 1, D) in float64: the weight transposed, the bias as its last row."""
    weight = out.weight.detach().double().T
    return weight if out.bias is None else torch.cat([weight, out.bias.detach().double()[None]])


def _error_of(weights: torch.Tensor, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    error = sum(((F @ weights - y) ** 2).sum() for F, y in pairs)
    return error / sum((y**2).sum() for _, y in pairs).clamp_min(TINY)


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
