"""Kernels from the Hub: asked for or not at all, and never in the way of a model that does without."""

import importlib
import types

import pytest
import torch

import convert.tools.env as environment
from modeling_llamba import hub_kernels, short_conv, ssd

FUNCTIONS = {name: object() for name in ("mamba_chunk_scan_combined", "causal_conv1d_fn", "causal_conv1d_update")}


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the Hub, which counts what is asked of it; variables and modules are as before afterwards."""
    asked = []

    def get_kernel(repository, version=None):
        asked.append((repository, version))
        return types.SimpleNamespace(**FUNCTIONS)

    monkeypatch.setattr("transformers.integrations.hub_kernels.get_kernel", get_kernel)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    hub_kernels._kernel.cache_clear()
    yield asked
    monkeypatch.undo()
    hub_kernels._kernel.cache_clear()
    for module in (ssd, short_conv):
        importlib.reload(module)


@pytest.mark.skipif(ssd.mamba_chunk_scan_combined is not None, reason="mamba-ssm is installed and comes first")
def test_the_hub_stands_in_for_packages_that_are_absent(hub, monkeypatch):
    monkeypatch.setenv(hub_kernels.HUB_VARIABLE, "1")
    for module in (ssd, short_conv):
        importlib.reload(module)
    assert ssd.mamba_chunk_scan_combined is FUNCTIONS["mamba_chunk_scan_combined"]
    assert short_conv.causal_conv1d_fn is FUNCTIONS["causal_conv1d_fn"]
    assert short_conv.causal_conv1d_update is FUNCTIONS["causal_conv1d_update"]
    assert hub == [(hub_kernels.HUB_REPOSITORY, hub_kernels.HUB_VERSION)], "loaded once"
    assert ssd.choose_backend("auto", on_cuda=True, recording=False) == "mamba_ssm"


@pytest.mark.parametrize("value, cuda", [(None, True), ("0", True), ("1", False)])
def test_nothing_is_loaded_unasked_or_without_a_device(value, cuda, hub, monkeypatch):
    monkeypatch.delenv(hub_kernels.HUB_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(hub_kernels.HUB_VARIABLE, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert hub_kernels.hub_function("mamba_chunk_scan_combined") is None and hub == []


def test_a_kernel_that_cannot_be_had_warns_and_leaves_torch(hub, monkeypatch):
    def absent(repository, version=None):
        raise FileNotFoundError("no build for this torch")

    monkeypatch.setattr("transformers.integrations.hub_kernels.get_kernel", absent)
    monkeypatch.setenv(hub_kernels.HUB_VARIABLE, "1")
    with pytest.warns(UserWarning, match="has no effect: .*no build for this torch"):
        assert hub_kernels.hub_function("causal_conv1d_fn") is None


def test_env_names_the_hub(monkeypatch):
    monkeypatch.setattr(environment, "hub_function", FUNCTIONS.get)
    kernels = {package: {"version": None, "problem": "not installed"} for package in environment.KERNELS}
    backends = environment._backends(kernels, cuda=True)
    scan, conv = backends["SSD scan (discrete_mamba2, mamba2)"], backends["short convolution"]
    assert (
        scan["runs"] == "mamba_ssm" and hub_kernels.HUB_REPOSITORY in scan["why"] and conv["runs"] == "causal_conv1d"
    )
    monkeypatch.setattr(environment, "hub_function", lambda name: None)
    assert environment._backends(kernels, cuda=True)["short convolution"]["runs"] == "torch"
