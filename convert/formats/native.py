"""transformers' own architectures that can hold a hybrid exactly, and what keeps one from being held.

Both are Llama's block with a Mamba-2 mixer: convolution with SiLU, a gated RMSNorm per group of heads. With as many
groups as heads that norm is ours per head, and B and C have no rotary embedding.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PreTrainedConfig


@dataclass(frozen=True, kw_only=True)
class StockClass:
    """One architecture: where its names differ from ours, and what it lacks."""

    architecture: str
    final_norm: str
    post_norm: str
    mlp: Mapping[str, tuple[str, ...]]
    """Its tensors of a layer's MLP <- ours, one below the other."""
    mlp_bias: bool
    partial_rotary: bool


STOCK_CLASSES = {
    "granitemoehybrid": StockClass(
        architecture="GraniteMoeHybridForCausalLM",
        final_norm="model.norm",
        post_norm="post_attention_layernorm",
        mlp={
            "shared_mlp.input_linear.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            "shared_mlp.output_linear.weight": ("mlp.down_proj.weight",),
        },
        mlp_bias=False,
        partial_rotary=False,
    ),
    "bamba": StockClass(
        architecture="BambaForCausalLM",
        final_norm="model.final_layernorm",
        post_norm="pre_ff_layernorm",
        mlp={
            f"feed_forward.{p}_proj.{kind}": (f"mlp.{p}_proj.{kind}",)
            for p in ("gate", "up", "down")
            for kind in ("weight", "bias")
        },
        mlp_bias=True,
        partial_rotary=True,
    ),
}


def obstacles(config: PreTrainedConfig, stock: StockClass) -> list[str]:
    """What of a hybrid's configuration an architecture cannot hold; empty when it can hold all of it."""
    if config.model_type != "llamba":
        return ["Phi's parallel block and LayerNorm"]
    kinds = set(config.layer_types)
    found = {
        # their cache counts tokens in an attention layer, so that not even a forward pass works without one
        "a model without an attention layer": not kinds & {"full_attention", "sliding_attention", "hybrid"},
        "layers with a window beside the mixer": "hybrid" in kinds,
        "attention with a sliding window": "sliding_attention" in kinds,
        f"the MLP's activation {config.hidden_act}": config.hidden_act not in ("silu", "swish"),
        "norms on queries and keys": config.qk_norm is not None and "full_attention" in kinds,
        "biases in the MLP": config.mlp_bias and not stock.mlp_bias,
        "a bias on the head": config.lm_head_bias,
        "partial rotary embedding": config.rope_parameters.get("partial_rotary_factor", 1.0) != 1
        and not stock.partial_rotary,
    }
    if "linear_attention" in kinds:
        found |= {
            f"the mixer {config.mixer}": config.mixer != "mamba2",
            "a convolution without SiLU": config.mixer_activation != "silu",
            "rotary embedding on B and C": config.mixer_rotary,
            f"the mixer's norm {config.mixer_norm!r}": config.mixer_norm != "head",
            "a norm in the mixer with an epsilon of its own": config.mixer_norm_eps not in (None, config.norm_eps),
            "norms on B and C": config.mixer_qk_norm is not None,
            "a bias on all of in_proj": config.mixer_in_bias,
        }
    return [what for what, is_so in found.items() if is_so]


def check_holdable(config: PreTrainedConfig, target: str) -> None:
    """Refuse what a stock class cannot hold.

    Raises:
        ValueError: listing it.
    """
    found = obstacles(config, STOCK_CLASSES[target])
    if found:
        raise ValueError(
            f"{target} cannot hold {', '.join(found)}. It takes a conversion with --export-ready of a teacher of "
            "Llama's kind without norms on queries and keys or a sliding window, some of whose layers stay attention."
        )


__all__ = ["STOCK_CLASSES", "StockClass", "check_holdable", "obstacles"]
