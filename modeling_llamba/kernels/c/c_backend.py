"""The backend of functions in C, for a CPU with a C compiler."""

import ctypes
from pathlib import Path

import torch

from ...hybrid.block_layout import Layout
from ...hybrid.eviction import BlockShape, Held
from ...hybrid.inputs import HybridInputs, Projected, WindowedHeads
from ...hybrid.prompt import Blocks
from ...hybrid.rounding import Rounding
from ...hybrid.step import is_early
from ..operators import is_traced
from ..torch_backend import TorchBackend
from . import c_functions as functions
from .c_library import TYPES, library


def make_backend() -> "CBackend | None":
    """The backend, or None where there is no library."""
    return None if library() is None else CBackend()


class CBackend(TorchBackend):
    """Operations in C, in float32; those that pass gradients or are traced are PyTorch's."""

    attends_to_pages = True
    attend_to_pages = staticmethod(functions.attend_to_pages)

    def computes(self, dtype: torch.dtype) -> bool:
        """Return True if the functions read numbers of this type."""
        return dtype in TYPES

    def compiled(self, source: Path) -> ctypes.CDLL | None:
        """See `TorchBackend.compiled`."""
        return library(source)

    def encode(self, vectors: torch.Tensor, rounding: Rounding) -> torch.Tensor:
        """See `TorchBackend.encode`."""
        return functions.encode_rows(vectors.detach(), rounding.bits, rounding.groups)

    def decode(self, rows: torch.Tensor, rounding: Rounding, dtype: torch.dtype, rotated: bool) -> torch.Tensor:
        """See `TorchBackend.decode`."""
        return functions.decode_rows(rows, rounding.bits, rounding.dim, rounding.groups, rotated).to(dtype)

    def attend_to_rows(
        self, query: torch.Tensor, keys, values, roundings: tuple[Rounding, Rounding], bias, scaling, softcap
    ) -> torch.Tensor:
        """See `TorchBackend.attend_to_rows`."""
        bits = (rounding.bits for rounding in roundings)
        return functions.attend_to_rows(query, keys, values, bias, scaling, softcap or 0.0, *bits)

    def open_blocks(self, held: Held, shape: BlockShape, next_index: torch.Tensor, in_all_rows: bool = False) -> Held:
        """See `TorchBackend.open_blocks`; in place."""
        if not _has_memory(held):
            return super().open_blocks(held, shape, next_index, in_all_rows)
        opened = functions.open_rows(*held[:4], next_index, shape)
        # another tuple of the same tensors says that a block was opened
        return Held(*held) if opened else held

    def step(
        self, heads: WindowedHeads, projected: Projected, inputs: HybridInputs, layer
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `TorchBackend.step`."""
        query = projected.query
        if query.shape[2] > 1 or not heads.are_plain:
            return super().step(heads, projected, inputs, layer)
        shape = heads.shape
        layer.put(projected.tokens(inputs.index), inputs.start)
        output, features = functions.mix_one(
            *layer.held, query, projected.sink_query, heads.mass, heads.scaling, heads.softcap or 0.0,
            shape.block, shape.sinks, shape.places, *shape.slow, shape.key_rounding.bits, shape.value_rounding.bits,
        )  # fmt: skip
        return output, None if is_early(heads, inputs) else features

    def choose_columns(self, layout: Layout, salience: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Layout.select`."""
        if not _reads(layout, salience):
            return super().choose_columns(layout, salience)
        shape, sizes = layout.shape, layout.sizes
        of_layout = (sizes.context // shape.block, sizes.blocks, sizes.leaving, sizes.mixed)
        return functions.choose_columns(salience, layout.present, shape.places, shape.block, shape.window, *of_layout)

    def hide_columns(
        self, layout: Layout, holders: torch.Tensor, until: torch.Tensor, dtype: torch.dtype, shared: int
    ) -> torch.Tensor:
        """See `Layout.bias`."""
        if not _reads(layout, holders):
            return super().hide_columns(layout, holders, until, dtype, shared)
        shape, sizes = layout.shape, layout.sizes
        of_layout = (sizes.context // shape.block, sizes.first, layout.group)
        least = torch.finfo(dtype).min
        return functions.hide_columns(holders, until, least, shared, shape.block, shape.window, *of_layout).to(dtype)

    def read_states(
        self, heads: WindowedHeads, blocks: Blocks, held: Held | None, begin, layout: Layout, last: int | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """See `TorchBackend.read_states`."""
        if heads.mass is None or torch.is_grad_enabled() or not _reads(layout, blocks.query):
            return super().read_states(heads, blocks, held, begin, layout, last)
        sizes = layout.sizes
        offset, tokens = sizes.offset, sizes.new_tokens
        if layout.slot is not None:  # tokens are gathered from all slots
            offset, tokens = 0, sizes.mixed * layout.shape.block
        output, features, state = functions.mix_blocks(
            blocks.query, blocks.output, blocks.log_mass, blocks.keys, blocks.values, blocks.until,
            None if held is None else held.state, begin, heads.mass, heads.scaling, *layout.shape.slow, sizes.first,
            offset, tokens, sizes.last - sizes.first, heads.has_map,
        )  # fmt: skip
        if layout.slot is not None:
            output = layout.to_tokens(output)
            features = None if features is None else layout.to_tokens(features)
        return output, features, state


def _reads(layout: Layout, t: torch.Tensor) -> bool:
    """True where functions can read this tensor: subclasses, such as fake tensors, have no numbers in memory."""
    return layout.sequence is None and not is_traced() and type(t) is torch.Tensor


def _has_memory(held: Held) -> bool:
    """True where functions can write to what is held."""
    keys, values, salience, state, _ = held
    if is_traced() or type(keys) is not torch.Tensor or not {keys.dtype, values.dtype} <= {torch.uint8, *TYPES}:
        return False
    return all(t is None or t[0].is_contiguous() for t in (keys, values, salience, state))
