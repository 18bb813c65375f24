"""One token of the normalised read by the kernel, against its equations in float64 and PyTorch's own operations."""

import copy
import json
import math
import os
import subprocess
import sys

import pytest
import torch

import modeling_llamba.normalised_read as normalised_read
import modeling_llamba.ssd as ssd
from modeling_llamba.hybrid_cache import new_cache, recurrent_state
from modeling_llamba.window_attention import Near, Tokens
from tests.kernels.ahead_of_time import CAPABILITIES, KERNELS, SHAPES, tools
from tests.kernels.conftest import DEVICE, INTERPRETED
from tests.students import student_config

COLUMNS = 9
LEAVING = torch.tensor([[2], [-1], [COLUMNS - 1], [0]])
FAR = (40, 40, 0, 1)
"""Tokens in the state of each row."""
EXTREME = math.log(1e-8)
CASES = {  # family, H, K, D, share of D that is rotated, range of log decays, dtype, heads with full attention
    "grouped queries": ("llamba", 9, 3, 64, 1.0, (-0.1, 0), torch.float32, []),
    "partial rotary, D 80": ("phimamba", 4, 4, 80, 0.4, (-0.1, 0), torch.float32, []),
    "D 16, one key head, full heads": ("llamba", 8, 1, 16, 1.0, (-0.1, 0), torch.float32, [0, 5, 7]),
    "D 256, in tiles": ("llamba", 2, 1, 256, 1.0, (-0.1, 0), torch.float32, []),
    "64 heads, the last full": ("llamba", 64, 2, 8, 1.0, (-0.1, 0), torch.float32, [1, 63]),
    "partial rotary, D 6": ("phimamba", 6, 2, 6, 0.67, (-0.1, 0), torch.float32, [2, 3]),
    "decays from 1e-8 to 1": ("llamba", 6, 6, 16, 1.0, (EXTREME, 0), torch.float32, []),
    "decays above 1": ("llamba", 4, 2, 16, 1.0, (0.1, 0.5), torch.float32, []),
    "bf16, grouped queries": ("llamba", 9, 3, 64, 1.0, (-0.1, 0), torch.bfloat16, [4]),
    "bf16, partial rotary, D 80": ("phimamba", 4, 2, 80, 0.4, (EXTREME, 0), torch.bfloat16, []),
}
SLOW = {
    "grouped queries": 8,
    "partial rotary, D 80": 3,
    "D 256, in tiles": 33,
    "partial rotary, D 6": 1,
    "decays above 1": 2,
    "bf16, grouped queries": 8,
    "bf16, partial rotary, D 80": 1,
}
"""Planes of the rotary embedding in the state; all of them in the other cases."""


def weights(read, kv, tokens):
    return read.log_decay[kv].double().clamp(max=0).exp() ** torch.arange(tokens - 1, -1, -1, dtype=torch.float64)


def slow_dimensions(read):
    """Dimensions of a head in the state: of the slowest planes, and those that are not rotated."""
    planes = read.config.rotary_planes
    first = planes - read.config.state_planes(read.layer_idx)
    return [d for d in range(read.head_dim) if d >= 2 * planes or d % planes >= first]


def state_of(read, keys, values):
    """The state (B, K, D + 1, N + 1) of tokens [B][K] (n, D)."""
    states = []
    for k, v in ((k, v) for of_row in zip(keys, values, strict=True) for k, v in zip(*of_row, strict=True)):
        one, w = torch.ones(len(k), 1).double(), weights(read, len(states) % read.kv_heads, len(k))
        states.append((w[:, None] * torch.cat([v, one], 1)).mT @ torch.cat([one, k[:, slow_dimensions(read)]], 1))
    return torch.stack(states).unflatten(0, (len(keys), -1))


def features_of(read, near, keys, values):
    """(B, H, 3, D), from what the attention found and the far tokens [B][K] (n, D)."""
    H, K, D, planes, slow = read.heads, read.kv_heads, read.head_dim, read.config.rotary_planes, slow_dimensions(read)
    part = [d if d < planes else d - planes for d in range(D)]
    of_slow = [part[d] - part[slow[0]] for d in slow]
    features = torch.zeros(len(keys), 3, H, D).double()
    features[:, 0] = near.output[:, 0].double()
    for b, head in ((b, head) for b in range(len(keys)) for head in range(H) if head not in read.full_heads):
        k, v = keys[b][head * K // H][:, slow], values[b][head * K // H]
        w, q, mass = weights(read, head * K // H, len(k)), near.query[b, 0, head].double() * D**-0.5, read.mass[head]
        n = w.sum()
        if not n:
            continue
        k_mean, v_mean = w @ k / n, w @ v / n
        log_mass = mass[0].double() + mass[1] * n.log()
        alpha, beta = mass[2:].double().split([max(of_slow) + 1, D - planes])
        log_mass += alpha[of_slow] @ (q[slow] * k_mean) + beta[part] @ q**2
        gate = torch.sigmoid(log_mass - near.log_mass[b, 0, head].double())
        tilt = (w * (k @ q[slow])) @ v / n - v_mean * (q[slow] @ k_mean)
        features[b, :, head] = torch.stack([(1 - gate) * features[b, 0, head], gate * v_mean, gate * tilt])
    return features.transpose(1, 2)


def make(case):
    """A read, what the attention found, and far keys and values [B][K] (n, D) in float64."""
    family, H, K, D, rotated, (lowest, highest), dtype, full_heads = CASES[case]
    config = student_config(
        family, pattern="normalised-only", num_attention_heads=H, num_key_value_heads=K, head_dim=D,
        hybrid_full_heads=[full_heads] * 2, mixer_num_kv_heads=K, hybrid_state_planes=SLOW.get(case),
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": rotated},
    )  # fmt: skip
    read = normalised_read.NormalisedRead(config, 0)
    read.log_decay.data = torch.linspace(lowest, highest, K)
    read.mass.data += 0.2 * torch.randn_like(read.mass)
    rows = len(FAR)
    query, output = torch.randn(2, rows, H, 1, D).to(dtype).transpose(2, 3)
    keys, values = torch.randn(2, rows, K, COLUMNS + 3, D).to(dtype)[..., 3:, :]  # cut off, as behind sinks
    log_mass = 4 * torch.randn(rows, H, 1).transpose(1, 2)
    log_mass[0] += 100 * torch.randint(-1, 2, (1, H))
    context = Tokens(keys, values, torch.arange(COLUMNS).expand(rows, -1))
    far = [[[torch.randn(n, D).double() + mean for _ in range(K)] for n in FAR] for mean in (0, 0.5)]
    return read, Near(output, log_mass, query, context, LEAVING.expand(-1, 5)[:, -1:]), *far


def on_device(near):
    context = Tokens(*(t.to(DEVICE) for t in near.context[:3]))
    return Near(*(t.to(DEVICE) for t in near[:3]), context, near.leaving.to(DEVICE))


def relative_error(got, expected):
    """The worst of any row and head, over its features or its state."""
    got, expected = (t.double().cpu().flatten(2) for t in (got, expected))
    return ((got - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-6)).max().item()


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_step_from_its_equations(record_property, monkeypatch, launches, case):
    read, near, keys, values = make(case)
    expected = features_of(read, near, keys, values)
    state = state_of(read, keys, values)
    for b, column in enumerate(LEAVING[:, 0]):
        for kv in range(read.kv_heads if column >= 0 else 0):
            old, own = (keys[b][kv], values[b][kv]), (t[b, kv, column, None].double() for t in near.context[:2])
            keys[b][kv], values[b][kv] = map(torch.cat, zip(old, own, strict=True))
    after = state_of(read, keys, values)
    read, near, found = read.to(DEVICE), on_device(near), {}
    for backend in ("torch", "auto"):
        monkeypatch.setenv(ssd.BACKEND_VARIABLE, backend)
        cache = new_cache(read.config)
        cache.update_recurrent_state(state.float().to(DEVICE), 0)
        held = recurrent_state(cache, 0)
        features = read(near, None, cache)
        assert features.shape == (len(FAR), 1, 3 * read.heads * read.head_dim) and features.dtype == near.output.dtype
        assert recurrent_state(cache, 0) is held  # in place
        assert torch.equal(held[1].cpu(), state[1].float())  # where nobody leaves
        found[backend] = features.view(len(FAR), 3, read.heads, -1).transpose(1, 2), held.clone()
    assert launches["read"] == 1
    limits = {torch.float32: 2e-5, torch.bfloat16: 8e-3 if INTERPRETED else 4e-3}
    errors = [relative_error(*pair) for pair in zip(found["auto"], (expected, after), strict=True)]
    record_property("features", f"{errors[0]:.1e}")
    record_property("state", f"{errors[1]:.1e}")
    assert errors[0] < limits[near.output.dtype] and errors[1] < 1e-6, errors
    between = relative_error(found["auto"][0], found["torch"][0])
    record_property("PyTorch's", f"{between:.1e}")
    assert between < limits[near.output.dtype]
    full = found["auto"][0][:, read.full_heads]
    assert torch.equal(full[:, :, 0], near.output[:, 0, read.full_heads]) and not full[:, :, 1:].any()


@torch.no_grad()
def test_what_the_kernel_does_not_take(monkeypatch, launches):
    """A prompt, what is recorded, what has a gradient, float64: PyTorch's own operations."""
    read, near, keys, values = make("grouped queries")
    read, near, state = read.to(DEVICE), on_device(near), state_of(read, keys, values)
    cache = new_cache(read.config)
    cache.update_recurrent_state(state.float().to(DEVICE), 0)
    with torch.enable_grad():
        read(near, None, cache)
    read(near, None, None)
    wide = new_cache(read.config)
    wide.update_recurrent_state(state.to(DEVICE), 0)
    doubled = near._replace(query=near.query.double(), output=near.output.double(), log_mass=near.log_mass.double())
    copy.deepcopy(read).double()(doubled, None, wide)
    assert launches["read"] == 0
    read(near, None, cache)
    assert launches["read"] == 1


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
    assert len(found) == len(SHAPES) * len(CAPABILITIES) * len(KERNELS)
    for name, takes in found.items():
        record_property(f"{name}:", "{registers} registers and {shared} bytes shared".format(**takes))
        assert takes["spilled"] == 0 and takes["registers"] <= 255 and takes["shared"] <= 48 * 1024, (name, takes)
