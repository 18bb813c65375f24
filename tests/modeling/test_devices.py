"""What a GPU would have to wait for, and what it would have to hold, seen without one."""

import contextlib

import pytest
import torch
from torch.nn.attention.flex_attention import AuxOutput
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import modeling_llamba.kernels.flex as flex
import modeling_llamba.model.sequences as sequences
from modeling_llamba.hybrid.block_layout import GROUP
from tests.helpers.backends import use_backend
from tests.helpers.hybrids import FAMILIES, tiny_config

aten = torch.ops.aten
LENGTH = 60


class Made(TorchFunctionMode):
    """Notes what is made of numbers of the host and sent to a device."""

    def __init__(self, waits):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, function, types, arguments=(), options=None):
        out = function(*arguments, **(options or {}))
        makes = function in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)
        if makes and out.device.type != "cpu" and out.numel():
            self.waits.append(function.__name__)
        return out


class Watch(TorchDispatchMode):
    """Notes the operations that wait for the device: values that are asked for, shapes that depend on values, and
    tensors that are sent over. On the meta device, where there are no values, most of them fail besides."""

    def __init__(self):
        super().__init__()
        self.waits, self.largest = [], 0

    @contextlib.contextmanager
    def watching(self):
        with Made(self.waits), self:
            yield self

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        out = function(*arguments, **(options or {}))
        asks = function in (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.nonzero.default)
        masks = function in (aten.index.Tensor, aten.masked_select.default) and any(
            t is not None and t.dtype == torch.bool for t in torch.utils._pytree.tree_leaves(arguments[1:])
        )
        tensors = [t for t in torch.utils._pytree.tree_leaves((arguments, out)) if isinstance(t, torch.Tensor)]
        sent = len({t.device.type for t in tensors if t.ndim}) > 1
        if asks or masks or sent:
            self.waits.append(str(function))
        self.largest = max([self.largest, *(t.numel() for t in tensors if t.dtype == torch.bool)])
        return out


def on_meta(family, mixer, pattern, **overrides):
    with torch.device("meta"):
        return FAMILIES[family][1](tiny_config(family, mixer, pattern, **overrides)).eval()


@pytest.fixture(autouse=True)
def asks_as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(sequences, "may_ask", lambda t: True)


@pytest.mark.parametrize(
    "family, mixer, pattern",
    [
        ("llamba", "discrete_mamba2", "beside"),  # salient tokens, heads, a state
        ("phimamba", "discrete_mamba2", "beside-only"),
        ("phimamba", "none", "beside-only"),
        ("llamba", "mamba1", "every"),
        ("llamba", "discrete_mamba2", "gemma"),
        ("phimamba", "mamba2", "window"),
        ("llamba", "discrete_mamba2", "pure"),
    ],
)
@torch.no_grad()
def test_nothing_waits_for_the_device(family, mixer, pattern):
    """A prompt, another stretch of it, and steps of one token, as long as nothing is padded."""
    model, ids = on_meta(family, mixer, pattern), torch.zeros(2, LENGTH, dtype=torch.long, device="meta")
    with Watch().watching() as watch:
        out = model(ids, use_cache=True)
        for new in (ids, ids[:, :1], ids[:, :1]):
            out = model(new, cache=out.cache)
    assert out.logits.shape[:2] == (2, 1)
    assert out.cache.get_seq_length() == 2 * LENGTH + 2
    assert watch.waits == []


@pytest.mark.parametrize(
    "ask",
    [
        lambda t: t.sum().item(),
        lambda t: bool(t.all()),
        lambda t: t[t > 0],
        lambda t: t.nonzero(),
        lambda t: t.to("meta"),
        lambda t: t.to("meta")[:, torch.tensor([0], device="meta")],
    ],
)
def test_the_watch_sees_what_waits(ask):
    with Watch().watching() as watch:
        ask(torch.ones(3, 3))
    assert watch.waits


@pytest.mark.parametrize("by_flex", [False, True])
@torch.no_grad()
def test_no_mask_of_all_pairs(monkeypatch, by_flex):
    """Per token, the largest mask holds a group, its window and its places, whatever the length; and nothing waits."""

    def causal(query, key, value, attn_mask=None, is_causal=False, **options):
        assert attn_mask is None
        assert is_causal
        return query

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", causal)

    def attend(query, key, value, cap, blocks, **options):
        assert blocks.shape[-2:] == (query.shape[2], key.shape[2])
        return query, AuxOutput(lse=query[..., 0], max_scores=None)

    if by_flex:
        use_backend(monkeypatch, flex.FlexBackend())
        monkeypatch.setattr(flex.FlexBackend, "can_flex", lambda *inputs: True)
    monkeypatch.setattr(flex, "compiled_flex_attention", lambda: attend)
    model = on_meta("llamba", "discrete_mamba2", "beside-only")
    sizes = []
    for length in (512, 4096):
        with Watch().watching() as watch:
            model(torch.zeros(1, length, dtype=torch.long, device="meta"), use_cache=True)
        assert watch.waits == []
        sizes.append(watch.largest / length)
    assert sizes[1] <= sizes[0] < GROUP + 8 + 5 + 2
