"""What the benchmarks share: time that other processes cannot buy, memory above what was there, targets."""

import gc
import json
import multiprocessing
import queue
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Milliseconds of this thread's CPU time: the median, and the smallest and largest."""

    median: float
    least: float
    most: float


@dataclass(frozen=True)
class Target:
    """A figure and what it was to be; smaller is better everywhere."""

    name: str
    value: float
    target: float

    def as_row(self) -> dict:
        """For results.json."""
        return asdict(self) | {"met": self.value <= self.target, "smaller_is_better": True}


def interleaved(functions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, Timing]:
    """Each function once to warm up, then all in rounds, so that whatever disturbs one disturbs the others.

    The order is drawn anew for each round: what ran before decides what the caches hold. CPU time of this one thread:
    wall time on a shared machine measures its neighbours.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    draw = random.Random(0)
    for _ in range(repeats):
        for name in draw.sample([*functions], len(functions)):
            started = time.thread_time()
            functions[name]()
            times[name].append(1e3 * (time.thread_time() - started))
    return {name: Timing(statistics.median(t), min(t), max(t)) for name, t in times.items()}


def matmul_gigaflops(size: int = 1024) -> Callable[[], object]:
    """A square matrix product, the yardstick for the machine's peak; 2 size^3 operations."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    return lambda: a @ b


def status_bytes(key: str) -> int:
    """VmRSS, VmHWM or RssAnon of this process."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def forget_peak() -> None:
    """Let VmHWM begin anew."""
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _peak(prepare, arguments, results) -> None:
    torch.set_num_threads(1)
    function, small = prepare(*arguments)
    small()  # code, thread-local buffers of the matrix library
    before = status_bytes("VmRSS")
    forget_peak()
    kept = function()
    results.put(status_bytes("VmHWM") - before)
    del kept


def extra_peak_bytes(prepare: Callable, *arguments) -> int:
    """Peak memory of a call above what its inputs and the interpreter take, in a process of its own.

    `prepare(*arguments)` gives the call and a small one of the same kind, for what the first call ever leaves behind.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    child = context.Process(target=_peak, args=(prepare, arguments, results))
    child.start()
    return result_of(child, results)


def result_of(child: BaseProcess, results: multiprocessing.Queue) -> Any:
    """What a process has put into the queue, once it is done.

    Raises:
        RuntimeError: it died first, for want of memory, say.
    """
    while True:
        try:
            found = results.get(timeout=1)
        except queue.Empty:
            if not child.is_alive():
                raise RuntimeError(f"The measuring process died with exit code {child.exitcode}.") from None
        else:
            child.join()
            return found


def allocated_peak(function: Callable[[], object]) -> int:
    """Most bytes of tensors that a call holds at once, its results included, what was there before it not.

    As PyTorch's allocator counts them, the same every time; `extra_peak_bytes` depends on what was freed before.
    What the matrix library takes for itself is not in it.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = function()
    del kept  # until here, so that results count
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def save_report(output: Path, topic: str, targets: list[Target], **figures) -> None:
    """Write one topic's figures beside those of the others."""
    output.mkdir(parents=True, exist_ok=True)
    report = {"targets": [target.as_row() for target in targets]} | figures
    (output / f"{topic}.json").write_text(json.dumps(report, indent=2) + "\n")
