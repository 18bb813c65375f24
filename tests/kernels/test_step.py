"""One token of a hybrid layer by one kernel, against its equations in float64 and PyTorch's own operations."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import modeling_llamba.hybrid.naive as equations
from modeling_llamba.hybrid.eviction import BlockShape, Held, NewTokens, SlowDims, advance
from modeling_llamba.hybrid.hybrid_cache import HybridLayer
from modeling_llamba.hybrid.inputs import HybridInputs
from modeling_llamba.hybrid.rounding import Rounding
from modeling_llamba.kernels.backend import BACKEND_VARIABLE
from modeling_llamba.kernels.torch_backend import TorchBackend
from modeling_llamba.kernels.triton.triton_backend import TritonBackend
from modeling_llamba.kernels.triton.triton_prompt import LARGEST
from modeling_llamba.model.cache import new_cache
from tests.helpers.hybrid_step import HIDDEN, PARTIAL, ROPE, relative_error, rotary_of
from tests.kernels.ahead_of_time import CAPABILITIES, KEPT, PROMPTS, ROUNDED, SHAPES, tools
from tests.kernels.conftest import DEVICE, INTERPRETED
from tests.kernels.layers import make_layer, naive

LENGTH = 22
PADDING = [[], [0, 1, 2, 9]]
"""Columns of each row that hold no token: rows of different lengths, and a row that waits for the others."""
BF16, PADDED = torch.bfloat16, True
CASES = {  # options of the layer, its dtype, the farthest a sink may be, rows of different lengths
    "grouped queries": ({}, torch.float32, None, False),
    "grouped queries, padded": ({}, torch.float32, None, PADDED),
    "kept heads": (dict(hybrid_full_heads=[[2, 3]]), torch.float32, None, False),
    "kept heads, padded": (dict(hybrid_full_heads=[[2, 3]]), torch.float32, None, PADDED),
    "slow planes": (dict(hybrid_state_planes=1), torch.float32, None, PADDED),
    "partial rotary, D 80": (
        dict(num_attention_heads=2, num_key_value_heads=2, head_dim=80,
             rope_parameters=ROPE | PARTIAL, hybrid_state_planes=3),
        torch.float32, None, False,
    ),
    "a cap, D 264, in tiles": (
        dict(num_attention_heads=2, num_key_value_heads=1, head_dim=264, attn_logit_softcapping=2.0, hybrid_block=4,
             hybrid_window=8, hybrid_salient=5, hybrid_state_planes=12),
        torch.float32, None, PADDED,
    ),
    "no salient, the cap": (dict(hybrid_salient=0, attn_logit_softcapping=2.0), torch.float32, None, False),
    "neither sinks nor salient": (dict(hybrid_salient=0, hybrid_sinks=0), torch.float32, None, PADDED),
    "far sinks": ({}, torch.float32, 8, False),
    "far sinks, padded": (dict(hybrid_block=3, hybrid_window=6), torch.float32, 8, PADDED),
    "many salient": (dict(hybrid_salient=9), torch.float32, 8, PADDED),
    "D 6, blocks of one token": (dict(head_dim=6, hybrid_block=1, hybrid_window=3), torch.float32, None, PADDED),
    "rows of 8 bits": (dict(window_bits=8), torch.float32, None, PADDED),
    "rows of 8 bits, D 48, far sinks, a kept head of 6 and 4": (
        dict(head_dim=48, window_bits=8, full_attention_bits=[6, 4], hybrid_full_heads=[[2, 3]]),
        torch.float32, 8, False,
    ),
    "a kept head of 4 and 8 bits, keys less an offset, padded": (
        dict(head_dim=16, full_attention_bits=[4, 8], key_offsets=True, hybrid_full_heads=[[0, 1]]),
        torch.float32, None, PADDED,
    ),
    "bf16, a kept head of 6 and 4 bits": (
        dict(head_dim=64, window_bits=8, full_attention_bits=[6, 4], hybrid_full_heads=[[4, 5]],
             hybrid_state_planes=8),
        BF16, None, False,
    ),
    "values alone in 8 bits, D 264, in tiles": (
        dict(num_attention_heads=2, num_key_value_heads=1, head_dim=264, window_bits=[16, 8], hybrid_state_planes=12),
        torch.float32, None, PADDED,
    ),
    "bf16, rows of 8 bits": (dict(head_dim=64, window_bits=8, hybrid_state_planes=8), BF16, None, False),
    "bf16": (dict(head_dim=64, hybrid_state_planes=8), BF16, None, False),
    "bf16, far sinks, padded": (dict(hybrid_full_heads=[[0, 1]]), BF16, 8, PADDED),
}  # fmt: skip


def token_numbers(padded: bool) -> torch.Tensor:
    """(B, L), -1 at padding."""
    index = torch.arange(LENGTH).expand(len(PADDING), -1)
    if not padded:
        return index
    real = torch.ones_like(index)
    for row, columns in enumerate(PADDING):
        real[row, columns] = 0
    return (real.cumsum(1) - 1).masked_fill(real == 0, -1)


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


def use_keys_of(layer, projected, real, limit, monkeypatch):
    """Let the equations round the layer's own keys and values, which have to be near theirs, by the layer's kernel.

    In the last bits of a number that lies half-way between two codes the one or the other is right. In bf16 a key's
    error makes it another code here and there, which of 4 bits is a 14th of the largest number: with codes of its own
    the layer is .018 to .059 off by the seed, on a CPU by PyTorch's operations.
    """
    pairs = zip(*((p.key, p.value) for p in projected), strict=True)
    keys, values = (torch.cat(vectors, dim=2).transpose(1, 2).double().cpu() for vectors in pairs)
    if layer.key_offset is not None:
        keys[:, :, layer.kept] -= layer.key_offset.double().cpu()
    given = iter([vectors[row, real[row].cpu()] for row in range(len(real)) for vectors in (keys, values)])
    as_held, dtype = equations._as_held, projected[0].key.dtype

    def own_vectors(layer, vectors, which):
        own = next(given)
        assert relative_error(own, vectors) < limit
        return as_held(layer, own, which)

    def rounded(vector, bits):
        rounding = Rounding(bits, len(vector))
        return rounding.decode(rounding.encode(vector.to(DEVICE, dtype)), torch.float64).cpu()

    monkeypatch.setattr(equations, "_as_held", own_vectors)
    monkeypatch.setattr(equations, "_rounded", rounded)


def by_kernels(plain, kernel):
    """An operation by a kernel, but for float64."""

    def run(backend, t, rounding, *others):
        is_wide = torch.float64 in (t.dtype, *others)
        return (plain if is_wide else kernel)(backend, t, rounding, *others)

    return run


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_layer_token_by_token(record_property, monkeypatch, launches, case):
    """From the first token on, so that window, places and state are empty, then fill up, and all three turn over."""
    options, dtype, reach, padded = CASES[case]
    layer = make_layer(dtype, **options)
    index, hidden_states = token_numbers(padded).to(DEVICE), torch.randn(len(PADDING), LENGTH, HIDDEN).to(dtype)
    hidden_states = hidden_states.to(DEVICE)
    limit = 2e-2 if dtype == BF16 else 3e-6 if INTERPRETED else 2e-5
    found, of_steps, attend = {}, {"torch": [], "auto": []}, layer.attend

    def noted(*inputs):
        of_steps[backend].append(attend(*inputs))
        return of_steps[backend][-1]

    def noted_keys(*inputs):
        projected.append(project(*inputs))
        return projected[-1]

    projected, project = [], layer.project
    # test_rounding.py is where rows are compared; here both have the same ones
    for name in ("encode", "decode"):
        monkeypatch.setattr(TorchBackend, name, by_kernels(getattr(TorchBackend, name), getattr(TritonBackend, name)))
    monkeypatch.setattr(layer, "attend", noted)
    monkeypatch.setattr(layer, "project", noted_keys)
    for backend in of_steps:
        monkeypatch.setenv(BACKEND_VARIABLE, backend)
        found[backend] = [*steps(layer, hidden_states, index, reach, new_cache(layer.config), not padded)]
        assert launches["layer"] == (LENGTH if backend == "auto" else 0)
        assert launches["write"] == (LENGTH if backend == "auto" and padded else 0)
        assert launches["kept heads"] == (LENGTH if backend == "auto" and layer.kept and not layer.softcap else 0)
    real = index >= 0
    found = {backend: torch.cat(outputs, dim=1)[real] for backend, outputs in found.items()}
    roundings = *layer.kept_roundings, layer.shape.key_rounding, layer.shape.value_rounding
    if any(rounding.rounds for rounding in roundings):
        use_keys_of(layer, projected[-LENGTH:], real, limit, monkeypatch)
    expected = naive(layer, hidden_states, index, reach)[real.cpu()]
    errors = {backend: relative_error(outputs, expected) for backend, outputs in found.items()}
    record_property("layer", f"{errors['auto']:.1e}")
    record_property("PyTorch's", f"{errors['torch']:.1e}")
    assert found["auto"].dtype == dtype, errors
    assert max(errors.values()) < limit, errors

    between = {"outputs": [], "features": []}
    for t, pairs in enumerate(zip(*of_steps.values(), strict=True)):
        for name, theirs, own in zip(between, *pairs, strict=True):
            assert (theirs is None) == (own is None)
            if theirs is not None and theirs[real[:, t]].any():  # there are no features while the state is empty
                assert theirs.shape == own.shape
                assert theirs.dtype == own.dtype == dtype
                between[name].append(relative_error(*(x[real[:, t]].flatten(1) for x in (own, theirs))))
    for name, found_errors in between.items():
        record_property(f"{name} beside PyTorch's", f"{max(found_errors):.1e}")
        assert len(found_errors) > 4, between
        assert max(found_errors) < limit, between


SIZES = {  # block, whole blocks, sinks, places, head dim, planes, slow planes, bits
    "the default": (32, 3, 4, 20, 64, 32, 16, 8),
    "in 16 bits": (16, 5, 2, 7, 64, 32, 8, 16),
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
    roundings = [Rounding(bits, dim, backend) for backend in ("auto", "torch")]
    shapes = [BlockShape(block, whole, sinks, places, SlowDims(planes, slow_planes), one, one) for one in roundings]
    shape, rounding = shapes[1], roundings[1]
    batch, heads = 5, 2
    window = shape.window
    first = torch.tensor([0, window - 1, window, window + 2 * block, window + 5 * block - 1 + places])

    def rows(length):
        return rounding.encode(torch.randn(batch, heads, length, dim, device=DEVICE))

    layers = [HybridLayer(shape) for shape in shapes]
    before = int(first.max())
    index = torch.arange(before).expand(batch, -1)
    index = torch.where(index < first[:, None], index, -1).to(DEVICE)
    salience = (torch.randn(batch, before) * 4).round().to(DEVICE)  # 0 and -0 are as large
    salience[index < sinks] = torch.inf
    salience[index < 0] = -torch.inf
    tokens = NewTokens(rows(before), rows(before), salience, index)
    held = advance(Held.empty(shape, tokens), tokens, shape)
    for layer in layers:
        layer.held = held.copied()
    errors = []
    for t in range(2 * block + 1):
        index = (first + t)[:, None].to(DEVICE)
        index[t % batch] = -1
        first[t % batch] -= 1
        tokens = NewTokens(rows(1), rows(1), (torch.randn(batch, 1) * 4).round().to(DEVICE), index)
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
    index, hidden_states = token_numbers(PADDED).to(DEVICE), torch.randn(len(PADDING), LENGTH, HIDDEN, device=DEVICE)
    layer, found = make_layer(window_bits=8), []
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
    layer, index = make_layer(), token_numbers(False)[:1].to(DEVICE)
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
        layer = make_layer(dtype, **options).train(training)
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
    shapes = 3 * len(SHAPES) + len(KEPT) + 6 * len(PROMPTS) + 2 * len(ROUNDED)
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
