"""Rows of vectors and vectors of rows by kernels: against the rounding in float64, and PyTorch's operations."""

import pytest
import torch

from modeling_llamba.hybrid.rounding import Rounding
from modeling_llamba.kernels.backend import BACKEND_VARIABLE
from modeling_llamba.model.config_values import CACHE_BITS
from tests.helpers.hybrid_step import relative_error
from tests.kernels.conftest import DEVICE, INTERPRETED

pytestmark = [pytest.mark.kernels, pytest.mark.gpu]
BITS = [bits for bits in CACHE_BITS if bits < 16]
DIMS = [16, 48, 64, 80, 96, 128, 256]
CASES = [(bits, dim) for bits in BITS for dim in DIMS] + [(8, 2), (8, 100), (4, 100)]
EXACT = [(bits, dim) for bits, dim in CASES if (dim & -dim) in (4, 16, 64, 256)]
"""Of whose matrices all entries are powers of two: sums of small integers are exact then, in any order."""
TYPES = [torch.float32, torch.bfloat16, torch.float16]
CUT = [torch.bfloat16] if INTERPRETED else []
"""Types that numbers are cut off to, where a GPU rounds."""


def of_torch(rounding: Rounding) -> Rounding:
    return rounding._replace(backend="torch")


def awkward_vectors(dim: int, dtype: torch.dtype) -> torch.Tensor:
    """(B, K, L, D) as a layer makes them, which is not in this order, with outliers, zeros and very small ones."""
    vectors = torch.randn(2, 7, 3, dim)
    vectors[0, 0, 0, dim // 3] = 100.0
    vectors[0, 1, 0] *= 1e-6
    vectors[1, 2] = 0.0
    return vectors.to(DEVICE, dtype).transpose(1, 2)


@pytest.mark.parametrize(("bits", "dim"), CASES)
@pytest.mark.parametrize("dtype", TYPES)
def test_rows_are_what_the_rounding_says(launches, record_property, bits, dim, dtype):
    """Each scale is the nearest of its type, or all but; each number the nearest code times the scale, or all but.

    So a code may be another than PyTorch's only where a number lies, within float32's error, half-way between two.
    """
    rounding, vectors = Rounding(bits, dim), awkward_vectors(dim, dtype)
    rows = rounding.encode(vectors)
    assert launches["encode"] == 1
    expected = rounding.encode(vectors.double())
    assert launches["encode"] == 1
    assert rows.dtype == expected.dtype
    assert rows.shape == expected.shape
    assert rows.is_contiguous()
    differing = (rows != expected).float().mean().item()
    record_property("bytes other than float64's", f"{differing:.1e}")
    assert differing < 1e-2

    step = 2 ** (8 - bits) * rows[..., : 2 * rounding.groups].view(torch.float16).double()[..., None]
    held = rounding.decode(rows, torch.float64, rotated=True).unflatten(-1, step.shape[-2:-1] + (-1,))
    given = rounding.rotate(vectors.double()).view_as(held)
    codes = held / step
    assert (codes - codes.round()).abs().max() < 1e-9
    assert codes.abs().max() <= rounding.largest
    assert ((held - given).abs() / step).max() < 0.5 + 1e-4
    exact = given.abs().amax(-1, keepdim=True) / rounding.largest
    smallest = torch.finfo(torch.float16).smallest_normal
    above = exact > smallest
    spacing = 2.0 ** (exact / 2 ** (8 - bits)).log2().floor().clamp(min=-14) * 2**-10 * 2 ** (8 - bits)
    assert ((step - exact).abs() / spacing)[above].max() < 0.5 + 1e-3
    assert (step[~above] == smallest).all()
    assert (~above).any()

    errors = [(rounding.decode(each, torch.float64) - vectors).norm().item() for each in (rows, expected)]
    assert errors[0] <= errors[1] * (1 + 1e-5)


@pytest.mark.parametrize(("bits", "dim"), EXACT)
@pytest.mark.parametrize("dtype", TYPES)
def test_equal_bytes_where_sums_are_exact(launches, bits, dim, dtype):
    rounding, vectors = Rounding(bits, dim), torch.randint(-9, 10, (50, 2, dim)).to(dtype)
    rows = rounding.encode(vectors.to(DEVICE))
    # on a CPU, since on a GPU PyTorch multiplies by the inverse of what it should divide by
    torch.testing.assert_close(rows.cpu(), of_torch(rounding).encode(vectors), rtol=0, atol=0)
    assert launches["encode"] == 1


@pytest.mark.parametrize(("bits", "dim"), CASES)
@pytest.mark.parametrize("dtype", TYPES)
def test_vectors_of_rows(launches, record_property, bits, dim, dtype):
    """Of rows as a cache holds them that grows in place, a part of more."""
    rounding = Rounding(bits, dim)
    encoded = rounding.encode(awkward_vectors(dim, torch.float64))
    rows = torch.full((2, 3, 40, encoded.shape[-1]), 7, dtype=torch.uint8, device=DEVICE)[:, :, 20:27]
    rows.copy_(encoded)
    rotated = rounding.decode(rows, dtype, rotated=True)
    if dtype not in CUT:
        torch.testing.assert_close(rotated, of_torch(rounding).decode(rows, dtype, rotated=True), rtol=0, atol=0)
    vectors = rounding.decode(rows, dtype)
    assert launches["decode"] == 2
    assert vectors.dtype == dtype
    assert vectors.shape == (2, 3, 7, dim)
    expected = rounding.decode(rows, torch.float64)
    assert launches["decode"] == 2
    error = relative_error(vectors, expected)
    record_property("vectors", f"{error:.1e}")
    assert error < torch.finfo(dtype).eps


@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 1, 3, 2, 64), (5, 3, 1, 64), (2, 3, 700, 64)])
@pytest.mark.parametrize("layout", ["whole", "turned", "every second number"])
def test_any_shape_and_strides(launches, shape, layout):
    """Rows of vectors, and again vectors of rows, do not depend on where the others lie."""
    rounding = Rounding(4, 64)
    vectors = torch.randint(-9, 10, shape, device=DEVICE).float()
    given = vectors
    if layout == "turned":
        given = vectors.movedim(0, -2).contiguous().movedim(-2, 0) if vectors.ndim > 1 else vectors
    elif layout == "every second number":
        given = torch.stack([vectors, vectors + 1], dim=-1)[..., 0]
    rows = rounding.encode(given)
    assert rows.shape == (*shape[:-1], rounding.width(torch.float32))
    assert torch.equal(rows, rounding.encode(vectors.double()))
    turned = rows
    if layout == "turned" and rows.ndim > 1:
        turned = rows.movedim(0, -2).contiguous().movedim(-2, 0)
    elif layout == "every second number":
        turned = torch.stack([rows, rows + 1], dim=-1)[..., 0]
    expected = rounding.decode(rows, torch.float64, rotated=True)
    assert torch.equal(rounding.decode(turned, torch.float32, rotated=True).double(), expected)
    assert launches["encode"] == launches["decode"] == 1


def test_no_vectors_have_no_rows():
    rounding = Rounding(6, 64)
    rows = rounding.encode(torch.zeros(2, 0, 64, device=DEVICE))
    assert rows.shape == (2, 0, rounding.width(torch.float32))
    assert rounding.decode(rows, torch.float32).shape == (2, 0, 64)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(bits, wrong):
    rounding, vectors = Rounding(bits, 64), torch.randn(3, 64, device=DEVICE)
    vectors[1, 5] = wrong
    held = rounding.decode(rounding.encode(vectors), torch.float32)
    assert not held[1].isfinite().any()
    assert held[[0, 2]].isfinite().all()


def test_what_the_kernels_do_not_take(monkeypatch, launches):
    """float64, and all where PyTorch's operations are asked for."""

    def run(rounding, dtype=torch.float32):
        rounding.decode(rounding.encode(torch.randn(2, 64, device=DEVICE, dtype=dtype)), dtype)
        return launches["encode"], launches["decode"]

    rounding = Rounding(8, 64)
    assert run(rounding, torch.float64) == run(of_torch(rounding)) == run(Rounding(16, 64)) == (0, 0)
    assert run(rounding) == (1, 1)
    monkeypatch.setenv(BACKEND_VARIABLE, "torch")
    assert run(rounding) == (1, 1)


def test_gradients_of_a_rounded_vector_pass(launches):
    rounding, vectors = Rounding(8, 64), torch.randn(3, 64, device=DEVICE, requires_grad=True)
    rounded = rounding.round(vectors, rounding.encode(vectors))
    assert launches["encode"] == launches["decode"] == 1
    rounded.sum().backward()
    assert torch.equal(vectors.grad, torch.ones_like(vectors))
