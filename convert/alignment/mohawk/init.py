"""The initial mixers of the papers, beside ours, so that they can be compared under the same training.

`mohawk` (Bick et al. 2024 and their released training code): nothing of the attention is kept; random projections,
identity convolution, open gate, D = 1, out_proj scaled by the square root of the depth.
`mamba-in-llama` (Wang et al. 2024): x, B, C and out_proj are the teacher's V, K, Q and O; gate, decays, step sizes and
convolution are drawn as Mamba draws them, D = 1.
"""

import math

import torch
from torch import nn

from modeling_llamba.matrix_mixer import OPEN_GATE


@torch.no_grad()
def mohawk_init(mixer: nn.Module, num_layers: int, seed: int) -> None:
    """MOHAWK's random mixer, in place."""
    generator = torch.Generator().manual_seed(seed)
    _draw_linear(mixer.in_proj.weight, generator)
    _draw_linear(mixer.out_proj.weight, generator)
    mixer.out_proj.weight /= math.sqrt(num_layers)
    for bias in (mixer.in_proj.bias, mixer.out_proj.bias, mixer.conv1d.bias):
        if bias is not None:
            bias.zero_()
    mixer.conv1d.weight.zero_()
    mixer.conv1d.weight[..., -1] = 1.0
    if mixer.z_bias is not None:
        mixer.in_proj.weight[_gate_rows(mixer)] = 0.0
        mixer.z_bias.fill_(OPEN_GATE)
    _draw_dynamics(mixer, generator)


@torch.no_grad()
def mamba_in_llama_init(mixer: nn.Module, seed: int) -> None:
    """Mamba in the Llama's, in place: `mixer` is a mapped one, whose x, B, C and out_proj stay."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.empty_like(mixer.in_proj.weight)
    _draw_linear(drawn, generator)
    gate = _gate_rows(mixer)
    mixer.in_proj.weight[gate] = drawn[gate]
    streams = mixer.x_size + mixer.B_size + mixer.C_size if hasattr(mixer, "C_size") else sum(mixer.sizes[1:4])
    rest = mixer.inner_size + streams
    mixer.in_proj.weight[rest:] = drawn[rest:]
    if mixer.z_bias is not None:
        mixer.z_bias.zero_()
    bound = mixer.conv1d.weight.shape[-1] ** -0.5
    mixer.conv1d.weight.uniform_(-bound, bound, generator=generator)
    _draw_dynamics(mixer, generator)


def _draw_dynamics(mixer: nn.Module, generator: torch.Generator) -> None:
    """D, decays and step sizes as the published classes initialise them."""
    mixer.D.fill_(1.0)
    kind = mixer.config.mixer
    if kind == "discrete_mamba2":
        if mixer.A_log_bias is not None:
            mixer.A_log_bias.zero_()
        return
    steps = mixer.dt_bias if kind == "mamba2" else mixer.dt_proj.bias
    drawn = torch.empty_like(steps).uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp()
    steps.copy_(drawn + torch.log(-torch.expm1(-drawn)))
    if kind == "mamba2":
        mixer.A_log.copy_(torch.empty_like(mixer.A_log).uniform_(1, 16, generator=generator).log())
    else:
        _draw_linear(mixer.dt_proj.weight, generator)
        mixer.A_log.copy_(torch.arange(1, mixer.d_state + 1).log().expand_as(mixer.A_log))


def _draw_linear(weight: torch.Tensor, generator: torch.Generator) -> None:
    """torch's default for Linear."""
    bound = weight.shape[-1] ** -0.5
    weight.uniform_(-bound, bound, generator=generator)


def _gate_rows(mixer: nn.Module) -> slice:
    """Rows of in_proj that give the gate: first, but after x, B and C in discrete_mamba2."""
    start = mixer.conv_size if mixer.config.mixer == "discrete_mamba2" else 0
    return slice(start, start + mixer.inner_size)
