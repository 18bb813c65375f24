"""The sequences in the rows of a batch: packed ones, padding, and the number of each token in its own.

Shapes: B batch, L length.
"""

import torch
from transformers.cache_utils import Cache
from transformers.utils import is_torchdynamo_compiling


def sequence_starts(seq_idx: torch.Tensor) -> torch.Tensor:
    """(B, L) bool: the tokens at which a packed sequence follows another."""
    return torch.nn.functional.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))


def packed_sequence_ids(
    position_ids: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    batch_shape: tuple[int, int],
    attention_mask: torch.Tensor | None,
    cache: Cache | None,
) -> torch.Tensor | None:
    """(B, L) ids of the packed sequences, from whichever of the three forms was given; None when nothing is packed.

    Restarting `position_ids` count in a forward without a cache, and between tokens that are not padding.

    Raises:
        ValueError: `cu_seqlens` does not describe this batch or the sequences of `seq_idx`, or a packed batch comes
            with a cache.
    """
    if cache is not None:
        if seq_idx is not None or cu_seqlens is not None:
            raise ValueError("Packed sequences leave no single state to continue from: pass no cache.")
        return None
    of_lengths = None
    if cu_seqlens is not None:
        num_tokens = batch_shape[0] * batch_shape[1]
        if batch_shape[0] != 1 or (not torch.compiler.is_compiling() and int(cu_seqlens[-1]) != num_tokens):
            raise ValueError(f"cu_seqlens packs one row of {num_tokens} tokens; got a batch of shape {batch_shape}.")
        positions = torch.arange(batch_shape[1], device=cu_seqlens.device)
        of_lengths = torch.bucketize(positions, cu_seqlens[1:], right=True)[None].int()
    if seq_idx is not None:
        seq_idx = seq_idx.expand(batch_shape)
        if of_lengths is not None and not torch.compiler.is_compiling():  # TRL gives both
            if not torch.equal(sequence_starts(seq_idx), sequence_starts(of_lengths)):
                raise ValueError("seq_idx and cu_seqlens pack other sequences; pass one of them.")
        return seq_idx
    if of_lengths is not None:
        return of_lengths
    if position_ids is None or (attention_mask is not None and attention_mask.shape != batch_shape):
        return None
    restarts = torch.diff(position_ids, dim=-1, prepend=position_ids[:, :1] - 1) != 1
    if attention_mask is not None:
        real = attention_mask.bool()
        restarts = restarts & real & torch.nn.functional.pad(real[:, :-1], (1, 0))
    if not is_torchdynamo_compiling() and not restarts.any():
        return None
    return restarts.cumsum(-1, dtype=torch.int32).expand(batch_shape)


def positions_in_sequence(seq_idx: torch.Tensor) -> torch.Tensor:
    """Position of each token within its packed sequence, (B, L)."""
    index = torch.arange(seq_idx.shape[1], device=seq_idx.device).expand(seq_idx.shape)
    return index - torch.where(sequence_starts(seq_idx), index, 0).cummax(dim=1).values


def token_index(shape, mask_2d, seq_idx, past, device) -> torch.Tensor:
    """(B, L) index of each token in its own sequence, behind `past` others in a cache; -1 at padding."""
    if seq_idx is not None:
        if mask_2d is None:
            return positions_in_sequence(seq_idx)
        real = mask_2d.long()
        before = real.cumsum(1) - real
        at_start = torch.where(sequence_starts(seq_idx), before, 0).cummax(dim=1).values
        return (before - at_start).masked_fill(real == 0, -1)
    if mask_2d is not None:
        return (mask_2d.long().cumsum(1) - 1).masked_fill(mask_2d == 0, -1)[:, -shape[1] :]
    return (torch.arange(shape[1], device=device) + past).expand(tuple(shape))


def may_ask(t: torch.Tensor) -> bool:
    """Return True if code may branch on a tensor's values: not while compiling, nor on the meta device."""
    return not is_torchdynamo_compiling() and t.device.type != "meta"


def is_padding_mask(attention_mask) -> bool:
    """Return True for a mask (B, L) of the tokens that are no padding, not one that `generate` prepared."""
    return isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2


def drop_full_mask(attention_mask):
    """Return None for a mask of ones: transformers finds packed sequences only if there is no mask."""
    if is_padding_mask(attention_mask) and may_ask(attention_mask) and bool(attention_mask.all()):
        return None
    return attention_mask
