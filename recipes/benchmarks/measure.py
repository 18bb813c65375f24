"""Tools of the benchmarks: CPU time of calls taken in turns, memory above what was there, targets, tables."""

import gc
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Milliseconds of this thread's CPU time: the median, and the smallest and largest."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.1f} ({self.least:.1f}, {self.most:.1f})"


@dataclass(frozen=True)
class Target:
    """A figure and the largest value that is good enough; smaller is better everywhere."""

    name: str
    value: float
    limit: float


@dataclass(frozen=True)
class Table:
    """Figures to look at; the cells are ready to print."""

    columns: list[str]
    rows: list[list[str]]


@dataclass
class Report:
    """Result of a topic; `skipped` holds the reason for each thing that could not be measured."""

    targets: list[Target] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, value: float, limit: float) -> None:
        """Add a target."""
        self.targets.append(Target(name, value, limit))


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


def in_own_process(function: Callable, *arguments: Any) -> Any:
    """The result of `function(*arguments)` in a fresh process, which has none of this one's memory."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def status_bytes(key: str) -> int:
    """VmRSS, VmHWM or RssAnon of this process."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def forget_peak() -> None:
    """Let VmHWM begin anew."""
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        # resets the peak of resident memory and nothing else, proc(5)
        file.write("5")


def peak_bytes(prepare: Callable[..., tuple[Callable, Callable]], arguments: tuple) -> int:
    """Peak memory of a call above what its inputs and the interpreter take.

    To be called in a process of its own: memory that was freed before hides some of a call's. `prepare(*arguments)`
    returns the call, and a small one of the same kind for what any first call leaves behind.
    """
    torch.set_num_threads(1)
    function, small = prepare(*arguments)
    small()  # code, thread-local buffers of the matrix library
    before = status_bytes("VmRSS")
    forget_peak()
    kept = function()
    peak = status_bytes("VmHWM")
    del kept  # until here, so that results count
    return peak - before
