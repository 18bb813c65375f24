"""Choice of the module that replaces a layer's attention, by the configuration."""

from torch import nn

from ..hybrid.hybrid_attention import HybridAttention


def make_mixer(config, layer_idx: int) -> nn.Module:
    """Make the mixer of a layer: a hybrid layer where `layer_types` says so, else the configuration's matrix mixer."""
    if config.layer_types[layer_idx] == "hybrid":
        return HybridAttention(config, layer_idx)
    from ..mixers.mixers import MIXERS

    return MIXERS[config.mixer](config, layer_idx)
