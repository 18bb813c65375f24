"""A hybrid layer for its kernels, and what its equations give in float64."""

import copy

import torch

from modeling_llamba import LlambaConfig
from modeling_llamba.hybrid_attention import HybridAttention
from modeling_llamba.naive import naive_hybrid_attention
from modeling_llamba.rotary import rotary_embedding
from tests.helpers.hybrid_step import ROPE, randomised
from tests.kernels.conftest import DEVICE

HIDDEN = 32


def make_layer(dtype=torch.float32, **options):
    """A layer whose every part matters."""
    sizes = dict(
        vocab_size=7, hidden_size=HIDDEN, intermediate_size=8, num_hidden_layers=1, num_attention_heads=6,
        num_key_value_heads=3, head_dim=8, max_position_embeddings=512, layer_types=["hybrid"], hybrid_window=4,
        hybrid_block=2, hybrid_sinks=2, hybrid_salient=3, hybrid_rank=4, rope_parameters=ROPE,
    )  # fmt: skip
    config = LlambaConfig(**sizes | options)
    config._attn_implementation = "sdpa" if config.attn_logit_softcapping is None else "eager"
    layer = randomised(HybridAttention(config, 0)).eval()
    return layer.to(dtype).to(DEVICE)


def rotary_of(layer, index, reach):
    """cos and sin for every token, and those for its look at sinks, or None."""
    embedding, positions = rotary_embedding(layer.config).to(index.device), index.clamp(min=0)
    like = layer.q_proj.weight
    return embedding(like, positions), None if reach is None else embedding(like, positions.clamp(max=reach))


def naive(layer, hidden_states, index, reach):
    """The same by the equations in float64, on the CPU; 0 at padding."""
    layer, hidden_states, index = copy.deepcopy(layer).cpu().double(), hidden_states.cpu().double(), index.cpu()
    rotary, sink_rotary = rotary_of(layer, index, reach)
    expected = torch.zeros_like(hidden_states)
    for row, real in enumerate(index >= 0):
        of_row = [None if pair is None else tuple(t[row, real] for t in pair) for pair in (rotary, sink_rotary)]
        expected[row, real] = naive_hybrid_attention(layer, hidden_states[row, real], *of_row)
    return expected
