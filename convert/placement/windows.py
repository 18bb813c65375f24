"""How wide the window of each layer is within a cache budget: wide where a narrow one costs the layer most.

What a layer loses differs a hundredfold from layer to layer, and falls with the width of its window to a power. Both
together say how to spend so many columns for the least error (figures: docs/results/quality.md).
"""

import contextlib

import torch

from ..alignment.activations import ActivationStream
from ..alignment.aligner import Aligner
from ..alignment.closed_form import held_out_error
from ..alignment.read_fit import fit_salience
from ..options import parse_size
from .placement import Placement

ROWS = 4
"""Calibration sequences on which errors are measured."""
POWER = 0.8
"""An error falls with the width of the window to this power."""
STEPS = 16
"""Windows are multiples of the widest over this number, so that not every layer needs kernels of its own."""


@torch.no_grad()
def layer_errors(aligner: Aligner, placement: Placement) -> dict[int, float]:
    """The relative squared error of each hybrid layer under this placement, with the theory's read and the teacher's
    output map. What a fit would leave is roughly in proportion, and takes ten times as long to find."""
    aligner.follow(placement.hybrid, placement)
    rows, memory = aligner.ids[-ROWS:], parse_size(aligner.options.alignment.activation_memory)
    errors, layers = {}, range(max(placement.windows) + 1)
    with contextlib.closing(ActivationStream(aligner.model, rows, len(rows) // 2, memory, aligner.work)) as stream:
        for layer in layers:
            aligner.progress("measuring layers", layer, len(layers))
            data = stream.attention_data(layer)
            if layer in placement.windows:
                mixer = aligner.model.mixer(layer)
                if mixer.attention.places:
                    fit_salience(mixer, [data.batch(data.fitting())[0]], data.rotary)
                errors[layer] = held_out_error(mixer, data)
    aligner.progress("measuring layers", len(layers), len(layers))
    return errors


def spread_windows(width: int, errors: dict[int, float], longest: int) -> dict[int, int]:
    """The width of each layer's window, `width` on average, for the least sum of errors.

    Args:
        errors: of each layer, with windows of one width. longest: the widest window that there may be.
    """
    step = max(longest // STEPS, 1)
    windows, left = dict.fromkeys(errors, min(step, width)), (width - min(step, width)) * len(errors)
    while left:
        wider = {layer: min(step, left, longest - at) for layer, at in windows.items() if at < longest}

        def gain(layer: int, wider: dict[int, int] = wider) -> float:
            at, more = windows[layer], wider[layer]
            return errors[layer] * (at**-POWER - (at + more) ** -POWER) / more

        best = max(wider, key=lambda layer: (gain(layer), -layer))
        windows[best] += wider[best]
        left -= wider[best]
    return windows
