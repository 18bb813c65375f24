"""Tiny random teachers of every family, with weights large enough that a wrong mapping shows."""

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

VOCAB = 128
TINY = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
MINISTRAL_ROPE = YARN_ROPE | {
    "original_max_position_embeddings": 8,  # so that few tokens have several factors
    "beta_fast": 16.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "llama_4_scaling_beta": 0.3,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 1.0,
}
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.75}

MIXED = ["sliding_attention", "full_attention"] * 2
TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
}

PROPORTIONAL_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
    "full_attention": {
        "rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "factor": 2.0,
    },
}  # fmt: skip
GEMMA4 = TINY | dict(
    num_key_value_heads=4,
    head_dim=16,
    num_global_key_value_heads=2,
    global_head_dim=32,
    attention_k_eq_v=True,
    attention_bias=True,
    hidden_size_per_layer_input=0,
    sliding_window=8,
    layer_types=MIXED,
    rope_parameters=PROPORTIONAL_ROPE,
    final_logit_softcapping=3.0,
    use_bidirectional_attention="vision",
)

MROPE = {
    "rope_type": "default",
    "rope_theta": 1e3,
    "partial_rotary_factor": 0.5,
    "mrope_interleaved": True,
    "mrope_section": [2, 1, 1],
}
DELTA_NET = dict(
    head_dim=16,
    attention_bias=True,
    layer_types=["linear_attention", "full_attention"] * 2,
    linear_conv_kernel_dim=3,
    linear_key_head_dim=6,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
SHARED_EXPERT = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=20
)  # fmt: skip

GRANITE = dict(embedding_multiplier=12.0, attention_multiplier=0.2, residual_multiplier=0.22, logits_scaling=8.0)
MAMBA = dict(
    layer_types=["linear_attention", "full_attention"] * 2,
    shared_intermediate_size=20,
    mamba_n_heads=4,
    mamba_n_groups=2,
    mamba_d_state=6,
    mamba_d_conv=3,
    mamba_chunk_size=16,
)

TEACHERS = {
    "llama-gqa": (LlamaForCausalLM, LlamaConfig(**TINY)),
    "llama-mha-tied": (LlamaForCausalLM, LlamaConfig(**TINY | {"num_key_value_heads": 4}, tie_word_embeddings=True)),
    "llama-mqa-wide-heads": (LlamaForCausalLM, LlamaConfig(**TINY | {"num_key_value_heads": 1}, head_dim=16)),
    "llama-biases": (LlamaForCausalLM, LlamaConfig(**TINY, attention_bias=True, mlp_bias=True)),
    "llama-llama3-rope": (LlamaForCausalLM, LlamaConfig(**TINY, rope_parameters=dict(LLAMA3_ROPE))),
    "llama-yarn": (LlamaForCausalLM, LlamaConfig(**TINY, rope_parameters=dict(YARN_ROPE))),
    "ministral3": (Ministral3ForCausalLM, Ministral3Config(**TINY, head_dim=16, rope_parameters=dict(MINISTRAL_ROPE))),
    "mistral-window": (MistralForCausalLM, MistralConfig(**TINY, sliding_window=8)),
    "mistral-no-window": (MistralForCausalLM, MistralConfig(**TINY, sliding_window=None)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**TINY)),
    "qwen2-mixed-window": (
        Qwen2ForCausalLM,
        Qwen2Config(**TINY, use_sliding_window=True, sliding_window=8, max_window_layers=2, tie_word_embeddings=True),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**TINY, head_dim=16)),
    "phi3": (Phi3ForCausalLM, Phi3Config(**TINY)),
    "phi3-longrope": (Phi3ForCausalLM, Phi3Config(**TINY, rope_parameters=dict(LONGROPE))),
    "phi3-partial-rotary-window": (
        Phi3ForCausalLM,
        Phi3Config(**TINY, sliding_window=8, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    ),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config(
            **TINY,
            head_dim=16,
            sliding_window=8,
            query_pre_attn_scalar=20,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **TINY,
            head_dim=16,
            sliding_window=8,
            layer_types=MIXED,
            rope_parameters=TWO_ROPES,
            query_pre_attn_scalar=20,
        ),
    ),
    "gemma4": (Gemma4ForCausalLM, Gemma4TextConfig(**GEMMA4)),
    "gemma4-experts": (
        Gemma4ForCausalLM,
        Gemma4TextConfig(
            **GEMMA4 | {"attention_k_eq_v": False, "attention_bias": False, "tie_word_embeddings": False},
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=24,
        ),
    ),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config(**TINY)),
    "olmo3": (
        Olmo3ForCausalLM,
        Olmo3Config(
            **TINY,
            sliding_window=8,
            layer_types=MIXED,
            rope_parameters={"sliding_attention": {"rope_theta": 1e4}, "full_attention": dict(YARN_ROPE)},
        ),
    ),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config(**TINY, no_rope_layers=[1, 0, 1, 0])),
    "granite": (
        GraniteForCausalLM,
        GraniteConfig(**TINY, **GRANITE),
    ),
    "glm4": (Glm4ForCausalLM, Glm4Config(**TINY, head_dim=16, rope_parameters=dict(PARTIAL_ROPE))),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2)),
    "qwen3-moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **TINY,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            mlp_only_layers=[1],
        ),
    ),
    "qwen3-5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig(**TINY, **DELTA_NET, rope_parameters=MROPE)),
    "qwen3-5-moe": (
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeTextConfig(**TINY, **DELTA_NET, **SHARED_EXPERT, rope_parameters=MROPE),
    ),
    "qwen3-next": (Qwen3NextForCausalLM, Qwen3NextConfig(**TINY, **DELTA_NET, **SHARED_EXPERT, mlp_only_layers=[1])),
    "lfm2": (
        Lfm2ForCausalLM,
        Lfm2Config(
            **TINY,
            layer_types=["conv", "full_attention"] * 2,
            conv_L_cache=4,
            block_multiple_of=5,
            block_ffn_dim_multiplier=1.5,
            tie_word_embeddings=False,
        ),
    ),
    "granite4": (
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig(**TINY, **MAMBA, **GRANITE, num_local_experts=4, num_experts_per_tok=2),
    ),
    "granite4-dense": (
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig(
            **TINY,
            **MAMBA,
            num_local_experts=0,
            attention_bias=True,
            attention_multiplier=0.3,
            position_embedding_type="rope",
            mamba_conv_bias=False,
        ),
    ),
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig(
            **TINY,
            head_dim=16,
            sliding_window=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            swiglu_alpha=1.3,
            swiglu_limit=0.8,
            rope_parameters=YARN_ROPE | {"truncate": False},
        ),
    ),
    "olmo-hybrid": (
        OlmoHybridForCausalLM,
        OlmoHybridConfig(**TINY, **{k: v for k, v in DELTA_NET.items() if k != "head_dim"}),
    ),
    "olmo-hybrid-rope": (
        OlmoHybridForCausalLM,
        OlmoHybridConfig(
            **TINY,
            layer_types=DELTA_NET["layer_types"],
            linear_key_head_dim=6,
            linear_allow_neg_eigval=False,
            rope_parameters={"rope_type": "default", "rope_theta": 1e3},
        ),
    ),
    "phi": (PhiForCausalLM, PhiConfig(**TINY | {"num_key_value_heads": 4})),
    "phi-gqa-qk-norm": (PhiForCausalLM, PhiConfig(**TINY, qk_layernorm=True)),
}


STATEFUL = [
    "qwen3-5", "qwen3-5-moe", "qwen3-next", "lfm2", "granite4", "granite4-dense", "olmo-hybrid", "olmo-hybrid-rope"
]  # fmt: skip
"""Teachers that are hybrids already."""
WITHOUT_MIXERS = [*STATEFUL, "gpt-oss", "gemma4", "gemma4-experts"]
"""Teachers that are hybrids already, or whose attention has gates, learned sinks or norms on values: no mixer takes
its place without a window."""
WITH_MIXERS = [name for name in TEACHERS if name not in WITHOUT_MIXERS]
FIRST = [name for name in TEACHERS if name.startswith(("llama", "mistral", "qwen2", "phi")) or name == "qwen3"]
"""Teachers that take every variant of a test; the others are other blocks around the same attention, and take some."""


def make_teacher(name: str, seed: int = 0, layers: int = 4, **overrides) -> torch.nn.Module:
    """A teacher in float32, every parameter random, norms and biases too; windows stay in the same share of layers."""
    model_class, config = TEACHERS[name]
    fields = config.to_dict() | {"num_hidden_layers": layers}
    if layers != config.num_hidden_layers:
        fields |= {name: fields[name][:layers] for name in ("layer_types", "no_rope_layers") if fields.get(name)}
        if "per_layer_config" in fields:
            fields["per_layer_config"] = {i: of for i, of in fields["per_layer_config"].items() if int(i) < layers}
        if "max_window_layers" in fields:
            fields |= {"max_window_layers": layers // 2, "layer_types": None}
    torch.manual_seed(seed)
    model = model_class(type(config)(**fields | overrides)).eval()
    with torch.no_grad():
        scalars = ((name, t) for name, t in model.named_buffers() if name.endswith("layer_scalar"))
        for parameter_name, parameter in (*model.named_parameters(), *scalars):
            is_norm = "norm" in parameter_name and parameter_name.endswith("weight")
            if is_norm or parameter_name.endswith("layer_scalar"):
                unit_offset = name.startswith(("gemma2", "gemma3", "qwen3-5", "qwen3-next"))
                offset = "linear_attn" in parameter_name or not unit_offset
                parameter.copy_(float(offset) + 0.2 * torch.randn_like(parameter))
                if name.startswith("gemma4") and parameter_name.endswith("k_norm.weight"):
                    parameter.mul_(len(parameter) ** -0.5)  # where other teachers have a factor on scores
            elif parameter.ndim == 1:
                parameter.copy_(0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model


def random_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Token ids without padding or special tokens."""
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))
