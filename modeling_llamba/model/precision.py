"""Sums that are too long for half precision."""

import contextlib

import torch


def full_precision(like: torch.Tensor) -> contextlib.AbstractContextManager:
    """Autocast would turn the products inside the recurrence to half precision, and its state with them."""
    device = like.device.type
    # entering the context costs as much as some of what is done in it for one token
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()
