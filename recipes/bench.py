"""Benchmarks: ratios measured side by side in one run, never absolute promises.

    make bench        or        python -m recipes.bench [--gigabytes 2] [--output runs/bench]

conversion: a synthetic bf16 Llama in 8 shards is copied, converted, and copied again; seconds and peak memory.
scan: the chunked SSD scan against the float64 recurrence and causal SDPA of the same shape.
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

from convert.plan import human_bytes
from convert.weight_mapping import Rule
from convert.writer import plan_shards, write_shards
from modeling_llamba.ssd import ssd_recurrence, ssd_scan

CONVERT = """
import json, sys, time, torch, transformers
from convert.pipeline import convert

def memory(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

before = memory("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
started = time.perf_counter()
convert(sys.argv[1], sys.argv[2], overwrite=True, max_shard_size=sys.argv[3], align='none')
print(json.dumps({"seconds": time.perf_counter() - started, "peak": memory("VmHWM") - before, "own": before}))
"""


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


def start_clean(target: Path) -> None:
    """No old output, nothing left to write back: otherwise one run pays for another's dirty pages."""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()


def plain_copy(source: Path, target: Path) -> float:
    """Seconds to copy a folder with ordinary reads and writes."""
    start_clean(target)
    target.mkdir()
    started = time.perf_counter()
    for path in source.iterdir():
        with open(path, "rb", buffering=0) as reader, open(target / path.name, "wb", buffering=0) as writer:
            while block := reader.read(16 * 2**20):
                writer.write(block)
    return time.perf_counter() - started


def memory_folder(fallback: Path, needed: int) -> Path:
    """A folder in memory where there is room: disks of shared machines vary tenfold from one copy to the next."""
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > needed
    return memory / f"convert-to-hybrid-bench-{os.getpid()}" if has_room else fallback


def bench_conversion(scratch: Path, gigabytes: float) -> dict:
    """Copy, convert, copy, three times over."""
    shutil.rmtree(scratch, ignore_errors=True)
    nbytes = synthetic_llama(scratch / "teacher", gigabytes)
    shard = max(path.stat().st_size for path in (scratch / "teacher").glob("*.safetensors"))
    copies, conversions = [], []
    for _ in range(3):
        copies.append(plain_copy(scratch / "teacher", scratch / "copy"))
        command = [sys.executable, "-c", CONVERT, str(scratch / "teacher"), str(scratch / "hybrid"), str(shard)]
        start_clean(scratch / "hybrid")
        conversions.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
        copies.append(plain_copy(scratch / "teacher", scratch / "copy"))
    largest = max(path.stat().st_size for path in (scratch / "hybrid").glob("*.safetensors"))
    seconds = statistics.median(c["seconds"] for c in conversions)
    peak = max(c["peak"] for c in conversions)
    shutil.rmtree(scratch)
    return {
        "bytes": nbytes,
        "shards": 8,
        "convert_seconds": seconds,
        "convert_seconds_all": [c["seconds"] for c in conversions],
        "copy_seconds": statistics.median(copies),
        "copy_seconds_all": copies,
        "convert_over_copy": seconds / statistics.median(copies),
        "peak_memory_bytes": peak,
        "largest_shard_bytes": largest,
        "peak_over_largest_shard": peak / largest,
    }


def _median_ms(function, repeats: int = 5) -> float:
    function()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def bench_scan(heads: int, length: int) -> dict:
    """One thread, P = N = 64."""
    torch.set_num_threads(1)
    x, B, C = (torch.randn(1, length, heads, 64) for _ in range(3))
    log_a = -torch.rand(1, length, heads)
    with torch.no_grad():
        scan = _median_ms(lambda: ssd_scan(x, log_a, B, C))
        q, k, v = (t.transpose(1, 2).contiguous() for t in (C, B, x))
        sdpa = _median_ms(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        exact = ssd_recurrence(x, log_a, B, C)[0]
        error = ((ssd_scan(x, log_a, B, C)[0] - exact).norm() / exact.norm()).item()
    return {
        "heads": heads,
        "length": length,
        "scan_ms": scan,
        "sdpa_ms": sdpa,
        "sdpa_over_scan": sdpa / scan,
        "relative_error": error,
    }


def main(output: Path, gigabytes: float) -> None:
    """Run everything and save results.json."""
    console = Console()
    output.mkdir(parents=True, exist_ok=True)
    scratch = memory_folder(output / "scratch", int(5e9 * gigabytes))
    conversion = bench_conversion(scratch, gigabytes) | {"scratch": str(scratch.parent)}
    table = Table("conversion", "", title=f"{human_bytes(conversion['bytes'])} bf16 Llama, 8 shards")
    table.add_row("measured in", conversion["scratch"])
    table.add_row("convert / plain copy", f"{conversion['convert_over_copy']:.2f}")
    table.add_row("seconds", f"{conversion['convert_seconds']:.2f} / {conversion['copy_seconds']:.2f}")
    table.add_row("peak memory above the interpreter's own", human_bytes(conversion["peak_memory_bytes"]))
    table.add_row("... over the largest shard", f"{conversion['peak_over_largest_shard']:.2f}")
    console.print(table)
    scans = [bench_scan(heads, length) for heads, length in ((9, 512), (9, 2048), (9, 8192), (32, 2048))]
    table = Table("heads", "length", "SSD scan ms", "causal SDPA ms", "ratio", "error vs float64")
    for row in scans:
        table.add_row(
            str(row["heads"]),
            str(row["length"]),
            f"{row['scan_ms']:.1f}",
            f"{row['sdpa_ms']:.1f}",
            f"{row['sdpa_over_scan']:.1f}",
            f"{row['relative_error']:.1e}",
        )
    console.print(table)
    (output / "results.json").write_text(json.dumps({"conversion": conversion, "scan": scans}, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/bench"))
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the synthetic teacher")
    arguments = parser.parse_args()
    main(arguments.output, arguments.gigabytes)
