"""Conversion against a plain copy of the same bytes: seconds and memory.

python -m recipes.benchmarks.conversion [--gigabytes 1] [--output runs/bench]

A synthetic bf16 Llama in 8 shards is copied, converted and copied again, several times over: on disk, with nothing
of the teacher in the page cache and until all is written, and in memory where there is room, since disks of shared
machines vary tenfold from one copy to the next. A conversion writes two shards at a time and takes the sha256 of two
of the teacher's beside that, so its seconds need free cores.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from convert.weights.rules import Rule
from convert.weights.writer import human_bytes, plan_shards, write_shards

from .measure import Target, save_report

TIME_LIMIT, SHARD_LIMIT, TENSOR_LIMIT = 1.1, 1.1, 2.0

COMPARE = """
import json, os, sys, threading, time, torch, transformers
from convert.pipeline import convert
from recipes.bench_conversion import plain_copy, start_clean

teacher, scratch, shard, on_disk = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4] == "disk"

def memory(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

def watch():
    while not done.wait(0.005):
        most[0] = max(most[0], memory("RssAnon"))

copies = [plain_copy(teacher, scratch + "/copy", on_disk)]
start_clean(teacher, scratch + "/hybrid")
before, anonymous, most, done = memory("VmRSS"), memory("RssAnon"), [0], threading.Event()
threading.Thread(target=watch, daemon=True).start()
open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
started, used = time.perf_counter(), time.process_time()
convert(teacher, scratch + "/hybrid", max_shard_size=shard, align="none")
if on_disk:
    os.sync()
seconds, cpu = time.perf_counter() - started, time.process_time() - used
done.set()
peak, most = memory("VmHWM") - before, most[0] - anonymous
copies.append(plain_copy(teacher, scratch + "/copy", on_disk))
print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "peak": peak, "anonymous": most, "copies": copies}))
"""


# the embedding of `synthetic_llama`
LARGEST_TENSOR_BYTES = 2 * 32000 * 2048


def synthetic_llama(folder: Path, gigabytes: float, num_shards: int = 8) -> int:
    """A Llama of about that size, random bf16 weights, in shards; returns its bytes."""
    hidden, per_layer = 2048, 2 * (2048 * (2048 * 2 + 2 * 512) + 3 * 2048 * 8192)
    layers = max(1, round((gigabytes * 1e9 - 2 * 2 * 32000 * hidden) / per_layer))
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    with torch.device("meta"):
        shapes = {name: tuple(t.shape) for name, t in LlamaForCausalLM(config).state_dict().items()}

    def random_rows(shape):
        return lambda checkpoint: iter([torch.randn(shape, dtype=torch.bfloat16)])

    rules = [Rule(name, shape, "initialised", (), random_rows(shape)) for name, shape in shapes.items()]
    total = sum(2 * torch.Size(shape).numel() for shape in shapes.values())
    folder.mkdir(parents=True)
    write_shards(plan_shards(rules, torch.bfloat16, total // num_shards), None, torch.bfloat16, folder)
    config.save_pretrained(folder)
    return total


def start_clean(source: str, target: str) -> None:
    """No old output, nothing left to write back, nothing read before: else one run pays for another or gains.

    To be called right before the clock starts: memory that was freed a while ago goes back to the host of a virtual
    machine, and costs several times as much to write to.
    """
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    for path in Path(source).iterdir():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain_copy(source: str, target: str, on_disk: bool) -> tuple[float, float]:
    """Seconds, and seconds of CPU, to copy a folder with ordinary reads and writes."""
    start_clean(source, target)
    os.mkdir(target)
    started, cpu = time.perf_counter(), time.thread_time()
    for path in Path(source).iterdir():
        with open(path, "rb", buffering=0) as reader, open(Path(target, path.name), "wb", buffering=0) as writer:
            while block := reader.read(4 * 2**20):
                writer.write(block)
    if on_disk:
        os.sync()
    return time.perf_counter() - started, time.thread_time() - cpu


def memory_folder(fallback: Path, needed: int) -> Path:
    """A folder in memory where there is room: disks of shared machines vary tenfold from one copy to the next."""
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > needed
    return memory / f"convert-to-hybrid-bench-{os.getpid()}" if has_room else fallback


def bench_conversion(scratch: Path, gigabytes: float, on_disk: bool, rounds: int = 7) -> dict:
    """Copy, convert, copy, several times over, each time in a process of its own."""
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        nbytes = synthetic_llama(scratch / "teacher", gigabytes)
        shard = max(path.stat().st_size for path in (scratch / "teacher").glob("*.safetensors"))
        command = [sys.executable, "-c", COMPARE, str(scratch / "teacher"), str(scratch), str(shard)]
        command.append("disk" if on_disk else "memory")
        conversions = []
        for _ in range(rounds):
            conversions.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
        copies = [copy for c in conversions for copy in c["copies"]]
        largest = max(path.stat().st_size for path in (scratch / "hybrid").glob("*.safetensors"))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    over = statistics.median(2 * c["seconds"] / sum(copy[0] for copy in c["copies"]) for c in conversions)
    seconds, cpu = (statistics.median(c[key] for c in conversions) for key in ("seconds", "cpu_seconds"))
    copy_seconds, copy_cpu = (statistics.median(c[i] for c in copies) for i in range(2))
    peak, anonymous = (max(c[key] for c in conversions) for key in ("peak", "anonymous"))
    return {
        "bytes": nbytes,
        "shards": 8,
        "convert_seconds": seconds,
        "convert_seconds_all": [c["seconds"] for c in conversions],
        "convert_cpu_seconds": cpu,
        "copy_seconds": copy_seconds,
        "copy_seconds_all": [c[0] for c in copies],
        "copy_cpu_seconds": copy_cpu,
        "convert_over_copy": over,  # median of rounds, each over its own two copies
        "convert_over_copy_cpu": cpu / copy_cpu,
        "peak_memory_bytes": peak,
        "anonymous_bytes": anonymous,
        "largest_shard_bytes": largest,
        "peak_over_largest_shard": peak / largest,
        "anonymous_over_largest_tensor": anonymous / LARGEST_TENSOR_BYTES,
    }


def main(output: Path, gigabytes: float) -> None:
    """Measure, print and save conversion.json."""
    disk = bench_conversion(output / "scratch-conversion", gigabytes, on_disk=True)
    memory = memory_folder(output / "scratch-conversion", int(4e9 * gigabytes))
    figures = bench_conversion(memory, gigabytes, on_disk=False, rounds=3)
    table = Table("conversion", "on disk", "in memory", title=f"{human_bytes(figures['bytes'])} bf16 Llama, 8 shards")
    rows = {
        "convert / plain copy, seconds": lambda f: f"{f['convert_over_copy']:.2f}",
        "seconds": lambda f: f"{f['convert_seconds']:.2f} / {f['copy_seconds']:.2f}",
        "... CPU time of all threads": lambda f: f"{f['convert_over_copy_cpu']:.2f}",
        "peak memory above the interpreter's own": lambda f: human_bytes(f["peak_memory_bytes"]),
        "... over the largest shard": lambda f: f"{f['peak_over_largest_shard']:.2f}",
        "anonymous memory over the largest tensor": lambda f: f"{f['anonymous_over_largest_tensor']:.2f}",
    }
    for name, text in rows.items():
        table.add_row(name, text(disk), text(figures))
    Console().print(table)
    most = {name: max(f[name] for f in (disk, figures)) for name in figures if "_over_largest" in name}
    targets = [
        Target("conversion: seconds over a plain copy, disk", disk["convert_over_copy"], TIME_LIMIT),
        Target("conversion: seconds over a plain copy, memory", figures["convert_over_copy"], TIME_LIMIT),
        Target("conversion: peak memory over the largest shard", most["peak_over_largest_shard"], SHARD_LIMIT),
        Target(
            "conversion: anonymous memory over the largest tensor", most["anonymous_over_largest_tensor"], TENSOR_LIMIT
        ),
    ]
    save_report(output, "conversion", targets, **figures, disk=disk)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/bench"))
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the synthetic teacher")
    main(**vars(parser.parse_args()))
