"""Planes of queries and keys, scaled so that the rounding of keys costs least.

A rotary embedding turns pairs of dimensions, the planes of a head, and a score is a sum over planes. So a plane of the
keys may be divided by a number and that of the queries multiplied by it, and no score changes. Rounding spreads its
error evenly over the planes of a key; a query then reads most of it in the planes in which queries are large. The sum
is least where both have the same size: divided by s = sqrt(rms of keys / rms of queries) per plane and key/value head.
Biases of keys that are a hundred times as large as the rest (Qwen2, Qwen2.5) make this a large difference.

Here s is a power of two, so that scaled weights are exact (but for the smallest of float16), and follows from weights
alone: inputs of a projection are taken to be independent and as large as the weights of the norm before it.

Shapes: D model width, H heads, K key/value heads, P head dim.
"""

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from ..io.reader import Checkpoint
from ..io.rules import Source

NAMES = tuple(f"{side}_{of}" for side in "qk" for of in ("proj.weight", "proj.bias", "norm.weight", "norm.bias"))
"""Tensors of an attention that make queries and keys."""
LARGEST = 8
"""Largest exponent of a scale: weights in float16 have to stay within its range."""


@dataclass(frozen=True, eq=False)
class PlaneScales:
    """Scales of the planes of one layer's queries and keys; they are computed when a tensor is first read.

    An unrotated dimension is a plane of its own.
    """

    sources: dict[str, Source]
    """Sources of the projections and norms of queries and keys, by their names in a layer's attention, unscaled."""
    norm_before: Source | None
    """Weight (D,) of the norm before the projections, if there is one."""
    unit_offset: bool
    """True if that norm multiplies by 1 + weight."""
    dim: int
    rotated: int
    """Number of planes that are turned."""
    shared_by_heads: bool
    """True if one weight of a norm serves all heads."""
    _found: list[torch.Tensor] = field(default_factory=list, repr=False)

    def factors(self, checkpoint: Checkpoint, which: Literal["q", "k"], rows: int) -> torch.Tensor:
        """Powers of two (rows,) for the rows of a tensor of queries or of keys."""
        if not self._found:
            self._found[:] = [self._exponents(checkpoint)]  # two threads may do this at once
        (exponents,) = self._found  # (K, P)
        if which == "k":
            exponents = -exponents
        return exponents.repeat_interleave(rows // exponents.numel(), dim=0).flatten().exp2()

    def _exponents(self, checkpoint: Checkpoint) -> torch.Tensor:
        queries, keys = (self._energies(checkpoint, which) for which in "qk")
        queries = queries.unflatten(0, (len(keys), -1)).mean(1)
        if self.shared_by_heads:
            queries, keys = queries.mean(0, keepdim=True), keys.mean(0, keepdim=True)
        exponents = torch.log2(keys / queries).div_(4)  # of squares
        return exponents.nan_to_num_(0, 0, 0).round_().clamp_(-LARGEST, LARGEST)

    def _energies(self, checkpoint: Checkpoint, which: str) -> torch.Tensor:
        """Expected squares (heads, P), in a rotated plane the mean of both dimensions'."""
        gain = 1.0
        if self.norm_before is not None:
            gain = self.norm_before.read(checkpoint).double() + self.unit_offset
        weight = self.sources[f"{which}_proj.weight"]
        energies = torch.cat([(rows.double() * gain).pow(2).sum(1) for rows in weight.blocks(checkpoint)])
        if bias := self.sources.get(f"{which}_proj.bias"):
            energies += bias.read(checkpoint).double().flatten().pow(2)
        energies = energies.unflatten(0, (-1, self.dim))
        if norm := self.sources.get(f"{which}_norm.weight"):
            of_norm = norm.read(checkpoint).double().pow(2)
            # the norm of each head, or of all heads together
            mean = energies.mean() if of_norm.numel() == energies.numel() else energies.mean(1, keepdim=True)
            energies = energies / mean * of_norm.view(-1, self.dim)
        both = slice(0, 2 * self.rotated)
        energies[:, both] = energies[:, both].unflatten(1, (2, -1)).mean(1).repeat(1, 2)
        return energies


def can_be_scaled(config) -> bool:
    """True if the planes can be scaled exactly; weights of norms of 1 + weight do not hold the product."""
    return not (config.qk_norm and config.norm_unit_offset)


def with_scaled_planes(sources: dict[str, Source], config) -> dict[str, Source]:
    """Sources of a hybrid that keeps all its attention, with the planes of queries and keys scaled where they can be.

    Args:
        config: of that hybrid.
    """
    scaled = dict(sources)
    if not can_be_scaled(config):
        return scaled
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        attention = f"{prefix}self_attn."
        own = {name: sources[attention + name] for name in NAMES if attention + name in sources}
        if "q_proj.weight" not in own:
            continue
        scales = PlaneScales(
            sources=own,
            norm_before=sources.get(f"{prefix}input_layernorm.weight"),
            unit_offset=config.norm_unit_offset,
            dim=config.of_kind(config.layer_types[layer]).head_dim,
            rotated=rotated_planes(config, layer),
            shared_by_heads=config.qk_norm in ("rms", "layer"),
        )
        for name, source in own.items():
            if (config.qk_norm is None) == ("proj" in name):
                factors = _of_rows(scales, name[0], source.shape[0])
                scaled[attention + name] = dataclasses.replace(source, scale=factors)
    return scaled


def rotated_planes(config, layer: int) -> int:
    """Number of planes of a layer's heads that its rotary embedding turns."""
    rope = config.rope_of(layer)
    if rope == "none":
        return 0
    of_layer = copy.copy(config.of_kind(config.layer_types[layer]))
    if rope == "local":
        of_layer.rope_parameters = config.local_rope_parameters
    return of_layer.rotary_planes


def _of_rows(scales: PlaneScales, which: Literal["q", "k"], rows: int) -> Callable[[Checkpoint], torch.Tensor]:
    return lambda checkpoint: scales.factors(checkpoint, which, rows)
