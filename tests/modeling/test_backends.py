"""Every backend that runs on this machine computes a layer as the equations in float64 say."""

import pytest

from modeling_llamba.kernels import torch_backend
from modeling_llamba.kernels.backend import BACKEND_VARIABLE
from modeling_llamba.kernels.c import c_functions, c_library
from tests.helpers.layer_cases import LAYERS, check_layer


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    monkeypatch.setattr(torch_backend, "SEGMENT", 64)


@pytest.mark.parametrize("name", LAYERS)
def test_pytorch(name, monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, "torch")
    check_layer(monkeypatch, LAYERS[name])


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("threads", [2], indirect=True)
def test_c(name, threads, monkeypatch):
    steps, prompts = [], []
    mix_one, mix_blocks = c_library.library().mix_one, c_functions.mix_blocks
    monkeypatch.setattr(c_library.library(), "mix_one", lambda *inputs: steps.append(1) or mix_one(*inputs))
    monkeypatch.setattr(c_functions, "mix_blocks", lambda *inputs: prompts.append(1) or mix_blocks(*inputs))
    case = LAYERS[name]
    check_layer(monkeypatch, case)
    assert len(steps) == (case.steps + case.parts.count(1) if case.is_plain else 0)
    assert bool(prompts) == bool(case.parts)
