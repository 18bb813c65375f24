"""Keys and values in few bits: each token's vector of a head is rounded alone and becomes one row of bytes.

Since no row depends on another, blocks open, caches are cropped and beams change places as with unrounded tensors.
Keys have a few dimensions with large values, which a common scale would leave no precision for the others. So a vector
is first multiplied by a Hadamard matrix, which spreads them over all dimensions (QuaRot, arXiv 2404.00456). Of the
result each group of numbers has a scale in float16, the largest magnitude over the largest code, and integer codes:

    row = [scales, codes]

Codes of 8 bits are bytes. Others are non-negative and cut into parts of 4, 2 and 1 bits, such as 6 = 4 + 2, the lowest
first. A byte holds 8 / p parts of p bits, which come from numbers D p / 8 apart.

Softmax attention is the same for rotated queries, keys and values as for unrotated ones, up to the rotation of its
output; what is stored need not be rotated back to be attended to.

Shapes: D head dim, W bytes of a row.
"""

import functools
import math
from typing import NamedTuple

import torch

GROUP = 32
"""Numbers with one scale, at four bits or less; at more, all numbers of a vector have one."""
WHOLE = 16
"""Bits that stand for the model's own type, in which nothing is rounded."""


class Rounding(NamedTuple):
    """Rounding of vectors of `dim` numbers to so many bits each; with 16, vectors are kept as they are."""

    bits: int
    dim: int

    @classmethod
    def of_pair(cls, bits: int | list[int], dim: int) -> "tuple[Rounding, Rounding]":
        """Roundings of keys and of values, from the bits of both or of each."""
        keys, values = bits if isinstance(bits, list) else (bits, bits)
        return cls(keys, dim), cls(values, dim)

    @property
    def rounds(self) -> bool:
        """True if vectors are rounded at all."""
        return self.bits < WHOLE

    @property
    def groups(self) -> int:
        """Number of groups, which have a scale each."""
        return 1 if self.bits > 4 else self.dim // math.gcd(self.dim, GROUP)

    @property
    def parts(self) -> tuple[int, ...]:
        """Bits of the parts of a code, the lowest first."""
        return tuple(size for size in (8, 4, 2, 1) if self.bits & size)

    @property
    def largest(self) -> int:
        """Largest code; the least is its negative."""
        return 2 ** (self.bits - 1) - 1

    def width(self, dtype: torch.dtype) -> int:
        """Bytes of a vector, where the model's type is `dtype`."""
        if not self.rounds:
            return self.dim * dtype.itemsize
        return self.dim * self.bits // 8 + self.groups * torch.float16.itemsize

    def rotate(self, t: torch.Tensor) -> torch.Tensor:
        """Multiply vectors (..., D) by the Hadamard matrix, which undoes itself; nothing where nothing is rounded."""
        return t @ hadamard(self.dim, t.dtype, t.device) if self.rounds else t

    def encode(self, t: torch.Tensor) -> torch.Tensor:
        """Rows (..., W) uint8 of vectors (..., D), or the vectors themselves where nothing is rounded."""
        if not self.rounds:
            return t
        wide = t.detach().to(torch.promote_types(t.dtype, torch.float32))
        groups = self.rotate(wide).unflatten(-1, (self.groups, -1))
        scale = torch.linalg.vector_norm(groups, ord=math.inf, dim=-1, keepdim=True) / self.largest
        # a vector of zeros has codes of 0, whatever its scale
        scale = scale.clamp(min=torch.finfo(torch.float16).smallest_normal).half()
        codes = (groups / scale.to(groups.dtype)).round_().flatten(-2)
        row = [scale.flatten(-2).view(torch.uint8)]
        if self.bits == 8:
            return torch.cat([*row, codes.to(torch.int8).view(torch.uint8)], dim=-1)
        codes = (codes + self.largest).to(torch.uint8)
        for size in self.parts:
            part = codes & (1 << size) - 1
            shifted = [piece << size * i for i, piece in enumerate(part.chunk(8 // size, dim=-1))]
            row.append(functools.reduce(torch.bitwise_or, shifted))
            codes = codes >> size
        return torch.cat(row, dim=-1)

    def decode(self, rows: torch.Tensor, dtype: torch.dtype, rotated: bool = False) -> torch.Tensor:
        """Vectors (..., D) of rows (..., W); as they are stored, which is multiplied by the matrix, if `rotated`."""
        if not self.rounds:
            return rows
        wide = torch.promote_types(dtype, torch.float32)
        first = self.groups * torch.float16.itemsize
        scale = rows[..., :first].view(torch.float16).to(wide)
        if self.bits == 8:
            codes = rows[..., first:].view(torch.int8).to(wide)
        else:
            codes = self._unpacked(rows[..., first:]).to(wide).sub_(self.largest)
        codes.unflatten(-1, (self.groups, -1)).mul_(scale[..., None])
        return (codes if rotated else self.rotate(codes)).to(dtype)

    def _unpacked(self, packed: torch.Tensor) -> torch.Tensor:
        """Codes (..., D) of the bytes that hold their parts."""
        codes, first, shift = None, 0, 0
        for size in self.parts:
            last = first + self.dim * size // 8
            part = packed[..., first:last].contiguous()  # on a CPU what follows is three times as fast then
            pieces = [part >> size * i & (1 << size) - 1 for i in range(8 // size)]
            part = torch.cat(pieces, dim=-1) << shift
            codes = part if codes is None else codes | part
            first, shift = last, shift + size
        return codes

    def round(self, t: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Vectors (..., D) as their rows hold them; gradients pass as if nothing were rounded."""
        if not self.rounds:
            return t
        return t + (self.decode(rows, t.dtype) - t).detach() if t.requires_grad else self.decode(rows, t.dtype)


@functools.lru_cache(maxsize=16)
def hadamard(dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An orthogonal symmetric matrix (D, D) of Hadamard matrices of the largest power of two that divides D."""
    with torch.inference_mode(False):  # a tensor of inference mode could not be used in training afterwards
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while dim % (2 * len(matrix)) == 0:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        matrix = matrix / len(matrix) ** 0.5
        return torch.block_diag(*[matrix] * (dim // len(matrix))).to(dtype=dtype, device=device)
