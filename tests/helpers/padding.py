"""Padding on the left."""

import torch


@torch.no_grad()
def left_padded(ids, amount):
    padding = torch.zeros(ids.shape[0], amount, dtype=torch.long)
    padded = torch.cat([padding, ids], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :amount] = 0
    return padded, mask
