"""The values that fields of a configuration may have."""

from collections.abc import Mapping
from typing import Any

MIXERS = ("discrete_mamba2", "mamba2", "mamba1", "none")
RECURRENT = "conv"
"""Entry of `layer_types` for a layer that keeps its teacher's own module with a state, whatever it is (recurrent.py).
transformers' caches accept two names for such layers, and the other, linear_attention, stands for mixers here."""
LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention", "hybrid", RECURRENT)
QK_NORMS = (None, "rms", "layer", "all_heads")
ROPES = ("main", "local", "none")
BACKEND_NAMES = ("auto", "torch", "mamba_ssm", "fla")
CACHE_BITS = (16, 8, 6, 4, 2)
ROPE_NUMBERS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# names in transformers' ACT2FN, whose import takes seconds; those with parameters of their own are left out
ACTIVATIONS = (
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh",
    "gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2",
    "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh",
)  # fmt: skip
ATTENTION_ALONE = ("attention_gate", "learned_sinks", "value_norm", "sliding_heads")
"""Fields of the attention that a mixer cannot follow."""
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "mixer_num_heads", "mixer_num_kv_heads",
    "mixer_head_dim", "mixer_d_state", "mixer_d_conv", "mixer_chunk_size",
)  # fmt: skip
LARGEST_SIZE = 2**31 - 1
SIZES_OF_STATES = (
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
    "linear_num_value_heads", "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv",
    "mamba_expand", "mamba_chunk_size", "conv_L_cache",
)  # fmt: skip
"""Sizes of a teacher's own module with a state."""
# smallest and largest value of every number in a configuration, this one's or a teacher's; whole where they are whole
BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys((*SIZES, "sliding_window", "hybrid_sink_reach", "mixer_dt_rank"), (1, LARGEST_SIZE)),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "mixer_norm_eps"), (0.0, 1.0)),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attention_dropout"), (0.0, 1.0)),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "attention_factor"), (1e-06, 1000000.0)),
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "initializer_range"), (0.0, 1000000.0)),
    **dict.fromkeys(SIZES_OF_STATES, (1, LARGEST_SIZE)),
    "num_hidden_layers": (1, 10_000),
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), (0, 10_000)),  # 0 is none
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), (0, LARGEST_SIZE)),
    "max_window_layers": (0, LARGEST_SIZE),
    "decoder_sparse_step": (1, LARGEST_SIZE),
    "query_pre_attn_scalar": (1e-6, 1e9),
    "original_max_position_embeddings": (1, LARGEST_SIZE),
    "rope_theta": (1e-6, 1e18),  # PyTorch takes no larger whole number
    "llama_4_scaling_beta": (0.0, 1e6),
    "partial_rotary_factor": (1e-6, 1.0),
    "hybrid_window": (2, 2**24),
    "hybrid_block": (1, 2**16),
    "hybrid_rank": (0, 2**16),
    "hybrid_sinks": (0, 2**24),
    "hybrid_salient": (0, 2**24),
    "hybrid_state_planes": (1, 2**24),
}


NESTED = (
    "text_config", "rope_parameters", "local_rope_parameters", "rope_scaling", "full_attention", "sliding_attention",
    "sliding_heads", "recurrent",
)  # fmt: skip


def check_numbers(values: Mapping[str, Any]) -> None:
    """Refuse a number of a configuration, or of the rotary settings in it, that no model can have.

    Raises:
        ValueError: naming the field and what it may be.
    """
    for name, value in values.items():
        if name in NESTED and isinstance(value, Mapping):
            check_numbers(value)
        elif name == "rope_parameters" and value is not None:
            raise ValueError(f"rope_parameters must be a dictionary, not {value!r}.")
        elif name in ("short_factor", "long_factor") and value is not None:
            numbers = value if isinstance(value, (list, tuple)) else [None]
            if not all(isinstance(number, (int, float)) and 0 < number < 1e9 for number in numbers):
                raise ValueError(f"{name} of RoPE must be a list of numbers above 0, not {str(value)[:40]}.")
        elif name in ("hybrid_window", "hybrid_rank") and isinstance(value, list):
            for number in value:
                check_numbers({name: number or None})  # 0 where a layer is not hybrid
        elif name in BOUNDS and value is not None:
            low, high = BOUNDS[name]
            kind, what = (int, "a whole number") if isinstance(low, int) else ((int, float), "a number")
            if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
                limit = f"at most {high}" if isinstance(value, kind) and value > high else f"at least {low}"
                raise ValueError(f"{name} must be {what} of {limit}, not {str(value)[:40]}.")
