"""Whole tiny models on the kernels, against the same models on PyTorch's own operations."""

import pytest
import torch

import modeling_llamba.ssd as ssd
from tests.kernels.conftest import DEVICE, INTERPRETED
from tests.students import make_student
from tests.teachers import random_ids

PROMPT, STEPS = (70 if INTERPRETED else 300), 8
# flex_attention is compiled for a device alone, where it wants wider heads
OPTIONS = {"dtype": torch.float32} | ({} if INTERPRETED else {"head_dim": 16, "mixer_d_state": 16})
KERNELS = {"fla": "chunk_simple_gla", "mamba_ssm": "mamba_chunk_scan_combined"}
KERNELS = {backend: name for backend, name in KERNELS.items() if INTERPRETED or getattr(ssd, name) is not None}
AUTO = {*([*KERNELS][:1])}
MODELS = {  # pattern and mixer
    "pure": ("pure", "discrete_mamba2"),
    "step sizes": ("hybrid", "mamba2"),
    "beside a window": ("beside", "discrete_mamba2"),
    "shared states": ("shared", "mamba2"),
    "normalised read": ("normalised", "discrete_mamba2"),
}


def relative_error(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@torch.no_grad()
def logits(model, ids):
    """Of the prompt at once, padded on the left in one row, and of steps of one token."""
    model, ids = model.to(DEVICE), ids.to(DEVICE)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    out = model(ids[:, :PROMPT], attention_mask=mask[:, :PROMPT], use_cache=True)
    found = [out.logits[0], out.logits[1, 5:]]
    for end in range(PROMPT + 1, PROMPT + STEPS + 1):
        out = model(ids[:, end - 1 : end], attention_mask=mask[:, :end], past_key_values=out.past_key_values)
        found.append(out.logits[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize("family", ["llamba", "phimamba"])
@pytest.mark.parametrize("name", MODELS)
def test_prefill_and_decoding(monkeypatch, launches, name, family):
    pattern, mixer = MODELS[name]
    model, ids = make_student(family, mixer, pattern, **OPTIONS), random_ids(2, PROMPT + STEPS)
    found = {}
    for backend in ("torch", *KERNELS, "auto"):
        before = dict(launches)
        monkeypatch.setenv(ssd.BACKEND_VARIABLE, backend)
        found[backend] = logits(model, ids)
        used = {kernel for kernel in KERNELS if launches[kernel] > before[kernel]}
        assert used == (AUTO if backend == "auto" else {backend} & {*KERNELS})
        steps = STEPS * model.config.layer_types.count("hybrid") * (name == "normalised read" and backend != "torch")
        assert launches["layer"] - before["layer"] == steps
    limit = 1e-5 if INTERPRETED else 5e-3
    assert all(relative_error(found[backend], found["torch"]) < limit for backend in found)


@pytest.mark.parametrize(
    "gap", [slice(PROMPT - 6, PROMPT), slice(PROMPT - 9, PROMPT - 4), slice(PROMPT + 1, PROMPT + 2)]
)
@torch.no_grad()
def test_padding_between_tokens_is_never_seen(monkeypatch, launches, gap):
    """Behind a prompt, inside it, and as a single token: PyTorch's operations take the steps from there on."""
    model, ids = make_student("llamba", "discrete_mamba2", "normalised", **OPTIONS), random_ids(2, PROMPT + STEPS)
    other, mask = ids.clone(), torch.ones_like(ids)
    mask[1, gap], other[1, gap] = 0, (ids[1, gap] + 7) % model.config.vocab_size
    found = {}
    for backend, tokens in (("torch", ids), ("auto", ids), ("auto", other)):
        monkeypatch.setenv(ssd.BACKEND_VARIABLE, backend)
        out = model.to(DEVICE)(
            tokens[:, :PROMPT].to(DEVICE), attention_mask=mask[:, :PROMPT].to(DEVICE), use_cache=True
        )
        steps = []
        for end in range(PROMPT + 1, PROMPT + STEPS + 1):
            out = model(
                tokens[:, end - 1 : end].to(DEVICE), attention_mask=mask[:, :end].to(DEVICE),
                past_key_values=out.past_key_values,
            )  # fmt: skip
            steps.append(out.logits[:, 0] * mask[:, end - 1, None].to(DEVICE))
        found[backend, tokens is other] = torch.cat(steps)
    expected = found["torch", False]
    assert all(relative_error(got, expected) < (1e-5 if INTERPRETED else 5e-3) for got in found.values())


LAYOUTS = {  # of a row of 20 and 50 tokens
    "seq_idx": dict(seq_idx=torch.tensor([[0] * 20 + [1] * 50])),
    "cu_seqlens": dict(cu_seqlens=torch.tensor([0, 20, 70])),
    "position_ids": dict(position_ids=torch.cat([torch.arange(20), torch.arange(50)])[None]),
    "padding at the end": dict(attention_mask=torch.tensor([[1] * 60 + [0] * 10])),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["beside a window", "shared states", "normalised read"])
def test_training(monkeypatch, launches, name, layout):
    """The gradient of every parameter, in each way to pack sequences; a model takes fla's kernel by itself."""
    pattern, mixer = MODELS[name]
    model, ids = make_student("llamba", mixer, pattern, dtype=torch.float32), random_ids(1, 70)
    grads = {}
    model, ids = model.to(DEVICE), ids.to(DEVICE)
    packing = {name: value.to(DEVICE) for name, value in LAYOUTS[layout].items()}
    labels = ids.masked_fill(packing.get("attention_mask", torch.ones_like(ids)) == 0, -100)
    for backend in ("torch", "auto"):
        monkeypatch.setenv(ssd.BACKEND_VARIABLE, backend)
        loss = model(ids, labels=labels, use_cache=False, **packing).loss
        found = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
        grads[backend] = dict(zip(dict(model.named_parameters()), found, strict=True))
    assert {kernel for kernel, count in launches.items() if count} == AUTO & {"fla"}
    for parameter, gradient in grads["torch"].items():
        got = grads["auto"][parameter]
        assert (got is None) == (gradient is None), parameter
        if gradient is not None:
            assert relative_error(got, gradient) < (1e-4 if INTERPRETED else 5e-2) or not gradient.any(), parameter
