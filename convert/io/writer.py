"""Write safetensors shards as the tensors come, never holding one whole.

A file is a length, a JSON header with every tensor's type, shape and offsets, and the bytes; since a plan holds all
shapes beforehand, the header can be written first and the bytes streamed after it.
"""

import hashlib
import json
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch

from .reader import Checkpoint, TensorInfo, is_finite
from .rules import Rule

HASH_BLOCK_BYTES = 2**20
WORKERS = 2
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


def output_dtype(name: str, tensors: Mapping[str, TensorInfo]) -> torch.dtype:
    """Return the type of that name; "auto" is the floating-point type of most bytes of the source."""
    if name != "auto":
        return getattr(torch, name)
    sizes = Counter()
    for info in tensors.values():
        if info.dtype.is_floating_point:
            sizes[info.dtype] += info.nbytes
    return sizes.most_common(1)[0][0]


def human_bytes(size: int) -> str:
    """1500000 -> "1.5 MB"."""
    amount = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.4g} {unit}"
        amount /= 1000
    return f"{amount:.4g} TB"


Progress = Callable[[str, int, int], None]
"""Function that is called with a step's name, the amount done and the total."""


@dataclass(frozen=True)
class Shard:
    """An output file and the rules of its tensors."""

    name: str
    rules: list[Rule]


def plan_shards(rules: list[Rule], dtype: torch.dtype, max_bytes: int) -> list[Shard]:
    """Cut the rules, in order, into files of at most `max_bytes`; a larger tensor has a file of its own."""
    groups: list[list[Rule]] = [[]]
    size = 0
    for rule in rules:
        nbytes = rule.nbytes(dtype)
        if groups[-1] and size + nbytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(rule)
        size += nbytes
    if len(groups) == 1:
        return [Shard("model.safetensors", groups[0])]
    total = len(groups)
    return [Shard(f"model-{i + 1:05d}-of-{total:05d}.safetensors", group) for i, group in enumerate(groups)]


def header_bytes(rules: list[Rule], dtype: torch.dtype) -> bytes:
    """Length and JSON header of a shard, padded to a multiple of 8 bytes as the format requires."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for rule in rules:
        end = offset + rule.nbytes(dtype)
        header[rule.target] = {
            "dtype": DTYPE_NAMES[rule.dtype or dtype],
            "shape": list(rule.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    # spaces are legal JSON, and offsets are counted from behind them
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def write_shards(
    shards: list[Shard],
    checkpoint: Checkpoint | None,
    dtype: torch.dtype,
    folder: Path,
    progress: Progress = lambda what, done, total: None,
) -> None:
    """Carry out the rules and write their tensors, then the index if there are several shards.

    Two shards are written at a time; within one, a file system has writers wait for each other.

    Args:
        checkpoint: what the rules read; None where they need nothing.
        progress: called with "writing, MB", the megabytes written so far, and those to write.

    Raises:
        ValueError: a value is not finite, in the teacher or after the change of type.
        OSError: the disk is full or not writable.
    """
    workers = WORKERS
    if checkpoint is not None and not checkpoint.concurrent:
        workers = 1
    report = threading.Lock()
    stop = threading.Event()
    written = 0
    total = sum(rule.nbytes(dtype) for shard in shards for rule in shard.rules)

    def reported(nbytes: int) -> None:
        nonlocal written
        with report:
            written += nbytes
            progress("writing, MB", math.ceil(written / 1e6), math.ceil(total / 1e6))

    with ThreadPoolExecutor(workers) as pool:
        try:
            writing = [pool.submit(_write_shard, s, checkpoint, dtype, folder, reported, stop) for s in shards]
            for shard in as_completed(writing):
                shard.result()
        finally:  # an interruption reaches this thread only
            stop.set()
    if len(shards) > 1:
        weight_map = {rule.target: shard.name for shard in shards for rule in shard.rules}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _bytes(block: torch.Tensor, dtype: torch.dtype, rule: Rule) -> memoryview:
    if block.dtype != dtype:
        # only if the change of type overflows: infinity before it has a message of its own
        wide = block
        block = block.to(dtype)
        if not is_finite(block) and is_finite(wide):
            raise ValueError(
                f"{rule.target} does not fit into {str(dtype)[6:]}; choose bfloat16 or float32 (--dtype)."
            )
    if rule.kind != "moved" and not is_finite(block):  # a tensor that moves was looked at when it was read
        raise ValueError(
            f"{rule.target} came out infinite or not a number; the teacher's weights are too large for it."
        )
    return memoryview(block.contiguous().reshape(-1).view(torch.uint8).numpy())


def _write_shard(
    shard: Shard,
    checkpoint: Checkpoint | None,
    dtype: torch.dtype,
    folder: Path,
    progress: Callable[[int], None],
    stop: threading.Event,
) -> None:
    """Write one file; give up when `stop` is set, and set it on failure."""
    if stop.is_set():
        return
    try:
        # blocks have megabytes, which a buffer would only copy
        with open(folder / shard.name, "wb", buffering=0) as file:
            file.write(header_bytes(shard.rules, dtype))
            for rule in shard.rules:
                written = 0
                for block in rule.blocks(checkpoint):
                    if stop.is_set():
                        return
                    data = _bytes(block, rule.dtype or dtype, rule)
                    _write_all(file, data)
                    written += len(data)
                    progress(len(data))
                expected = rule.nbytes(dtype)
                assert written == expected, f"{rule.target}: wrote {written} bytes of {expected}"
    except BaseException:
        stop.set()
        raise


def _write_all(file: FileIO, data: memoryview) -> None:
    done = 0
    start = file.tell()
    while done < len(data):  # an unbuffered write may stop early, at 2 GiB for one
        done += file.write(data[done:])
    if hasattr(os, "posix_fadvise"):  # has the disk begin at once, where the kernel would wait for more
        os.posix_fadvise(file.fileno(), start, done, os.POSIX_FADV_DONTNEED)


def write_and_hash(
    shards: list[Shard],
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    folder: Path,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, str]:
    """Write the shards as `write_shards` does, while another thread hashes the files they are made from.

    Returns:
        The sha256 of every source file, by its name.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(1) as background:
        hashes = background.submit(hash_files, checkpoint.files, stop)
        try:
            write_shards(shards, checkpoint, dtype, folder, progress)
        except BaseException:
            stop.set()
            raise
        return hashes.result()


def hash_files(files: list[Path], stop: threading.Event) -> dict[str, str]:
    """sha256 of each weights file, as `sha256sum` and the Hub show it; gives up when `stop` is set.

    Two files at a time: one after the other would go on alone on one core after the writers are done.
    """
    with ThreadPoolExecutor(WORKERS) as pool:
        digests = pool.map(lambda path: _sha256(path, stop), files)
        return {path.name: digest for path, digest in zip(files, digests, strict=True)}


def _sha256(path: Path, stop: threading.Event) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(HASH_BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while not stop.is_set() and (count := file.readinto(buffer)):
            digest.update(buffer[:count])
    return digest.hexdigest()
