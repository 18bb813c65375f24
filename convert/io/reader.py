"""Read a teacher's checkpoint tensor by tensor: safetensors, PyTorch (weights only) or GGUF."""

import contextlib
import functools
import json
import math
import mmap
import os
import pickle
import re
import threading
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from safetensors import SafetensorError, safe_open

# Rows are read in blocks of about this many bytes: memory does not grow with the model, and what is read, looked at
# and written stays in a core's cache.
BLOCK_BYTES = 2**20
OWN_PAGES_BYTES = 2**18  # from here on malloc's bookkeeping is worth avoiding
LARGEST_WEIGHT = 1e11
MAX_HEADER_BYTES = 100_000_000  # safetensors refuses more

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
# several weights to a number, as MLX stores them, or less than a byte each
PACKED_DTYPES = ("U16", "U32", "U64", "F4", "F6_E2M3", "F6_E3M2", "F8_E8M0")
# GGUF's metadata that transformers' reader may leave out -> the configuration field that must have the same value
GGUF_FIELDS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
# Gemma's architecture -> number of layers of its 27B model. The attention scale of that model is in no GGUF file, and
# it is not the default of transformers
GGUF_OTHER_SCALE = {"gemma2": 46, "gemma3": 62}
MXFP4_PARTS = ("_blocks", "_scales")
"""Ends of the names of tensors that hold another packed as MXFP4."""
GGUF_EXPERTS = re.compile(r"\.ffn_(gate|up|down)_exps\.weight$")


@dataclass(frozen=True)
class TensorInfo:
    """Shape and type of a tensor that has not been read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def rows(self) -> int:
        """Length of the first dimension; a scalar is one row."""
        if not self.shape:
            return 1
        return self.shape[0]


class Checkpoint(ABC):
    """Named tensors on disk: `tensors` has their shapes and types, `blocks` reads the rows of one."""

    tensors: dict[str, TensorInfo]
    files: list[Path]
    concurrent = True
    """True if several threads may read at once."""

    def same_values(self, one: str, other: str) -> bool:
        """Return True if two tensors hold the same numbers."""
        shape = self.tensors[one].shape
        bytes_of = max(self.tensors[one].nbytes, self.tensors[other].nbytes)
        if shape != self.tensors[other].shape:
            return False
        step = max(1, BLOCK_BYTES * shape[0] // max(bytes_of, 1))
        starts = range(0, shape[0], step)
        pairs = ([self.read(name, i, min(i + step, shape[0])) for name in (one, other)] for i in starts)
        # in float64, where the same number is equal in whatever type it is stored
        return all(a.double().equal(b.double()) for a, b in pairs)

    @abstractmethod
    def read_rows(self, name: str, start: int, stop: int, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """Rows start..stop of a tensor (the whole of a scalar); they may lie in `buffer`, if that is given."""

    def buffer_bytes(self) -> int:
        """Bytes of memory that reading the largest tensor takes."""
        return BLOCK_BYTES

    def blocks(self, *ranges: tuple[str, int, int | None]) -> Iterator[torch.Tensor]:
        """Rows start..stop of one tensor after another in blocks, checked, each in place of the last."""
        steps = []
        buffer_bytes = 0
        for name, start, stop in ranges:
            rows = self.tensors[name].rows
            if stop is None:
                stop = rows
            row_bytes = self.tensors[name].nbytes // max(rows, 1)
            step = max(1, BLOCK_BYTES // max(row_bytes, 1))
            buffer_bytes = max(buffer_bytes, min(step, stop - start) * row_bytes)
            steps += [(name, first, min(first + step, stop)) for first in range(start, stop, step)]
        buffer = _own_pages(buffer_bytes)  # one for all tensors: the system clears pages before it lends them
        for name, start, stop in steps:
            block = self.read_rows(name, start, stop, buffer)
            check_weights(block, name)
            yield block

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows start..stop of a tensor, checked."""
        if stop is None:
            stop = self.tensors[name].rows
        whole = self.read_rows(name, start, stop)
        check_weights(whole, name)
        return whole


def _own_pages(nbytes: int) -> torch.Tensor:
    """Memory that returns to the system when it is freed; with several threads, malloc would keep tens of MB."""
    if nbytes < OWN_PAGES_BYTES:
        return torch.empty(nbytes, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def quantisation_fault(name: str, info: TensorInfo) -> list[str]:
    """Describe the fault of a tensor whose type is not that of whole weights: a list of one text, or an empty one."""
    is_whole = info.dtype.is_floating_point and info.dtype.itemsize >= 2
    return [] if is_whole else [f"{name} has type {info.dtype}, so the weights are quantised"]


def is_finite(values: torch.Tensor, limit: float = math.inf) -> bool:
    """Return True if there is no NaN and no number that reaches the limit."""
    if not values.is_floating_point() or values.numel() == 0:
        return True
    # aminmax returns NaN if there is one, and NaN < limit is False
    return all(abs(extreme.item()) < limit for extreme in torch.aminmax(values))


def check_weights(values: torch.Tensor, name: str) -> None:
    """Refuse what no trained teacher has: NaN, infinity, and numbers so large that products of weights overflow."""
    if not is_finite(values, LARGEST_WEIGHT):
        kind = "NaN"
        if not values.isnan().any():
            kind = f"{values.abs().max().item():.2g}, which no trained model has"
        raise ValueError(f"Tensor {name} of the teacher contains {kind}; the checkpoint is damaged.")


class SafetensorsCheckpoint(Checkpoint):
    """One or more safetensors files, read with plain file reads: mapped pages would count as memory."""

    def __init__(self, files: list[Path]):
        self.files = files
        self.tensors = {}
        self._place: dict[str, tuple[Path, int]] = {}
        for path in files:
            self._read_header(path)
        self._open: dict[Path, int] = {}
        self._opening = threading.Lock()

    def _read_header(self, path: Path) -> None:
        with open(path, "rb") as file:  # first, or safe_open has the kernel read megabytes around what it maps
            length = int.from_bytes(file.read(8), "little")
            encoded = file.read(min(length, MAX_HEADER_BYTES))
        try:
            with safe_open(path, framework="pt"):  # validates the header against the size of the file
                pass
        except SafetensorError as error:
            raise ValueError(f"Shard {path.name} is corrupt or truncated ({error}); download it again.") from error
        for name, entry in json.loads(encoded).items():
            if name == "__metadata__":
                continue
            if entry["dtype"] in PACKED_DTYPES:
                raise ValueError(
                    f"Tensor {name} of {path.name} has type {entry['dtype']}, so the weights are quantised; "
                    "supported are full-precision ones (F64, F32, F16, BF16)."
                )
            if entry["dtype"] not in SAFETENSORS_DTYPES:
                raise ValueError(f"Tensor {name} has type {entry['dtype']}, which is not supported.")
            self.tensors[name] = TensorInfo(tuple(entry["shape"]), SAFETENSORS_DTYPES[entry["dtype"]])
            self._place[name] = (path, 8 + length + entry["data_offsets"][0])

    def read_rows(self, name: str, start: int, stop: int, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """See `Checkpoint.read_rows`."""
        info = self.tensors[name]
        row_bytes = info.nbytes // info.rows
        path, offset = self._place[name]
        with self._opening:
            if path not in self._open:
                self._open[path] = os.open(path, os.O_RDONLY)
        nbytes = (stop - start) * row_bytes
        if buffer is None:
            buffer = _own_pages(nbytes)
        buffer = buffer[:nbytes]
        view = memoryview(buffer.numpy())
        done = 0
        while done < len(view):  # one call reads at most 2 GiB
            # with an offset of its own, so that threads share one open file
            count = os.preadv(self._open[path], [view[done:]], offset + start * row_bytes + done)
            if count == 0:
                raise ValueError(f"Shard {path.name} ended while {name} was read; it changed under us.")
            done += count
        values = buffer.view(info.dtype)
        if not info.shape:
            return values.view(())
        return values.view(stop - start, *info.shape[1:])


class PickledCheckpoint(Checkpoint):
    """pytorch_model.bin files, loaded with `weights_only` and mapped rather than read."""

    def __init__(self, files: list[Path]):
        self.files = files
        self._values: dict[str, torch.Tensor] = {}
        for path in files:
            try:
                # files from before torch 1.6 are no zip archives and cannot be mapped
                shard = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
            except (RuntimeError, EOFError, OSError, KeyError, IndexError, TypeError, AssertionError) as error:
                raise ValueError(f"Shard {path.name} is corrupt or truncated; download it again.") from error
            except pickle.UnpicklingError as error:
                raise ValueError(
                    f"Shard {path.name} holds more than plain tensors, and unpickling it could run code; "
                    "convert it to safetensors first."
                ) from error
            if not isinstance(shard, dict):
                raise ValueError(f"Shard {path.name} holds no named tensors.")
            for name, tensor in shard.items():
                if isinstance(tensor, torch.Tensor):
                    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
                        raise ValueError(f"Tensor {name} of {path.name} is no plain tensor; save it as one.")
                    self._values[str(name)] = tensor
        self.tensors = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in self._values.items()}

    def read_rows(self, name: str, start: int, stop: int, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """See `Checkpoint.read_rows`."""
        value = self._values[name]
        if value.ndim == 0:
            return value
        return value[start:stop].contiguous()


def open_gguf(path: Path) -> Any:
    """The reader of a GGUF file, which takes seconds for a large vocabulary; the last one is kept."""
    state = path.stat()
    return _open_gguf(path, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=1)
def _open_gguf(path: Path, changed: int, size: int) -> Any:
    import gguf

    return gguf.GGUFReader(path)


def read_turn_ends(path: Path) -> list[int]:
    """The tokens that a GGUF file names as ends of a turn and of a message."""
    fields = [open_gguf(path).fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    return [int(field.contents()) for field in fields if field is not None]


class GgufCheckpoint(Checkpoint):
    """A GGUF file, dequantised one tensor at a time to float32 and renamed by transformers' own tables."""

    concurrent = False  # the tensor at hand is kept whole

    def __init__(self, path: Path, teacher_config):
        from transformers import AutoModelForCausalLM
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        self.files = [path]
        reader = open_gguf(path)
        architecture = bytes(reader.fields["general.architecture"].parts[-1]).decode()
        _check_left_out(path.name, reader.fields, architecture, teacher_config)
        self.licence: str | None = None
        if licence := reader.fields.get("general.license"):
            self.licence = str(licence.contents())
        heads = {key: getattr(teacher_config, key) for key in ("num_attention_heads", "num_key_value_heads")}
        self._processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=heads)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(teacher_config)
        with _one_table_of_names():
            names = get_gguf_hf_weights_map(skeleton, self._processor)
        stacks = {tensor.name: tensor for tensor in reader.tensors if GGUF_EXPERTS.search(tensor.name)}
        unknown = [tensor.name for tensor in reader.tensors if tensor.name not in {**names, **stacks}]
        if unknown:  # rope_freqs.weight of Llama 3.1, for one: transformers would leave it out and change the model
            raise ValueError(f"{path.name} holds {unknown[0]}, which transformers cannot place; use the safetensors.")
        self._stored = {names[t.name]: (t, t.data) for t in reader.tensors if t.name not in stacks}
        shapes = {name: tensor.shape for name, (tensor, _) in self._stored.items()}
        for name, tensor in stacks.items():  # experts one by one, as in safetensors
            module = names[name.removesuffix(".weight")].rpartition(".")[0]
            for e, data in enumerate(tensor.data):
                expert = f"{module}.{e}.{GGUF_EXPERTS.search(name)[1]}_proj.weight"
                self._stored[expert] = (tensor, data)
                shapes[expert] = tensor.shape[:-1]
        self.tensors = {
            name: TensorInfo(tuple(int(size) for size in reversed(shape)), torch.float32)
            for name, shape in shapes.items()
        }
        self._last: tuple[str, torch.Tensor] | None = None

    def buffer_bytes(self) -> int:
        """A tensor is dequantised whole: once as numpy made it, once reordered, once kept for its rows."""
        return 3 * max(info.nbytes for info in self.tensors.values())

    def read_rows(self, name: str, start: int, stop: int, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """See `Checkpoint.read_rows`."""
        from gguf import dequantize

        if self._last is None or self._last[0] != name:
            tensor, data = self._stored[name]
            weights = dequantize(data, tensor.tensor_type)
            weights = self._processor.process(weights=weights, name=tensor.name).weights
            # numbers that are not packed are a view of the mapped file, which is read-only
            self._last = (name, torch.from_numpy(weights.copy()).view(self.tensors[name].shape))
        return self._last[1][start:stop]


@contextlib.contextmanager
def _one_table_of_names() -> Iterator[None]:
    """Make gguf's table of tensor names once, for which transformers asks again at every module of a model."""
    import gguf

    make = gguf.get_tensor_name_map
    gguf.get_tensor_name_map = functools.cache(make)
    try:
        yield
    finally:
        gguf.get_tensor_name_map = make


def _check_left_out(name: str, fields, architecture: str, config) -> None:
    """Refuse a GGUF file of which transformers' reader makes another model."""
    causal = fields.get(f"{architecture}.attention.causal")
    if causal is not None and not causal.contents():
        raise ValueError(
            f"{name} is not causal (attention.causal is false): its tokens see later ones, a hybrid's cannot."
        )
    said = {key: fields.get(f"{architecture}.{key}") for key in ("rope.scaling.type", *GGUF_FIELDS)}
    for key, field in said.items():
        value = None if field is None else field.contents()
        has = "none"
        if key != "rope.scaling.type":
            has = getattr(config, GGUF_FIELDS[key], None)
        if value not in (None, has):
            raise ValueError(f"{name} says {key} {value}, where transformers reads {has}; use the safetensors.")
    if config.num_hidden_layers == GGUF_OTHER_SCALE.get(architecture):
        raise ValueError(
            f"Of {name}, a Gemma of 27B, transformers reads another attention scale; use the safetensors."
        )


class Mxfp4Checkpoint(Checkpoint):
    """Weights whose experts are packed as MXFP4, unpacked one expert at a time to bfloat16, which holds them exactly.

    Of a tensor X of the model there are X_blocks, two numbers to a byte, and X_scales, an exponent for 32 numbers.
    """

    def __init__(self, packed: Checkpoint):
        self.packed = packed
        self.files = packed.files
        self.concurrent = packed.concurrent
        self.tensors = {}
        for name, info in packed.tensors.items():
            if not name.endswith(MXFP4_PARTS):
                self.tensors[name] = info
            elif name.endswith("_blocks"):
                whole = name.removesuffix("_blocks")
                scales = packed.tensors.get(f"{whole}_scales")
                (*lead, half) = info.shape
                if scales is None or len(lead) != 3 or half != 16 or [*scales.shape] != lead:
                    raise ValueError(
                        f"{name} {info.shape} holds no MXFP4 weights: it takes (experts, rows, groups, 16), beside "
                        f"{whole}_scales with an exponent for each group."
                    )
                (experts, columns, groups) = lead
                self.tensors[whole] = TensorInfo((experts, groups * 2 * half, columns), torch.bfloat16)

    def buffer_bytes(self) -> int:
        """Bytes of an expert's numbers, twice as bfloat16, and of the indices in 32 bits that they come from."""
        whole = (info for name, info in self.tensors.items() if name not in self.packed.tensors)
        return 4 * max(info.nbytes // info.shape[0] for info in whole)

    def read_rows(self, name: str, start: int, stop: int, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """See `Checkpoint.read_rows`."""
        if name in self.packed.tensors:
            return self.packed.read_rows(name, start, stop, buffer)
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        blocks, scales = (self.packed.read_rows(name + part, start, stop) for part in MXFP4_PARTS)
        return convert_moe_packed_tensors(blocks, scales)


def unpacked(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, in which no tensor is packed as MXFP4."""
    is_packed = any(name.endswith(MXFP4_PARTS) for name in checkpoint.tensors)
    return Mxfp4Checkpoint(checkpoint) if is_packed else checkpoint


class RemoteHeaders(Checkpoint):
    """Names and shapes of a Hub repository's safetensors, read without downloading the weights."""

    def __init__(self, repository: str, revision: str | None):
        self.files = []
        metadata = HfApi().get_safetensors_metadata(repository, revision=revision)
        self.tensors = {
            name: TensorInfo(tuple(tensor.shape), SAFETENSORS_DTYPES.get(tensor.dtype, torch.uint8))
            for file in metadata.files_metadata.values()
            for name, tensor in file.tensors.items()
        }

    def read_rows(self, name: str, start: int, stop: int, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """Refuse: a plan reads no weights."""
        raise AssertionError(f"{name} was asked for, but only the headers are here")


def _special_float(values: dict[str, Any]) -> Any:
    """An infinite number, or none, which transformers writes as an object."""
    if values.keys() == {"__float__"}:
        return float(values["__float__"])
    return values


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None where there is no such file.

    Raises:
        ValueError: it is no JSON, or no object; naming the file.
    """
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(), object_hook=_special_float)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object.")
    return values


def open_weights(folder: Path) -> Checkpoint:
    """The weights in a folder that transformers would load: safetensors first, and one file before an index.

    Raises:
        ValueError: no weights, an index that names an absent shard, or a damaged shard.
    """
    for single, kind in (("model.safetensors", SafetensorsCheckpoint), ("pytorch_model.bin", PickledCheckpoint)):
        index = folder / f"{single}.index.json"
        if (folder / single).is_file():
            return kind([folder / single])
        if index.is_file():
            return kind(_shards(index))
    raise ValueError(
        f"{folder} holds no weights: expected model.safetensors, pytorch_model.bin, or an index of their shards."
        f"{gguf_hint(folder)}"
    )


def gguf_hint(folder: Path) -> str:
    """Return a sentence on how to name a GGUF file of a folder, for errors; empty where there is none."""
    files = sorted(file.name for file in folder.iterdir() if file.suffix.lower() == ".gguf")
    return f" For GGUF say --gguf-file {files[0]}." if files else ""


def _shards(index: Path) -> list[Path]:
    try:
        weight_map = read_json(index)["weight_map"]
        shards = [index.parent / name for name in sorted(set(weight_map.values()))]
        # an index comes from others, and no name in it may lead to a file elsewhere
        if any(shard.parent != index.parent for shard in shards):
            raise TypeError("a shard in another folder")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not a valid shard index.") from error
    absent = [shard.name for shard in shards if not shard.is_file()]
    if absent:
        raise ValueError(f"{index.name} names {absent[0]}, which is not in {index.parent}; download it again.")
    return shards
