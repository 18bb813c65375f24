"""The kernels of mamba-ssm and fla, unchanged: on a GPU, or without one in Triton's interpreter, on CPU tensors.

`make test-gpu` runs these tests on the device. `make test-kernels` runs them in the interpreter, in an environment of
its own; what makes the packages believe in a GPU then stands here, and nothing of it in the product. Not seen that
way: speed, tensor cores but for their rounding (TENSOR_CORES), and CUDA C++ (causal-conv1d, flash-attn).
"""

import builtins
import contextlib
import importlib
import importlib.metadata
import os
import sys
import types
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
RESULTS = Path("runs/kernels/results.md")
with contextlib.suppress(ImportError):
    from triton.runtime.autotuner import Autotuner

    run_and_time = Autotuner._bench

    def once(call, quantiles):
        """In the interpreter, which has memory for all, not even that."""
        if not INTERPRETED:
            call()
        return [1.0] * 3

    def first_that_fits(self, *args, **kwargs):
        """What a configuration takes: the others are not compiled, which would take minutes.

        On a GPU it may want more shared memory than there is, at which the tuner itself goes on to the next.
        """
        if getattr(self, "found_for", None) is self.nargs:
            return [float("inf")] * 3
        self.do_bench = once
        times = run_and_time(self, *args, **kwargs)
        if times[0] < float("inf"):
            self.found_for = self.nargs
        return times

    Autotuner._bench = first_that_fits

if INTERPRETED:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget

    TENSOR_CORES = False
    PROPERTIES = types.SimpleNamespace(
        name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=80 * 2**30,
        shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
    )  # fmt: skip

    class Driver:
        """What Triton and fla ask of a GPU."""

        utils = types.SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448, "multiprocessor_count": 132}
        )
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_benchmarker = staticmethod(lambda: None)
        get_current_device = staticmethod(lambda: 0)
        get_device_interface = staticmethod(lambda: torch.cuda)
        get_active_torch_device = staticmethod(lambda: torch.device("cpu"))

    triton.runtime.driver._default = triton.runtime.driver._active = Driver()
    torch.cuda.device = lambda index: contextlib.nullcontext()
    torch.cuda.get_device_properties = lambda device=None: PROPERTIES
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_name = lambda device=None: PROPERTIES.name
    torch.cuda.current_device, torch.cuda.device_count = lambda: 0, lambda: 1
    for compiled in ("selective_scan_cuda", "causal_conv1d_cuda"):
        sys.modules[compiled] = types.ModuleType(compiled)

    def tensor_range(*bounds):
        """In a compiled kernel the index of a loop is a tensor; in the interpreter an int, which has no `.to`."""
        indices = builtins.range(*(int(bound) for bound in bounds))
        if not any(isinstance(bound, tl.tensor) for bound in bounds):
            return indices
        return map(triton.runtime.interpreter._implicit_cvt, indices)

    for module in ("chunk_h", "chunk_o"):
        importlib.import_module(f"fla.ops.common.{module}").range = tensor_range

    interpreter = triton.runtime.interpreter
    plain_operation = interpreter.InterpreterBuilder.binary_op

    def widened(handle):
        """bf16 is kept as bit patterns."""
        return (handle.data.astype("uint32") << 16).view("float32") if handle.dtype == tl.bfloat16 else handle.data

    def dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        """tl.dot, which knows no bf16 otherwise; with TENSOR_CORES fp32 is rounded as they do."""
        factors = [widened(a), widened(b)]
        if TENSOR_CORES and a.dtype == tl.float32 and input_precision.name == "TF32":
            factors = [interpreter._round_f32_to_tf32(factor) for factor in factors]
        product = interpreter.np.matmul(*factors, dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def binary_operation(self, lhs, rhs, op):
        """Arithmetic, which knows no bf16 otherwise."""
        if lhs.dtype != tl.bfloat16:
            return plain_operation(self, lhs, rhs, op)
        result = interpreter.TensorHandle(op(widened(lhs), widened(rhs)), tl.float32)
        return self.cast_impl(result, tl.bfloat16) if result.data.dtype == "float32" else result

    interpreter.InterpreterBuilder.create_dot = dot
    interpreter.InterpreterBuilder.binary_op = binary_operation
elif not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """The choice of a backend, and of the kernel for one token, as it is made for tensors on CUDA."""
    if not INTERPRETED:
        return
    from modeling_llamba.kernels.flex import FlexBackend
    from modeling_llamba.kernels.triton.triton_backend import make_backend
    from tests.helpers.backends import use_backend

    use_backend(monkeypatch, make_backend())
    # which PyTorch would compile for a CPU, where it has no such kernel
    monkeypatch.setattr(FlexBackend, "can_flex", lambda *inputs: False)


@pytest.fixture
def launches(monkeypatch):
    """How often each kernel was asked for."""
    from modeling_llamba.kernels.triton import scans, triton_rounding, triton_rows, triton_step

    places = {
        "fla": (scans, "chunk_simple_gla"),
        "mamba_ssm": (scans, "mamba_chunk_scan_combined"),
        "layer": (triton_step, "mix_one"),
        "write": (triton_step, "write_one"),
        "kept heads": (triton_rows, "attend_to_rows"),
        "encode": (triton_rounding, "encode_rows"),
        "decode": (triton_rounding, "decode_rows"),
    }
    counts = dict.fromkeys(places, 0)
    for key, (module, name) in places.items():
        kernel = getattr(module, name)

        def counted(*args, kernel=kernel, key=key, **kwargs):
            counts[key] += 1
            return kernel(*args, **kwargs)

        if kernel is not None:
            monkeypatch.setattr(module, name, counted)
    return counts


@pytest.fixture
def flex_in_the_interpreter(monkeypatch):
    """As it is, PyTorch's would compile for a CPU; there it takes no gradient, and none is asked for."""
    if INTERPRETED:
        from torch.nn.attention.flex_attention import flex_attention

        import modeling_llamba.kernels.flex as flex

        monkeypatch.setattr(flex, "compiled_flex_attention", lambda: flex_attention)


@pytest.fixture
def mixed(monkeypatch):
    """How often the kernels mixed a segment."""
    import modeling_llamba.kernels.triton.triton_prompt as kernels

    calls, mix_blocks = [], kernels.mix_blocks
    monkeypatch.setattr(kernels, "mix_blocks", lambda *inputs: calls.append(1) or mix_blocks(*inputs))
    return calls


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/kernels/" in item.nodeid:
            item.add_marker(pytest.mark.kernels if INTERPRETED else pytest.mark.gpu)


def pytest_terminal_summary(terminalreporter):
    """Write what every test found to RESULTS."""
    rows = [
        [report.nodeid.split("::")[-1], outcome, f"{report.duration:.1f}"]
        + [", ".join(f"{name} {value}" for name, value in report.user_properties)]
        for outcome in ("passed", "failed", "skipped")
        for report in terminalreporter.stats.get(outcome, [])
        if "tests/kernels/" in report.nodeid
    ]
    if rows:
        where = "Triton's interpreter, no GPU" if INTERPRETED else torch.cuda.get_device_name()
        packages = ("torch", "triton", "fla-core", "mamba-ssm", "causal-conv1d", "transformers")
        found = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
        versions = ", ".join(f"{name} {found[name]}" for name in packages if name in found)
        rows = [["test", "outcome", "seconds", "relative errors"], ["---"] * 4, *rows]
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        RESULTS.write_text(f"{where}; {versions}.\n\n{table}\n")
        terminalreporter.write_line(f"{where} -> {RESULTS}")
