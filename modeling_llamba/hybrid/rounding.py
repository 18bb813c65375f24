"""Keys and values in few bits: each token's vector of a head is rounded alone and becomes one row of bytes.

Rows are independent, so evicting, cropping and reordering beams work as on tensors that are not rounded.
Keys have a few dimensions with large values, which a common scale would leave no precision for the others. So a vector
is first multiplied by a Hadamard matrix, which spreads them over all dimensions (QuaRot, arXiv 2404.00456). Of the
result each group of numbers has integer codes, which are signed, and a scale in float16:

    row = [scales, codes]        scale = largest magnitude of the group / (largest code * shift), shift = 2^(8 - bits)

Codes stand in the upper bits of a byte, where they are `shift` times as large. So few operations take them out:

    8 bits   a byte each
    4, 2     byte i holds the codes i + j W of all j, the lowest bits those of j = 0; W is the number of bytes
    6        3/4 of the codes in the upper bits of a byte each; of the last quarter 2 bits in each of three bytes

Softmax attention is the same for rotated queries, keys and values as for unrotated ones, up to the rotation of its
output; what is stored need not be rotated back to be attended to.

Shapes: P head dim, W bytes of a row.
"""

import functools
import math
from typing import NamedTuple

import torch

from ..kernels.backend import backend_for

GROUP = 32
"""Numbers with one scale, at four bits or less; at more, all numbers of a vector have one."""
SMALLEST_SCALE = torch.finfo(torch.float16).smallest_normal
"""Scale of codes of 8 bits at least; of codes of fewer bits, smaller by their shift."""
WHOLE = 16
"""Bits that stand for the model's own type, in which nothing is rounded."""
DECODED = 2**27
"""Numbers of keys that are taken out of their rows at once, as far as one head has not more: 64 sequences of 32,768
tokens would otherwise take as much memory for a moment as their whole cache."""


class Rounding(NamedTuple):
    """Rounding of vectors of `dim` numbers to so many bits each; with 16, vectors are kept as they are.

    backend: `backend` of the configuration, of which "torch" keeps kernels away.
    """

    bits: int
    dim: int
    backend: str = "auto"

    @classmethod
    def of_pair(cls, bits: int | list[int], dim: int, backend: str = "auto") -> "tuple[Rounding, Rounding]":
        """Roundings of keys and of values, from the bits of both or of each."""
        if not isinstance(bits, list):
            bits = [bits, bits]
        keys, values = bits
        return cls(keys, dim, backend), cls(values, dim, backend)

    @classmethod
    def of_attention(cls, config, layer: int) -> "tuple[Rounding, Rounding]":
        """Roundings of the keys and values that a layer with full or sliding attention caches."""
        kind = config.layer_types[layer]
        bits = config.window_bits if kind == "sliding_attention" else config.full_attention_bits
        return cls.of_pair(bits, config.of_kind(kind).head_dim, config.backend)

    @property
    def rounds(self) -> bool:
        """True if vectors are rounded at all."""
        return self.bits < WHOLE

    @property
    def groups(self) -> int:
        """Number of groups, which have a scale each."""
        if self.bits > 4:
            return 1
        return self.dim // math.gcd(self.dim, GROUP)

    @property
    def largest(self) -> int:
        """Largest code; the least is its negative."""
        return 2 ** (self.bits - 1) - 1

    def width(self, dtype: torch.dtype) -> int:
        """Bytes of a vector, where the model's type is `dtype`."""
        if not self.rounds:
            return self.dim * dtype.itemsize
        return width_of(self.bits, self.dim, self.groups)

    def rotate(self, t: torch.Tensor) -> torch.Tensor:
        """Multiply vectors (..., P) by the Hadamard matrix, which undoes itself; nothing where nothing is rounded."""
        if not self.rounds:
            return t
        return t @ hadamard(self.dim, t.dtype, t.device)

    def encode(self, t: torch.Tensor) -> torch.Tensor:
        """Rows (..., W) uint8 of vectors (..., P), or the vectors themselves where nothing is rounded."""
        return backend_for(t, self.backend).encode(t, self) if self.rounds else t

    def decode(self, rows: torch.Tensor, dtype: torch.dtype, rotated: bool = False) -> torch.Tensor:
        """Vectors (..., P) of rows (..., W); as they are stored, which is multiplied by the matrix, if `rotated`."""
        return backend_for(rows, self.backend, dtype).decode(rows, self, dtype, rotated) if self.rounds else rows

    def round(self, t: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Vectors (..., P) as their rows hold them; gradients pass as if nothing were rounded."""
        if not self.rounds:
            return t
        held = self.decode(rows, t.dtype)
        if not t.requires_grad:
            return held
        return t + (held - t).detach()


def width_of(bits: int, dim: int, groups: int) -> int:
    """Bytes of a row."""
    return dim * bits // 8 + groups * torch.float16.itemsize


def encode_rows(t: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Rows (..., W) uint8 of vectors (..., P)."""
    groups = rounding.rotate(t.detach().to(torch.promote_types(t.dtype, torch.float32)))
    if rounding.groups > 1:
        groups = groups.unflatten(-1, (rounding.groups, -1))
    shift = 2 ** (8 - rounding.bits)
    scale = torch.linalg.vector_norm(groups, ord=math.inf, dim=-1, keepdim=True)
    # a vector of zeros has codes of 0, whatever its scale
    scale = scale.div_(rounding.largest * shift).clamp_(min=SMALLEST_SCALE / shift).half()
    codes = groups / scale.to(groups.dtype)
    if shift > 1:
        codes.div_(shift)
    codes = codes.round_().to(torch.int8)
    if rounding.groups > 1:
        codes = codes.flatten(-2)
    codes = pack(codes, rounding.bits)
    # flat, since torch.compile may lay the scales out such that those of a vector do not follow one another
    scales = scale.flatten().view(torch.int8).view(*t.shape[:-1], -1)
    return torch.cat([scales, codes], dim=-1).view(torch.uint8)


def decode_rows(rows: torch.Tensor, rounding: Rounding, dtype: torch.dtype, rotated: bool) -> torch.Tensor:
    """Vectors (..., P) of rows (..., W); as they are stored, which is multiplied by the matrix, if `rotated`."""
    wide = torch.promote_types(dtype, torch.float32)
    groups = rounding.groups
    first = groups * torch.float16.itemsize
    scale = rows[..., :first].view(torch.float16)
    if groups > 1:
        scale = scale.contiguous()  # else each row's few numbers are converted by a loop of their own
    scale = scale.to(wide)
    vectors = unpack(rows[..., first:], rounding.bits).view(torch.int8).to(wide)
    if groups == 1:
        vectors.mul_(scale)
    else:
        vectors.view(*scale.shape, -1).mul_(scale[..., None])
    if not rotated:
        vectors = rounding.rotate(vectors)
    return vectors.to(dtype)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes (..., P bits / 8) that hold codes (..., P) of so many bits, int8."""
    if bits == 8:
        return codes
    if bits == 6:
        size = codes.shape[-1] // 4
        last = codes[..., 3 * size :]
        cut = torch.cat([last >> 4, last >> 2, last], dim=-1)
        return (codes[..., : 3 * size] << 2).bitwise_or_(cut.bitwise_and_(3))
    pieces = codes.chunk(8 // bits, dim=-1)
    packed = pieces[-1]
    for piece in reversed(pieces[:-1]):
        packed = (packed << bits) | (piece & (1 << bits) - 1)
    return packed


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes (..., P) in the upper bits of a byte each, of bytes (..., P bits / 8) uint8."""
    if bits == 8:
        return packed
    packed = packed.contiguous()  # on a CPU what follows is three times as fast then
    if bits == 6:
        high, middle, low = (packed & 3).chunk(3, dim=-1)
        last = torch.add(low, middle, alpha=4).add_(high, alpha=16)
        last <<= 2
        return torch.cat([packed & 0b11111100, last], dim=-1)
    upper = 256 - (1 << 8 - bits)
    pieces = [packed << 8 - bits]
    pieces += [(packed << shift) & upper for shift in range(8 - 2 * bits, 0, -bits)]
    return torch.cat([*pieces, packed & upper], dim=-1)


@torch.compiler.assume_constant_result  # else a compiled model would make it at every call
def hadamard(dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An orthogonal symmetric matrix (P, P) of Hadamard matrices of the largest power of two that divides P."""
    return _hadamard(dim, dtype, device)


@functools.cache  # never to be freed, as a CUDA graph may read it
def _hadamard(dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # a tensor of inference mode could not be used in training afterwards
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while dim % (2 * len(matrix)) == 0:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        matrix = matrix / len(matrix) ** 0.5
        return torch.block_diag(*[matrix] * (dim // len(matrix))).to(dtype=dtype, device=device)
