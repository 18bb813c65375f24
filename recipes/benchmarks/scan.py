"""The SSD scan against other people's, side by side in one process on one thread; P = N = 64.

CPU time forward for several heads and lengths, its share of the speed of one large matrix product, forward with
backward, peak memory, the error against the float64 recurrence with decays from 1e-8 to 1, and how the time grows with
length, heads and batch.
"""

import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path

import torch

from modeling_llamba.ssd import ssd_recurrence, ssd_scan
from modeling_llamba.ssd_chunked import cached_chunk

from .measure import Report, Table, Timing, allocated_peak, extra_peak_bytes, interleaved
from .peers import find_peers

Shape = tuple[int, int]
"""Heads and tokens."""
SIZE = 64  # P and N
CHUNK = 64
SHAPES = [(heads, length) for heads in (9, 32) for length in (512, 2048, 8192)]
TRAINED = [(9, 2048), (32, 2048), (9, 8192)]
# transformers' scan holds (chunks, Q, Q, heads, N) numbers: 17 GB here, and several times 4 or 5 where it is trained
TOO_LARGE = {("transformers Q256", (32, 8192))}
TOO_LARGE_TO_TRAIN = {("transformers Q256", shape) for shape in ((32, 2048), (9, 8192))}
LIMITS = {"fla naive": 1.0, "transformers Q64": 0.65, "transformers Q256": 0.25, "causal SDPA": 1.0}
TRAINING_LIMIT = 0.75
FAR, FAR_LIMIT = 8192, 1 / 16  # of causal SDPA
PEAK_SHARE = 0.35
ERROR_LIMIT = 1e-6
GROWTH_LIMIT = 1.1
FORWARD_EXTRA, TRAINING_TENSORS = 2 * 2**20, 7
GROWN = {  # heads, tokens, batch
    "length": {n: (9, n, 1) for n in (512, 1024, 2048, 4096, 8192, 16384)},
    "heads": {n: (n, 2048, 1) for n in (4, 8, 16, 32)},
    "batch": {n: (4, 2048, n) for n in (1, 2, 4, 8)},
}


def inputs(heads: int, length: int, batch: int = 1) -> tuple[torch.Tensor, ...]:
    """x, log_a, B and C with decays spread over what a trained model has."""
    torch.manual_seed(0)
    x, B, C = (torch.randn(batch, length, heads, SIZE) for _ in range(3))
    return x, -2 * torch.rand(batch, length, heads) - 1e-3, B, C


def prefill(shape: Shape, peers: dict) -> tuple[dict[str, Timing], float]:
    """Timings of one shape, and our share of the speed of a matrix product of 1,024 in the same run."""
    heads, length = shape
    tensors = inputs(*shape)
    calls = {"ours": lambda: ssd_scan(*tensors)}
    for name, prepare in peers.items():
        if (name, shape) not in TOO_LARGE:
            function, arguments = prepare(*tensors)
            calls[name] = functools.partial(function, *arguments)
    a, b = (torch.randn(1024, 1024) for _ in range(2))
    with torch.no_grad():
        timings = interleaved(calls | {"matmul": lambda: a @ b}, repeats(shape, 21, 7))
    peak = 2 * 1024**3 / timings.pop("matmul").median
    within, between = 2 * cached_chunk(CHUNK, heads) * (SIZE + SIZE), 2 * 2 * SIZE * SIZE
    operations = heads * length * (within + between)  # of the scan's matrix products
    return timings, operations / timings["ours"].median / peak


def training(shape: Shape, peers: dict) -> dict[str, Timing]:
    """Forward and backward with gradients of all inputs."""
    tensors = inputs(*shape)
    weight = torch.randn_like(tensors[0])
    calls = {"ours": _with_backward(_ours, tensors, weight)}
    for name, prepare in peers.items():
        if (name, shape) not in TOO_LARGE_TO_TRAIN:
            calls[name] = _with_backward(*prepare(*tensors), weight)
    return interleaved(calls, repeats(shape, 9, 5))


def repeats(shape: Shape, most: int, some: int) -> int:
    """Fewer where one round takes seconds, more where it takes milliseconds, which anything disturbs."""
    return most if math.prod(shape) < 20_000 else some if math.prod(shape) < 70_000 else 3


def _ours(*tensors: torch.Tensor) -> torch.Tensor:
    return ssd_scan(*tensors)[0]


def _with_backward(function: Callable, tensors, weight: torch.Tensor) -> Callable[[], tuple]:
    leaves = [t.detach().requires_grad_() for t in tensors]

    def run():
        y = function(*leaves)
        return y, torch.autograd.grad(y, leaves, weight if y.shape == weight.shape else weight.transpose(1, 2))

    return run


def accuracy(shapes: tuple[Shape, ...] = ((4, 1024), (32, 128))) -> dict[str, float]:
    """Relative error of outputs, state and gradients, of the worst head; mild decays, and a from 1e-8 to 1."""
    errors, decays = {}, {"mild": -2.0, "extreme": math.log(1e-8)}
    for (heads, length), (name, lowest) in itertools.product(shapes, decays.items()):
        x, _, B, C = inputs(heads, length)
        log_a = torch.empty(1, length, heads).uniform_(lowest, 0)
        log_a[..., 0] = 0 if name == "extreme" else log_a[..., 0]  # a head that never forgets
        tensors = [t.requires_grad_() for t in (x, log_a, B, C, torch.randn(1, heads, SIZE, SIZE))]
        results = []
        for scan in (ssd_scan, ssd_recurrence):
            outputs = scan(*tensors)
            torch.manual_seed(1)
            weighted = sum((t * torch.randn(t.shape)).sum() for t in outputs)
            results.append((*outputs, *torch.autograd.grad(weighted, tensors)))
        for what, ours, exact in zip(("y", "state", "dx", "dlog_a", "dB", "dC", "dstate"), *results, strict=True):
            head_axis = 1 if "state" in what else 2
            of_heads = zip(ours.double().unbind(head_axis), exact.double().unbind(head_axis), strict=True)
            errors[f"{heads} heads, {name}: {what}"] = max(((o - e).norm() / e.norm()).item() for o, e in of_heads)
    return errors


def _memory_call(name: str, shape: Shape, trained: bool) -> tuple[Callable, Callable]:
    """The call, and a small one; for `extra_peak_bytes`."""

    def call(length: int) -> Callable:
        tensors = inputs(shape[0], length)
        function, tensors = (_ours, tensors) if name == "ours" else find_peers()[0][name](*tensors)
        if trained:
            return _with_backward(function, tensors, torch.randn(1, length, shape[0], SIZE))
        return torch.no_grad()(functools.partial(function, *tensors))

    return call(shape[1]), call(128)


def memory(peers: dict, report: Report) -> None:
    """Peak bytes beyond the inputs: the gradients and the output count, the inputs and dy do not.

    Of the process, ours at both numbers of heads and the peers', and ours as the allocator counts it.
    """
    names, rows = [n for n in peers if n != "transformers Q256"], []
    for kind, length in (("forward", 8192), ("forward and backward", 2048)):
        for heads in (9, 32):
            call, tensor = ((heads, length), kind != "forward"), heads * length * SIZE * 4
            resident = extra_peak_bytes(_memory_call, "ours", *call)
            allocated = allocated_peak(_memory_call("ours", *call)[0])
            for counted, size in (("resident", resident), ("allocated", allocated)):
                if kind == "forward":
                    name = f"forward, {heads} heads: bytes beyond the output, {counted}"
                    report.add(name, size - tensor, FORWARD_EXTRA)
                else:
                    name = f"forward and backward, {heads} heads: tensors of x's size, {counted}"
                    report.add(name, size / tensor, TRAINING_TENSORS)
            others = [extra_peak_bytes(_memory_call, name, *call) for name in names] if heads == 9 else []
            sizes = [f"{size / 1e6:.0f}" for size in (resident, allocated, *others)]
            rows.append([f"{kind}, {heads} heads, {length} tokens", *sizes, *[""] * (len(names) - len(others))])
    columns = ["peak memory beyond the inputs, MB", "ours, resident", "ours, allocated", *names]
    report.tables.append(Table(columns, rows))


def growth(shapes: dict[int, tuple[int, int, int]]) -> float:
    """Exponent of the best power law of the time against a size; 1 is linear."""
    tensors = {n: inputs(heads, length, batch) for n, (heads, length, batch) in shapes.items()}
    with torch.no_grad():
        timings = interleaved({str(n): lambda t=t: ssd_scan(*t) for n, t in tensors.items()}, 5)
    return exponent({int(n): timing.median for n, timing in timings.items()})


def exponent(times: dict[int, float]) -> float:
    """Slope of log time against log size by least squares."""
    xs, ys = ([math.log(v) for v in values] for values in (times, times.values()))
    x0, y0 = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - x0) * (y - y0) for x, y in zip(xs, ys, strict=True)) / sum((x - x0) ** 2 for x in xs)


def add_prefill_targets(shape: Shape, timings: dict[str, Timing], share: float, report: Report) -> None:
    """The limits of one shape."""
    heads, length = shape
    where = f"prefill, {heads} heads, {length} tokens"
    for peer, limit in LIMITS.items():
        if peer in timings and (length >= 2048 or not peer.startswith("transformers")):
            limit = FAR_LIMIT if peer == "causal SDPA" and length >= FAR else limit
            report.add(f"{where}: time over {peer}", timings["ours"].median / timings[peer].median, limit)
    if length >= 2048:
        report.add(f"{where}: matrix product's speed over ours", 1 / share, 1 / PEAK_SHARE)


def timing_row(shape: Shape, timings: dict[str, Timing], peers: dict) -> list[str]:
    """Ours in milliseconds, the peers as multiples of it."""
    ours = timings["ours"]
    others = [f"{timings[peer].median / ours.median:.2f} x" if peer in timings else "" for peer in peers]
    return [f"{shape[0]}, {shape[1]}", str(ours), *others]


def measure(output: Path, shapes: list[Shape] = SHAPES, trained: list[Shape] = TRAINED) -> Report:
    """Everything above."""
    torch.set_num_threads(1)
    peers, absent = find_peers()
    report = Report(skipped=absent)
    rows: list[list[str]] = []
    for shape in shapes:
        timings, share = prefill(shape, peers)
        add_prefill_targets(shape, timings, share, report)
        rows.append([*timing_row(shape, timings, peers), f"{share:.0%}"])
    columns = ["heads, tokens", "ms (least, most)", *peers]
    report.tables.append(Table([f"forward: {columns[0]}", *columns[1:], "of matmul peak"], rows))
    rows = []
    for shape in trained:
        timings = training(shape, peers)
        for peer in (peer for peer in peers if peer in timings):
            name = f"forward and backward, {shape[0]} heads, {shape[1]} tokens: time over {peer}"
            report.add(name, timings["ours"].median / timings[peer].median, TRAINING_LIMIT)
        rows.append(timing_row(shape, timings, peers))
    report.tables.append(Table([f"forward and backward: {columns[0]}", *columns[1:]], rows))
    for name, error in accuracy().items():
        report.add(f"error against float64, {name}", error, ERROR_LIMIT)
    memory(peers, report)
    for what, grown in GROWN.items():
        report.add(f"time grows with {what}: exponent", growth(grown), GROWTH_LIMIT)
    for kind, those in (("forward", TOO_LARGE), ("forward and backward", TOO_LARGE_TO_TRAIN)):
        for name, (heads, length) in sorted(those):
            report.skipped[f"{name} {kind}, {heads} heads, {length} tokens"] = "it takes too much memory"
    return report
