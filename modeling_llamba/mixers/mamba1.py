"""Mamba-1: the first mixer of Mamba-in-the-Llama.

A state of N numbers per channel, with a step size per channel and a decay per channel and state. in_proj gives
[z, x, B, C, dt]; dt is low rank. x is expanded from the key/value heads to all heads before the convolution; B and
C are not convolved. Each head of P channels is cut into P / N pieces that pair the matching N features of query and
key, so with N = P the mixer can represent linear attention head by head, and with N < P its diagonal blocks.
Wang et al. 2024 (The Mamba in the Llama), section 2; the expansion is aligned with the heads, which the released
code is not under grouped queries.

Shapes: B batch, L length, D model width, H heads, G groups, P head dim, N state, I inner width.
"""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.cache_utils import Cache

from ..model.cache import record, recurrent_state
from ..model.norms import head_norm
from ..model.rotary import Rotary, apply_rotary, scale_queries
from .matrix_mixer import convolve_with_cache, gate_bias, initialise_gate, inverse_softplus_step
from .selective_scan import selective_advance, selective_matrix, selective_scan, selective_step
from .short_conv import ShortConv
from .ssd import repeat_groups


class Mamba1(nn.Module):
    """Selective scan mixer with the interface of `SSDMixer`; its matrix has one "head" per channel."""

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.mixer_num_heads
        self.num_groups = config.mixer_num_kv_heads
        self.head_dim = config.mixer_head_dim
        self.d_state = config.mixer_d_state
        self.inner_size = self.num_heads * self.head_dim
        self.x_size = self.num_groups * self.head_dim
        self.sizes = [self.inner_size, self.x_size, self.x_size, self.inner_size, config.mixer_dt_rank]
        self.in_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=config.mixer_in_bias)
        self.conv1d = ShortConv(self.inner_size, config.mixer_d_conv, config.mixer_activation, config)
        self.dt_proj = nn.Linear(config.mixer_dt_rank, self.inner_size, bias=True)
        self.A_log = nn.Parameter(torch.zeros(self.inner_size, self.d_state))
        self.D = nn.Parameter(torch.ones(self.inner_size))
        self.z_bias = gate_bias(config, self.inner_size)
        self.B_norm = head_norm(config.mixer_qk_norm, self.head_dim, self.num_groups, config.norm_eps)
        self.C_norm = head_norm(config.mixer_qk_norm, self.head_dim, self.num_heads, config.norm_eps)
        self.out_proj = nn.Linear(self.inner_size, config.hidden_size, bias=config.mixer_out_bias)

    @torch.no_grad()
    def initialise(self) -> None:
        """Open the gate, and draw steps and rates as the code of Mamba does."""
        initialise_gate(self)
        init.copy_(self.dt_proj.bias, inverse_softplus_step(self.dt_proj.bias))
        # rates 1, 2, ... N in each channel (S4D-real)
        states = torch.arange(1, self.d_state + 1, dtype=torch.float32, device=self.A_log.device)
        init.copy_(self.A_log, states.log().expand_as(self.A_log))

    def project(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Rotary | None = None,
        padding_mask: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """x, dt (B, L, I), B, C (B, L, I / N, N) and the gate (B, L, I)."""
        z, x, B, C, dt = self.in_proj(hidden_states).split(self.sizes, dim=-1)
        x = repeat_groups(x.unflatten(-1, (self.num_groups, self.head_dim)), self.num_heads).flatten(2)
        x = convolve_with_cache(self.conv1d, x, padding_mask, seq_idx, cache, self.layer_idx)
        dt = self.dt_proj(dt)
        dt = F.softplus(dt.to(torch.promote_types(dt.dtype, torch.float32)))
        if padding_mask is not None:  # a step of size zero neither decays the state nor adds to it
            dt = dt * padding_mask[..., None].to(dt.dtype)
        B = B.unflatten(-1, (self.num_groups, self.head_dim))
        C = C.unflatten(-1, (self.num_heads, self.head_dim))
        if self.B_norm is not None:
            B, C = self.B_norm(B), self.C_norm(C)
        if self.config.mixer_rotary:
            B, C = (apply_rotary(t, *position_embeddings[:2], head_dim_axis=2) for t in (B, C))
        C = scale_queries(C, position_embeddings, head_dim_axis=2)
        B = repeat_groups(B, self.num_heads)
        pieces = (self.inner_size // self.d_state, self.d_state)
        return x, dt, B.flatten(2).unflatten(-1, pieces), C.flatten(2).unflatten(-1, pieces), z

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Rotary | None = None,
        padding_mask: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """(B, L, D) -> (B, L, D); arguments as in `SSDMixer.forward`."""
        x, dt, B, C, z = self.project(hidden_states, position_embeddings, padding_mask, seq_idx, cache)
        A = -self.A_log.to(dt.dtype).exp()
        state = None if cache is None else recurrent_state(cache, self.layer_idx)
        record(cache, self.layer_idx, state, (x, dt, B), partial(_replay, A=A))
        if state is not None and x.shape[1] == 1 and seq_idx is None:
            y, state = selective_step(state, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0])
            y = y[:, None]
        else:
            y, state = selective_scan(x, dt, A, B, C, state, seq_idx)
        if cache is not None:
            cache.update_recurrent_state(state, self.layer_idx)
        return self.finish(y + self.D.to(y.dtype) * x.to(y.dtype), z)

    def finish(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Gate (B, L, I) and project to (B, L, D)."""
        if self.z_bias is not None:
            gate = gate + self.z_bias
        return self.out_proj((y * F.silu(gate.to(y.dtype))).to(gate.dtype))

    def materialize(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Rotary | None = None,
        padding_mask: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The unrolled matrix per channel (B, I, L, L), skip included, and x (B, I, L, 1) with y = M x."""
        x, dt, B, C, _ = self.project(hidden_states, position_embeddings, padding_mask, seq_idx)
        matrix = selective_matrix(dt, -self.A_log.to(dt.dtype).exp(), B, C, seq_idx)
        matrix = matrix + torch.diag_embed(self.D.to(matrix.dtype)[:, None].expand(-1, matrix.shape[-1]))
        return matrix, x.transpose(1, 2)[..., None]


def _replay(state: torch.Tensor | None, inputs: tuple[torch.Tensor, ...], A: torch.Tensor) -> torch.Tensor:
    """The state after some tokens' x, dt and B; see `selective_advance`."""
    x, dt, B = inputs
    if state is None:
        state = x.new_zeros(len(x), *A.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    return selective_advance(state, x, dt, B, A)
