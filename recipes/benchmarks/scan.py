"""The SSD scan against other people's, side by side in one process on one thread; P = N = 64.

CPU time forward for several heads and lengths, its share of the speed of one large matrix product, forward with
backward, peak memory, and the error against the float64 recurrence with decays from 1e-8 to 1.
"""

import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from modeling_llamba.ssd import ssd_recurrence, ssd_scan
from modeling_llamba.ssd_chunked import cached_chunk

from .measure import Report, Table, Timing, in_own_process, interleaved, peak_bytes
from .peers import Prepare, find_peers

Shape = tuple[int, int]
"""Heads and tokens."""
SIZE = 64  # P and N
CHUNK = 64
FORWARD, TRAINING = "forward", "forward and backward"
SHAPES = {FORWARD: [(9, 512), (9, 8192), (32, 512), (32, 8192)], TRAINING: [(9, 2048), (32, 2048)]}
LIMITS = {"fla naive": 1.0, "transformers": 0.65, "causal SDPA": 1.0}
TRAINING_LIMIT = 0.75
FAR, FAR_LIMIT = 8192, 1 / 16  # of causal SDPA
PEAK_SHARE = 0.35
ERROR_LIMIT = 1e-6
FORWARD_EXTRA, TRAINING_TENSORS = 2 * 2**20, 7


def inputs(heads: int, length: int) -> tuple[torch.Tensor, ...]:
    """x, log_a, B and C with decays spread over what a trained model has."""
    torch.manual_seed(0)
    x, B, C = (torch.randn(1, length, heads, SIZE) for _ in range(3))
    return x, -2 * torch.rand(1, length, heads) - 1e-3, B, C


def scan_call(name: str, shape: Shape, kind: str) -> Callable[[], Any]:
    """A call of our scan or of a peer's: its output, and after it the gradients of all inputs where it is trained."""
    tensors = inputs(*shape)
    prepare: Prepare = find_peers()[0][name] if name != "ours" else lambda *t: (lambda *t: ssd_scan(*t)[0], t)
    function, arguments = prepare(*tensors)
    if kind == FORWARD:
        return torch.no_grad()(functools.partial(function, *arguments))
    weight, leaves = torch.randn_like(tensors[0]), [t.detach().requires_grad_() for t in arguments]

    def run() -> tuple:
        y = function(*leaves)
        return y, torch.autograd.grad(y, leaves, weight if y.shape == weight.shape else weight.transpose(1, 2))

    return run


def timings_of(names: list[str], shape: Shape, kind: str) -> dict[str, Timing]:
    """Ours, the peers', and `matmul`, a matrix product of 1,024."""
    a, b = (torch.randn(1024, 1024) for _ in range(2))
    calls = {name: scan_call(name, shape, kind) for name in ("ours", *names)} | {"matmul": lambda: a @ b}
    # more rounds where one takes milliseconds, which anything disturbs
    return interleaved(calls, 21 if math.prod(shape) < 20_000 else 5)


def share_of_peak(shape: Shape, timings: dict[str, Timing]) -> float:
    """Speed of the forward scan's matrix products over that of one large matrix product."""
    heads, length = shape
    within, between = 2 * cached_chunk(CHUNK, heads) * (SIZE + SIZE), 2 * 2 * SIZE * SIZE
    operations = heads * length * (within + between)
    return operations / timings["ours"].median / (2 * 1024**3 / timings["matmul"].median)


def add_targets(kind: str, shape: Shape, timings: dict[str, Timing], report: Report) -> None:
    """The limits of one shape."""
    heads, length = shape
    where = f"{kind}, {heads} heads, {length} tokens"
    limits = LIMITS | ({"causal SDPA": FAR_LIMIT} if length >= FAR else {})
    for peer, limit in limits.items():
        if peer in timings and (kind == TRAINING or length >= 2048 or peer != "transformers"):
            ratio = timings["ours"].median / timings[peer].median
            report.add(f"{where}: time over {peer}", ratio, TRAINING_LIMIT if kind == TRAINING else limit)
    if kind == FORWARD and length >= 2048:
        report.add(f"{where}: matrix product's speed over ours", 1 / share_of_peak(shape, timings), 1 / PEAK_SHARE)


def accuracy(shapes: tuple[Shape, ...] = ((4, 1024), (32, 128))) -> dict[str, float]:
    """Largest relative error of any head's output, state or gradient; mild decays, and a from 1e-8 to 1."""
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
        worst = 0.0
        for ours, exact in zip(*results, strict=True):
            head_axis = 1 if ours.shape[1] == heads else 2  # of a state, and of what has a length
            of_heads = zip(ours.double().unbind(head_axis), exact.double().unbind(head_axis), strict=True)
            worst = max([worst, *(((o - e).norm() / e.norm()).item() for o, e in of_heads)])
        errors[f"{heads} heads, {name} decays"] = worst
    return errors


def _memory_calls(name: str, shape: Shape, kind: str) -> tuple[Callable, Callable]:
    return scan_call(name, shape, kind), scan_call(name, (shape[0], 128), kind)


def memory(names: list[str], report: Report) -> None:
    """Peak bytes beyond the inputs: the gradients and the output count, the inputs and dy do not."""
    rows = []
    for (kind, length), heads in itertools.product(((FORWARD, 8192), (TRAINING, 2048)), (9, 32)):
        measured = ["ours", *(names if heads == 9 else [])]
        sizes = [in_own_process(peak_bytes, _memory_calls, (name, (heads, length), kind)) for name in measured]
        tensor = heads * length * SIZE * 4
        if kind == FORWARD:
            report.add(f"{kind}, {heads} heads: bytes beyond the output", sizes[0] - tensor, FORWARD_EXTRA)
        else:
            report.add(f"{kind}, {heads} heads: tensors of x's size", sizes[0] / tensor, TRAINING_TENSORS)
        cells = [f"{size / 1e6:.0f}" for size in sizes] + [""] * (1 + len(names) - len(sizes))
        rows.append([f"{kind}, {heads} heads, {length} tokens", *cells])
    report.tables.append(Table(["peak memory beyond the inputs, MB", "ours", *names], rows))


def measure(output: Path) -> Report:
    """Everything above."""
    torch.set_num_threads(1)
    found, absent = find_peers()
    peers, report = list(found), Report(skipped=absent)
    for kind, shapes in SHAPES.items():
        rows = []
        for shape in shapes:
            timings = timings_of(peers, shape, kind)
            add_targets(kind, shape, timings, report)
            ours = timings["ours"]
            others = [f"{timings[peer].median / ours.median:.2f} x" for peer in peers]
            share = f"{share_of_peak(shape, timings):.0%}" if kind == FORWARD else ""
            rows.append([f"{shape[0]}, {shape[1]}", str(ours), share, *others])
        report.tables.append(Table([f"{kind}: heads, tokens", "ms (least, most)", "of matmul peak", *peers], rows))
    for name, error in accuracy().items():
        report.add(f"error against float64, {name}", error, ERROR_LIMIT)
    memory(peers, report)
    return report
