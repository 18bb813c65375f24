"""Published configurations, tokenizer classes, chat templates and generation settings of real models, made small.

What a file says is as published in 2026-11, but for sizes, and for token ids, which are moved into a small vocabulary
in their order. Where a number decides which way transformers takes (windows, positions, RoPE), it is the real one. Of
the models of 2025 and 2026 at the end, fields that are not named are left to transformers, whose defaults are those of
the checkpoint for Ministral 3, GLM-4, OLMo Hybrid and, but for positions, Qwen's; their chat templates are not theirs.
"""

from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 320
SMALL = dict(
    num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
    shared_expert_intermediate_size=40, shared_intermediate_size=40, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=6, linear_value_head_dim=8, mamba_n_heads=4, mamba_d_state=8, top_k_experts=2,
    global_head_dim=32, num_global_key_value_heads=1,
)  # fmt: skip
"""Sizes of experts and states, and of heads of full attention, in models that have them."""
HEAD_DIM = 16
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
CODE_SPLIT = WORDS + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Pattern of words in OLMo 2's and Llama 3's tokenizer.json; the classes for GPT-2 and Llama 2 have others."""
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
PHI3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
)
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}{% endif %}"
    "{% if m.role == 'assistant' %}{% set content = m.content %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}<|im_end|>{{ content }}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_end|><think>\n{% endif %}"
)


@dataclass(frozen=True)
class RealModel:
    """Files of one model; sizes are those published and are divided by `small_config`."""

    config: dict[str, Any]
    tokenizer_class: str
    template: str | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    bos: bool = True
    """True if the tokenizer puts BOS before a text."""
    pad: bool = True
    """True if the tokenizer has a pad token."""


def of(model_type: str, layers: int, hidden: int, heads: int, kv_heads: int, positions: int, **more: Any) -> dict:
    """Fields of a config.json."""
    sizes = dict(num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads)
    return {"model_type": model_type, "max_position_embeddings": positions} | sizes | more


LLAMA3_ROPE = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
LLAMA3_ENDS = dict(bos_token_id=128000, eos_token_id=[128001, 128008, 128009])
LONG = {
    "type": "longrope",
    "short_factor": [1.0 + i / 8 for i in range(48)],
    "long_factor": [1.0 + i for i in range(48)],
}
GEMMA_HEAD = dict(
    head_dim=256, query_pre_attn_scalar=256, hidden_activation="gelu_pytorch_tanh", bos_token_id=2, eos_token_id=1,
    pad_token_id=0,
)  # fmt: skip
GEMMA3_TEXT = dict(sliding_window=512, sliding_window_pattern=6, rope_theta=1e6, rope_local_base_freq=1e4) | GEMMA_HEAD
SAMPLED = dict(do_sample=True, temperature=0.6, top_p=0.9)
DELTA_NET = dict(
    linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16,
    linear_num_value_heads=32,
)  # fmt: skip
QWEN3_5 = DELTA_NET | dict(
    head_dim=256, eos_token_id=248044, attn_output_gate=True, mtp_num_hidden_layers=1, mamba_ssm_dtype="float32",
    rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                     "mrope_interleaved": True, "mrope_section": [11, 11, 10]},
)  # fmt: skip
GEMMA4_TEXT = dict(
    head_dim=256, global_head_dim=512, attention_k_eq_v=True, use_bidirectional_attention="vision",
    hidden_size_per_layer_input=0, num_kv_shared_layers=0, sliding_window=1024, final_logit_softcapping=30.0,
    layer_types=[*["sliding_attention"] * 5, "full_attention"] * 10, bos_token_id=2, eos_token_id=1, pad_token_id=0,
    rope_parameters={
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
)  # fmt: skip
LLAMA_2 = dict(rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2)

REAL_MODELS = {
    "Llama-2-7b": RealModel(
        of("llama", 32, 4096, 32, 32, 4096, rope_scaling=None, **LLAMA_2), "LlamaTokenizer", None,
        dict(bos_token_id=1, eos_token_id=2, pad_token_id=0, temperature=0.9, top_p=0.6, max_length=4096), pad=False,
    ),
    "Llama-2-7b-chat": RealModel(
        of("llama", 32, 4096, 32, 32, 4096, **LLAMA_2), "LlamaTokenizer", INST,
        dict(bos_token_id=1, eos_token_id=2, pad_token_id=0, **SAMPLED), pad=False,
    ),
    "vicuna-7b-v1.5": RealModel(
        of("llama", 32, 4096, 32, 32, 4096, use_cache=False, pad_token_id=0, **LLAMA_2), "LlamaTokenizer", None,
        dict(bos_token_id=1, eos_token_id=2, max_length=4096, pad_token_id=0, temperature=0.9, top_p=0.6),
    ),
    "TinyLlama-1.1B-Chat": RealModel(
        of("llama", 22, 2048, 32, 4, 2048, rope_theta=1e4, **LLAMA_2), "LlamaTokenizer", CHATML,
        dict(bos_token_id=1, eos_token_id=2, pad_token_id=0, max_length=2048),
    ),
    "Llama-3.1-8B-Instruct": RealModel(
        of("llama", 32, 4096, 32, 8, 131072, rope_theta=5e5, rope_scaling=LLAMA3_ROPE, **LLAMA3_ENDS),
        "PreTrainedTokenizerFast", LLAMA3, SAMPLED | LLAMA3_ENDS, pad=False,
    ),
    "Llama-3.2-1B": RealModel(
        of("llama", 16, 2048, 32, 8, 131072, head_dim=64, rope_theta=5e5, rope_scaling=LLAMA3_ROPE | {"factor": 32.0},
           tie_word_embeddings=True, bos_token_id=128000, eos_token_id=128001),
        "PreTrainedTokenizerFast", None, SAMPLED | dict(bos_token_id=128000, eos_token_id=128001), pad=False,
    ),
    "SmolLM2-135M-Instruct": RealModel(
        of("llama", 30, 576, 9, 3, 8192, rope_theta=1e5, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
           pad_token_id=2, rope_interleaved=False), "GPT2Tokenizer", CHATML,
        dict(bos_token_id=1, eos_token_id=2, pad_token_id=2), bos=False,
    ),
    "SmolLM3-3B": RealModel(
        of("smollm3", 36, 2048, 16, 4, 65536, rope_theta=5e6, no_rope_layers=[1, 1, 1, 0] * 9,
           use_sliding_window=False, sliding_window=None, max_window_layers=28, tie_word_embeddings=True,
           bos_token_id=128000, eos_token_id=128012, pad_token_id=128004), "PreTrainedTokenizerFast", CHATML,
        SAMPLED | dict(bos_token_id=128000, eos_token_id=128012, pad_token_id=128004), bos=False,
    ),
    "Yi-1.5-6B-Chat": RealModel(
        of("llama", 32, 4096, 32, 4, 4096, rope_theta=5e6, bos_token_id=1, eos_token_id=7, pad_token_id=0),
        "LlamaTokenizer", CHATML, SAMPLED | dict(bos_token_id=1, eos_token_id=7, pad_token_id=0), bos=False,
    ),
    "deepseek-coder-1.3b": RealModel(
        of("llama", 24, 2048, 16, 16, 16384, rope_theta=1e5, rope_scaling={"type": "linear", "factor": 4.0},
           bos_token_id=32013, eos_token_id=32021), "LlamaTokenizerFast", INST,
        dict(bos_token_id=32013, eos_token_id=32021),
    ),
    "DeepSeek-R1-Distill-Llama-8B": RealModel(
        of("llama", 32, 4096, 32, 8, 131072, rope_theta=5e5, rope_scaling=LLAMA3_ROPE, bos_token_id=128000,
           eos_token_id=128001), "LlamaTokenizerFast", R1,
        dict(do_sample=True, temperature=0.6, top_p=0.95, bos_token_id=128000, eos_token_id=128001),
    ),
    "DeepSeek-R1-Distill-Qwen-1.5B": RealModel(
        of("qwen2", 28, 1536, 12, 2, 131072, rope_theta=1e4, sliding_window=4096, use_sliding_window=False,
           max_window_layers=21, use_mrope=False, bos_token_id=151643, eos_token_id=151643), "LlamaTokenizerFast", R1,
        dict(do_sample=True, temperature=0.6, top_p=0.95, bos_token_id=151646, eos_token_id=151643),
    ),
    "Mistral-7B-v0.1": RealModel(
        of("mistral", 32, 4096, 32, 8, 32768, sliding_window=4096, rope_theta=1e4, **LLAMA_2), "LlamaTokenizer",
        generation=dict(bos_token_id=1, eos_token_id=2), pad=False,
    ),
    "Mistral-7B-Instruct-v0.3": RealModel(
        of("mistral", 32, 4096, 32, 8, 32768, sliding_window=None, rope_theta=1e6, **LLAMA_2), "LlamaTokenizer", INST,
        dict(bos_token_id=1, eos_token_id=2), pad=False,
    ),
    "Mixtral-8x7B-Instruct": RealModel(
        of("mixtral", 32, 4096, 32, 8, 32768, sliding_window=None, rope_theta=1e6, num_local_experts=8,
           num_experts_per_tok=2, output_router_logits=False, router_aux_loss_coef=0.02, **LLAMA_2),
        "LlamaTokenizer", INST, dict(bos_token_id=1, eos_token_id=2, pad_token_id=2), pad=False,
    ),
    "Qwen2.5-0.5B-Instruct": RealModel(
        of("qwen2", 24, 896, 14, 2, 32768, rope_theta=1e6, sliding_window=32768, use_sliding_window=False,
           max_window_layers=21, tie_word_embeddings=True, bos_token_id=151643, eos_token_id=151645),
        "Qwen2Tokenizer", CHATML,
        dict(bos_token_id=151643, pad_token_id=151643, eos_token_id=[151645, 151643], do_sample=True,
             repetition_penalty=1.1, temperature=0.7, top_p=0.8, top_k=20), bos=False,
    ),
    "Qwen3-0.6B": RealModel(
        of("qwen3", 28, 1024, 16, 8, 40960, head_dim=128, rope_theta=1e6, sliding_window=None, max_window_layers=28,
           use_sliding_window=False, tie_word_embeddings=True, bos_token_id=151643, eos_token_id=151645),
        "Qwen2Tokenizer", CHATML,
        dict(bos_token_id=151643, pad_token_id=151643, eos_token_id=[151645, 151643], do_sample=True,
             temperature=0.6, top_p=0.95, top_k=20), bos=False,
    ),
    "Qwen3-30B-A3B": RealModel(
        of("qwen3_moe", 48, 2048, 32, 4, 40960, head_dim=128, rope_theta=1e6, num_experts=128, num_experts_per_tok=8,
           moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True,
           max_window_layers=48, use_sliding_window=False, sliding_window=None, output_router_logits=False,
           router_aux_loss_coef=0.001, bos_token_id=151643, eos_token_id=151645), "Qwen2Tokenizer", CHATML,
        dict(bos_token_id=151643, pad_token_id=151643, eos_token_id=[151645, 151643], **SAMPLED), bos=False,
    ),
    "gemma-2-2b-it": RealModel(
        of("gemma2", 26, 2304, 8, 4, 8192, sliding_window=4096, attn_logit_softcapping=50.0,
           final_logit_softcapping=30.0, rope_theta=1e4, cache_implementation="hybrid", **GEMMA_HEAD),
        "GemmaTokenizer", GEMMA,
        dict(bos_token_id=2, cache_implementation="hybrid", eos_token_id=[1, 107], pad_token_id=0),
    ),
    "gemma-3-1b-it": RealModel(
        of("gemma3_text", 26, 1152, 4, 1, 32768, **GEMMA3_TEXT | dict(eos_token_id=[1, 106])),
        "GemmaTokenizer", GEMMA,
        dict(bos_token_id=2, cache_implementation="hybrid", do_sample=True, eos_token_id=[1, 106], pad_token_id=0,
             top_k=64, top_p=0.95),
    ),
    "gemma-3-270m": RealModel(
        of("gemma3_text", 18, 640, 4, 1, 32768, **GEMMA3_TEXT), "GemmaTokenizer", None,
        dict(cache_implementation="hybrid", do_sample=True, top_k=64, top_p=0.95),
    ),
    "phi-1_5": RealModel(
        of("phi", 24, 2048, 32, 32, 2048, partial_rotary_factor=0.5, qk_layernorm=False, rope_theta=1e4,
           hidden_act="gelu_new", bos_token_id=None, eos_token_id=None), "CodeGenTokenizer", bos=False, pad=False,
    ),
    "phi-2": RealModel(
        of("phi", 32, 2560, 32, 32, 2048, partial_rotary_factor=0.4, qk_layernorm=False, rope_theta=1e4,
           resid_pdrop=0.1, hidden_act="gelu_new", bos_token_id=50256, eos_token_id=50256), "CodeGenTokenizer", None,
        dict(bos_token_id=50256, eos_token_id=50256), bos=False, pad=False,
    ),
    "Phi-3.5-mini-instruct": RealModel(
        of("phi3", 32, 3072, 32, 32, 131072, original_max_position_embeddings=4096, rope_scaling=LONG, rope_theta=1e4,
           sliding_window=262144, bos_token_id=1, eos_token_id=32000, pad_token_id=32000), "LlamaTokenizer", PHI3,
        dict(bos_token_id=1, eos_token_id=[32007, 32001, 32000], pad_token_id=32000), bos=False,
    ),
    "Phi-4-mini-instruct": RealModel(
        of("phi3", 32, 3072, 24, 8, 131072, original_max_position_embeddings=4096, rope_scaling=LONG, rope_theta=1e4,
           partial_rotary_factor=0.75, sliding_window=262144, tie_word_embeddings=True, bos_token_id=199999,
           eos_token_id=199999, pad_token_id=199999), "GPT2Tokenizer", PHI3,
        dict(bos_token_id=199999, eos_token_id=[200020, 199999], pad_token_id=199999), bos=False,
    ),
    "OLMo-2-0425-1B-Instruct": RealModel(
        of("olmo2", 16, 2048, 16, 16, 4096, rope_theta=5e5, rms_norm_eps=1e-6, eos_token_id=100257,
           pad_token_id=100277, bos_token_id=None), "GPT2Tokenizer", CHATML,
        dict(eos_token_id=100257, pad_token_id=100277), bos=False,
    ),
    "Olmo-3-7B-Instruct": RealModel(
        of("olmo3", 32, 4096, 32, 32, 65536, rope_theta=5e5, sliding_window=4096, eos_token_id=100257,
           pad_token_id=100277, bos_token_id=None,
           rope_scaling={"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
                         "attention_factor": 1.2079441541679836, "original_max_position_embeddings": 8192}),
        "GPT2Tokenizer", CHATML, dict(eos_token_id=[100265, 100257], max_new_tokens=32768, **SAMPLED), bos=False,
    ),
    "granite-3.3-2b-instruct": RealModel(
        of("granite", 40, 2048, 32, 8, 131072, rope_theta=1e7, attention_multiplier=0.015625,
           embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.22, tie_word_embeddings=True,
           bos_token_id=0, eos_token_id=0,
           pad_token_id=0), "GPT2Tokenizer", CHATML, dict(bos_token_id=0, eos_token_id=0, pad_token_id=0), bos=False,
    ),
    "Qwen3.5-27B": RealModel(
        of("qwen3_5_text", 64, 5120, 24, 4, 262144, intermediate_size=17408, **QWEN3_5), "Qwen2Tokenizer", CHATML,
        bos=False,
    ),
    "Qwen3.5-35B-A3B": RealModel(
        of("qwen3_5_moe_text", 40, 2048, 16, 2, 262144, num_experts=256, num_experts_per_tok=8,
           moe_intermediate_size=512, shared_expert_intermediate_size=512, router_aux_loss_coef=0.001,
           mlp_only_layers=[], **QWEN3_5), "Qwen2Tokenizer", CHATML, bos=False,
    ),
    "Qwen3-Coder-Next": RealModel(
        of("qwen3_next", 48, 2048, 16, 2, 262144, head_dim=256, rope_theta=5e6, partial_rotary_factor=0.25,
           intermediate_size=5120, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512,
           shared_expert_intermediate_size=512, decoder_sparse_step=1, norm_topk_prob=True, full_attention_interval=4,
           use_sliding_window=False, router_aux_loss_coef=0.001, bos_token_id=151643, eos_token_id=151645,
           **DELTA_NET), "Qwen2Tokenizer", CHATML, bos=False,
    ),
    "LFM2-350M": RealModel(
        of("lfm2", 16, 1024, 16, 8, 128000, intermediate_size=4608, block_auto_adjust_ff_dim=False, conv_L_cache=3,
           full_attn_idxs=[2, 5, 8, 10, 12, 14], norm_eps=1e-5, bos_token_id=1, eos_token_id=7, pad_token_id=0),
        "PreTrainedTokenizerFast", CHATML,
    ),
    "granite-4.0-h-small": RealModel(
        of("granitemoehybrid", 40, 4096, 32, 8, 131072, num_local_experts=72, num_experts_per_tok=10,
           intermediate_size=768, shared_intermediate_size=1536, mamba_d_state=128, mamba_d_conv=4, mamba_expand=2,
           tie_word_embeddings=True, position_embedding_type="nope", mamba_n_heads=128,
           bos_token_id=100257, eos_token_id=100257, pad_token_id=100256,
           layer_types=[*["linear_attention"] * 5, "full_attention", *["linear_attention"] * 4] * 4),
        "GPT2Tokenizer", CHATML, bos=False,
    ),
    "Olmo-Hybrid-7B": RealModel(
        of("olmo_hybrid", 32, 3840, 30, 30, 65536, rope_parameters=None, rms_norm_eps=1e-6, bos_token_id=None,
           eos_token_id=100257, pad_token_id=100277, linear_conv_kernel_dim=4, linear_allow_neg_eigval=True,
           linear_num_key_heads=30, linear_num_value_heads=30, linear_key_head_dim=96, linear_value_head_dim=192),
        "GPT2Tokenizer", CHATML, bos=False,
    ),
    "Ministral-3-8B-Instruct-2512": RealModel(
        of("ministral3", 34, 4096, 32, 8, 262144, head_dim=128, sliding_window=None, bos_token_id=1, eos_token_id=2,
           pad_token_id=11,
           rope_parameters={"type": "yarn", "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0,
                            "original_max_position_embeddings": 16384, "beta_fast": 32.0, "beta_slow": 1.0,
                            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}),
        "PreTrainedTokenizerFast", INST,
    ),
    "GLM-4-9B-0414": RealModel(
        of("glm4", 40, 4096, 32, 2, 131072, head_dim=128, attention_bias=True, partial_rotary_factor=0.5,
           rope_theta=1e4, pad_token_id=151329, eos_token_id=[151329, 151336, 151338]), "PreTrainedTokenizerFast",
        CHATML, bos=False,
    ),
    "gemma-4-31B": RealModel(
        of("gemma4_text", 60, 5376, 32, 16, 262144, intermediate_size=21504, num_global_key_value_heads=4,
           **GEMMA4_TEXT), "GemmaTokenizer",
    ),
    "gemma-4-26B-A4B": RealModel(
        of("gemma4_text", 30, 2816, 16, 8, 262144, intermediate_size=2112, num_global_key_value_heads=2,
           enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704,
           **GEMMA4_TEXT | {"layer_types": GEMMA4_TEXT["layer_types"][:30]}), "GemmaTokenizer",
    ),
    "gpt-oss-20b": RealModel(
        of("gpt_oss", 24, 2880, 64, 8, 131072, head_dim=64, attention_bias=True, sliding_window=128,
           layer_types=["sliding_attention", "full_attention"] * 12, num_local_experts=32, num_experts_per_tok=4,
           experts_per_token=4, initial_context_length=4096, swiglu_limit=7.0, router_aux_loss_coef=0.9,
           output_router_logits=False, rope_theta=150000, eos_token_id=200002, pad_token_id=199999,
           rope_scaling={"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False,
                         "original_max_position_embeddings": 4096}),
        "PreTrainedTokenizerFast", CHATML, bos=False,
    ),
}  # fmt: skip


def small_ids(fields: dict[str, Any]) -> dict[str, int]:
    """Map the special token ids of a model to ids at the end of a small vocabulary, in the same order."""
    found: set[int] = set()
    for name, value in fields.items():
        if name.endswith("_token_id") and value is not None:
            found |= set(value) if isinstance(value, list) else {value}
    beyond = sorted(number for number in found if number >= VOCABULARY - 16)
    return {number: VOCABULARY - len(beyond) + i for i, number in enumerate(beyond)}


def small_config(model: RealModel) -> dict[str, Any]:
    """A config.json with few layers, narrow heads in the published proportion and a small vocabulary."""
    config = dict(model.config)
    layers, shared = config["num_hidden_layers"], config["num_attention_heads"] // config["num_key_value_heads"]
    count = 6 if "sliding_window_pattern" in config else 4
    kv_heads = min(config["num_key_value_heads"], 2)
    heads = kv_heads * min(shared, 8)
    config |= dict(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=heads * HEAD_DIM)
    config |= dict(num_hidden_layers=count, intermediate_size=96, vocab_size=VOCABULARY, initializer_range=0.1)
    if "head_dim" in config:
        config |= dict(head_dim=HEAD_DIM, hidden_size=64)
    if "query_pre_attn_scalar" in config:
        config["query_pre_attn_scalar"] = HEAD_DIM
    config |= {name: size for name, size in SMALL.items() if name in config}
    if "layer_types" in config:
        count = max(count, config["layer_types"].index("full_attention") + 1)
        config |= dict(num_hidden_layers=count, layer_types=config["layer_types"][:count])
    if "mrope_section" in (rope := config.get("rope_parameters") or {}):
        config["rope_parameters"] = rope | {"mrope_section": [1, 1, 0]}
    if "no_rope_layers" in config:
        config["no_rope_layers"] = config["no_rope_layers"][:count]
    if "max_window_layers" in config:
        config["max_window_layers"] = config["max_window_layers"] * count // layers
    if isinstance(rope := config.get("rope_scaling"), dict) and "long_factor" in rope:
        turned = int(HEAD_DIM * config.get("partial_rotary_factor", 1.0)) // 2
        factors = {name: rope[name][:turned] for name in ("short_factor", "long_factor")}
        config["rope_scaling"] = rope | factors
    ids = small_ids(config | model.generation)
    for name, value in config.items():
        if name.endswith("_token_id") and value is not None:
            config[name] = [ids.get(v, v) for v in value] if isinstance(value, list) else ids.get(value, value)
    return config


def small_generation(model: RealModel) -> dict[str, Any] | None:
    """A generation_config.json, or None where none was published."""
    ids, found = small_ids(model.config | model.generation), {}
    for name, value in model.generation.items():
        if name.endswith("_token_id"):
            value = [ids.get(v, v) for v in value] if isinstance(value, list) else ids.get(value, value)
        found[name] = value
    return found or None
