"""The state of a hybrid layer as its queries read it; hybrid_attention.py has the equations.

Shapes: B batch, H' heads with a window, K key/value heads, R heads per key/value head, P head dim, N state, F planes
and other dims, F' slow planes and other slow dims, E block, M mixed blocks, J groups of blocks, Q queries.
"""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from .eviction import State
from .inputs import WindowedHeads


class Readout(NamedTuple):
    """A state as the queries of each head read it, in float32 or wider; q is not scaled here.

    constant (..., K, R, 1): c0 + c1 log m, -inf while the state is empty. linear (..., K, R, 1, P): what the log mass
    takes from q itself, alpha times the mean of k'. quadratic (K, ..., R, 1, P): beta. value_mean (..., K, 1, 1, P).
    covariance (..., K, P, P): q times it is C q'.
    """

    constant: torch.Tensor
    linear: torch.Tensor
    quadratic: torch.Tensor
    value_mean: torch.Tensor
    covariance: torch.Tensor


def theory_mass(config, layer: int) -> torch.Tensor:
    """The mass of a state whose keys are all alike: c0 = 0, c1 = 1, alpha = 1, beta = 0; (H', 2 + F' + F), F' slow."""
    slow_parts = config.state_keys(layer) - config.state_planes(layer)
    heads = config.num_attention_heads - len(config.full_heads_of(layer))
    mass = torch.zeros(heads, 2 + slow_parts + config.head_dim - config.rotary_planes)
    mass[:, 1 : 2 + slow_parts] = 1.0
    return mass


def read(
    query: torch.Tensor, output: torch.Tensor, log_mass: torch.Tensor, readout: Readout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mix what the state returns into the outputs of softmax attention.

    Args:
        query, output: (B, K, R, Q, P), or (B, J, K, M/J, R, Q, P). log_mass: without P, Z. readout: of states
            (B, K, .), or (B, J, K, M/J, .).

    Returns:
        The outputs, and the features (..., 3 P) of the low-rank map.
    """
    shape = query.shape
    dtype = output.dtype
    query = query.to(readout.linear.dtype)
    linear = torch.addcmul(readout.linear, query, readout.quadratic)
    mass = (linear * query).sum(-1) + readout.constant
    gate = torch.sigmoid(mass - log_mass)[..., None]
    far = torch.baddbmm(
        readout.value_mean.reshape(-1, 1, shape[-1]),
        query.reshape(-1, shape[-3] * shape[-2], shape[-1]),
        readout.covariance.reshape(-1, shape[-1], shape[-1]),
    ).view(shape)
    far, gate = far.to(dtype), gate.to(dtype)
    mean = readout.value_mean.to(dtype).expand(shape)
    return torch.lerp(output, far, gate), gate * torch.cat([output, mean, far], dim=-1)


def readout(heads: WindowedHeads, state: State) -> Readout:
    """The readout of a state (..., K, .)."""
    slow = heads.shape.slow
    K, R = heads.groups
    c0, c1, alpha, beta = mass_of_heads(heads, state.key_mean.dtype)
    middle = (1,) * (state.log_count.ndim > 2)  # blocks of a group, between the heads and what is of each head
    c0, c1 = (t.view(K, *middle, R, 1) for t in (c0, c1))
    constant = c0 + c1 * state.log_count[..., None, None]
    # a gate of exactly 0: the layer is its teacher's attention until a token has left
    constant = constant.masked_fill(state.empty[..., None, None], -torch.inf)
    linear = state.key_mean[..., None, None, :] * (alpha * heads.scaling).view(K, *middle, R, 1, -1)
    covariance = slow.put(state.covariance * heads.scaling).mT
    quadratic = (beta * heads.scaling**2).view(K, *middle, R, 1, -1)
    return Readout(constant, slow.put(linear), quadratic, state.value_mean[..., None, None, :], covariance)


def mass_of_heads(heads: WindowedHeads, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """c0 and c1 (H',), alpha (H', N) and beta (H', P): one number for both dimensions of a plane."""
    slow = heads.shape.slow
    parts = heads.shape.key_rounding.dim - slow.planes
    slow_parts = heads.mass.shape[1] - 2 - parts
    c0, c1, alpha, beta = heads.mass.to(dtype).split([1, 1, slow_parts, parts], dim=1)
    alpha = torch.cat([alpha[:, : slow.slow_planes], alpha], dim=1)
    beta = torch.cat([beta[:, : slow.planes], beta], dim=1)
    return c0[:, 0], c1[:, 0], alpha, beta


def mass_features(heads: WindowedHeads, query: torch.Tensor, state: State) -> torch.Tensor:
    """[1, log m, (q' . mean k')_f, (q . q)_f] of queries (B, J, K, M/J, R, Q, P), the factors of `mass`."""
    query = query.to(state.key_mean.dtype) * heads.scaling
    slow = heads.shape.slow
    products = (
        (slow.take(query) * state.key_mean[..., None, None, :], slow.slow_planes),
        (query.square(), slow.planes),
    )
    by_plane = [t[..., half:] + F.pad(t[..., :half], (0, t.shape[-1] - 2 * half)) for t, half in products]
    log_count = state.log_count[..., None, None, None].expand(*query.shape[:-1], 1)
    return torch.cat([torch.ones_like(log_count), log_count, *by_plane], dim=-1)
