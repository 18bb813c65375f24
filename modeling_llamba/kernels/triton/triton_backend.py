"""The backend of Triton kernels, for a GPU.

Shapes: B batch, I inner width.
"""

import torch
from transformers.utils import is_torchdynamo_compiling

from ...hybrid.block_layout import Blocks
from ...hybrid.eviction import BlockShape, Held, NewTokens
from ...hybrid.inputs import HybridInputs, Projected, Ranked, WindowedHeads
from ...hybrid.near import attend_causally
from ...hybrid.rounding import Rounding
from ...hybrid.step import is_early
from ...model.rotary import Rotary
from ..flex import FlexBackend, attend_by_flex
from ..operators import is_traced
from ..torch_backend import Mixed
from . import scans, triton_columns, triton_prompt, triton_rounding, triton_rows, triton_step, triton_tokens

SEGMENT = 32768
"""Tokens of a prompt whose states lie in memory at once: kernels hold one for each 256 tokens alone."""


def make_backend() -> "TritonBackend":
    """The backend."""
    return TritonBackend()


class TritonBackend(FlexBackend):
    """Operations by Triton kernels, in float32; those that pass gradients or are traced are PyTorch's."""

    attends_to_pages = True
    attend_to_pages = staticmethod(triton_rows.attend_to_pages)

    def computes(self, dtype: torch.dtype) -> bool:
        """False for float64, which kernels would not compute in."""
        return dtype != torch.float64

    def rotate(self, query: torch.Tensor, key: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """See `TorchBackend.rotate`."""
        if not _rotates(query, key, rotary):
            return super().rotate(query, key, rotary)
        return triton_tokens.rotate(query, key, rotary)[:2]

    def rotate_and_rank(self, query: torch.Tensor, key: torch.Tensor, rotary: Rotary, ranked: Ranked):
        """See `TorchBackend.rotate_and_rank`."""
        if not _rotates(query, key, rotary):
            return super().rotate_and_rank(query, key, rotary, ranked)
        return triton_tokens.rotate(query, key, rotary, ranked)

    def encode_pair(self, key: torch.Tensor, value: torch.Tensor, roundings: tuple[Rounding, Rounding]):
        """See `TorchBackend.encode_pair`."""
        rounding = roundings[0]
        if rounding != roundings[1] or not rounding.rounds or key.dtype != value.dtype:
            return super().encode_pair(key, value, roundings)
        if is_traced() or type(key) is not torch.Tensor:
            return super().encode_pair(key, value, roundings)
        return triton_rounding.encode_pair(key.detach(), value.detach(), rounding.bits, rounding.groups)

    def encode(self, vectors: torch.Tensor, rounding: Rounding) -> torch.Tensor:
        """See `TorchBackend.encode`."""
        return triton_rounding.encode_rows(vectors.detach(), rounding.bits, rounding.groups)

    def decode(self, rows: torch.Tensor, rounding: Rounding, dtype: torch.dtype, rotated: bool) -> torch.Tensor:
        """See `TorchBackend.decode`."""
        return triton_rounding.decode_rows(rows, rounding.bits, rounding.dim, rounding.groups, dtype, rotated)

    def attend_to_rows(
        self, query: torch.Tensor, keys, values, roundings: tuple[Rounding, Rounding], bias, scaling, softcap
    ) -> torch.Tensor:
        """See `TorchBackend.attend_to_rows`; in 16 bits too, where PyTorch's cuDNN plans anew for every length."""
        bits = (rounding.bits for rounding in roundings)
        return triton_rows.attend_to_rows(query, keys, values, bias, scaling, softcap or 0.0, *bits)

    def write_one(self, held: Held, tokens: NewTokens, shape: BlockShape) -> bool:
        """See `TorchBackend.write_one`."""
        if shape.slow is None or not triton_prompt.fits(shape, shape.key_rounding.dim, least=1):
            return False
        if not all(t.is_contiguous() for t in held):  # the kernels write to tensors without gaps
            return False
        triton_step.write_one(
            *held, *tokens, shape.block, shape.places, *shape.slow, shape.key_rounding.dim, *_bits(shape)
        )
        return True

    def step(
        self, heads: WindowedHeads, projected: Projected, inputs: HybridInputs, layer
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `TorchBackend.step`."""
        query = projected.query
        shape = heads.shape
        if query.shape[2] > 1 or not heads.are_plain or shape.slow is None:
            return super().step(heads, projected, inputs, layer)
        layer.put(projected.tokens(inputs.index), inputs.start)
        output, features = triton_step.mix_one(
            *layer.held, query, projected.sink_query, heads.mass, heads.scaling, heads.softcap or 0.0,
            shape.block, shape.sinks, shape.places, *shape.slow, *_bits(shape),
        )  # fmt: skip
        return output, None if is_early(heads, inputs) else features

    def segment_length(self, heads: WindowedHeads, projected: Projected, inputs: HybridInputs) -> int:
        """See `TorchBackend.segment_length`."""
        if self._mixes(heads, projected, inputs):
            return SEGMENT
        return super().segment_length(heads, projected, inputs)

    def _mixes(self, heads: WindowedHeads, projected: Projected, inputs: HybridInputs) -> bool:
        """True where kernels do what surrounds flex_attention: without a gradient, rows alike."""
        if torch.is_grad_enabled() or is_torchdynamo_compiling() or inputs.start is None or inputs.seq_idx is not None:
            return False
        if not heads.are_plain or projected.sink_query is not None:
            return False
        return triton_prompt.fits(heads.shape, projected.query.shape[-1])

    def mix(
        self, heads: WindowedHeads, projected: Projected, inputs: HybridInputs, held: Held | None, keeps: bool = False
    ) -> Mixed:
        """See `TorchBackend.mix`."""
        in_window = held is None and projected.query.shape[2] <= heads.shape.window
        if in_window or not self._mixes(heads, projected, inputs):
            return super().mix(heads, projected, inputs, held, keeps)
        with triton_rounding.on_device_of(projected.query):
            return _mix(heads, projected, inputs, held, keeps and inputs.end_alike)

    def ssd_scan(self, x, log_a, B, C, initial_state, seq_idx, chunk_size: int, asked: str):
        """See `TorchBackend.ssd_scan`; by another package's kernel."""
        return scans.ssd_scan(x, log_a, B, C, initial_state, seq_idx, chunk_size, asked)

    def convolve(self, x, weight, bias, seq_idx, activation: str) -> torch.Tensor | None:
        """See `TorchBackend.convolve`; by causal-conv1d's kernel."""
        return scans.convolve(x, weight, bias, seq_idx, activation)

    def convolve_one(self, x, past, weight, bias, activation: str) -> torch.Tensor | None:
        """See `TorchBackend.convolve_one`; by causal-conv1d's kernel."""
        return scans.convolve_one(x, past, weight, bias, activation)


def _rotates(query: torch.Tensor, key: torch.Tensor, rotary: Rotary) -> bool:
    """True where a kernel does it: without a gradient, and outside of a graph, whose compiler fuses it itself."""
    if torch.is_grad_enabled() or is_traced() or type(query) is not torch.Tensor:
        return False
    return triton_tokens.can_rotate(query, key, rotary)


def _bits(shape: BlockShape) -> tuple[int, int]:
    """Bits of keys and of values."""
    return shape.key_rounding.bits, shape.value_rounding.bits


def _mix(heads: WindowedHeads, projected: Projected, inputs: HybridInputs, held: Held | None, keeps: bool) -> Mixed:
    shape, state = heads.shape, None
    batch, count, length, P = projected.query.shape
    if held is None:
        blocks = Blocks.behind_window(shape, length)
    else:
        blocks, state = Blocks.continued(shape, length, inputs.start), held.state
    keys, values, salience, query = triton_columns.lay_out(projected, held, blocks)
    lost = triton_columns.lose_columns(salience, blocks)
    slots = query.shape[2]
    numbers = triton_prompt.numbered_slots(slots, blocks.first, shape.block, blocks.first_column, query.device)
    tiles = triton_columns.visible_tiles(lost.until, slots, blocks)
    near = attend_by_flex(query, keys, values, *numbers, lost.until, None, heads.scaling, heads.softcap, tiles)
    output = projected.value.new_empty(batch, length, count, P)
    if held is None:  # the first tokens attend to all before them
        first = slice(shape.places, shape.places + shape.window)
        of_first = projected.query[:, :, : shape.window], keys[:, :, first], values[:, :, first]
        output[:, : shape.window] = attend_causally(heads, *of_first)
    features, state = triton_prompt.mix_blocks(
        projected.query, *near, keys, values, lost, state, heads.mass, heads.scaling, blocks, output, heads.has_map
    )
    if not keeps:
        return output, features, None
    tokens = projected.tokens(inputs.index)
    places = triton_columns.last_places(salience, lost, blocks)
    return output, features, triton_columns.hold(held, tokens, salience, places, state, blocks)
