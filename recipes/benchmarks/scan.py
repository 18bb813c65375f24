"""The SSD scan against other people's, side by side in one process on one thread.

python -m recipes.benchmarks.scan [--output runs/bench]

CPU time of the thread, interleaved, medians. P = N = 64. What is reported: prefill for several heads and lengths, its
share of the speed of one large matrix product, forward with backward, peak memory, the error against the float64
recurrence with decays from 1e-8 to 1, and how the time grows with length, heads and batch.
"""

import argparse
import functools
import itertools
import math
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from modeling_llamba.ssd import ssd_recurrence, ssd_scan
from modeling_llamba.ssd_chunked import cached_chunk

from .measure import Target, Timing, allocated_peak, extra_peak_bytes, interleaved, matmul_gigaflops, save_report
from .peers import find_peers

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
ALLOCATED = "ours, allocated"
FORWARD_EXTRA, TRAINING_TENSORS = 2 * 2**20, 7


def inputs(heads: int, length: int, batch: int = 1) -> tuple[torch.Tensor, ...]:
    """x, log_a, B and C with decays spread over what a trained model has."""
    torch.manual_seed(0)
    x, B, C = (torch.randn(batch, length, heads, SIZE) for _ in range(3))
    return x, -2 * torch.rand(batch, length, heads) - 1e-3, B, C


def scan_flops(heads: int, length: int) -> float:
    """Multiplications and additions in the matrix products of one forward pass."""
    within, between = 2 * cached_chunk(CHUNK, heads) * (SIZE + SIZE), 2 * 2 * SIZE * SIZE
    return heads * length * (within + between)


def repeats_for(heads: int, length: int) -> int:
    """Fewer where one round takes seconds, more where it takes milliseconds, which anything disturbs."""
    return 21 if heads * length < 20_000 else 7 if heads * length < 80_000 else 3


def prefill(shape: tuple[int, int], peers: dict, scan=ssd_scan) -> tuple[dict[str, Timing], float]:
    """Timings of one shape, and our share of the matrix product's speed in the same run."""
    x, log_a, B, C = inputs(*shape)
    calls = {"ours": lambda: scan(x, log_a, B, C)}
    for name, prepare in peers.items():
        if (name, shape) not in TOO_LARGE:
            calls[name] = functools.partial(_called, *prepare(x, log_a, B, C))
    with torch.no_grad():
        timings = interleaved(calls | {"matmul": matmul_gigaflops()}, repeats_for(*shape))
    peak = 2 * 1024**3 / timings.pop("matmul").median
    return timings, scan_flops(*shape) / timings["ours"].median / peak


def _called(function, tensors) -> torch.Tensor:
    return function(*tensors)


def _both(function, tensors, weight: torch.Tensor):
    """A call of forward and backward, with gradients of all the tensors."""
    leaves = [t.detach().requires_grad_() for t in tensors]

    def run():
        y = function(*leaves)
        return y, torch.autograd.grad(y, leaves, weight if y.shape == weight.shape else weight.transpose(1, 2))

    return run


def _ours(*tensors: torch.Tensor) -> torch.Tensor:
    return ssd_scan(*tensors)[0]


def training(shape: tuple[int, int], peers: dict) -> dict[str, Timing]:
    """Forward and backward with gradients of all inputs."""
    tensors = inputs(*shape)
    weight = torch.randn_like(tensors[0])
    calls = {"ours": _both(_ours, tensors, weight)}
    for name, prepare in peers.items():
        if (name, shape) not in TOO_LARGE_TO_TRAIN:
            calls[name] = _both(*prepare(*tensors), weight)
    return interleaved(calls, 9 if math.prod(shape) < 20_000 else 5 if math.prod(shape) < 70_000 else 3)


def accuracy(shapes: tuple[tuple[int, int], ...] = ((4, 1024), (32, 128))) -> dict[str, float]:
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


def _memory_call(name: str, shape: tuple[int, int], trained: bool):
    """The call, and a small one; for `extra_peak_bytes`."""

    def calls(length):
        tensors = inputs(shape[0], length)
        peers, _ = find_peers()
        function, tensors = (_ours, tensors) if name == "ours" else peers[name](*tensors)
        if trained:
            return _both(function, tensors, torch.randn(1, length, shape[0], SIZE))
        return torch.no_grad()(functools.partial(function, *tensors))

    return calls(shape[1]), calls(128)


def memory(peers: dict) -> dict[str, dict[str, int]]:
    """Peak bytes beyond the inputs: the gradients and the output count, the inputs and dy do not.

    Of the process, ours at both numbers of heads and the peers', and ours as the allocator counts it.
    """
    names, sizes = ["ours", *(n for n in peers if n != "transformers Q256")], {}
    for kind, length in (("forward", 8192), ("forward and backward", 2048)):
        for heads, those in ((9, names), (32, ["ours"])):
            what = ((heads, length), kind != "forward")
            row = {n: extra_peak_bytes(_memory_call, n, *what) for n in those}
            row[ALLOCATED] = allocated_peak(_memory_call("ours", *what)[0])
            sizes[f"{kind}, {heads} heads, {length}"] = row
    return sizes


def memory_targets(sizes: dict[str, dict[str, int]]) -> list[Target]:
    """The limits, for either way to count."""
    found = []
    for what, row in sizes.items():
        kind, heads, length = what.split(", ")
        tensor = int(heads.split()[0]) * int(length) * SIZE * 4
        for counted, name in (("resident", "ours"), ("allocated", ALLOCATED)):
            if kind == "forward":
                extra = row[name] - tensor
                found.append(Target(f"forward, {heads}: bytes beyond the output, {counted}", extra, FORWARD_EXTRA))
            else:
                what = f"forward and backward, {heads}: tensors of x's size, {counted}"
                found.append(Target(what, row[name] / tensor, TRAINING_TENSORS))
    return found


def growth() -> dict[str, dict]:
    """Time against length, heads and batch, each with the exponent of the best power law; 1 is linear."""
    rows = {
        "length": {n: (9, n, 1) for n in (512, 1024, 2048, 4096, 8192, 16384)},
        "heads": {n: (n, 2048, 1) for n in (4, 8, 16, 32)},
        "batch": {n: (4, 2048, n) for n in (1, 2, 4, 8)},
    }
    figures = {}
    for what, shapes in rows.items():
        with torch.no_grad():
            tensors = {n: inputs(heads, length, batch) for n, (heads, length, batch) in shapes.items()}
            calls = {str(n): (lambda t=t: ssd_scan(*t)) for n, t in tensors.items()}
            times = {int(n): t.median for n, t in interleaved(calls, 5).items()}
        figures[what] = {"ms": times, "exponent": exponent(times)}
    return figures


def exponent(times: dict[int, float]) -> float:
    """Slope of log time against log size by least squares."""
    xs, ys = ([math.log(v) for v in values] for values in (times, times.values()))
    x0, y0 = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - x0) * (y - y0) for x, y in zip(xs, ys, strict=True)) / sum((x - x0) ** 2 for x in xs)


def targets_of(shape: tuple[int, int], timings: dict[str, Timing], share: float) -> list[Target]:
    """The limits of one prefill shape."""
    heads, length = shape
    ours, where = timings["ours"].median, f"prefill, {heads} heads, {length} tokens"
    found = []
    for peer, limit in LIMITS.items():
        if peer in timings and (length >= 2048 or not peer.startswith("transformers")):
            limit = FAR_LIMIT if peer == "causal SDPA" and length >= FAR else limit
            found.append(Target(f"{where}: time over {peer}", ours / timings[peer].median, limit))
    if length >= 2048:
        found.append(Target(f"{where}: matrix product's speed over ours", 1 / share, 1 / PEAK_SHARE))
    return found


def main(output: Path) -> None:
    """Measure everything, print it and save scan.json."""
    torch.set_num_threads(1)
    console, (peers, absent) = Console(), find_peers()
    targets, rows, shares = [], {}, {}
    for shape in SHAPES:
        timings, share = prefill(shape, peers)
        rows[shape], shares[shape] = timings, share
        targets += targets_of(shape, timings, share)
    console.print(timing_table("prefill, ms of CPU time (x ours)", rows, [*peers], shares))
    trained = {}
    for shape in TRAINED:
        trained[shape] = training(shape, peers)
        for peer in peers:
            if peer in trained[shape]:
                ratio = trained[shape]["ours"].median / trained[shape][peer].median
                name = f"forward and backward, {shape[0]} heads, {shape[1]} tokens: time over {peer}"
                targets.append(Target(name, ratio, TRAINING_LIMIT))
    console.print(timing_table("forward and backward, ms of CPU time (x ours)", trained, [*peers]))
    errors = accuracy()
    targets += [Target(f"error against float64, {name}", error, ERROR_LIMIT) for name, error in errors.items()]
    sizes = memory(peers)
    targets += memory_targets(sizes)
    grows = growth()
    targets += [Target(f"time grows with {what}: exponent", f["exponent"], 1.1) for what, f in grows.items()]
    names = ["ours", ALLOCATED, *peers]
    table = Table("peak memory beyond the inputs, MB", *names)
    for what, row in sizes.items():
        table.add_row(what, *(f"{row[name] / 1e6:.0f}" if name in row else "" for name in names))
    console.print(table)
    for name, shape in sorted(TOO_LARGE):
        absent[f"{name}, {shape[0]} heads, {shape[1]} tokens"] = "it takes too much memory"
    for name, shape in sorted(TOO_LARGE_TO_TRAIN):
        absent[f"{name} forward and backward, {shape[0]} heads, {shape[1]} tokens"] = "it takes too much memory"
    for name, reason in absent.items():
        console.print(f"{name}: skipped, {reason}", highlight=False)
    as_rows = lambda table: [  # noqa: E731
        {"heads": s[0], "length": s[1], "ms": {n: asdict(t) for n, t in r.items()}} for s, r in table.items()
    ]
    share_rows = [{"heads": s[0], "length": s[1], "share": share} for s, share in shares.items()]
    save_report(output, "scan", targets, prefill=as_rows(rows), training=as_rows(trained), peak_share=share_rows,
                errors=errors, memory=sizes, growth=grows, skipped=absent)  # fmt: skip


def timing_table(title: str, rows: dict, peers: list[str], shares: dict | None = None) -> Table:
    """Ours in milliseconds with its spread, the peers as multiples of it."""
    extra = ["of matmul peak"] if shares else []
    table = Table("heads", "length", "ours ms", *peers, *extra, title=title)
    for shape, timings in rows.items():
        ours = timings["ours"]
        cells = [f"{timings[p].median / ours.median:.2f}" if p in timings else "-" for p in peers]
        share = [f"{shares[shape]:.0%}"] if shares else []
        spread = f"{ours.median:.1f} ({ours.least:.1f}-{ours.most:.1f})"
        table.add_row(str(shape[0]), str(shape[1]), spread, *cells, *share)
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/bench"))
    main(parser.parse_args().output)
