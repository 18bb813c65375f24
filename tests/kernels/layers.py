"""A hybrid layer for its kernels, and what its equations give in float64."""

import copy

import torch

from modeling_llamba.hybrid.naive import naive_hybrid_attention
from tests.helpers import hybrid_step
from tests.helpers.hybrid_step import rotary_of
from tests.kernels.conftest import DEVICE


def make_layer(dtype=torch.float32, **options):
    """A layer whose every part matters, on the device."""
    return hybrid_step.make_layer(dtype, **options).to(DEVICE)


def naive(layer, hidden_states, index, reach):
    """The same by the equations in float64, on the CPU; 0 at padding."""
    layer, hidden_states, index = copy.deepcopy(layer).cpu().double(), hidden_states.cpu().double(), index.cpu()
    rotary, sink_rotary = rotary_of(layer, index, reach)
    expected = torch.zeros_like(hidden_states)
    for row, real in enumerate(index >= 0):
        of_row = [None if pair is None else tuple(t[row, real] for t in pair) for pair in (rotary, sink_rotary)]
        expected[row, real] = naive_hybrid_attention(layer, hidden_states[row, real], *of_row)
    return expected
