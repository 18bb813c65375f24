"""One mixer fitted by several optimisers in the same time: are AdamW's 120 steps of the closed form the right choice?

python -m recipes.validation_text runs/text
python -m recipes.fit_comparison runs/fit_comparison.json --dataset runs/text/wikipedia_5.jsonl [--layers 3 17 26]

All start from the same mixer (decay chosen, out_proj solved) and end with out_proj solved once more. AdamW runs as in
the converter; the others get the CPU time that it took, on all fitting sequences at once: they need exact gradients.

L-BFGS: every parameter, history of 10, strong Wolfe line search.
alternating: the output is linear in the rows of in_proj that make x, in those of B and in those of C (the gate and the
decay held, the convolution without an activation), so each block is a least-squares problem, solved by a few
conjugate-gradient steps in turn; then out_proj in closed form, and around again.
"""

import argparse
import copy
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers.utils import logging

from convert.alignment import ClosedFormAligner
from convert.alignment.activations import ActivationStream
from convert.alignment.closed_form import FitSettings, LayerData, best_decay, refine, solve_out_proj
from convert.config import make_config
from convert.teacher import embedded_teacher, find_teacher

CG_STEPS = 4
MEMORY = 10**12


def squared_error(mixer: nn.Module, data: LayerData) -> float:
    """||mixer(u) - y||^2 / ||y||^2 over the fitting sequences; gradients are added to the parameters'."""
    norm = sum(data.batch([row])[1].square().sum().item() for row in data.fitting())
    total = 0.0
    for row in data.fitting():
        u, y = data.batch([row])
        loss = (mixer(u, data.rotary) - y).square().sum() / norm
        loss.backward()
        total += loss.item()
    return total


class OutOfTime(Exception):
    """The time is used."""


class Clock:
    """CPU seconds of this process, and when they are used up."""

    def __init__(self, seconds: float):
        self.until = time.process_time() + seconds

    def check(self) -> None:
        """Raise OutOfTime when it is time."""
        if time.process_time() > self.until:
            raise OutOfTime


def lbfgs(mixer: nn.Module, data: LayerData, clock: Clock) -> None:
    """Minimise over every parameter, in place; the best point seen stays."""
    parameters = [p.requires_grad_(True) for p in mixer.parameters()]
    optimizer = torch.optim.LBFGS(parameters, max_iter=10**6, history_size=10, line_search_fn="strong_wolfe")
    best, best_state = float("inf"), None

    def closure() -> float:
        nonlocal best, best_state
        clock.check()
        optimizer.zero_grad()
        error = squared_error(mixer, data)
        if error < best:
            best, best_state = error, copy.deepcopy(mixer.state_dict())
        return error

    try:
        optimizer.step(closure)
    except OutOfTime:
        pass
    mixer.load_state_dict(best_state)


def alternating(mixer: nn.Module, data: LayerData, clock: Clock, ridges: tuple[float, ...]) -> None:
    """Conjugate gradients on x, B and C in turn, out_proj in closed form after each round, in place."""
    sizes = (mixer.x_size, mixer.B_size, mixer.C_size)
    try:
        while True:
            for rows in torch.arange(sum(sizes)).split(sizes):
                conjugate_gradients(mixer, mixer.in_proj.weight.requires_grad_(True), rows, data, clock)
            solve_out_proj(mixer, data, ridges)
    except OutOfTime:
        pass


def conjugate_gradients(mixer: nn.Module, weight: nn.Parameter, rows: torch.Tensor, data: LayerData, clock: Clock):
    """A few steps on some rows of a weight in which the output is linear, so that the error is a quadratic."""

    def gradient() -> torch.Tensor:
        clock.check()
        weight.grad = None
        squared_error(mixer, data)
        return weight.grad[rows]

    start = gradient()
    residual, direction = -start, -start
    for _ in range(CG_STEPS):
        at = weight.detach()[rows].clone()
        try:
            weight.data[rows] = at + direction
            curved = gradient() - start  # the Hessian times the direction, exactly
        finally:
            weight.data[rows] = at
        length = residual.square().sum() / (direction * curved).sum()
        weight.data[rows] = at + length * direction
        following = residual - length * curved
        start = -following
        direction = following + following.square().sum() / residual.square().sum() * direction
        residual = following


def compare(
    mixer: nn.Module, data: LayerData, settings: FitSettings, layer: int, longer: int
) -> dict[str, dict[str, float]]:
    """Fitting and held-out error, and seconds, of each way, and of two in `longer` times the time if that is not 1."""
    with torch.no_grad():
        _, start = best_decay(mixer, data, settings)
    results: dict[str, dict[str, float]] = {}

    def run(name: str, change: Callable[[nn.Module], None]) -> None:
        candidate, began = copy.deepcopy(start).requires_grad_(True), time.process_time()
        change(candidate)
        seconds = time.process_time() - began
        held_out, _ = solve_out_proj(candidate, data, settings.ridges)
        fitting = squared_error(candidate.requires_grad_(True), data)
        results[name] = {"held_out": held_out, "fitting": fitting, "cpu_seconds": seconds}

    run("solve only", lambda candidate: None)
    run("AdamW", lambda candidate: refine(candidate, data, settings, layer))
    given = results["AdamW"]["cpu_seconds"]
    run("L-BFGS", lambda candidate: lbfgs(candidate, data, Clock(given)))
    run("alternating", lambda candidate: alternating(candidate, data, Clock(given), settings.ridges))
    if longer > 1:
        more = dataclasses.replace(settings, refine_steps=longer * settings.refine_steps)
        run(f"AdamW, {longer} x the time", lambda candidate: refine(candidate, data, more, layer))
        run(f"L-BFGS, {longer} x the time", lambda candidate: lbfgs(candidate, data, Clock(longer * given)))
    return results


def main(
    output: Path, dataset: str, layers: list[int], tokens: int, steps: int, longer: int, model: str | None
) -> dict:
    """Stream to each layer, compare there, print and keep the figures.

    Raises:
        ValueError: no such layer, or a text that is too short.
    """
    logging.set_verbosity_error()
    options = make_config(
        model=model or str(embedded_teacher()), output="unused", calibration_dataset=dataset,
        calibration_tokens=tokens, layer_selection="uniform",
    )  # fmt: skip
    found = find_teacher(options.model)
    aligner = ClosedFormAligner(found, options, found.open_weights(), lambda what, done, total: None)
    if not layers or not 0 <= min(layers) <= max(layers) < aligner.model.num_layers:
        raise ValueError(f"The teacher has the layers 0 to {aligner.model.num_layers - 1}, not {layers}.")
    results, settings = {}, dataclasses.replace(aligner.settings.fit, refine_steps=steps)
    with ActivationStream(aligner.model, aligner.ids, aligner.settings.held_out_sequences, MEMORY) as stream:
        for layer in range(max(layers) + 1):
            data = stream.attention_data(layer)
            if layer in layers:
                results[layer] = compare(aligner.model.mixer(layer), data, settings, layer, longer)
                show(layer, results[layer])
    report = {"text": Path(dataset).name, "tokens": aligner.ids.numel(), "layers": results}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=2) + "\n")
    return report


def show(layer: int, results: dict[str, dict[str, float]]) -> None:
    """Print one layer's table."""
    table = Table("", "held-out error", "fitting error", "CPU seconds", title=f"layer {layer}")
    for name, row in results.items():
        table.add_row(name, f"{row['held_out']:.3f}", f"{row['fitting']:.3f}", f"{row['cpu_seconds']:.1f}")
    Console().print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--dataset", default="default")
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 17, 26])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=FitSettings.refine_steps, help="of AdamW")
    parser.add_argument("--longer", type=int, default=1, help="also AdamW and L-BFGS in so many times the time")
    parser.add_argument("--model", help="teacher (default: the embedded one)")
    main(**vars(parser.parse_args()))
