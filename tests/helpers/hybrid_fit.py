"""A hybrid layer of a tiny teacher, and what its attention makes of random rows."""

from convert.fit.activations import ActivationStream
from convert.layout.placement import Attention, CacheBits, Hybrid, Placement
from tests.helpers.tiny import config_of, rows, teacher_model

WINDOW, BLOCK, SINKS, SALIENT, RANK = 6, 2, 1, 2, 8
IN_16_BITS = CacheBits()


def layer_and_data(folder, heads=(), sequences=8, bits=IN_16_BITS, **hybrid):
    """Layer 1, which sees everything in every teacher here; the last quarter of the sequences judges."""
    model = teacher_model(folder)
    hybrid = {"salient": SALIENT, "rank": RANK, "full_heads": heads} | hybrid
    layers = (Attention(), Hybrid(WINDOW, BLOCK, SINKS, **hybrid), Attention(), Attention())
    placement = Placement(layers, bits)
    model.follow(config_of(model.weights, placement))
    stream = ActivationStream(model, rows(sequences), sequences // 4, 10**9)
    data = [stream.attention_data(i) for i in range(2)][-1]
    return model.mixer(1).requires_grad_(False), data
