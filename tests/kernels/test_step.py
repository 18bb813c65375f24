"""One token of a hybrid layer by one kernel, against its equations in float64 and PyTorch's own operations."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from modeling_llamba.hybrid.eviction import BlockShape, Held, NewTokens, SlowDims, advance
from modeling_llamba.hybrid.hybrid_cache import HybridLayer
from modeling_llamba.hybrid.inputs import HybridInputs
from modeling_llamba.hybrid.rounding import Rounding
from modeling_llamba.kernels.backend import BACKEND_VARIABLE
from modeling_llamba.kernels.triton.triton_prompt import LARGEST
from modeling_llamba.model.cache import new_cache
from tests.helpers.hybrid_step import HIDDEN, make_layer, relative_error, rotary_of
from tests.helpers.layer_cases import numbers_of_tokens
from tests.kernels.ahead_of_time import CAPABILITIES, KEPT, PROMPTS, ROUNDED, SHAPES, tools
from tests.kernels.conftest import DEVICE, INTERPRETED

LENGTH = 22


def steps(layer, hidden_states, index, reach, cache, start=True):
    """The layer's output (B, L, hidden), one token at a time."""
    rotary, sink_rotary = rotary_of(layer, index, reach)
    for t in range(index.shape[1]):
        now, known = slice(t, t + 1), t if start else None
        hidden = None
        if layer.kept:
            least = torch.finfo(hidden_states.dtype).min
            hidden = (index[:, None, None, : t + 1] < 0).to(hidden_states.dtype) * least
        far = None if sink_rotary is None else tuple(part[:, now] for part in sink_rotary)
        inputs = HybridInputs(index[:, now], known, sink_rotary=far, causal_mask=hidden)
        yield layer(hidden_states[:, now], tuple(part[:, now] for part in rotary), inputs, cache)


SIZES = {  # block, whole blocks, sinks, places, head dim, planes, slow planes, bits
    "the default": (32, 3, 4, 20, 64, 32, 16, 8),
    "in 16 bits": (16, 5, 2, 7, 64, 32, 8, 16),
    "in 6 bits": (32, 3, 4, 20, 64, 32, 16, 6),
    "in 6 and 4 bits": (16, 2, 1, 33, 128, 64, 16, [6, 4]),
    "partial rotary": (4, 2, 1, 33, 80, 16, 16, 16),
    "no places": (8, 1, 0, 0, 48, 24, 3, 8),
    "one block": (4, 0, 1, 2, 16, 8, 4, 8),
    "the largest": (64, 15, 4, 128, 128, 64, 64, 8),
}


@pytest.mark.parametrize("sizes", SIZES)
@torch.no_grad()
def test_a_token_is_written(record_property, launches, sizes):
    """In rows of different lengths, some of which open a block, beside PyTorch's operations, with equal salience."""
    block, whole, sinks, places, dim, planes, slow_planes, bits = SIZES[sizes]
    roundings = [Rounding.of_pair(bits, dim, backend) for backend in ("auto", "torch")]
    shapes = [BlockShape(block, whole, sinks, places, SlowDims(planes, slow_planes), *pair) for pair in roundings]
    shape = shapes[1]
    batch, heads = 5, 2
    window = shape.window
    first = torch.tensor([0, window - 1, window, window + 2 * block, window + 5 * block - 1 + places])

    def rows(length):
        return [each.encode(torch.randn(batch, heads, length, dim, device=DEVICE)) for each in roundings[1]]

    layers = [HybridLayer(shape) for shape in shapes]
    before = int(first.max())
    index = torch.arange(before).expand(batch, -1)
    index = torch.where(index < first[:, None], index, -1).to(DEVICE)
    salience = (torch.randn(batch, before) * 4).round().to(DEVICE)  # 0 and -0 are as large
    salience[index < sinks] = torch.inf
    salience[index < 0] = -torch.inf
    tokens = NewTokens(*rows(before), salience, index)
    held = advance(Held.empty(shape, tokens), tokens, shape)
    for layer in layers:
        layer.held = held.copied()
    errors = []
    for t in range(2 * block + 1):
        index = (first + t)[:, None].to(DEVICE)
        index[t % batch] = -1
        first[t % batch] -= 1
        tokens = NewTokens(*rows(1), (torch.randn(batch, 1) * 4).round().to(DEVICE), index)
        layers[0].put(tokens, None)
        layers[1].put(tokens, None)
        own, theirs = (layer.held for layer in layers)
        for name in ("keys", "values", "salience", "seen"):
            assert torch.equal(getattr(own, name), getattr(theirs, name)), (t, name)
        if theirs.state.any():
            errors.append(relative_error(own.state, theirs.state))
    assert launches["write"] == 2 * block + 1
    assert max(errors) < 2e-6
    assert (theirs.state != held.state).any()
    assert len(errors) > block
    record_property("state", f"{max(errors):.1e}")


@torch.no_grad()
def test_sizes_that_the_kernel_does_not_take(monkeypatch, launches):
    """Rows of different lengths in a layer that is too large for it: PyTorch's operations write the token."""
    index = numbers_of_tokens(LENGTH, padded=True).to(DEVICE)
    hidden_states = torch.randn(2, LENGTH, HIDDEN, device=DEVICE)
    layer, found = make_layer(window_bits=8).to(DEVICE), []
    for small in (True, False):
        with monkeypatch.context() as context:
            if not small:
                context.setitem(LARGEST, "places", 1)
            found.append(torch.cat([*steps(layer, hidden_states, index, None, new_cache(layer.config), False)], dim=1))
    assert launches["write"] == LENGTH
    assert launches["layer"] == 2 * LENGTH
    assert relative_error(*(outputs[index >= 0] for outputs in found)) < 2e-5


class Launches(TorchDispatchMode):
    """Names of PyTorch's operations that are kernels on a GPU: neither views nor memory."""

    FREE = ("empty", "new_empty", "empty_strided", "lift_fresh", "detach", "promote_types", "_unsafe_view", "set_")

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function._schema.name.split("::")[1]
        if not function.is_view and name not in self.FREE:
            self.names.append(name)
        return function(*arguments, **(options or {}))


ROTARY, SALIENCE, WRITTEN = ("mul", "add", "neg", "cat"), ("mul", "sum"), ("copy_", "add_")


@torch.no_grad()
def test_one_launch_instead_of_many(record_property, monkeypatch, launches):
    """A step of a layer with salient tokens, its window full and no block to open: what else it asks PyTorch for."""
    layer, index = make_layer().to(DEVICE), numbers_of_tokens(LENGTH, padded=False)[:1].to(DEVICE)
    hidden_states, counts = torch.randn(1, LENGTH, HIDDEN, device=DEVICE), {}
    for backend in ("torch", "auto"):
        monkeypatch.setenv(BACKEND_VARIABLE, backend)
        taken = steps(layer, hidden_states, index, None, new_cache(layer.config))
        for _ in range(LENGTH - 1):
            next(taken)
        launches["layer"] = 0
        with Launches() as watch:
            next(taken)
        counts[backend] = watch.names
        assert launches["layer"] == (backend == "auto")
    beside = counts["auto"]  # an operator of our own, which takes as long as a launch, would be among them
    assert {*beside} <= {"mm", "addmm", *ROTARY, *SALIENCE, *WRITTEN}
    record_property("operations of the layer in PyTorch", len(counts["torch"]))
    record_property("beside the kernel", len(beside))


@torch.no_grad()
def test_what_the_kernel_does_not_take(monkeypatch, launches):
    """A prompt, what is recorded, dropout, float64, a layer without a state, and all where PyTorch's are asked for."""

    def run(tokens=1, dtype=torch.float32, training=False, **options):
        layer = make_layer(dtype, **options).to(DEVICE).train(training)
        hidden_states, index = torch.randn(2, tokens, HIDDEN).to(DEVICE, dtype), torch.arange(tokens).expand(2, -1)
        index = index.to(DEVICE)
        layer(hidden_states, rotary_of(layer, index, None)[0], HybridInputs(index, 0), new_cache(layer.config))
        return launches["layer"]

    assert run(tokens=2) == run(dtype=torch.float64) == run(mixer="none", hybrid_rank=0) == 0
    assert run(training=True, attention_dropout=0.1) == run(backend="torch") == 0
    with torch.enable_grad():
        assert run() == 0
    assert run() == 1
    assert run(training=True) == 2
    monkeypatch.setenv(BACKEND_VARIABLE, "torch")
    assert run() == 2


@pytest.mark.skipif(not INTERPRETED, reason="a device compiles for itself")
def test_it_compiles_ahead_of_time(record_property):
    """For A100 and H100: no register is spilled, and little shared memory is taken."""
    missing = [name for name in ("ptxas", "cuobjdump") if not (tools() / name).is_file()]
    if missing:
        pytest.skip(f"the wheel of triton brings no {' and no '.join(missing)} here, which compile for NVIDIA's GPUs")
    command, own = [sys.executable, "-m", "tests.kernels.ahead_of_time"], {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    shapes = 3 * len(SHAPES) + 2 * len(KEPT) + 8 * len(PROMPTS) + 2 * len(ROUNDED)
    assert len(found) == shapes * len(CAPABILITIES)
    for name, takes in found.items():
        record_property(f"{name}:", "{registers} registers and {shared} bytes shared".format(**takes))
        spilled = 300 if "prompts" in name else 0  # bytes; of 256 dimensions a program of mix_kernel holds much
        assert takes["spilled"] <= spilled, (
            name,
            takes,
        )
        assert takes["registers"] <= 255, (
            name,
            takes,
        )
        assert takes["shared"] <= 48 * 1024, (
            name,
            takes,
        )
