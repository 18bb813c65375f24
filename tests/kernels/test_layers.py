"""Triton kernels compute a hybrid layer as the equations in float64 say, on the cases that all backends share."""

import pytest
import torch

import modeling_llamba.kernels.triton.triton_backend as triton_backend
import modeling_llamba.kernels.triton.triton_prompt as kernels
from tests.helpers.layer_cases import LAYERS, check_layer
from tests.kernels.conftest import DEVICE, INTERPRETED

pytestmark = pytest.mark.usefixtures("flex_in_the_interpreter")
LIMITS = {torch.float32: 5e-6 if INTERPRETED else 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
IN_16_BITS = ("grouped queries", "tokens, a kept head, padded", "tokens, D 64, 8 bits, a kept head of 6 and 4")
CASES = [(name, torch.float32) for name in LAYERS] + [(name, torch.bfloat16) for name in IN_16_BITS]
CASES.append(("grouped queries", torch.float16))


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_layer(record_property, monkeypatch, launches, mixed, name, dtype):
    if name != "grouped queries":  # which has chunks and segments as they are, longer than the prompt
        monkeypatch.setattr(kernels, "CHUNK", 16)
        monkeypatch.setattr(triton_backend, "SEGMENT", 64)
    case = LAYERS[name]
    error = check_layer(monkeypatch, case, DEVICE, dtype, LIMITS[dtype])
    record_property("layer", f"{error:.1e}")
    bits = case.options.get("window_bits", 16)
    in_kernels = {*(bits if isinstance(bits, list) else [bits])} <= {8, 16}
    assert launches["write"] == (case.steps + case.parts.count(1) if in_kernels else 0)
    assert launches["layer"] == (launches["write"] if case.is_plain else 0)
    assert bool(mixed) == bool(case.parts and case.is_plain and case.reach is None)
