"""A mixer whose matrix is causal Toeplitz: one kernel over the lags per head; only the gate depends on the input.

    y_l = sum_d kernel[d] x_{l-d}        out = out_proj(y * silu(gate(u) + bias))

For comparison only: a convolution as long as the text has no fixed state to decode from. Shapes: B batch, L length, H
heads, P head dim, D model width.
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from convert.alignment.closed_form import LayerData
from convert.alignment.matrix_orientation import attention_rows
from modeling_llamba.matrix_mixer import OPEN_GATE

ROWS_AT_ONCE = 128


class ToeplitzMixer(nn.Module):
    """Starts from the attention it replaces: its values, its o_proj, and a kernel to be filled in.

    Args:
        attention: the teacher's, with v_proj and o_proj. length: lags of the kernel; what lies further back is lost.
    """

    def __init__(self, attention: nn.Module, config, length: int):
        super().__init__()
        self.config, self.A_log_bias = config, None  # no decay to set
        self.head_dim, self.groups = attention.head_dim, attention.num_key_value_groups
        self.x_proj = copy.deepcopy(attention.v_proj)
        width, inner = attention.o_proj.out_features, attention.o_proj.in_features
        self.gate = nn.Linear(width, inner)
        nn.init.zeros_(self.gate.weight)
        nn.init.constant_(self.gate.bias, OPEN_GATE)
        self.kernel = nn.Parameter(torch.zeros(inner // self.head_dim, length))
        self.out_proj = nn.Linear(inner, width)
        with torch.no_grad():
            self.out_proj.weight.copy_(attention.o_proj.weight)
            self.out_proj.bias.copy_(torch.zeros(width) if attention.o_proj.bias is None else attention.o_proj.bias)
        self.requires_grad_(True)

    def materialize(self, length: int) -> torch.Tensor:
        """The matrices (H, L, L), the same for every input."""
        lag = torch.arange(length)[:, None] - torch.arange(length)
        known = (lag >= 0) & (lag < self.kernel.shape[1])
        return torch.where(known, self.kernel[:, lag.clamp(0, self.kernel.shape[1] - 1)], 0.0)

    def forward(self, hidden_states: torch.Tensor, position_embeddings=None, padding_mask=None, seq_idx=None,
                past_key_values=None) -> torch.Tensor:  # fmt: skip
        """(B, L, D) -> (B, L, D), for whole rows without padding."""
        assert padding_mask is None and seq_idx is None and past_key_values is None
        length = hidden_states.shape[1]
        x = self.x_proj(hidden_states).unflatten(-1, (-1, self.head_dim)).repeat_interleave(self.groups, dim=2)
        size = 2 * length  # of the transform: no lag wraps around
        spectrum = torch.fft.rfft(self.kernel[:, :length].float(), size)[None, :, :, None]
        mixed = torch.fft.irfft(torch.fft.rfft(x.transpose(1, 2).float(), size, dim=2) * spectrum, size, dim=2)
        y = mixed[:, :, :length].transpose(1, 2).flatten(2).to(x.dtype)
        return self.out_proj(y * F.silu(self.gate(hidden_states)))


@torch.no_grad()
def set_kernel(mixer: ToeplitzMixer, attention: nn.Module, data: LayerData, sequences: int) -> None:
    """The Toeplitz matrix nearest to the attention of all of the first fitting sequences, head by head, in place."""
    length = min(mixer.kernel.shape[1], data.u.shape[1])
    totals = torch.zeros_like(mixer.kernel)
    rows = data.fitting()[:sequences]
    for row in rows:
        u, _ = data.batch([row])
        tiles = torch.cat([part for _, part in attention_rows(attention, u, data.rotary, ROWS_AT_ONCE)], dim=2)[0]
        for lag in range(length):
            totals[:, lag] += tiles.diagonal(-lag, -2, -1).mean(-1)
    mixer.kernel.copy_(totals / len(rows))
