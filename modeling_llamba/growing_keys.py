"""Keys and values that grow in place.

transformers' dynamic cache concatenates: every token copies all keys and values there are, which at a context of 4,096
is more than half of a small model's step. Here a layer of it, itself unchanged, gets room for the tokens to come.
"""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.utils import is_torchdynamo_compiling

# tokens; or an eighth of what there is, where that is more
MIN_ROOM = 128


def update_keys(
    cache: Cache, layer_idx: int, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cache.update` with the new tokens' keys and values (B, K, L, D); returns all of them."""
    if cache.offloading or layer_idx >= len(cache.layers):
        return cache.update(keys, values, layer_idx)
    return append_keys(cache.layers[layer_idx], keys, values)


def append_keys(layer: CacheLayerMixin, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`layer.update`, in place where the layer is a dynamic one and nothing needs its former tensors.

    Args:
        keys, values: (B, K, L, D) of the new tokens.

    Returns:
        All keys and values of the layer, views into its room once it has grown.
    """
    # with a gradient wanted of the queries alone, attention would keep views of the room for its backward pass
    recording = torch.is_grad_enabled()
    grows = type(layer) is DynamicLayer and layer.is_initialized and layer.keys.numel() > 0
    if not grows or recording or layer.keys.requires_grad or is_torchdynamo_compiling():
        layer.room = None
        return layer.update(keys, values)
    held, past = (layer.keys, layer.values), layer.keys.shape[-2]
    total = past + keys.shape[-2]
    room = getattr(layer, "room", None)
    if room is None or not all(_begins(r, t) and total <= r.shape[-2] for r, t in zip(room, held, strict=True)):
        size = total + max(MIN_ROOM, total // 8)
        room = tuple(t.new_empty(*t.shape[:2], size, t.shape[-1]) for t in held)
        for r, t in zip(room, held, strict=True):
            r[:, :, :past] = t
        layer.room = room
    for r, new in zip(room, (keys, values), strict=True):
        r[:, :, past:total] = new
    layer.keys, layer.values = (r[:, :, :total] for r in room)
    return layer.keys, layer.values


def _begins(room: torch.Tensor, held: torch.Tensor) -> bool:
    """Whether `room` begins with `held` itself; whoever reorders, moves or copies a cache makes other tensors."""
    return held.data_ptr() == room.data_ptr() and held.stride() == room.stride() and len(held) == len(room)
