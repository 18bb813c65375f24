"""The two classes of hybrid that a conversion or an import writes: the shapes of their tensors and states."""

import functools
import json
from collections.abc import Callable
from types import SimpleNamespace

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, LinearAttentionLayer

import modeling_llamba
import modeling_phimamba
from modeling_llamba.model.attention import SoftmaxAttention
from modeling_llamba.model.config_values import RECURRENT
from modeling_llamba.model.mixer import make_mixer

HYBRIDS = {"llamba": modeling_llamba.LlambaConfig, "phimamba": modeling_phimamba.PhiMambaConfig}
OWN_FIELDS = {"mixer", "format_version"}
"""Fields of config.json by which a hybrid of this project is known: the first where it holds mixers, the other unless
an early version wrote it."""
MIXER_LAYERS = ("linear_attention", "hybrid")
"""Layer types whose attention was replaced."""
LAYER_LETTERS = {
    "full_attention": ("A", "attention"),
    "sliding_attention": ("A", "attention"),
    "hybrid": ("H", "hybrid"),
    "linear_attention": ("M", "mixer"),
    RECURRENT: ("R", "the teacher's own state"),
}
"""The letter that stands for each type of layer, and its meaning."""
Shapes = dict[str, tuple[int, ...]]


def model_class(model_type: str) -> type:
    """The causal language model of a hybrid; the first call takes seconds, since it imports transformers' models."""
    assert model_type in HYBRIDS, model_type
    if model_type == "llamba":
        return modeling_llamba.LlambaForCausalLM
    return modeling_phimamba.PhiMambaForCausalLM


def tensor_shapes(config: PreTrainedConfig) -> Shapes:
    """Names and shapes of a hybrid's tensors, in its own order; a tied head is left out.

    Written down here instead of read off a model, since a plan is made without transformers' models.
    """
    sizes = config.vocab_size, config.hidden_size
    shapes = {"model.embed_tokens.weight": sizes}
    for layer in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _block_shapes(config, layer).items()}
    shapes |= _norm("model.norm", config)
    if not config.tie_word_embeddings:
        shapes |= {"lm_head.weight": sizes}
    if config.lm_head_bias:
        shapes |= {"lm_head.bias": sizes[:1]}
    return shapes


def _block_shapes(config: PreTrainedConfig, layer: int) -> Shapes:
    hidden = config.hidden_size
    inner = config.intermediate_size
    if config.layer_types[layer] in MIXER_LAYERS:
        shapes = mixer_shapes(config, layer)
    elif config.layer_types[layer] == RECURRENT:
        from modeling_llamba.model.recurrent import RecurrentMixer  # here, since it imports transformers' models

        shapes = _module_shapes("recurrent", RecurrentMixer, config, layer)
    else:
        shapes = _module_shapes("self_attn", SoftmaxAttention, config, layer)
    if config.model_type == "phimamba":
        shapes |= _linear("mlp.fc1", hidden, inner, True) | _linear("mlp.fc2", inner, hidden, True)
        return shapes | _norm("input_layernorm", config)
    if config.layer_scalar:
        shapes = {"layer_scalar": (1,)} | shapes
    if config.has_experts(layer):
        count = config.num_experts
        width = config.moe_intermediate_size
        if config.swiglu_limit is None:
            shapes |= {
                "mlp.experts.gate_up_proj": (count, 2 * width, hidden),
                "mlp.experts.down_proj": (count, hidden, width),
                "mlp.gate.weight": (count, hidden),
            }
        else:
            shapes |= {
                "mlp.router.weight": (count, hidden),
                "mlp.router.bias": (count,),
                "mlp.experts.gate_up_proj": (count, hidden, 2 * width),
                "mlp.experts.gate_up_proj_bias": (count, 2 * width),
                "mlp.experts.down_proj": (count, width, hidden),
                "mlp.experts.down_proj_bias": (count, hidden),
            }
        if (shared := config.shared_expert_intermediate_size) is not None:
            shapes |= _gated_mlp("mlp.shared_expert", hidden, shared, config.mlp_bias)
            if config.shared_expert_gate:
                shapes |= {"mlp.shared_expert_gate.weight": (1, hidden)}
    else:
        shapes |= _gated_mlp("mlp", hidden, inner, config.mlp_bias)
    norms = {"input_layernorm": "after", "mixer_out_norm": "before"}
    norms |= {"post_attention_layernorm": "after", "mlp_out_norm": "before"}
    for name, absent in norms.items():
        if config.norms_of(layer) != absent:
            shapes |= _norm(name, config)
    if config.experts_beside_mlp:
        count = config.num_experts
        width = config.moe_intermediate_size
        shapes |= {
            "beside_mlp.router.scale": (hidden,),
            "beside_mlp.router.per_expert_scale": (count,),
            "beside_mlp.router.proj.weight": (count, hidden),
            "beside_mlp.experts.gate_up_proj": (count, 2 * width, hidden),
            "beside_mlp.experts.down_proj": (count, hidden, width),
        }
        for name in ("mlp_norm", "input_norm", "output_norm"):
            shapes |= _norm(f"beside_mlp.{name}", config)
    return shapes


def mixer_shapes(config: PreTrainedConfig, layer: int) -> Shapes:
    """Names and shapes of the tensors of a mixer, as they are called in a block."""
    return _module_shapes("mixer", make_mixer, config, layer)


def _module_shapes(name: str, make: Callable, config: PreTrainedConfig, layer: int) -> Shapes:
    with torch.device("meta"):
        module = make(config, layer)
    return {f"{name}.{parameter}": tuple(tensor.shape) for parameter, tensor in module.state_dict().items()}


def _gated_mlp(name: str, hidden: int, inner: int, bias: bool) -> Shapes:
    shapes = _linear(f"{name}.gate_proj", hidden, inner, bias) | _linear(f"{name}.up_proj", hidden, inner, bias)
    return shapes | _linear(f"{name}.down_proj", inner, hidden, bias)


def _linear(name: str, width_in: int, width_out: int, bias: bool) -> Shapes:
    shapes = {f"{name}.weight": (width_out, width_in)}
    if bias:
        shapes[f"{name}.bias"] = (width_out,)
    return shapes


def _norm(name: str, config: PreTrainedConfig) -> Shapes:
    parts = ("weight",)
    if config.model_type == "phimamba":
        parts = ("weight", "bias")
    return {f"{name}.{part}": (config.hidden_size,) for part in parts}


def state_sizes(config: PreTrainedConfig) -> tuple[int, int]:
    """Number of elements of the convolution's and of the recurrent state in a layer that keeps its teacher's state."""
    read = {"hidden_size": config.hidden_size, "hidden_act": config.hidden_act, "norm_eps": config.norm_eps}
    return _state_sizes(json.dumps(read | {"recurrent": config.recurrent}))


@functools.cache
def _state_sizes(fields: str) -> tuple[int, int]:
    """Read the sizes off a pass of one token on the meta device.

    They are cached, since the search for a placement needs them for every candidate.

    Args:
        fields: fields of the configuration from which the module is made, as JSON.
    """
    from modeling_llamba.model.recurrent import RecurrentMixer  # here, since it imports transformers' models

    cache = DynamicCache()
    cache.layers = [LinearAttentionLayer()]
    config = SimpleNamespace(**json.loads(fields))
    with torch.device("meta"):
        RecurrentMixer(config, 0)(torch.zeros(1, 1, config.hidden_size), None, None, cache)
    (layer,) = cache.layers
    kinds = layer.conv_states, layer.recurrent_states
    return tuple(sum(t.numel() for t in states.values() if t is not None) for states in kinds)


def meta_shapes(model_class: type, config: PreTrainedConfig) -> Shapes:
    """Names and shapes of the tensors that a model class stores, made on the meta device."""
    with torch.device("meta"):
        model = model_class(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return shapes


def layer_letters(layer_types: list[str]) -> str:
    """Write a model's layers as one letter per layer."""
    return "".join(LAYER_LETTERS[kind][0] for kind in layer_types)


def legend_of_letters(layer_types: list[str], hybrid: str = LAYER_LETTERS["hybrid"][1]) -> str:
    """Explain the letters of these layers: "A attention, H hybrid"; `hybrid` are other words for a hybrid layer."""
    words = LAYER_LETTERS | {"hybrid": ("H", hybrid)}
    return ", ".join(sorted({" ".join(words[kind]) for kind in layer_types}))
