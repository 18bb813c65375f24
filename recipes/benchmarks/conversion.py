"""Conversion against a plain copy of the same bytes: seconds and memory.

A synthetic bf16 Llama in 8 shards, and two mixtures of experts twice its size, are copied, converted and copied again,
several times over: on disk, with nothing of the teacher in the page cache and until all is written, and the Llama in
memory where there is room, since disks of shared machines vary tenfold from one copy to the next. A conversion writes
two shards at a time and takes the sha256 of two of the teacher's beside that, so its seconds need free cores. What a
process does once (reading options, importing what draws the card's pictures: a second) is done beforehand.
"""

import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from convert.dry_run import plan_conversion
from convert.io.rules import Rule
from convert.io.writer import plan_shards, write_shards
from convert.options import make_options
from convert.pipeline import convert
from convert.teachers.qwen3_moe import QWEN3_MOE
from convert.teachers.weights import expert_pieces

from .measure import Report, Table, forget_peak, in_own_process, status_bytes

OVER_COPY, OVER_SHARD = "seconds over a plain copy", "peak memory over the largest shard"
OVER_TENSOR = "anonymous memory over the largest tensor"
LIMITS = {OVER_COPY: 1.1, OVER_SHARD: 1.1, OVER_TENSOR: 2.0}
MOE_LIMITS = {OVER_COPY: 1.2, OVER_SHARD: 1.1}
GIGABYTES, MOE_GIGABYTES = 1.0, 2.0
MEMORY = Path("/dev/shm")
VOCABULARY, WIDTH, INNER = 32000, 2048, 8192
EXPERTS, EXPERT_INNER = 96, 768
WINDOW = 512
LARGEST_TENSOR_BYTES = 2 * VOCABULARY * WIDTH


def synthetic_llama(folder: Path, gigabytes: float, num_shards: int = 8) -> None:
    """A Llama of about that size."""
    per_layer = 2 * (WIDTH * (WIDTH * 2 + 2 * 512) + 3 * WIDTH * INNER)
    layers = max(1, round((gigabytes * 1e9 - 2 * LARGEST_TENSOR_BYTES) / per_layer))
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8,
    )  # fmt: skip
    write_random(folder, LlamaForCausalLM, config, num_shards)


def synthetic_moe(folder: Path, gigabytes: float) -> None:
    """A Qwen3-MoE of about that size, each expert's matrices on their own, as they are published."""
    layers = max(1, round((gigabytes * 1e9 - 2 * LARGEST_TENSOR_BYTES) / (6 * EXPERTS * EXPERT_INNER * WIDTH)))
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=EXPERTS, moe_intermediate_size=EXPERT_INNER,
    )  # fmt: skip
    write_random(folder, Qwen3MoeForCausalLM, config, apart=True)


def synthetic_hybrid(folder: Path, gigabytes: float) -> None:
    """A Qwen3.5-MoE of about that size, three of four layers with a state, its experts stacked as published."""
    experts = round((gigabytes * 1e9 - 2 * LARGEST_TENSOR_BYTES) / (4 * 6 * EXPERT_INNER * WIDTH))
    config = Qwen3_5MoeTextConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=4, num_experts=experts,
        moe_intermediate_size=EXPERT_INNER,
    )  # fmt: skip
    write_random(folder, Qwen3_5MoeForCausalLM, config)


def write_random(
    folder: Path, model_class: type, config: PreTrainedConfig, num_shards: int = 8, apart: bool = False
) -> None:
    """Random bf16 weights of a model in shards; `apart` has each expert's matrices on their own."""
    config.architectures = [model_class.__name__]
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        shapes = {name: tuple(t.shape) for name, t in model_class(config).state_dict().items()}
    pieces = expert_pieces(QWEN3_MOE, shapes, config.num_hidden_layers) if apart else {}
    for stack, names in pieces.items():
        experts, rows, columns = shapes.pop(stack)
        shapes |= {name: (rows * experts // len(names), columns) for name in names}

    def random_rows(shape):
        return lambda checkpoint: iter([torch.randn(shape, dtype=torch.bfloat16)])

    rules = [Rule(name, shape, "initialised", (), random_rows(shape)) for name, shape in shapes.items()]
    total = sum(2 * torch.Size(shape).numel() for shape in shapes.values())
    folder.mkdir(parents=True)
    write_shards(plan_shards(rules, torch.bfloat16, total // num_shards), None, torch.bfloat16, folder)
    config.save_pretrained(folder)


def start_clean(source: Path, target: Path) -> None:
    """No old output, nothing left to write back, nothing read before: else one run pays for another or gains.

    To be called right before the clock starts: memory that was freed a while ago goes back to the host of a virtual
    machine, and costs several times as much to write to.
    """
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    for path in source.iterdir():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain_copy(source: Path, target: Path, on_disk: bool) -> float:
    """Seconds to copy a folder with ordinary reads and writes."""
    start_clean(source, target)
    target.mkdir()
    started = time.perf_counter()
    for path in source.iterdir():
        with open(path, "rb", buffering=0) as reader, open(target / path.name, "wb", buffering=0) as writer:
            while block := reader.read(4 * 2**20):
                writer.write(block)
    if on_disk:
        os.sync()
    return time.perf_counter() - started


def copy_convert_copy(
    scratch: Path, max_shard_size: str, on_disk: bool, window: int | None = None
) -> dict[str, float]:
    """Copy, convert and copy scratch/teacher in this process; seconds and bytes of memory.

    The conversion is left in scratch/hybrid. Run it in a process of its own, so that the memory is the conversion's.
    """
    teacher = scratch / "teacher"
    hybrid = scratch / "hybrid"
    anonymous = [0]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            anonymous[0] = max(anonymous[0], status_bytes("RssAnon"))

    with tempfile.TemporaryDirectory() as small:
        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
        )
        write_random(Path(small, "teacher"), LlamaForCausalLM, config)
        convert(f"{small}/teacher", f"{small}/hybrid", align="none")
    plan_conversion(make_options(str(teacher), str(hybrid), align="none", window=window))  # imports what it takes
    first = plain_copy(teacher, scratch / "copy", on_disk)
    start_clean(teacher, hybrid)
    held = status_bytes("VmRSS")
    anonymous_before = status_bytes("RssAnon")
    threading.Thread(target=watch, daemon=True).start()
    forget_peak()
    started = time.perf_counter()
    convert(str(teacher), hybrid, max_shard_size=max_shard_size, align="none", window=window)
    if on_disk:
        os.sync()
    seconds = time.perf_counter() - started
    done.set()
    peak = status_bytes("VmHWM") - held
    most = anonymous[0] - anonymous_before
    copied = (first + plain_copy(teacher, scratch / "copy", on_disk)) / 2
    return {"seconds": seconds, "copy_seconds": copied, "peak": peak, "anonymous": most}


def rounds_in(
    scratch: Path,
    on_disk: bool,
    rounds: int,
    synthetic: Callable[[Path, float], None] = synthetic_llama,
    gigabytes: float = GIGABYTES,
    window: int | None = None,
) -> dict[str, float]:
    """Medians of the times and the largest memory over several rounds, each in a process of its own.

    Args:
        window: for hybrid layers, where a teacher's states leave no place for mixers.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        synthetic(scratch / "teacher", gigabytes)
        shard = str(max(path.stat().st_size for path in (scratch / "teacher").glob("*.safetensors")))
        runs = [in_own_process(copy_convert_copy, scratch, shard, on_disk, window) for _ in range(rounds)]
        largest = max(path.stat().st_size for path in (scratch / "hybrid").glob("*.safetensors"))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    figures = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    return figures | {
        OVER_COPY: statistics.median(run["seconds"] / run["copy_seconds"] for run in runs),
        OVER_SHARD: max(run["peak"] for run in runs) / largest,
        OVER_TENSOR: max(run["anonymous"] for run in runs) / LARGEST_TENSOR_BYTES,
    }


def measure(output: Path) -> Report:
    """Measure writing from and to a disk, and within memory where there is room."""
    report = Report()
    rows = []
    found = {}
    found["disk"] = rounds_in(output / "scratch-conversion", True, 7)
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4e9 * GIGABYTES:
        found["memory"] = rounds_in(MEMORY / f"convert-to-hybrid-bench-{os.getpid()}", False, 3)
    else:
        report.skipped["conversion within memory"] = f"no room in {MEMORY}"
    with_experts = {"disk, experts": (synthetic_moe, None), "disk, experts and states": (synthetic_hybrid, WINDOW)}
    for where, (synthetic, window) in with_experts.items():
        found[where] = rounds_in(output / "scratch-conversion", True, 3, synthetic, MOE_GIGABYTES, window)
    for where, figures in found.items():
        for what, limit in (MOE_LIMITS if where in with_experts else LIMITS).items():
            report.add(f"conversion: {what}, {where}", figures[what], limit)
        cells = (f"{figures[key]:.2f}" for key in ("seconds", "copy_seconds"))
        size = MOE_GIGABYTES if where in with_experts else GIGABYTES
        rows.append([f"{size} GB, {where}", *cells, f"{figures['peak'] / 1e6:.0f}"])
    report.tables.append(Table(["conversion", "seconds", "of a copy", "peak memory, MB"], rows))
    return report
