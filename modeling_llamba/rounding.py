"""Keys and values in 8 or 4 bits: each token's vector of a head is rounded alone and becomes one row of bytes.

Since no row depends on another, blocks open, caches are cropped and beams change places as with unrounded tensors.
Keys have a few dimensions with large values, which a common scale would leave no precision for the others. So a vector
is first multiplied by a Hadamard matrix, which spreads them over all dimensions (QuaRot, arXiv 2404.00456). Of the
result each group of numbers has a scale in float16, the largest magnitude over the largest code, and integer codes:

    row = [scales, codes]            8 bits: one code a byte, one group
                                     4 bits: numbers i and i + D / 2 in one byte, groups of GROUP numbers

Softmax attention is the same for rotated queries, keys and values as for unrotated ones, up to the rotation of its
output; what is stored need not be rotated back to be attended to.

Shapes: D head dim, W bytes of a row.
"""

import functools
import math
from typing import NamedTuple

import torch

GROUP = 32
"""Numbers with one scale, at four bits."""
WHOLE = 16
"""Bits that stand for the model's own type, in which nothing is rounded."""


class Rounding(NamedTuple):
    """Rounding of vectors of `dim` numbers to so many bits each; with 16, vectors are kept as they are."""

    bits: int
    dim: int

    @property
    def rounds(self) -> bool:
        """True if vectors are rounded at all."""
        return self.bits < WHOLE

    @property
    def groups(self) -> int:
        """Number of groups, which have a scale each."""
        return 1 if self.bits == 8 else self.dim // math.gcd(self.dim, GROUP)

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
        scale = (groups.abs().amax(-1, keepdim=True) / self.largest).clamp(max=torch.finfo(torch.float16).max)
        scale = scale.half()
        # a scale of 0 has codes of 0
        codes = (groups / scale.to(groups.dtype).clamp(min=torch.finfo(torch.float16).smallest_normal)).round_()
        codes = codes.clamp_(-self.largest, self.largest).flatten(-2)
        if self.bits == 8:
            packed = codes.to(torch.int8).view(torch.uint8)
        else:
            low, high = (codes + 8).to(torch.uint8).chunk(2, dim=-1)
            packed = low | high << 4
        return torch.cat([scale.flatten(-2).view(torch.uint8), packed], dim=-1)

    def decode(self, rows: torch.Tensor, dtype: torch.dtype, rotated: bool = False) -> torch.Tensor:
        """Vectors (..., D) of rows (..., W); as they are stored, which is multiplied by the matrix, if `rotated`."""
        if not self.rounds:
            return rows
        wide = torch.promote_types(dtype, torch.float32)
        first = self.groups * torch.float16.itemsize
        scale, packed = rows[..., :first].view(torch.float16), rows[..., first:]
        if self.bits == 8:
            codes = packed.view(torch.int8).to(wide)
        else:
            codes = torch.cat([packed & 15, packed >> 4], dim=-1).to(wide) - 8
        vectors = (codes.unflatten(-1, (self.groups, -1)) * scale.to(wide)[..., None]).flatten(-2)
        return (vectors if rotated else self.rotate(vectors)).to(dtype)

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
