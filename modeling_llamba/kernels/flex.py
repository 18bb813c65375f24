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

from ..mixers.ssd import requested_backend

FLEX_BLOCK = 128
MIN_QUERIES = 128
"""Least number of queries for which flex_attention is used: for fewer it runs another kernel, made for one query."""
RECOMPILES = 256
"""Kinds of inputs in a process after which PyTorch would no longer compile, and hold all scores in memory."""


def can_flex(query: torch.Tensor, backend: str) -> bool:
    """Return True if flex_attention is a kernel here, for queries (B, H', L, P); backend: `mixer_backend`."""
    if not query.is_cuda or query.shape[2] < MIN_QUERIES or requested_backend(backend) == "torch":
        return False
    if not hasattr(flex, "AuxRequest"):  # before torch 2.9 it returns no log-sum-exp
        return False
    return query.dtype != torch.float64 and query.shape[-1] >= 16 and find_spec("triton") is not None


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
