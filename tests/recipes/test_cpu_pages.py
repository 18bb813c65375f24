"""A token of each request by C in scattered pages, against PyTorch's operations on the same tensors, without vLLM."""

import pytest
import torch

from modeling_llamba.hybrid.eviction import Held, NewTokens
from modeling_llamba.hybrid.hybrid_cache import HybridLayer, hidden_columns
from modeling_llamba.hybrid.inputs import HybridInputs, Projected
from modeling_llamba.kernels.backend import BACKEND_VARIABLE
from recipes.serving.cpu_pages import SlotStep, runs_in_c
from tests.helpers.hybrid_step import make_layer, relative_error

SLOTS = {  # options of the layer, True for queries to far sinks
    "unrounded": ({}, False),
    "far sinks": (dict(hybrid_salient=9), True),
    "8 bits": (dict(window_bits=8), True),
    "6 and 4 bits": (dict(head_dim=48, window_bits=[6, 4]), False),
    "2 bits for values alone": (dict(head_dim=16, window_bits=[16, 2]), True),
    "neither sinks nor salient": (dict(hybrid_salient=0, hybrid_sinks=0), False),
    "blocks of one token": (dict(hybrid_block=1, hybrid_window=5), False),
    "a cap": (dict(num_key_value_heads=1, attn_logit_softcapping=2.0), False),
    "slow planes": (dict(head_dim=64, hybrid_state_planes=3, window_bits=8), False),
}
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    """(B, .) uint8 of a tensor (B, ...)."""
    return t.flatten(1).contiguous().view(torch.uint8)


class Slots:
    """The tensors of rows in scattered pages of so many bytes each, among which others lie."""

    def __init__(self, tensors: dict[str, torch.Tensor], size: int):
        self.first = {}
        end = 48
        for name in sorted(tensors, key=lambda name: -tensors[name].element_size()):
            self.first[name] = end
            end += as_bytes(tensors[name]).shape[1]
        batch, pages = len(tensors["keys"]), -(-end // size)
        self.rows = torch.randperm(batch * pages + 4)[: batch * pages].view(batch, pages)
        self.memory = torch.full((batch * pages + 4, size), 255, dtype=torch.uint8)
        self.write(tensors)

    def write(self, tensors: dict[str, torch.Tensor]) -> None:
        flat = self.memory[self.rows].flatten(1)
        for name, t in tensors.items():
            content = as_bytes(t)
            flat[:, self.first[name] : self.first[name] + content.shape[1]] = content
        self.memory[self.rows] = flat.view(*self.rows.shape, -1)


class WrittenLayer(HybridLayer):
    """A cache into which the tokens are written already, each row's in a column of its own."""

    def __init__(self, shape, held: Held, column: torch.Tensor):
        super().__init__(shape)
        self.held, self.column = held, column

    def write(self, tokens, start):
        return 0, self.held.salience.shape[1], hidden_columns(self.held, self.shape.places, self.column[:, None])


@pytest.mark.parametrize("case", SLOTS)
@pytest.mark.parametrize("size", [64, 1008, 2**16])
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@torch.no_grad()
def test_a_token_in_slots(case, size, dtype, threads, monkeypatch):
    """Of requests that begin, that fill their window, and that are behind it; every byte is as expected."""
    options, far = SLOTS[case]
    layer = make_layer(dtype, **options)
    shape = layer.shape
    (K, R), P, B = layer.heads().groups, layer.head_dim, 3
    number = torch.tensor([0, shape.window - 1, shape.window + 3 * shape.block])
    queries = [torch.randn(B, K * R, 1, P).to(dtype) for _ in range(1 + far)]
    key, value = torch.randn(2, B, K, 1, P).to(dtype)
    salience = torch.randn(B, 1)
    rows = layer.rows_of(key, value)
    columns = shape.places + shape.window
    vectors = torch.randn(2, B, K, columns, P).to(dtype)
    ranks = torch.randn(B, columns)
    ranks[:, : shape.places] = ranks[:, : shape.places].sort(dim=1, descending=True).values
    ranks[:, : shape.sinks] = torch.inf
    ranks[0, : shape.places] = -torch.inf
    state = torch.randn_like(Held.empty(shape, NewTokens(*rows, salience, number[:, None])).state)
    state[..., -1, 0] = 30.0
    state[:2] = 0
    tensors = {
        "keys": shape.key_rounding.encode(vectors[0]).contiguous(),
        "values": shape.value_rounding.encode(vectors[1]).contiguous(),
        "salience": ranks,
        "state": state,
    }
    slots = Slots(tensors, size)
    step = SlotStep(layer, slots.first, dtype)
    heads = torch.cat([*queries, key, value], dim=1).transpose(1, 2)
    found = step(slots.memory, slots.rows, number[:, None], salience, heads)

    column = shape.places + number - (number // shape.block - shape.whole_blocks).clamp(min=0) * shape.block
    each = torch.arange(B)
    for name, new in zip(("keys", "values"), rows, strict=True):
        tensors[name][each, :, column] = new[:, :, 0]
    ranks[each, column] = salience[:, 0]
    memory = slots.memory.clone()
    slots.write(tensors)
    assert torch.equal(memory, slots.memory)
    monkeypatch.setenv(BACKEND_VARIABLE, "torch")
    cache = WrittenLayer(shape, Held(*tensors.values(), number + 1), column)
    projected = Projected(queries[0], queries[1] if far else None, key, value, salience, *rows)
    for own, theirs in zip(found, layer.attend(projected, HybridInputs(number[:, None]), cache), strict=True):
        assert relative_error(own.flatten(1), theirs.flatten(1)) < LIMITS[dtype]


def test_c_runs_here():
    assert runs_in_c(torch.zeros(1), torch.float32, "auto")
