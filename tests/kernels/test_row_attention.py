"""Attention of one token to keys and values in rows, against softmax over what they hold in float64."""

import itertools

import pytest
import torch

import modeling_llamba.kernels.triton.triton_rows as kernel
from modeling_llamba.hybrid.rounding import Rounding
from tests.helpers.hybrid_step import attention_to_pages, attention_to_rows, relative_error, rows_in_room
from tests.kernels.conftest import DEVICE

pytestmark = [pytest.mark.kernels, pytest.mark.gpu]
BITS = [(8, 8), (6, 4), (4, 6), (2, 8), (4, 2), (16, 16), (16, 4), (8, 16)]
CASES = [  # head dim, query heads of a key/value head, columns, cap of the scores, hidden columns
    (64, 3, 1, None, False),
    (64, 3, 300, None, True),
    (80, 1, 77, 2.0, False),
    (128, 4, 530, 5.0, True),
]


@pytest.mark.parametrize(("bits", "case"), list(itertools.product(BITS, CASES)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_one_token_attends_to_rows(monkeypatch, bits, case, dtype):
    dim, shared, columns, softcap, hides = case
    monkeypatch.setattr(kernel, "SPAN", 64)
    monkeypatch.setattr(kernel, "MOST_PARTS", 8)
    roundings = Rounding.of_pair(list(bits), dim)
    query = torch.randn(2, 2 * shared, 1, dim, device=DEVICE).to(dtype)
    key, value = torch.randn(2, 2, 2, columns, dim, device=DEVICE).to(dtype)
    key_rows, value_rows = (rows_in_room(t, rounding) for t, rounding in zip((key, value), roundings, strict=True))
    bias = None
    if hides:
        bias = torch.zeros(2, columns, device=DEVICE)
        bias[0, :70] = -torch.inf
        bias[1, 100:110] = torch.finfo(torch.float32).min
    scale = 2 * dim**-0.5
    output = kernel.attend_to_rows(query, key_rows, value_rows, bias, scale, softcap or 0.0, *bits)
    expected = attention_to_rows(query, (key_rows, value_rows), bits, bias, scale, softcap)
    assert output.dtype == dtype
    assert output.shape == expected.shape
    assert relative_error(output, expected) < (1e-6 if dtype == torch.float32 else 5e-3)


@torch.no_grad()
def test_nothing_comes_of_hidden_columns_alone():
    """Padding that is fed token by token sees nothing, and what came of it must not be NaN in later keys."""
    query, keys = torch.randn(2, 2, 1, 16, device=DEVICE), torch.randn(2, 1, 20, 16, device=DEVICE)
    bias = torch.zeros(2, 20, device=DEVICE)
    bias[1] = -torch.inf
    output = kernel.attend_to_rows(query, keys, keys, bias, 0.25, 0.0, 16, 16)
    assert output[0].any()
    assert not output[1].any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_rows_in_pages(monkeypatch, bits, dtype):
    """Of requests of several lengths, whose pages lie in any order; what is in pages of none is never read."""
    monkeypatch.setattr(kernel, "SPAN", 64)
    monkeypatch.setattr(kernel, "MOST_PARTS", 8)
    output, expected = attention_to_pages(kernel.attend_to_pages, bits, dtype, DEVICE)
    assert relative_error(output, expected) < (1e-6 if dtype == torch.float32 else 5e-3)
