"""flex_attention over the columns of a layout: on a GPU one kernel, in place of a fused attention for each group.

Shapes: B batch, L length, H' heads with a window, K key/value heads, P head dim, T columns.
"""

import functools
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers.utils import is_torchdynamo_compiling

from ..hybrid.block_layout import Layout
from ..hybrid.inputs import WindowedHeads
from .softmax import Near
from .torch_backend import TorchBackend

FLEX_BLOCK = 128
MIN_QUERIES = 128
"""Least number of queries for which flex_attention is used: for fewer it runs another kernel, made for one query."""
IS_THERE = hasattr(flex, "AuxRequest") and find_spec("triton") is not None
"""True where it is compiled for a GPU, and returns the log-sum-exp, as it does since torch 2.9."""
RECOMPILES = 256
"""Kinds of inputs in a process after which PyTorch would no longer compile, and hold all scores in memory."""


class FlexBackend(TorchBackend):
    """PyTorch's operations, with flex_attention for the blocks of a prompt on a GPU."""

    def recomputes(self, heads: WindowedHeads, query: torch.Tensor) -> bool:
        """False where flex_attention is used, which keeps no scores."""
        return super().recomputes(heads, query) and not self.can_flex(heads, query, query.shape[2])

    def can_flex(self, heads: WindowedHeads, query: torch.Tensor, queries: int) -> bool:
        """Return True if flex_attention is a kernel for so many queries (..., P) of a head."""
        if not IS_THERE or heads.dropout or queries < MIN_QUERIES:
            return False
        return query.dtype != torch.float64 and query.shape[-1] >= 16

    def attend_groups(
        self, heads: WindowedHeads, query: torch.Tensor, keys, values, holders, until, layout: Layout
    ) -> Near:
        """See `TorchBackend.attend_groups`."""
        flat = layout.in_order(query).transpose(1, 2)  # (B, H', slots, P)
        if not self.can_flex(heads, flat, flat.shape[2]):
            return super().attend_groups(heads, query, keys, values, holders, until, layout)
        seen_from = layout.block_of_query(), layout.column_of_query(), until, layout.sequence
        output, log_mass = attend_by_flex(flat, keys, values, *seen_from, heads.scaling, heads.softcap)
        parts = (output.transpose(1, 2), log_mass.transpose(1, 2)[..., None])
        output, log_mass = (layout.in_groups(t, heads.groups) for t in parts)
        return output, log_mass[..., 0]


def attend_by_flex(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block: torch.Tensor,
    column: torch.Tensor,
    until: torch.Tensor,
    sequence: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    tiles: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries (B, H', slots, P) to columns (B, K, T, P), and its log-sum-exp (B, H', slots).

    Args:
        block, column (slots,): block and column of each query. until (B, T): the first block to which a column is not
            visible. sequence (B, blocks): the first column of each block's sequence, or None. tiles: numbers and
            indices of the blocks of the mask that hold anything visible, where they are known; without gradients.
    """

    def cap(score, b, h, i, j):
        return softcap * torch.tanh(score / softcap)

    if tiles is None:
        mask = visible_blocks(block, column, until, sequence)
    else:
        mask = _mask_of(*tiles, block, column, until, sequence, gradients=False)
    attend = flex_attention if is_torchdynamo_compiling() else compiled_flex_attention()
    output, aux = attend(
        *(t.to(values.dtype) for t in (query, keys, values)),  # autocast leaves them unlike
        None if softcap is None else cap, mask,
        scale=scale, enable_gqa=True, return_aux=flex.AuxRequest(lse=True),
    )  # fmt: skip
    return output, aux.lse.clamp(min=torch.finfo(aux.lse.dtype).min)


def visible_blocks(
    block: torch.Tensor, column: torch.Tensor, until: torch.Tensor, sequence: torch.Tensor | None
) -> BlockMask:
    """The mask of `attend_by_flex`, whose blocks are FLEX_BLOCK queries by as many columns."""
    size, slots, columns = FLEX_BLOCK, len(block), until.shape[1]
    first = torch.arange(0, slots, size, device=until.device)  # query
    last = (first + size).clamp(max=slots) - 1
    begins = torch.arange(0, columns, size, device=until.device)
    latest = F.pad(until, (0, -columns % size)).unflatten(1, (-1, size)).amax(-1)
    visible = (latest[:, None] > block[first][:, None]) & (begins <= column[last][:, None])
    numbers = visible.sum(-1, dtype=torch.int32)[:, None]
    indices = visible.int().argsort(dim=-1, descending=True, stable=True).int()[:, None]
    return _mask_of(numbers, indices, block, column, until, sequence)


def _mask_of(numbers, indices, block, column, until, sequence, gradients: bool = True) -> BlockMask:
    until, block, column = until.int(), block.int(), column.int()

    def mask(b, h, i, j):
        seen = (j <= column[i]) & (until[b, j] > block[i])
        return seen if sequence is None else seen & (j >= sequence[b, block[i]])

    return BlockMask.from_kv_blocks(
        numbers, indices, BLOCK_SIZE=FLEX_BLOCK, mask_mod=mask, seq_lengths=(len(block), until.shape[1]),
        compute_q_blocks=gradients,
    )  # fmt: skip


@functools.cache
def compiled_flex_attention() -> Callable:
    """flex_attention, compiled: uncompiled it would hold all scores in memory."""
    compiled = torch.compile(flex_attention)

    def attend(*args, **kwargs):
        with torch._dynamo.config.patch(recompile_limit=RECOMPILES, accumulated_recompile_limit=RECOMPILES):
            return compiled(*args, **kwargs)

    return attend
