"""Tiny hybrids of both families, with weights large enough that a leak shows."""

import torch

from modeling_llamba import LlambaConfig, LlambaForCausalLM
from modeling_phimamba import PhiMambaConfig, PhiMambaForCausalLM
from tests.helpers.teachers import TINY

FAMILIES = {"llamba": (LlambaConfig, LlambaForCausalLM), "phimamba": (PhiMambaConfig, PhiMambaForCausalLM)}
MIXERS = ("discrete_mamba2", "mamba2", "mamba1")
PATTERNS = {
    "pure": ["linear_attention"] * 2,
    "hybrid": ["linear_attention", "full_attention"],
    "attention": ["full_attention"] * 2,
    "window": ["sliding_attention", "linear_attention"],
    "beside": ["hybrid", "full_attention", "hybrid", "linear_attention"],
    "beside-only": ["hybrid"] * 2,
    "shared": ["linear_attention", "hybrid"],
    "every": ["linear_attention", "full_attention", "hybrid"],
    "attention-first": ["full_attention", "linear_attention"],
    "gemma": ["hybrid", "sliding_attention", "linear_attention", "full_attention"],
    "experts": ["linear_attention", "full_attention"],
}
WINDOWS = {"beside-only": [8, 6], "beside": [6, 0, 4, 0]}
"""Where layers differ in the width of their windows."""
BLOCKS = {
    "gemma": dict(
        norm_placement="both", norm_unit_offset=True, qk_norm="all_heads", mixer_qk_norm="all_heads",
        embedding_multiplier=3.0, attention_multiplier=0.3, residual_multiplier=0.5, logits_scaling=0.5,
        final_logit_softcapping=3.0, layer_rope=["local", "main", "none", "local"],
        local_rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    ),
    "experts": dict(
        norm_placement="after", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[1],
    ),
}  # fmt: skip
"""What differs in the block, by pattern: more at once than in any teacher."""


def tiny_config(family: str = "llamba", mixer: str = "discrete_mamba2", pattern: str = "hybrid", **overrides):
    options = dict(
        mixer=mixer,
        layer_types=PATTERNS[pattern],
        num_hidden_layers=len(PATTERNS[pattern]),
        mixer_num_kv_heads=2,
        mixer_rotary=mixer != "mamba1",
        mixer_d_state=4 if mixer == "mamba1" else 8,
        mixer_decay_bias=mixer == "discrete_mamba2",
        mixer_out_bias=True,
        mixer_chunk_size=16,
        sliding_window=8,
        hybrid_window=WINDOWS.get(pattern, 6),
        mixer_shared_state=pattern == "shared",
        hybrid_block=2,
        hybrid_sinks=2,
        hybrid_salient=3 if pattern.startswith("beside") else 0,
        hybrid_state_planes=2 if pattern.startswith("beside") else None,
        hybrid_rank=3,
        hybrid_full_heads=[[2, 3] if kind == "hybrid" and i else [] for i, kind in enumerate(PATTERNS[pattern])],
    )
    return FAMILIES[family][0](**TINY | options | BLOCKS.get(pattern, {}) | overrides)


def make_hybrid(
    family: str = "llamba", mixer: str = "discrete_mamba2", pattern: str = "hybrid", dtype=torch.float64, **overrides
):
    """Random weights everywhere, convolutions included, and decays that reach back many tokens.

    In float64, where two ways to the same result agree to rounding and anything more is a fault.
    """
    torch.manual_seed(0)
    model = FAMILIES[family][1](tiny_config(family, mixer, pattern, **overrides)).eval().to(dtype)
    if pattern == "experts":
        model.set_experts_implementation("eager")  # transformers' default knows no float64
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            elif name.endswith("A_log_bias"):
                parameter.copy_(-2 + torch.randn_like(parameter))
            elif name.endswith(("A_log", "dt_bias", "dt_proj.bias")):
                parameter.copy_(-1 + 0.5 * torch.randn_like(parameter))
            elif "conv1d" in name:
                parameter.copy_(0.5 * torch.randn_like(parameter))
            elif parameter.ndim == 1:
                parameter.copy_(0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
        for name, parameter in model.named_parameters():
            if name.endswith("salience"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
    return model


def trained_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters that get a gradient."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
