"""What C computes on a CPU: against the same in float64, and against PyTorch's operations."""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from modeling_llamba.hybrid.eviction import BlockShape, Held, SlowDims, open_blocks
from modeling_llamba.hybrid.rounding import Rounding, hadamard
from modeling_llamba.kernels import backend, softmax
from modeling_llamba.kernels.c import c_functions, c_library
from modeling_llamba.kernels.torch_backend import TorchBackend
from modeling_llamba.model.cache import new_cache
from modeling_llamba.model.config_values import CACHE_BITS
from tests.helpers.hybrid_step import (
    HIDDEN,
    attention_to_pages,
    attention_to_rows,
    in_parts,
    make_layer,
    relative_error,
    rows_in_room,
)

LENGTH = 24
ROWS = [(bits, dim) for bits in CACHE_BITS if bits < 16 for dim in (16, 48, 64, 80, 128)] + [(8, 2), (8, 100)]
BITS = [(8, 8), (6, 4), (4, 6), (2, 8), (4, 2), (16, 16), (16, 4), (8, 16)]
ATTENTION = [  # head dim, query heads of a key/value head, columns, cap of the scores, hidden columns
    (64, 3, 1, None, False),
    (64, 3, 300, None, True),
    (72, 7, 70, None, False),
    (80, 1, 77, 2.0, False),
    (128, 4, 1100, 5.0, True),
]


def token_by_token(layer, hidden_states):
    return torch.cat([*in_parts(layer, hidden_states, [1] * LENGTH, new_cache(layer.config))], dim=1)


@pytest.mark.parametrize(("bits", "dim"), ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_the_rounding(bits, dim, dtype):
    check_rows(bits, dim, dtype)


def check_rows(bits, dim, dtype):
    """A code may be another only where a number lies, within float32's error, half-way between two."""
    vectors = torch.randn(2, 7, 3, dim)
    vectors[0, 0, 0, dim // 3] = 100.0
    vectors[0, 1, 0] *= 1e-6
    vectors[1, 2] = 0.0
    vectors = vectors.to(dtype).transpose(1, 2)
    rounding = Rounding(bits, dim)
    expected = rounding.encode(vectors.double())
    rows = rounding.encode(vectors)
    assert rows.shape == expected.shape
    assert (rows != expected).float().mean() < 2e-3
    for rotated in (True, False):
        held = rounding.decode(rows[:, 1:], dtype, rotated)
        theirs = rounding.decode(rows[:, 1:], torch.float64, rotated)
        assert held.dtype == dtype
        torch.testing.assert_close(held, theirs.to(dtype))


@pytest.mark.parametrize("bits", [8, 6, 4, 2])
@pytest.mark.parametrize("worst", [torch.nan, torch.inf])
def test_a_vector_that_is_no_number_stays_none(bits, worst):
    rounding = Rounding(bits, 64)
    vectors = torch.randn(3, 64)
    vectors[1, 5] = worst
    held = rounding.decode(rounding.encode(vectors), torch.float32)
    assert held[1].isnan().any()
    assert held[[0, 2]].isfinite().all()


@pytest.mark.parametrize(("bits", "case"), list(itertools.product(BITS, ATTENTION)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2], indirect=True)
def test_one_token_attends_to_rows(bits, case, dtype, threads):
    check_attention_to_rows(bits, case, dtype)


@torch.no_grad()
def check_attention_to_rows(bits, case, dtype):
    dim, shared, columns, softcap, hides = case
    roundings = Rounding.of_pair(list(bits), dim)
    query = torch.randn(2, 2 * shared, 1, dim).to(dtype)
    vectors = torch.randn(2, 2, 2, columns, dim).to(dtype)
    rows = [rows_in_room(t, rounding) for t, rounding in zip(vectors, roundings, strict=True)]
    bias = None
    if hides:
        bias = torch.zeros(2, columns)
        bias[0, :70] = -torch.inf
        bias[1, 100:110] = torch.finfo(torch.float32).min
    scale = 2 * dim**-0.5
    output = c_functions.attend_to_rows(query, *rows, bias, scale, softcap or 0.0, *bits)
    expected = attention_to_rows(query, rows, bits, bias, scale, softcap)
    assert output.dtype == dtype
    assert output.shape == expected.shape
    assert relative_error(output, expected) < (2e-6 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize(
    ("dim", "shared", "lengths"), [(64, 3, (1, 16, 77, 300)), (128, 4, (1300, 16, 700)), (80, 2, (5,))]
)
@torch.no_grad()
def test_one_token_attends_to_rows_in_pages(bits, dtype, threads, dim, shared, lengths, monkeypatch):
    monkeypatch.setattr(c_functions, "SPAN", 64)
    output, expected = attention_to_pages(
        c_functions.attend_to_pages, bits, dtype, "cpu", dim, shared, lengths, spare=3
    )
    assert output.dtype == dtype
    assert relative_error(output, expected) < (2e-6 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("capability", ["DEFAULT", "AVX2"])
@pytest.mark.parametrize("bits", [(8, 8), (6, 4)])
def test_fewer_registers_do_the_same(capability, bits, monkeypatch):
    """The functions are made for the machine; here for a lesser one, whose instructions this one has, too."""
    strongest = torch.backends.cpu.get_cpu_capability()
    if strongest not in ("AVX512", "AVX2"):
        pytest.skip(f"{strongest} has one kind of register")
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    made = c_library.library.__wrapped__()
    monkeypatch.setattr(c_functions, "library", lambda: made)
    for dim in (64, 80, 128):
        for rounding in Rounding.of_pair(list(bits), dim):
            check_rows(rounding.bits, dim, torch.float32)
        check_attention_to_rows(bits, (dim, 5, 70, None, False), torch.float32)


@pytest.mark.parametrize("by", ["C", "PyTorch's fused attention", "PyTorch"])
@torch.no_grad()
def test_nothing_comes_of_hidden_columns_alone(monkeypatch, by):
    """Padding that is fed token by token sees nothing, and what came of it must not be NaN in later keys."""
    query, keys = torch.randn(2, 2, 1, 16), torch.randn(2, 1, 20, 16)
    bias = torch.zeros(2, 20)
    bias[1] = -torch.inf
    if by == "PyTorch":
        monkeypatch.setattr(softmax, "fuses", lambda *tensors: False)
    if by == "C":
        output = c_functions.attend_to_rows(query, keys, keys, bias, 0.25, 0.0, 16, 16)
    else:
        output = TorchBackend().attend_to_rows(query, keys, keys, Rounding.of_pair(16, 16), bias, 0.25, None)
    assert output[0].any()
    assert not output[1].any()


@pytest.mark.parametrize("worst", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("hides", [False, True])
@torch.no_grad()
def test_what_is_no_number_is_not_hidden(worst, where, hides):
    tensors = {"query": torch.randn(1, 2, 1, 16), "key": torch.randn(1, 1, 90, 16), "value": torch.randn(1, 1, 90, 16)}
    tensors[where][:, :, -1, 3] = worst
    bias = torch.zeros(1, 90)
    bias[:, :5] = -torch.inf
    output = c_functions.attend_to_rows(*tensors.values(), bias if hides else None, 0.25, 0.0, 16, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *tensors.values(), bias[:, None, None] if hides else None, scale=0.25, enable_gqa=True
    )
    torch.testing.assert_close(output.isfinite(), expected.transpose(1, 2).isfinite())
    assert not output.isfinite().all()


@torch.no_grad()
def test_scores_that_overflow_are_not_hidden():
    query, keys = torch.full((1, 1, 1, 16), 1e38), torch.full((1, 1, 3, 16), 9.0)
    output = c_functions.attend_to_rows(query, keys, keys, None, 1.0, 0.0, 16, 16)
    assert output.isnan().all()


@pytest.mark.parametrize("bits", [16, 8, [6, 4]])
@pytest.mark.parametrize("sizes", [(16, 2, 4, 16), (4, 7, 2, 3), (3, 1, 0, 5), (1, 5, 0, 0), (8, 3, 3, 61)])
@pytest.mark.parametrize("threads", [1, 2], indirect=True)
def test_blocks_are_opened_in_place(bits, sizes, threads):
    """In the rows whose next token begins one, with ties and empty places; exactly as by sorting."""
    block, whole_blocks, sinks, salient = sizes
    roundings = Rounding.of_pair(bits, 16)
    shape = BlockShape(block, whole_blocks, sinks, sinks + salient, SlowDims(8, 3), *roundings)
    columns = shape.places + shape.window
    vectors = torch.randn(2, 4, 2, columns, 16)
    rows = (rounding.encode(t) for rounding, t in zip(roundings, vectors, strict=True))
    salience = torch.randn(4, columns).mul_(2).round_()
    salience[:, : shape.places] = salience[:, : shape.places].sort(dim=1, descending=True).values
    salience[1, shape.places // 2 : shape.places] = -torch.inf
    state = torch.randn(4, 2, 17, 7)
    opens = [shape.window, shape.window + 3 * block, shape.window - block, shape.window + (block > 1)]
    next_index = torch.tensor(opens)
    held = Held(*rows, salience, state, next_index)
    expected = open_blocks(held.copied(), shape, next_index)
    assert c_functions.open_rows(*held[:4], next_index, shape) == (2 if block > 1 else 3)
    assert torch.equal(held.salience, expected.salience)
    torch.testing.assert_close(held.state, expected.state)
    there = held.salience > -torch.inf
    for own, theirs in zip(held[:2], expected[:2], strict=True):
        own, theirs = (t.transpose(1, 2)[there] for t in (own, theirs))
        assert torch.equal(own, theirs)


@torch.no_grad()
def test_a_layer_in_bfloat16():
    layer = make_layer(torch.bfloat16, head_dim=64, hybrid_state_planes=8)
    hidden_states = torch.randn(2, LENGTH, HIDDEN).bfloat16()
    found = token_by_token(layer, hidden_states)
    assert found.dtype == torch.bfloat16
    expected = token_by_token(layer.float(), hidden_states.float())
    assert relative_error(found, expected) < 3e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_autocast(dtype):
    layer = make_layer(hybrid_full_heads=[[2, 3]])
    hidden_states = torch.randn(2, LENGTH, HIDDEN)
    expected = token_by_token(layer, hidden_states)
    with torch.autocast("cpu", dtype=dtype):
        found = token_by_token(layer, hidden_states)
    assert relative_error(found, expected) < 3e-2


def test_fake_tensors_have_no_numbers():
    hadamard(64, torch.float32, torch.device("cpu"))  # kept from here on, and no fake itself
    with FakeTensorMode(allow_non_fake_inputs=True):
        rows = Rounding(8, 64).encode(torch.randn(2, 3, 64))
        assert Rounding(8, 64).decode(rows, torch.float32).shape == (2, 3, 64)
    assert isinstance(rows, FakeTensor)
    assert rows.shape == (2, 3, 66)


def test_a_home_that_is_not_to_be_written_to(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(c_library, "HF_MODULES_CACHE", tmp_path / "file")
    assert c_library.library.__wrapped__() is not None


def test_a_library_that_is_broken_is_made_once_more(monkeypatch, tmp_path):
    monkeypatch.setattr(c_library, "LIBRARY_FOLDER", tmp_path)
    assert c_library.library.__wrapped__() is not None
    (kept,) = tmp_path.rglob("*.so")
    whole = kept.read_bytes()
    kept.unlink()  # not written to, as it is loaded
    kept.write_bytes(b"broken")
    assert c_library.library.__wrapped__() is not None
    assert kept.read_bytes()[:4] == whole[:4]
    assert len([*kept.parent.iterdir()]) == 1


def test_a_folder_that_cannot_be_written_to(monkeypatch, tmp_path):
    """The library is made in a temporary folder then, and the home keeps nothing."""
    (tmp_path / "home").write_text("no folder")
    monkeypatch.setattr(c_library, "LIBRARY_FOLDER", tmp_path / "home" / "libraries")
    assert c_library.library.__wrapped__() is not None


def test_it_is_built_where_it_is_kept(monkeypatch, tmp_path):
    """A temporary folder that nothing may be run in is not needed."""
    monkeypatch.setattr(c_library, "LIBRARY_FOLDER", tmp_path)
    monkeypatch.setattr(c_library.tempfile, "tempdir", "/nowhere")
    assert c_library.library.__wrapped__() is not None


def test_a_kept_folder_that_nothing_may_be_run_from(monkeypatch, tmp_path):
    """A temporary folder serves, and the process is not slower."""
    load = c_library.ctypes.CDLL

    def refuse_in_kept(path):
        if path.startswith(str(tmp_path)):
            raise OSError(f"{path}: failed to map segment from shared object")
        return load(path)

    said = []
    monkeypatch.setattr(c_library.logger, "warning", said.append)
    monkeypatch.setattr(c_library, "LIBRARY_FOLDER", tmp_path / "libraries")
    monkeypatch.setattr(c_library.ctypes, "CDLL", refuse_in_kept)
    assert c_library.library.__wrapped__() is not None
    assert not said


def test_the_true_cause_is_named(monkeypatch, tmp_path):
    def refuse(path):
        raise OSError(f"{path}: failed to map segment from shared object")

    said = []
    monkeypatch.setattr(c_library.logger, "warning", said.append)
    monkeypatch.setattr(c_library, "LIBRARY_FOLDER", tmp_path / "libraries")
    monkeypatch.setattr(c_library.ctypes, "CDLL", refuse)
    assert c_library.library.__wrapped__() is None
    assert len(said) == 1
    assert f"{tmp_path / 'libraries'} may be run, by its mount option noexec; set HF_HOME" in said[0]
    assert "install gcc" not in said[0]


def test_a_variable_keeps_a_hybrid_from_compiling(monkeypatch, tmp_path):
    monkeypatch.setattr(c_library, "LIBRARY_FOLDER", tmp_path)
    monkeypatch.setenv("HYBRID_COMPILE_C", "0")
    assert c_library.library.__wrapped__() is None
    assert not [*tmp_path.iterdir()]


def test_two_processes_compile_at_once(tmp_path):
    code = "from modeling_llamba.kernels.c.c_library import library; assert library() is not None"
    options = dict(env=os.environ | {"HF_MODULES_CACHE": str(tmp_path)}, cwd=Path(__file__).parents[2])
    both = [subprocess.Popen([sys.executable, "-c", code], **options) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert len([*tmp_path.rglob("hybrid_kernels/*")]) == 1


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "false"])
@torch.no_grad()
def test_without_a_compiler_pytorch_does_the_same(compiler, monkeypatch, tmp_path):
    layer = make_layer(window_bits=8)
    hidden_states = torch.randn(2, LENGTH, HIDDEN)
    expected = token_by_token(layer, hidden_states)
    said = []
    monkeypatch.setattr(c_library.logger, "warning", said.append)
    monkeypatch.setattr(c_library, "LIBRARY_FOLDER", tmp_path / "libraries")
    for name in ("cc", "gcc", "clang", "false"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        if compiler == "false":
            program.symlink_to(shutil.which("false"))
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    c_library.library.cache_clear()
    monkeypatch.delitem(backend.FOUND, "cpu")
    try:
        found = token_by_token(layer, hidden_states)
    finally:
        c_library.library.cache_clear()
    assert relative_error(found, expected) < 1e-5
    assert len(said) == 1
    assert "slower" in said[0]
    assert not any(tmp_path.rglob("*.so"))
