"""Choice of the module that replaces a layer's attention, by the configuration."""

from torch import nn

from ..hybrid.hybrid_attention import HybridAttention
from .mamba1 import Mamba1
from .mamba2 import DiscreteMamba2, Mamba2

MIXERS = {"discrete_mamba2": DiscreteMamba2, "mamba2": Mamba2, "mamba1": Mamba1}


def make_mixer(config, layer_idx: int) -> nn.Module:
    """Make the mixer of a layer: a hybrid layer where `layer_types` says so, else the configuration's matrix mixer."""
    if config.layer_types[layer_idx] == "hybrid":
        return HybridAttention(config, layer_idx)
    return MIXERS[config.mixer](config, layer_idx)
