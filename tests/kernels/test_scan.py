"""The scan by the kernels of fla and mamba-ssm, through our own code, against the float64 recurrence.

Of bf16 the limits are those of the type: fla multiplies in it, and the interpreter cuts bits off where a GPU rounds. A
GPU multiplies float32 in TF32, ten bits.
"""

import math

import pytest
import torch

import modeling_llamba.kernels.triton.scans as scans
import modeling_llamba.mixers.ssd as ssd
from modeling_llamba.hybrid.naive import ssd_recurrence
from tests.kernels import conftest
from tests.kernels.conftest import DEVICE, INTERPRETED

NAMES = ("y", "state", "dx", "dlog_a", "dB", "dC", "dstate")
SMALL = 32, 16
SIZES = {  # P, N of the two scans of the normalised readout, its matrix and its sums
    "SmolLM2's read": (64, 32), "SmolLM2's sums": (97, 1), "Llama-3.1-8B's read": (128, 64),
    "Llama-3.1-8B's sums": (193, 1),
}  # fmt: skip
EXTREME = math.log(1e-8)
CASES = {  # B, L, H, G, T, lowest and highest log decay, lengths of packed sequences in each row, begins at a state
    "1 token": (1, 1, 2, 2, 2, (-3, 0), None, True),
    "63 tokens": (1, 63, 2, 2, 2, (-3, 0), None, True),
    "64 tokens": (1, 64, 2, 2, 2, (-3, 0), None, False),
    "65 tokens": (2, 65, 2, 1, 2, (-3, 0), None, True),
    "130 tokens, grouped heads": (1, 130, 4, 2, 4, (-3, 0), None, True),
    "shared states": (1, 130, 4, 2, 2, (-3, 0), None, True),
    "one state": (1, 65, 4, 1, 1, (-3, 0), None, True),
    "decays from 1e-8 to 1": (1, 130, 2, 2, 2, (EXTREME, 0), None, True),
    "a head of 1e-8, a head of 1": (1, 65, 2, 2, 2, ((EXTREME, 0), (EXTREME, 0)), None, True),
    "decays near 1": (1, 130, 2, 2, 2, (-1e-6, 0), None, True),
    "decays of 1": (1, 130, 2, 2, 2, (0, 0), None, True),
    "packed": (1, 130, 2, 2, 2, (-3, 0), [[65, 1, 64]], False),
    "packed, behind a state": (1, 65, 4, 2, 4, (-3, 0), [[3, 62]], True),
    "packed rows, behind states": (2, 65, 4, 2, 2, (EXTREME, 0), [[64, 1], [20, 45]], True),
    "packed rows, one of them whole": (2, 20, 2, 1, 2, (-3, 0), [[20], [7, 13]], True),
    "SmolLM2's read": (1, 130, 6, 2, 2, (0, 0), None, True),
    "SmolLM2's sums": (1, 130, 2, 2, 2, (0, 0), None, True),
    "Llama-3.1-8B's read": (1, 65, 4, 1, 1, (0, 0), None, True),
    "Llama-3.1-8B's sums": (1, 65, 1, 1, 1, (0, 0), None, True),
}
# the read computes in float32 whatever the model's type
KINDS = [(case, torch.float32) for case in CASES] + [(case, torch.bfloat16) for case in CASES if case not in SIZES]


def make(case, dtype=torch.float32, requires_grad=False):
    B, L, H, G, T, decays, packing, begins = CASES[case]
    P, N = SIZES.get(case, SMALL)
    sizes = (B, L, G, P), (B, L, T), (B, L, G, N), (B, L, H, N), (B, T, P, N)
    inputs = [torch.randn(size).to(dtype) for size in sizes]
    lowest, highest = map(torch.tensor, decays)  # of all heads, or of each
    inputs[1] = lowest + (highest - lowest) * torch.rand(sizes[1])
    inputs[4] = inputs[4].float()
    inputs = [t.to(DEVICE).requires_grad_(requires_grad) for t in inputs[: 5 if begins else 4]]
    seq_idx = None
    if packing is not None:
        seq_idx = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in packing])
        seq_idx = seq_idx.to(DEVICE)
    return inputs, seq_idx


def with_gradients(scan, inputs, **options):
    outputs = scan(*inputs, **options)
    torch.manual_seed(1)
    weighted = sum((t * torch.randn(t.shape).to(DEVICE)).sum() for t in outputs)
    return *outputs, *torch.autograd.grad(weighted, inputs)


@pytest.fixture
def errors(record_property):
    """Relative to the float64 recurrence, by name."""

    def compare(got, expected):
        pairs = zip(NAMES, got, expected, strict=False)
        found = {name: ((a.double() - b).norm() / b.double().norm().clamp_min(1e-30)).item() for name, a, b in pairs}
        for name, error in found.items():
            record_property(name, f"{error:.1e}")
        return found

    return compare


@pytest.mark.skipif(not INTERPRETED and scans.chunk_simple_gla is None, reason="needs fla-core")
@pytest.mark.parametrize("case, dtype", KINDS)
def test_fla_and_its_gradients(errors, case, dtype):
    has_gradients = scans.fla_gradient_problem() is None
    inputs, seq_idx = make(case, dtype, requires_grad=has_gradients)
    run = with_gradients if has_gradients else lambda scan, inputs, **options: scan(*inputs, **options)
    got = run(ssd.ssd_scan, inputs, seq_idx=seq_idx, backend="fla")
    expected = run(ssd_recurrence, inputs, seq_idx=seq_idx)
    assert got[0].dtype == got[1].dtype == torch.float32
    exact = dtype == torch.float32 and INTERPRETED
    limits = dict.fromkeys(NAMES, 1e-5 if exact else 2e-3 if dtype == torch.float32 else 1.5e-2)
    limits["dlog_a"] = 1e-4 if exact else 3e-2  # behind float32 sums of logarithms, up to 1,200
    found = errors(got, expected)
    assert all(error < limits[name] for name, error in found.items()), found


@pytest.mark.skipif(not INTERPRETED and scans.mamba_chunk_scan_combined is None, reason="needs mamba-ssm")
@pytest.mark.parametrize("case, dtype", KINDS)
def test_mamba_ssm(errors, case, dtype):
    inputs, seq_idx = make(case, dtype)
    got = ssd.ssd_scan(*inputs, seq_idx=seq_idx, backend="mamba_ssm")
    found = errors(got, ssd_recurrence(*inputs, seq_idx=seq_idx))
    assert max(found.values()) < (1e-5 if INTERPRETED else 2e-3), found


@pytest.mark.skipif(not INTERPRETED, reason="TF32 hides what is to be seen")
@pytest.mark.parametrize("nearest", [1e-2, 1e-4, 1e-6, 1e-8])
def test_why_mamba_ssm_does_not_train(errors, nearest):
    """Its x is divided by -log_a, and the gradient of that near a = 1 is a small difference of large numbers."""
    inputs, _ = make("decays of 1")
    inputs[1] = -nearest * torch.rand(inputs[1].shape)
    inputs = [t.requires_grad_() for t in inputs]
    with pytest.raises(ValueError, match="train with 'auto', 'fla', 'torch'"):
        ssd.ssd_scan(*inputs, backend="mamba_ssm")
    got = with_gradients(lambda *t: scans.mamba_ssm_scan(*t, None, 64), inputs)
    found = errors(got, with_gradients(ssd_recurrence, inputs))
    assert found["dlog_a"] > 2e-8 / nearest
    assert max(error for name, error in found.items() if name != "dlog_a") < 1e-5


@pytest.mark.skipif(not INTERPRETED, reason="every float32 test on a GPU is this one")
@pytest.mark.parametrize("backend", ["fla", "mamba_ssm"])
@pytest.mark.parametrize("case", ["130 tokens, grouped heads", "decays from 1e-8 to 1", "decays near 1"])
def test_float32_on_tensor_cores(monkeypatch, errors, case, backend):
    """They round the factors of a product to TF32, ten bits."""
    monkeypatch.setattr(conftest, "TENSOR_CORES", True)
    inputs, _ = make(case)
    found = errors(ssd.ssd_scan(*inputs, backend=backend), ssd_recurrence(*inputs))
    assert 1e-5 < max(found.values()) < 1e-3, found
