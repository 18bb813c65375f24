"""Distances of matrices to every family of one state size: what a process of `matrix_approximation` does.

Shapes: M matrices, L length.
"""

import math
from dataclasses import dataclass

import torch

from .fits import Factors, alternate, beyond_window, decay_start, descend, distance, fold_decays, truncated_svd
from .gated_delta_fit import fit_gated_delta
from .semiseparable import balanced_truncation, lower_bound

WINDOW, SINKS = 32, 4


@dataclass(frozen=True)
class Effort:
    """How LR and SSD are fitted: sweeps of exact solves, or gradient steps from random factors where there are any.

    The gated delta rule is fitted by `delta_steps` gradient steps from SSD's fit, if at all.
    """

    sweeps: int = 8
    gradient_steps: int = 0
    extensions: bool = True
    delta_steps: int = 0


def approximate(target: torch.Tensor, state: int, effort: Effort) -> dict[str, list[float]]:
    """Distances (M,) of matrices (M, L, L) to each family of one state size."""
    target = target.double()
    zeros = target.new_zeros(*target.shape[:2], 1)
    found = {"ssm": distance(target, balanced_truncation(target, state).matrix())}
    found["lower_bound"] = lower_bound(target, state)
    if effort.gradient_steps:
        low_rank = descend(target, state, False, effort.gradient_steps)
        ssd = descend(target, state, True, effort.gradient_steps)
    else:
        C, B = truncated_svd(target, state)
        low_rank = alternate(target, Factors(C, B, zeros), effort.sweeps, fit_decays=False)
        ssd = alternate(target, Factors(C, B, zeros + math.log(0.99)), effort.sweeps, fit_decays=True)
        ssd = ssd.better_of(low_rank, target)  # which is one with decays of 1
    found["low_rank"], found["ssd"] = (distance(target, fit.matrix()) for fit in (low_rank, ssd))
    if effort.extensions:
        found |= extensions(target, state, effort, ssd)
    if effort.delta_steps:
        found["gated_delta"] = distance(target, fit_gated_delta(target, ssd, effort.delta_steps).matrix())
    return {name: values.tolist() for name, values in found.items()}


def extensions(target: torch.Tensor, state: int, effort: Effort, ssd: Factors) -> dict[str, torch.Tensor]:
    """What has come since, where it is cheap.

    Rotary embedding on B and C is no row of its own: it rotates free factors into free factors, so that SSD with and
    without it are the same matrices.
    """
    sums = ssd.matrix().sum(-1, keepdim=True)
    normalised = ssd.matrix() / torch.where(sums.abs() < 0.1, 1.0, sums)
    sweeps = max(effort.sweeps // 2, 1)
    mamba1 = alternate(target, decay_start(target, state), sweeps, fit_decays=False)
    rest = beyond_window(target, WINDOW, SINKS)
    C, B = truncated_svd(rest, state)
    start = Factors(C, B, target.new_full((*target.shape[:2], 1), math.log(0.99)))
    beside = alternate(rest, start, sweeps, fit_decays=True)
    return {
        "ssd_normalised": distance(target, normalised),
        "mamba1": distance(target, mamba1.matrix()),
        "mamba1_folded": distance(target, fold_decays(mamba1).matrix()),
        "window_ssd": distance(rest, beside.matrix()),
    }
