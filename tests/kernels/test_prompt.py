"""Prompts of a hybrid layer by kernels, against its equations in float64 and PyTorch's own operations."""

import pytest
import torch

import modeling_llamba.kernels.flex as flex
import modeling_llamba.kernels.triton.triton_backend as triton_backend
import modeling_llamba.kernels.triton.triton_columns as fates
import modeling_llamba.kernels.triton.triton_prompt as kernels
from modeling_llamba.hybrid.block_layout import Layout
from modeling_llamba.hybrid.eviction import BlockShape, Held, SlowDims
from modeling_llamba.hybrid.inputs import Projected
from modeling_llamba.hybrid.rounding import Rounding
from modeling_llamba.kernels.backend import BACKEND_VARIABLE
from modeling_llamba.model.cache import new_cache
from tests.helpers.hybrid_step import HIDDEN, in_parts, make_layer, relative_error
from tests.helpers.layer_cases import D16, LAYERS, naive_rows, numbers_of_tokens
from tests.kernels.conftest import DEVICE, INTERPRETED

pytestmark = pytest.mark.usefixtures("flex_in_the_interpreter")
PROMPTS = [name for name, case in LAYERS.items() if case.parts and case.is_plain and case.reach is None]


@pytest.mark.parametrize("name", PROMPTS)
@torch.no_grad()
def test_what_a_prompt_leaves_behind(monkeypatch, mixed, name):
    """To the state and the order of the places, by kernels as by PyTorch's operations."""
    options, reach, parts = LAYERS[name][:3]
    if name != PROMPTS[0]:
        monkeypatch.setattr(kernels, "CHUNK", 16)
        monkeypatch.setattr(triton_backend, "SEGMENT", 64)
    layer = make_layer(**options).to(DEVICE)
    hidden_states = torch.randn(2, sum(parts), HIDDEN, device=DEVICE)
    held = {}
    for backend in ("torch", "auto"):
        monkeypatch.setenv(BACKEND_VARIABLE, backend)
        cache = new_cache(layer.config)
        for _ in in_parts(layer, hidden_states, parts, cache, reach):
            pass
        held[backend] = cache.layers[0].held
        assert bool(mixed) == (backend == "auto")
    for name in ("salience", "seen"):
        torch.testing.assert_close(getattr(held["auto"], name), getattr(held["torch"], name))
    assert relative_error(held["auto"].state, held["torch"].state.double()) < (5e-6 if INTERPRETED else 2e-5)
    there = held["torch"].salience > -torch.inf
    for own, theirs in zip(held["auto"][:2], held["torch"][:2], strict=True):
        own, theirs = (t.transpose(1, 2)[there] for t in (own, theirs))
        assert torch.equal(own, theirs)


def layouts(shape: BlockShape, length: int, start: int) -> tuple[Held | None, Layout]:
    """A layout of new tokens that begin their sequences, or of tokens that go on."""
    key = torch.zeros(2, 1, length, 16, device=DEVICE)
    if start == 0:
        return None, Layout.behind_window(shape, key)
    salience = torch.randn(2, shape.places + shape.window, device=DEVICE).sort(dim=1, descending=True).values
    salience[1, shape.places // 2 :] = -torch.inf  # empty places
    salience[:, : shape.sinks] = torch.inf
    whole = torch.zeros(2, 1, shape.places + shape.window, 16, device=DEVICE)
    held = Held(whole, whole, salience, None, torch.full((2,), start, device=DEVICE))
    return held, Layout.continued(shape, held, key, start)


@pytest.mark.parametrize("start", [0, 5, 200])
@pytest.mark.parametrize("sizes", [(16, 2, 4, 16), (4, 7, 2, 3), (3, 1, 0, 5), (1, 5, 0, 0), (8, 3, 3, 61)])
def test_the_fate_of_columns(sizes, start):
    """Exactly as by sorting, with ties, and tokens that never hold a place; and the tiles of the mask."""
    block, whole_blocks, sinks, salient = sizes
    whole = Rounding(16, 16)
    shape = BlockShape(block, whole_blocks, sinks, sinks + salient, SlowDims(8, 4), whole, whole)
    length = 300
    held, layout = layouts(shape, length, start)
    new = torch.randn(2, length, device=DEVICE).mul_(4).round_().div_(4)  # ties
    new[:, ::7] = -torch.inf
    if start == 0:
        new[:, :sinks] = torch.inf
    salience = layout.salience(None if held is None else held.salience, new)
    holders, until = layout.select(salience)
    blocks = layout.sizes
    salience[:, blocks.first_column + blocks.offset + blocks.new_tokens :] = -torch.inf  # as `lay_out` has it
    lost = fates.lose_columns(salience, blocks)
    real = slice(0, blocks.first_column + blocks.offset + blocks.new_tokens)
    assert torch.equal(lost.until[:, real].long(), until[:, real])
    open_last = blocks.last - blocks.first
    assert torch.equal(fates.last_places(salience, lost, blocks), holders[:, open_last])
    until, bounds = lost.until[0], lost.bounds[0].tolist()
    for number, begin, end in zip(range(blocks.first, blocks.blocks), bounds[:-1], bounds[1:], strict=True):
        columns = (until == number).nonzero()[:, 0].tolist() if number else []
        assert sorted(lost.order[0, begin:end].tolist()) == columns
        assert len(columns) <= block
    slots = blocks.offset + blocks.new_tokens
    slots += -slots % fates.TILE
    tiles = fates.visible_tiles(lost.until, slots, blocks)
    of_slots = kernels.numbered_slots(slots, blocks.first, block, blocks.first_column, lost.until.device)
    plain = flex.visible_blocks(*of_slots, lost.until, None)
    assert torch.equal(tiles[0], plain.kv_num_blocks)
    for row, numbers in enumerate(tiles[0].tolist()):
        for q, number in enumerate(numbers[0]):
            assert torch.equal(tiles[1][row, 0, q, :number], plain.kv_indices[row, 0, q, :number])
            assert not tiles[1][row, 0, q, number:].any()


@pytest.mark.parametrize("start", [0, 5, 200])
@pytest.mark.parametrize("bits", [16, 8, 6])
@torch.no_grad()
def test_columns_and_slots(start, bits):
    """Keys, values, salience and queries lie where PyTorch's operations put them, rows of bytes as numbers."""
    roundings = Rounding.of_pair(bits, 16)
    shape = BlockShape(4, 7, 2, 5, SlowDims(8, 4), *roundings)
    length = 300
    held, layout = layouts(shape, length, start)
    key, value, query = (torch.randn(2, length, heads, 16, device=DEVICE).transpose(1, 2) for heads in (1, 1, 3))
    salience = torch.randn(2, length, device=DEVICE)
    rows = [rounding.encode(t) for rounding, t in zip(roundings, (key, value), strict=True)]
    past = None
    if held is not None:
        vectors = torch.randn(2, 2, 1, shape.places + shape.window, 16, device=DEVICE)
        past = [rounding.encode(t) for rounding, t in zip(roundings, vectors, strict=True)]
        held = held._replace(keys=past[0], values=past[1])
    found = fates.lay_out(Projected(query, None, key, value, salience, *rows), held, layout.sizes)
    for own, rounding, new, former in zip(found[:2], roundings, rows, past or (None, None), strict=True):
        new = rounding.decode(new, torch.float32)
        former = None if former is None else rounding.decode(former, torch.float32)
        torch.testing.assert_close(own, layout.columns(former, new), rtol=1e-5, atol=1e-6)
    real = slice(0, layout.sizes.window_columns.stop)
    salience = layout.salience(None if held is None else held.salience, salience)
    assert torch.equal(found.salience[:, real], salience[:, real])
    assert (found.salience[:, real.stop :] == -torch.inf).all()
    slots = layout.in_order(layout.queries(query, (1, 3))).transpose(1, 2)
    both = min(slots.shape[2], found.query.shape[2])  # each has room for its own whole parts
    assert torch.equal(found.query[:, :, :both], slots[:, :, :both])
    assert not found.query[:, :, both:].any()
    assert not slots[:, :, both:].any()


@torch.no_grad()
def test_autocast(mixed):
    """A float32 layer in bfloat16: keys are float32 where they are rotated, values are not."""
    layer = make_layer(**D16).to(DEVICE)
    hidden_states = torch.randn(2, 150, HIDDEN, device=DEVICE)
    expected = naive_rows(layer, hidden_states, numbers_of_tokens(150, padded=False), None)
    with torch.autocast(DEVICE, torch.bfloat16):
        output = torch.cat([*in_parts(layer, hidden_states, [100, 50], new_cache(layer.config))], dim=1)
    assert mixed
    assert relative_error(output.flatten(0, 1), expected.flatten(0, 1)) < 3e-2


def test_sizes_that_the_kernels_are_not_made_for():
    """Compiling for them would take minutes."""
    whole = Rounding(16, 64)
    shape = BlockShape(16, 13, 4, 20, SlowDims(32, 16), whole, whole)
    assert kernels.fits(shape, 64)
    assert not kernels.fits(shape, 8)
    for larger in (dict(block=128), dict(places=129), dict(whole_blocks=64), dict(slow=SlowDims(128, 96))):
        assert not kernels.fits(shape._replace(**larger), 256)
