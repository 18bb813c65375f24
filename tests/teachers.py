"""Tiny random teachers of every family, with weights large enough that a wrong mapping shows."""

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
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
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 1.0,
}

TEACHERS = {
    "llama-gqa": (LlamaForCausalLM, LlamaConfig(**TINY)),
    "llama-mha-tied": (LlamaForCausalLM, LlamaConfig(**TINY | {"num_key_value_heads": 4}, tie_word_embeddings=True)),
    "llama-mqa-wide-heads": (LlamaForCausalLM, LlamaConfig(**TINY | {"num_key_value_heads": 1}, head_dim=16)),
    "llama-biases": (LlamaForCausalLM, LlamaConfig(**TINY, attention_bias=True, mlp_bias=True)),
    "llama-llama3-rope": (LlamaForCausalLM, LlamaConfig(**TINY, rope_parameters=dict(LLAMA3_ROPE))),
    "llama-yarn": (LlamaForCausalLM, LlamaConfig(**TINY, rope_parameters=dict(YARN_ROPE))),
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
    "phi": (PhiForCausalLM, PhiConfig(**TINY | {"num_key_value_heads": 4})),
    "phi-gqa-qk-norm": (PhiForCausalLM, PhiConfig(**TINY, qk_layernorm=True)),
}


def make_teacher(name: str, seed: int = 0, layers: int = 4) -> torch.nn.Module:
    """A teacher in float32, every parameter random, norms and biases too; windows stay in the same share of layers."""
    model_class, config = TEACHERS[name]
    fields = config.to_dict() | {"num_hidden_layers": layers}
    if layers != config.num_hidden_layers:
        fields.pop("layer_types", None)
        fields |= {"max_window_layers": layers // 2} if "max_window_layers" in fields else {}
    torch.manual_seed(seed)
    model = model_class(type(config)(**fields)).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name and parameter_name.endswith("weight"):
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            elif parameter.ndim == 1:
                parameter.copy_(0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model


def random_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Token ids without padding or special tokens."""
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))
