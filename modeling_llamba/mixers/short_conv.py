"""The short causal depthwise convolution before the scan.

Shapes: B batch, L length, I inner width.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init

from ..kernels.backend import backend_for
from .ssd import is_recorded


class ShortConv(nn.Module):
    """Depthwise causal convolution that can start from the last inputs of an earlier call.

    Not an nn.Conv1d, although its weights look like one's: PEFT would wrap that in an adapter that receives neither
    the cached inputs nor the packing, and so refuses this one. Train it whole, with `modules_to_save=["conv1d"]`.
    """

    def __init__(self, channels: int, kernel_size: int, activation: str, config=None):
        """config: says in its `backend` what may compute this; without it, anything."""
        super().__init__()
        self.config = config
        self.kernel_size = kernel_size
        self.activation = activation
        self.weight = nn.Parameter(torch.zeros(channels, 1, kernel_size))
        self.bias = nn.Parameter(torch.zeros(channels))

    @torch.no_grad()
    def initialise(self) -> None:
        """Make it the identity: the last tap is the current token."""
        init.zeros_(self.bias)
        identity = torch.zeros_like(self.weight)
        identity[..., -1] = 1.0
        init.copy_(self.weight, identity)

    def forward(
        self,
        x: torch.Tensor,
        seq_idx: torch.Tensor | None = None,
        past: torch.Tensor | None = None,
        joined: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Convolve.

        Args:
            x: (B, L, I). seq_idx: (B, L) or None; no sequence is convolved with another.
            past: (B, I, >= width - 1) inputs right before x, or None for zeros.
            joined: for one token, (B, I, >= width) past and x in one; instead of past.

        Returns:
            (B, L, I), after the activation.
        """
        if joined is not None:
            return self._last(joined)
        width = self.kernel_size
        if past is None:
            found = self._backend(x).convolve(x, self.weight, self.bias, seq_idx, self.activation)
            if found is not None:
                return found
        dtype = torch.promote_types(x.dtype, torch.float32)
        taps = self.weight.to(dtype)[:, 0].T
        bias = self.bias.to(dtype)
        if seq_idx is not None:
            return self._activated(self._packed(x.to(dtype), taps, seq_idx) + bias, x.dtype)
        if past is None:
            left = x.new_zeros(x.shape[0], width - 1, x.shape[2])
        else:
            left = past[..., past.shape[-1] - width + 1 :].mT
        y = self._sum_of_taps(torch.cat([left, x], dim=1).to(dtype), taps, x.shape[1])
        return self._activated(y + bias, x.dtype)

    def _last(self, inputs: torch.Tensor) -> torch.Tensor:
        """Convolve one token: (B, I, >= width) inputs up to and with it -> (B, 1, I)."""
        dtype = torch.promote_types(inputs.dtype, torch.float32)
        y = torch.linalg.vecdot(inputs[..., -self.kernel_size :].to(dtype), self.weight.to(dtype)[:, 0])
        return self._activated(y + self.bias.to(dtype), inputs.dtype)[:, None]

    def step(self, x: torch.Tensor, past: torch.Tensor) -> torch.Tensor | None:
        """Convolve one token (B, 1, I) by a kernel that adds it to past (B, I, width); None where there is none."""
        if is_recorded(x, self.weight, self.bias):
            return None
        return self._backend(x).convolve_one(x, past, self.weight, self.bias, self.activation)

    def _backend(self, x: torch.Tensor):
        return backend_for(x, "auto" if self.config is None else self.config.backend)

    def _activated(self, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self.activation == "silu":
            y = F.silu(y)
        return y.to(dtype)

    def _sum_of_taps(self, x: torch.Tensor, taps: torch.Tensor, length: int) -> torch.Tensor:
        """Sum `kernel_size` shifted products.

        A grouped conv1d can take tens of times as long on a CPU, above all in bf16.
        """
        y = x[:, :length] * taps[0]
        for k in range(1, self.kernel_size):
            y = torch.addcmul(y, x[:, k : k + length], taps[k])
        return y

    def _packed(self, x: torch.Tensor, taps: torch.Tensor, seq_idx: torch.Tensor) -> torch.Tensor:
        width = self.kernel_size
        y = x * taps[width - 1]
        for shift in range(1, min(width, x.shape[1])):
            same = (seq_idx[:, shift:] == seq_idx[:, :-shift]).unsqueeze(-1)
            y = y + F.pad(x[:, :-shift] * same, (0, 0, shift, 0)) * taps[width - 1 - shift]
        return y
