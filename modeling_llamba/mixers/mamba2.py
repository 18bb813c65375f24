"""The two Mamba-2 mixers; both have a scalar decay per head and differ in how it comes about.

Discrete Mamba-2, of Phi-Mamba and Llamba, is the default here:

    S_t = a_t S_{t-1} + x_t B_t^T        y_t = S_t C_t + D x_t        a_t = sigmoid(-A_log_t)
    out = out_proj(y * silu(z + z_bias))

in_proj gives [x, B, C, z, A_log]; x, B, C pass through the short convolution. Bick et al. 2024 (MOHAWK),
section 4 and its released configuration. Beyond the published class: x and B at G <= H heads, rotary embedding
and norms on B and C, a bias on A_log (without one the initial memory cannot be set), biases on the projections.

Mamba-2, of Mamba-in-the-Llama:

    dt_t = softplus(dt_t + dt_bias)      S_t = exp(-exp(A_log) dt_t) S_{t-1} + dt_t x_t B_t^T
    y_t = S_t C_t + D x_t                out = out_proj(norm(y * silu(z)))

in_proj gives [z, x, B, C, dt]; x, B, C pass through the short convolution and SiLU; x and B have the teacher's
key/value heads and are repeated per head after it. Wang et al. 2024 (The Mamba in the Llama), section 2.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init

from .matrix_mixer import SSDMixer, Streams, hold_state_at_padding, initialise_gate, inverse_softplus_step


class DiscreteMamba2(SSDMixer):
    """A decay per head and token, no step size, no norm."""

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.A_log_bias = None
        if config.mixer_decay_bias:
            self.A_log_bias = nn.Parameter(torch.zeros(self.num_states))

    @torch.no_grad()
    def initialise(self) -> None:
        """Open the gate; the bias of the decay is zero."""
        initialise_gate(self)
        if self.A_log_bias is not None:
            init.zeros_(self.A_log_bias)

    def project(self, hidden_states, position_embeddings=None, padding_mask=None, seq_idx=None, cache=None):
        sizes = [self.conv_size, self.inner_size, self.num_states]
        xBC, z, A_log = self.in_proj(hidden_states).split(sizes, dim=-1)
        x, BC = self._convolve(xBC, padding_mask, seq_idx, cache)
        B, C = self._norm_and_rotate(BC, position_embeddings)
        A_log = A_log.to(torch.promote_types(A_log.dtype, torch.float32))
        if self.A_log_bias is not None:
            A_log = A_log + self.A_log_bias.to(A_log.dtype)
        return Streams(x, hold_state_at_padding(-F.softplus(A_log), padding_mask), B, C, z, None)


class Mamba2(SSDMixer):
    """A learned rate A per head times a step size per head and token."""

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.A_log = nn.Parameter(torch.zeros(self.num_states))
        self.dt_bias = nn.Parameter(torch.zeros(self.num_states))

    @torch.no_grad()
    def initialise(self) -> None:
        """Open the gate, and draw steps, and rates from 1 to 16, as the code of Mamba-2 does."""
        initialise_gate(self)
        init.copy_(self.dt_bias, inverse_softplus_step(self.dt_bias))
        init.copy_(self.A_log, torch.empty_like(self.A_log).uniform_(1, 16).log())

    def project(self, hidden_states, position_embeddings=None, padding_mask=None, seq_idx=None, cache=None):
        sizes = [self.inner_size, self.conv_size, self.num_states]
        z, xBC, dt = self.in_proj(hidden_states).split(sizes, dim=-1)
        x, BC = self._convolve(xBC, padding_mask, seq_idx, cache)
        B, C = self._norm_and_rotate(BC, position_embeddings)
        dt = dt.to(torch.promote_types(dt.dtype, torch.float32))
        dt = F.softplus(dt + self.dt_bias.to(dt.dtype))
        log_a = hold_state_at_padding(-self.A_log.to(dt.dtype).exp() * dt, padding_mask)
        return Streams(x, log_a, B, C, z, dt)
