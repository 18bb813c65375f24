"""Prompts of a hybrid layer by functions in C, against its equations in float64 and PyTorch's operations."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from modeling_llamba.hybrid.block_layout import Layout
from modeling_llamba.hybrid.eviction import BlockShape, Held, SlowDims
from modeling_llamba.hybrid.inputs import HybridInputs
from modeling_llamba.hybrid.rounding import Rounding
from modeling_llamba.kernels import torch_backend
from modeling_llamba.kernels.backend import BACKEND_VARIABLE
from modeling_llamba.kernels.c import c_functions
from modeling_llamba.kernels.c.c_backend import CBackend
from modeling_llamba.kernels.torch_backend import TorchBackend
from modeling_llamba.model.cache import new_cache
from tests.helpers.hybrid_step import HIDDEN, in_parts, make_layer, relative_error, rotary_of
from tests.helpers.layer_cases import LAYERS

LENGTH = 150
PROMPTS = [name for name, case in LAYERS.items() if case.parts and not case.padded]


@pytest.fixture
def mixed(monkeypatch):
    """How often C mixed a segment."""
    calls, mix_blocks = [], c_functions.mix_blocks
    counted = lambda *inputs: calls.append(1) or mix_blocks(*inputs)  # noqa: E731
    monkeypatch.setattr(c_functions, "mix_blocks", counted)
    return calls


def by_both(monkeypatch, mixed, run):
    """Results of `run()` by C and by PyTorch's operations."""
    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    found = run()
    assert mixed
    mixed.clear()
    monkeypatch.setenv(BACKEND_VARIABLE, "torch")
    by_torch = run()
    assert not mixed
    return found, by_torch


@pytest.mark.parametrize("name", PROMPTS)
@torch.no_grad()
def test_what_a_prompt_leaves_behind(name, monkeypatch, mixed):
    """To the state and the order of the places."""
    options, reach, parts = LAYERS[name][:3]
    monkeypatch.setattr(torch_backend, "SEGMENT", 64)
    layer = make_layer(**options)
    hidden_states = torch.randn(2, sum(parts), HIDDEN)

    def run():
        cache = new_cache(layer.config)
        return [*in_parts(layer, hidden_states, parts, cache, reach)], cache.layers[0].held

    (_, held), (_, by_torch) = by_both(monkeypatch, mixed, run)
    if {"window_bits", "full_attention_bits"} & options.keys():
        # a number on the edge between two codes gets either, by the order in which a processor adds
        assert sum((getattr(held, name) != getattr(by_torch, name)).sum() for name in ("keys", "values")) < 4
        return
    for name in ("salience", "seen", "keys", "values"):
        torch.testing.assert_close(getattr(held, name), getattr(by_torch, name), rtol=0, atol=1e-6)
    assert relative_error(held.state, by_torch.state) < 1e-5


@pytest.mark.parametrize("options", [{}, dict(hybrid_salient=9), dict(window_bits=8), dict(hybrid_rank=0)])
@torch.no_grad()
def test_padding_on_the_left_and_rows_of_other_lengths(options, monkeypatch, mixed):
    """A first part with padding, and a second in which rows have seen different numbers of tokens."""
    layer = make_layer(**options)
    hidden_states = torch.randn(3, LENGTH, HIDDEN)
    index = torch.arange(LENGTH) - torch.tensor([0, 5, 77])[:, None]
    index = index.where(index >= 0, -1)
    rotary, _ = rotary_of(layer, index, None)

    def run():
        cache = new_cache(layer.config)
        parts = []
        for now in (slice(0, 90), slice(90, LENGTH)):
            inputs = HybridInputs(index[:, now])
            parts.append(layer(hidden_states[:, now], tuple(t[:, now] for t in rotary), inputs, cache))
        return torch.cat(parts, dim=1)

    output, by_torch = by_both(monkeypatch, mixed, run)
    real = index >= 0
    assert relative_error(output[real], by_torch[real]) < 1e-5


def layouts(length: int, start: int, sizes: tuple[int, ...]) -> tuple[Held | None, Layout]:
    """A layout of new tokens that begin their sequences, or of tokens that go on."""
    block, whole_blocks, sinks, salient = sizes
    whole = Rounding(16, 16)
    shape = BlockShape(block, whole_blocks, sinks, sinks + salient, SlowDims(8, 4), whole, whole)
    key = torch.zeros(2, 1, length, 16)
    if start == 0:
        return None, Layout.behind_window(shape, key)
    generator = torch.Generator().manual_seed(0)
    salience = torch.randn(2, shape.places + shape.window, generator=generator).sort(dim=1, descending=True).values
    salience[1, shape.places // 2 :] = -torch.inf  # empty places
    salience[:, : shape.sinks] = torch.inf
    held = torch.zeros(2, 1, shape.places + shape.window, 16)
    held = Held(held, held, salience, None, torch.full((2,), start))
    return held, Layout.continued(shape, held, key, start)


@pytest.mark.parametrize("start", [0, 5, 200])
@pytest.mark.parametrize("sizes", [(16, 2, 4, 16), (4, 7, 2, 3), (3, 1, 0, 5), (1, 5, 0, 0), (8, 3, 3, 61)])
def test_the_fate_of_columns(sizes, start):
    """Exactly as by sorting, with ties, and tokens that never hold a place; and the mask."""
    length = 300
    new = torch.randn(2, length).mul_(4).round_().div_(4)  # ties
    new[:, ::7] = -torch.inf
    if start == 0:
        new[:, : sizes[2]] = torch.inf
    found = []
    for backend in (CBackend(), TorchBackend()):
        held, layout = layouts(length, start, sizes)
        salience = layout.salience(None if held is None else held.salience, new)
        holders, until = backend.choose_columns(layout, salience)
        found.append((holders, until, backend.hide_columns(layout, holders, until, torch.float32, 3)))
    for by_c, by_torch in zip(*found, strict=True):
        assert torch.equal(by_c, by_torch)


@torch.no_grad()
def test_bfloat16(mixed):
    layer = make_layer(torch.bfloat16, head_dim=64, hybrid_state_planes=8)
    hidden_states = torch.randn(2, LENGTH, HIDDEN).bfloat16()
    found = torch.cat([*in_parts(layer, hidden_states, [90, 60], new_cache(layer.config))], dim=1)
    assert mixed
    assert found.dtype == torch.bfloat16
    layer = layer.float()
    expected = torch.cat([*in_parts(layer, hidden_states.float(), [90, 60], new_cache(layer.config))], dim=1)
    assert relative_error(found, expected) < 3e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_autocast(dtype, mixed):
    layer = make_layer(hybrid_full_heads=[[2, 3]])
    hidden_states = torch.randn(2, LENGTH, HIDDEN)
    [expected] = in_parts(layer, hidden_states, [LENGTH], new_cache(layer.config))
    mixed.clear()
    with torch.autocast("cpu", dtype=dtype):
        [found] = in_parts(layer, hidden_states, [LENGTH], new_cache(layer.config))
    assert mixed
    assert relative_error(found, expected) < 3e-2


def test_gradients_are_pytorchs(mixed):
    """With a gradient C finds columns alone."""
    layer = make_layer()
    hidden_states = torch.randn(2, LENGTH, HIDDEN)
    gradients = []
    for one in (layer, make_layer().double()):
        one.load_state_dict(layer.state_dict())
        inputs = hidden_states.clone().to(one.q_proj.weight.dtype).requires_grad_()
        [output] = in_parts(one, inputs, [LENGTH], None)
        output.square().sum().backward()
        gradients.append(inputs.grad)
    assert not mixed
    assert relative_error(*gradients) < 1e-4


@torch.no_grad()
def test_fake_tensors_have_no_numbers():
    layer = make_layer(hybrid_full_heads=[[2, 3]])
    with FakeTensorMode(allow_non_fake_inputs=True):
        [output] = in_parts(layer, torch.randn(2, LENGTH, HIDDEN), [LENGTH], new_cache(layer.config))
    assert isinstance(output, FakeTensor)
    assert output.shape == (2, LENGTH, HIDDEN)


@torch.no_grad()
def test_what_is_traced_computes_the_same():
    layer = make_layer()
    hidden_states, others = torch.randn(2, 2, LENGTH, HIDDEN)

    def prompt(hidden_states):
        [output] = in_parts(layer, hidden_states, [LENGTH], None)
        return output

    traced = make_fx(prompt)(hidden_states)
    torch.testing.assert_close(traced(others), prompt(others))


@torch.no_grad()
def test_pytorchs_default_type_changes_nothing():
    layer = make_layer()
    hidden_states = torch.randn(2, LENGTH, HIDDEN)
    [expected] = in_parts(layer, hidden_states, [LENGTH], new_cache(layer.config))
    torch.set_default_dtype(torch.bfloat16)
    try:
        [found] = in_parts(layer, hidden_states, [LENGTH], new_cache(layer.config))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)
