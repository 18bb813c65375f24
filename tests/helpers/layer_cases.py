"""One table of hybrid layers, and the check that every backend passes on it: outputs as the equations in float64 give.

A prompt is read in parts, and then tokens one by one, or all tokens are read one by one.
"""

import copy
from typing import NamedTuple

import torch

import modeling_llamba.hybrid.naive as equations
from modeling_llamba.hybrid.inputs import HybridInputs
from modeling_llamba.hybrid.rounding import Rounding
from modeling_llamba.model.cache import new_cache
from tests.helpers.hybrid_step import HIDDEN, PARTIAL, ROPE, make_layer, relative_error, rotary_of


class LayerCase(NamedTuple):
    """options: of the layer. reach: the farthest that a sink may be. parts: lengths in which a prompt is read; the
    numbers of tokens are not known where it is padded. steps: tokens one by one after it."""

    options: dict
    reach: int | None = None
    parts: tuple[int, ...] = (70, 30)
    padded: bool = False
    steps: int = 8

    @property
    def is_plain(self) -> bool:
        """True for a layer that kernels compute."""
        return not self.options.get("learned_sinks")


PADDING = ((), (0, 1, 2, 9))
"""Columns of each row that hold no token, where there are any: rows of different lengths, one with a gap."""
TOKENS = dict(parts=(), steps=26)
"""From the first token on, so that window, places and state are empty, then fill up, and all three turn over."""
BY_PLANES = dict(
    num_attention_heads=2, num_key_value_heads=2, head_dim=80, rope_parameters=ROPE | PARTIAL, hybrid_state_planes=3
)
D16 = dict(head_dim=16, hybrid_state_planes=4)
LAYERS = {
    "grouped queries": LayerCase(D16),
    "tokens": LayerCase({}, **TOKENS),
    "tokens, padded": LayerCase({}, padded=True, **TOKENS),
    "parts, one of them short": LayerCase(D16, parts=(61, 2, 27)),
    "parts within a block and a window": LayerCase(D16 | dict(hybrid_block=8, hybrid_window=32), parts=(13, 7, 70)),
    "a kept head": LayerCase(D16 | dict(hybrid_full_heads=[[2, 3]])),
    "tokens, a kept head, padded": LayerCase(dict(hybrid_full_heads=[[2, 3]]), padded=True, **TOKENS),
    "tokens, slow planes": LayerCase(dict(hybrid_state_planes=1), **TOKENS),
    "slow planes, D 24": LayerCase(dict(head_dim=24, hybrid_state_planes=3), parts=(99, 1)),
    "partial rotary, D 80": LayerCase(BY_PLANES),
    "tokens, partial rotary, D 80": LayerCase(BY_PLANES, **TOKENS),
    "a cap, blocks of three tokens": LayerCase(
        D16 | dict(hybrid_block=3, hybrid_window=6, attn_logit_softcapping=2.0, num_key_value_heads=1),
    ),
    "tokens, a cap, D 264, padded": LayerCase(
        dict(num_attention_heads=2, num_key_value_heads=1, head_dim=264, attn_logit_softcapping=2.0, hybrid_block=4,
             hybrid_window=8, hybrid_salient=5, hybrid_state_planes=12),
        padded=True, **TOKENS,
    ),
    "D 256, of which 128 are slow": LayerCase(
        dict(num_attention_heads=2, num_key_value_heads=1, head_dim=256, hybrid_state_planes=64), parts=(100,)
    ),
    "tokens, D 6, blocks of one token, padded": LayerCase(
        dict(head_dim=6, hybrid_block=1, hybrid_window=3), padded=True, **TOKENS
    ),
    "no salient": LayerCase(D16 | dict(hybrid_salient=0)),
    "neither sinks nor salient": LayerCase(D16 | dict(hybrid_salient=0, hybrid_sinks=0)),
    "many salient, blocks of one token": LayerCase(D16 | dict(hybrid_salient=30, hybrid_block=1)),
    "far sinks": LayerCase(dict(hybrid_salient=9), reach=8),
    "tokens, far sinks, padded": LayerCase(dict(hybrid_block=3, hybrid_window=6), reach=8, padded=True, **TOKENS),
    "learned sinks": LayerCase(D16 | dict(learned_sinks=True)),
    "gates, no map": LayerCase(D16 | dict(attention_gate="head", hybrid_rank=0)),
    "rows of 8 bits": LayerCase(D16 | dict(window_bits=8)),
    "tokens, rows of 8 bits, padded": LayerCase(dict(window_bits=8), padded=True, **TOKENS),
    "6 and 4 bits, a kept head of 6 and 4 less an offset": LayerCase(
        dict(head_dim=48, window_bits=[6, 4], full_attention_bits=[6, 4], key_offsets=True, hybrid_full_heads=[[2, 3]])
    ),
    "tokens, 8 bits, far sinks, a kept head of 4 and 8 less an offset": LayerCase(
        dict(head_dim=48, window_bits=8, full_attention_bits=[4, 8], key_offsets=True, hybrid_full_heads=[[2, 3]]),
        reach=8, **TOKENS,
    ),
    "tokens, D 64, 8 bits, a kept head of 6 and 4": LayerCase(
        dict(head_dim=64, window_bits=8, full_attention_bits=[6, 4], hybrid_full_heads=[[4, 5]],
             hybrid_state_planes=8),
        **TOKENS,
    ),
    "tokens, values alone in 8 bits, D 264, padded": LayerCase(
        dict(num_attention_heads=2, num_key_value_heads=1, head_dim=264, window_bits=[16, 8], hybrid_state_planes=12),
        padded=True, **TOKENS,
    ),
    "tokens, 2 bits for values alone": LayerCase(
        dict(head_dim=16, window_bits=[16, 2], full_attention_bits=[4, 8], hybrid_full_heads=[[0, 1]]), **TOKENS
    ),
}  # fmt: skip


@torch.no_grad()
def check_layer(monkeypatch, case: LayerCase, device="cpu", dtype=torch.float32, limit=1e-5) -> float:
    """Compare a layer's outputs, by the backend that is found, with the equations; return the largest error."""
    layer = make_layer(dtype, **case.options).to(device)
    length = sum(case.parts) + case.steps
    hidden_states = torch.randn(2, length, HIDDEN).to(device, dtype)
    index = numbers_of_tokens(length, case.padded).to(device)
    projected, project = [], layer.project
    monkeypatch.setattr(layer, "project", lambda *inputs: projected.append(project(*inputs)) or projected[-1])
    found = torch.cat([*_outputs(layer, hidden_states, index, case)], dim=1)
    assert found.dtype == dtype
    layer.project = project
    real = (index >= 0).cpu()
    roundings = *layer.kept_roundings, layer.shape.key_rounding, layer.shape.value_rounding
    with monkeypatch.context() as rounded:
        if any(rounding.rounds for rounding in roundings):
            round_own_vectors(layer, projected, real, limit, rounded)
        expected = naive_rows(layer, hidden_states, index, case.reach)
    error = relative_error(found.cpu()[real], expected[real])
    assert error < limit, error
    return error


def numbers_of_tokens(length: int, padded: bool) -> torch.Tensor:
    """(2, length), -1 where there is none."""
    real = torch.ones(2, length, dtype=torch.long)
    for row, columns in enumerate(PADDING if padded else ()):
        real[row, list(columns)] = 0
    return (real.cumsum(1) - 1).masked_fill(real == 0, -1)


def _outputs(layer, hidden_states, index, case: LayerCase):
    rotary, sink_rotary = rotary_of(layer, index, case.reach)
    cache = new_cache(layer.config)
    columns = torch.arange(index.shape[1], device=index.device)
    least = torch.finfo(hidden_states.dtype).min
    first = 0
    for length in (*case.parts, *[1] * case.steps):
        now = slice(first, first + length)
        far = None if sink_rotary is None else tuple(t[:, now] for t in sink_rotary)
        inputs = HybridInputs(index[:, now], None if case.padded else first, sink_rotary=far)
        if layer.kept:
            hidden = (columns[: now.stop] > columns[now, None]) | (index[:, None, : now.stop] < 0)
            inputs = inputs._replace(causal_mask=hidden[:, None].to(hidden_states.dtype) * least)
        yield layer(hidden_states[:, now], tuple(t[:, now] for t in rotary), inputs, cache)
        first = now.stop


def naive_rows(layer, hidden_states, index, reach) -> torch.Tensor:
    """The outputs by the equations in float64, on the CPU; 0 at padding."""
    layer, hidden_states, index = copy.deepcopy(layer).cpu().double(), hidden_states.cpu().double(), index.cpu()
    rotary, sink_rotary = rotary_of(layer, index, reach)
    expected = torch.zeros_like(hidden_states)
    for row, real in enumerate(index >= 0):
        of_row = [None if pair is None else tuple(t[row, real] for t in pair) for pair in (rotary, sink_rotary)]
        expected[row, real] = equations.naive_hybrid_attention(layer, hidden_states[row, real], *of_row)
    return expected


def round_own_vectors(layer, projected, real, limit, monkeypatch) -> None:
    """Let the equations round the layer's own keys and values, which have to be near theirs, as the layer does.

    In the last bits of a number that lies half-way between two codes the one or the other is right. In bf16 a key's
    error makes it another code here and there, which of 4 bits is a 14th of the largest number: with codes of its own
    the layer is .018 to .059 off by the seed, on a CPU by PyTorch's operations.
    """
    pairs = zip(*((p.key, p.value) for p in projected), strict=True)
    keys, values = (torch.cat(vectors, dim=2).transpose(1, 2).double().cpu() for vectors in pairs)
    if layer.key_offset is not None:
        keys[:, :, layer.kept] -= layer.key_offset.double().cpu()
    given = iter([vectors[row, real[row]] for row in range(len(real)) for vectors in (keys, values)])
    as_held, like = equations._as_held, projected[0].key

    def own_vectors(layer, vectors, which):
        own = next(given)
        assert relative_error(own, vectors) < limit
        return as_held(layer, own, which)

    def rounded(vector, bits):
        rounding = Rounding(bits, len(vector))
        return rounding.decode(rounding.encode(vector.to(like)), torch.float64).cpu()

    monkeypatch.setattr(equations, "_as_held", own_vectors)
    monkeypatch.setattr(equations, "_rounded", rounded)
