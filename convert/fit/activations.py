"""Stream text through the teacher block by block, giving each layer's attention inputs and outputs.

Only one layer's activations exist at a time: the residual stream in float32, the attention's input and output in
bfloat16 (a relative rounding error of 4e-3, squared 1e-5, far below any fit's). They lie in memory, or on disk where
they would take more than they may.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from ..errors import during, is_out_of_memory
from .layer_data import LayerData
from .processes import ALONE, Team
from .teacher_model import TeacherModel

STREAM_SEQUENCES = 4
"""Sequences that a block of the teacher reads at once; half as many where memory does not suffice."""


class ActivationStream:
    """The residual stream of some sequences, and how to move it through a block.

    Args:
        ids: (B, L) token ids. held_out: how many of the last sequences judge instead of fit.
        memory: bytes the activations may take in memory; more goes to a temporary file in `folder`.
        team: processes over which the sequences are divided.
    """

    def __init__(
        self,
        teacher: TeacherModel,
        ids: torch.Tensor,
        held_out: int,
        memory: int,
        folder: Path | None = None,
        team: Team = ALONE,
    ):
        if not 0 < held_out < len(ids):
            raise ValueError(f"{len(ids)} calibration sequences cannot be split into fitting and {held_out} held-out.")
        self.teacher = teacher
        self.length = ids.shape[1]
        self.held_out = held_out
        self.team = team
        self.at_once = STREAM_SEQUENCES
        self.shape = (*ids.shape, teacher.config.hidden_size)
        # in whole groups: rows that pass a block together give the same bits on any number of processes
        ids = ids[team.rows(len(ids), STREAM_SEQUENCES)]
        shape = (*ids.shape, teacher.config.hidden_size)
        # the stream in float32, the attention's input and output in bfloat16
        on_disk = ids.numel() * shape[-1] * (4 + 2 + 2) > memory
        self._folder = None
        if on_disk:
            self._folder = tempfile.TemporaryDirectory(dir=folder, prefix=".activations-")
        self.hidden = self._array("hidden", shape, torch.float32)
        self.u = self._array("u", shape, torch.bfloat16)
        self.y = self._array("y", shape, torch.bfloat16)
        self.whole: tuple[torch.Tensor, torch.Tensor] | None = None
        for rows in self._rows():
            self._store(self.hidden[rows], teacher.embed(ids[rows]))

    def _array(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self._folder is None:
            return torch.empty(shape, dtype=dtype, pin_memory=self.teacher.device.type == "cuda")
        path = Path(self._folder.name, name)
        size = torch.Size(shape).numel()
        with during(f"making room for activations in {path}"), open(path, "wb") as file:
            if hasattr(os, "posix_fallocate"):  # or a disk that fills would end the process without a word
                os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
        return torch.from_file(os.fspath(path), shared=True, size=size, dtype=dtype).view(shape)

    def _rows(self, begin: int = 0) -> Iterator[slice]:
        for first in range(begin, len(self.hidden), self.at_once):
            yield slice(first, first + self.at_once)

    def _store(self, stored: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to host memory in the stored type, without waiting if that is pinned. Return a boolean on the
        device: True if all values are finite."""
        computed = computed.to(stored.dtype)
        stored.copy_(computed, non_blocking=True)
        return computed.isfinite().all()

    @torch.no_grad()
    def attention_data(self, layer: int) -> LayerData:
        """Move the stream through the teacher's block `layer`, and return its attention's inputs and outputs.

        A device may not have written them when this returns, so only the device may read them, in the order of its
        stream.
        """
        block = self.teacher.block(layer)
        seen = []
        finite = [torch.ones((), dtype=torch.bool, device=self.teacher.device)]
        handle = block.attention.register_forward_hook(lambda module, args, output: seen.append((args[0], output[0])))
        try:
            rows = list(self._rows())
            while rows:
                hidden = self.hidden[rows[0]].to(self.teacher.device, non_blocking=True)
                try:
                    output = block(hidden, **self.teacher.block_inputs(hidden))
                except Exception as error:
                    if not is_out_of_memory(error) or self.at_once == 1:
                        raise
                    self.at_once //= 2
                    seen.clear()
                    rows = list(self._rows(rows[0].start))
                    continue
                (of_attention,) = seen
                for here, there in zip((self.u, self.y), of_attention, strict=True):
                    finite.append(self._store(here[rows[0]], there))
                self._store(self.hidden[rows.pop(0)], output)  # last: without a norm before, u lies in there
                seen.clear()
        finally:
            handle.remove()
        is_finite, mean_rotary = torch.stack(finite).all(), self.teacher.mean_rotary(layer)
        return LayerData(self.u, self.y, self._rotary(layer), self.held_out, finite=is_finite, mean_rotary=mean_rotary)

    def _rotary(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.teacher.rotary(self.length, layer)

    def gathered(self, data: LayerData, layer: int, owner: int) -> LayerData | None:
        """Return a layer's data of all sequences in the process that fits it; None in the others."""
        if self.team.size == 1:
            return data
        if self.teacher.device.type == "cuda":
            torch.cuda.synchronize(self.teacher.device)  # what is sent now is there
        mine = self.team.rank == owner
        if mine and self.whole is None:
            self.whole = tuple(self._array(f"whole-{name}", self.shape, torch.bfloat16) for name in ("u", "y"))
        for number, part in enumerate((data.u, data.y)):
            self.team.gather(part, self.whole[number] if mine else None, owner, STREAM_SEQUENCES)
        if not mine:
            return None
        return LayerData(*self.whole, self._rotary(layer), self.held_out, mean_rotary=self.teacher.mean_rotary(layer))

    def close(self) -> None:
        """Let go of the arrays and their file."""
        self.hidden = self.u = self.y = self.whole = None
        if self._folder is not None:
            self._folder.cleanup()
