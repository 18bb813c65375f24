"""Which code runs the scan, and that causal-conv1d is called rightly; tests/kernels runs the scan's kernels."""

import types

import pytest
import torch

import modeling_llamba.kernels.triton.scans as scans
from modeling_llamba.kernels.backend import BACKEND_VARIABLE, requested_backend
from modeling_llamba.kernels.torch_backend import TorchBackend
from modeling_llamba.mixers.short_conv import ShortConv
from modeling_llamba.model.config_values import BACKEND_NAMES
from tests.helpers.backends import use_backend
from tests.helpers.hybrids import make_hybrid, tiny_config
from tests.helpers.scans import relative_error
from tests.helpers.teachers import random_ids

NAMES = ("x", "log_a", "B", "C", "state")


CHOICES = {  # installed, asked, gradients wanted -> runs on CUDA; of which GPU with which Triton, Ampere unless said
    "nothing installed": ("", "auto", False, "torch"),
    "both": ("mamba_ssm fla", "auto", False, "fla"),
    "both, in training": ("mamba_ssm fla", "auto", True, "fla"),
    "mamba_ssm alone": ("mamba_ssm", "auto", False, "mamba_ssm"),
    "mamba_ssm alone, in training": ("mamba_ssm", "auto", True, "torch"),
    "torch by name": ("mamba_ssm fla", "torch", False, "torch"),
    "fla by name": ("mamba_ssm fla", "fla", False, "fla"),
    "mamba_ssm by name": ("mamba_ssm fla", "mamba_ssm", False, "mamba_ssm"),
    "mamba_ssm by name, in training": ("mamba_ssm fla", "mamba_ssm", True, "loses gradients"),
    "absent by name": ("mamba_ssm", "fla", False, "fla-core"),
    "fla on Hopper, wrong Triton": ("mamba_ssm fla", "auto", False, "fla", (9, 0), "3.6.0"),
    "the same, in training": ("mamba_ssm fla", "auto", True, "torch", (9, 0), "3.6.0"),
    "the same by name, in training": ("fla", "fla", True, "upgrade triton to 3.7.1", (9, 0), "3.7.0"),
    "the same by name": ("fla", "fla", False, "fla", (9, 0), "3.7.0"),
    "mamba_ssm alone there, in training": ("mamba_ssm", "auto", True, "torch", (9, 0), "3.6.0"),
    "Hopper, new Triton, in training": ("fla", "auto", True, "fla", (9, 0), "3.7.1"),
    "Hopper, newer Triton, in training": ("fla", "fla", True, "fla", (9, 0), "3.10.0"),
    "Hopper, old Triton, in training": ("fla", "auto", True, "fla", (9, 0), "3.3.1"),
    "Ampere, in training": ("fla", "auto", True, "fla", (8, 0), "3.6.0"),
    "Blackwell, in training": ("fla", "fla", True, "fla", (10, 0), "3.6.0"),
}


def of_gpu(monkeypatch, capability, triton):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(scans, "triton", types.SimpleNamespace(__version__=triton))


@pytest.mark.parametrize("case", CHOICES)
def test_choice_of_a_backend(monkeypatch, case):
    installed, asked, recording, expected, *device = CHOICES[case]
    of_gpu(monkeypatch, *device or ((8, 0), "3.6.0"))
    monkeypatch.setattr(scans, "mamba_chunk_scan_combined", object() if "mamba_ssm" in installed else None)
    monkeypatch.setattr(scans, "chunk_simple_gla", object() if "fla" in installed else None)
    if expected in BACKEND_NAMES:
        assert scans.choose_scan(asked, recording) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            scans.choose_scan(asked, recording)


def test_it_is_said_once_that_fla_does_not_train(monkeypatch):
    of_gpu(monkeypatch, (9, 0), "3.5.0")
    monkeypatch.setattr(scans, "chunk_simple_gla", object())
    said = []
    monkeypatch.setattr(scans.logger, "warning", lambda text, *args: said.append(text))
    for _ in range(3):
        assert scans.choose_scan("auto", recording=True) == "torch"
    assert len(said) == 1
    assert "Triton 3.5.0" in said[0]
    assert "PyTorch's operations train" in said[0]


def test_the_environment_overrides_the_configuration(monkeypatch):
    model, ids = make_hybrid(), random_ids(1, 20)
    plain = model(ids).logits
    monkeypatch.setenv(BACKEND_VARIABLE, "fla")
    with pytest.raises(ValueError, match="The fla backend needs CUDA tensors"):
        model(ids)
    monkeypatch.setenv(BACKEND_VARIABLE, "fast")
    with pytest.raises(ValueError, match="Unknown backend 'fast' in HYBRID_BACKEND"):
        model(ids)
    model.config.backend = "fla"
    monkeypatch.setenv(BACKEND_VARIABLE, "torch")
    assert torch.equal(model(ids).logits, plain)


class Convolving(TorchBackend):
    """Convolutions as on CUDA."""

    def convolve(self, *inputs):
        return scans.convolve(*inputs)

    def convolve_one(self, *inputs):
        return scans.convolve_one(*inputs)


@pytest.mark.parametrize("activation", ["identity", "silu"])
def test_causal_conv1d_update_arguments(monkeypatch, activation):
    """The kernel's documented contract: x (B, C) joins conv_state (B, C, >= width), in place; weight (C, width)."""

    def stand_in(x, conv_state, weight, bias=None, activation=None):
        assert x.shape == conv_state.shape[:2]
        assert weight.shape == (x.shape[1], 4)
        assert bias.shape == weight.shape[:1]
        assert activation in (None, "silu")
        conv_state.copy_(torch.cat([conv_state[..., 1:], x[..., None]], -1))
        y = (conv_state[..., -4:] * weight).sum(-1) + bias
        return torch.nn.functional.silu(y) if activation else y

    monkeypatch.setattr(scans, "causal_conv1d_update", stand_in)
    conv = ShortConv(6, 4, activation)
    torch.nn.init.normal_(conv.weight), torch.nn.init.normal_(conv.bias)
    x = torch.randn(2, 9, 6)
    past = x[:, 1:5].mT.clone()
    with torch.no_grad(), monkeypatch.context() as on_cuda:
        assert conv.step(x[:, 5:6], past) is None, "the kernel is for CUDA tensors"
        use_backend(on_cuda, Convolving())
        steps = [conv.step(x[:, t : t + 1], past) for t in range(5, 9)]
        on_cuda.undo()
        whole = conv(x)
        remembered = [conv(x[:, t : t + 1], joined=x[:, : t + 1].mT) for t in range(5, 9)]
    torch.testing.assert_close(torch.cat(steps, 1), whole[:, 5:])
    torch.testing.assert_close(torch.cat(remembered, 1), whole[:, 5:])


def conv_of(channels, activation="silu", config=None):
    conv = ShortConv(channels, 4, activation, config)
    torch.nn.init.normal_(conv.weight), torch.nn.init.normal_(conv.bias)
    return conv


@pytest.mark.parametrize("packing", [False, True])
def test_causal_conv1d_arguments(monkeypatch, packing):
    """The kernel's documented contract: x (B, C, L), channels side by side in rows of a multiple of 8."""
    seen = []

    def stand_in(x, weight, bias=None, seq_idx=None, activation=None):
        assert x.stride(1) == 1
        assert x.stride(2) % 8 == 0
        assert x.stride(0) % 8 == 0
        assert x.shape[1] % 8 == 0
        assert weight.shape == (x.shape[1], 4)
        assert bias.shape == weight.shape[:1]
        assert activation in (None, "silu")
        assert (seq_idx is not None) == packing
        assert seq_idx is None or seq_idx.dtype == torch.int32
        seen.append(x.shape)
        with monkeypatch.context() as plain:
            plain.setattr(scans, "causal_conv1d_fn", None)
            return conv(x.mT, seq_idx).mT

    seq_idx = torch.tensor([[0] * 4 + [1] * 5] * 2) if packing else None
    for channels, length, expected in ((16, 9, 1), (12, 9, 0), (16, 1, 0)):  # not of 12 channels, nor of one row
        conv, ids = conv_of(channels), None if seq_idx is None else seq_idx[:, :length]
        x = torch.randn(2, length, channels + 5)[..., :channels]  # a slice, as of a projection
        plain = conv(x, ids)
        seen.clear()
        with monkeypatch.context() as on_cuda:
            on_cuda.setattr(scans, "causal_conv1d_fn", stand_in)
            use_backend(on_cuda, Convolving())
            torch.testing.assert_close(conv(x, ids), plain)
        assert len(seen) == expected


def test_who_wants_torch_gets_no_compiled_convolution(monkeypatch):
    class Config:
        backend = "auto"

    monkeypatch.setattr(scans, "causal_conv1d_update", lambda x, *others, **options: x)
    use_backend(monkeypatch, Convolving())
    x, past = torch.randn(1, 1, 8), torch.zeros(1, 8, 4)
    configured, plain = (conv_of(8, config=config).requires_grad_(False) for config in (Config, None))
    assert configured.step(x, past) is not None
    assert plain.step(x, past) is not None
    Config.backend = "torch"
    assert configured.step(x, past) is None
    monkeypatch.setenv(BACKEND_VARIABLE, "torch")
    assert plain.step(x, past) is None


def test_one_token_with_a_gradient_of_the_weights_alone_takes_no_kernel(monkeypatch):
    """causal_conv1d_update knows no gradient."""
    monkeypatch.setattr(scans, "causal_conv1d_update", lambda x, *others, **options: x)
    use_backend(monkeypatch, Convolving())
    conv, x, past = conv_of(8), torch.randn(1, 1, 8), torch.zeros(1, 8, 4)
    assert conv.step(x, past) is None
    assert conv.requires_grad_(False).step(x, past) is not None
    assert conv.step(x.requires_grad_(), past) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.skipif(scans.causal_conv1d_fn is None, reason="needs causal-conv1d")
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_causal_conv1d_equals_the_sum_of_taps_on_gpu(monkeypatch, dtype, packing):
    """Outputs, gradients, and one token after the other."""
    conv = conv_of(960).to("cuda", dtype)
    x = torch.randn(2, 70, 1545, device="cuda", dtype=dtype)[..., :960].detach().requires_grad_()
    seq_idx = (torch.arange(70, device="cuda") // 30).expand(2, 70) if packing else None
    results = {}
    for backend in ("auto", "torch"):
        monkeypatch.setenv(BACKEND_VARIABLE, backend)
        y = conv(x, seq_idx)
        results[backend] = (y, *torch.autograd.grad(y.float().square().sum(), (x, conv.weight, conv.bias)))
    for kernel, plain in zip(*results.values(), strict=True):
        assert relative_error(kernel, plain.double()) < (1e-5 if dtype == torch.float32 else 2e-2)
    monkeypatch.setenv(BACKEND_VARIABLE, "auto")
    with torch.no_grad():
        past = x[:, 1:5].mT.clone()
        steps = [conv.step(x[:, t : t + 1], past) for t in range(5, 9)]
        assert relative_error(torch.cat(steps, 1), conv(x)[:, 5:9].double()) < 2e-2


def test_the_names_of_version_0_2_still_hold(monkeypatch):
    assert tiny_config(mixer_backend="torch").backend == "torch"
    assert "mixer_backend" not in tiny_config(mixer_backend="torch").to_dict()
    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    monkeypatch.setenv("HYBRID_SSD_BACKEND", "torch")
    assert requested_backend("auto") == "torch"
    monkeypatch.setenv(BACKEND_VARIABLE, "fla")
    assert requested_backend("auto") == "fla"
