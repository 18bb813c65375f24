"""Every backend that runs on this machine computes a layer as the equations in float64 say."""

import sys

import pytest

from modeling_llamba import kernels
from modeling_llamba.kernels import backend, torch_backend
from modeling_llamba.kernels.backend import BACKEND_VARIABLE
from modeling_llamba.kernels.c import c_functions, c_library
from tests.helpers.layer_cases import LAYERS, check_layer

OWN_BACKEND = """
from modeling_llamba.kernels.torch_backend import TorchBackend


class OwnBackend(TorchBackend):
    calls = []

    def step(self, *inputs):
        self.calls.append("step")
        return super().step(*inputs)

    def mix_blocks(self, *inputs):
        self.calls.append("mix_blocks")
        return super().mix_blocks(*inputs)


def make_backend():
    return OwnBackend()
"""


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


def test_a_folder_and_a_line_add_a_backend(tmp_path, monkeypatch):
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "own_backend.py").write_text(OWN_BACKEND)
    monkeypatch.setattr(kernels, "__path__", [*kernels.__path__, str(tmp_path)])
    monkeypatch.setitem(backend.BACKENDS, "cpu", "kernels.own.own_backend")
    monkeypatch.setattr(backend, "FOUND", {})
    case = next(iter(LAYERS.values()))
    check_layer(monkeypatch, case)
    calls = sys.modules.pop("modeling_llamba.kernels.own.own_backend").OwnBackend.calls
    assert calls.count("step") >= case.steps > 0
    assert "mix_blocks" in calls
