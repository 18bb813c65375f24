"""The published models at their real sizes, planned without a weight: every tensor has its place, no byte too many."""

import math

import pytest
import torch

from convert.formats.base import ForeignCheckpoint
from convert.formats.import_ import recognise
from convert.formats.table import make_rules
from convert.hybrids.shapes import HYBRIDS, tensor_shapes
from convert.io.reader import TensorInfo


class Headers:
    """A checkpoint of which only names and shapes are known."""

    files: list = []

    def __init__(self, shapes):
        self.tensors = {name: TensorInfo(shape, torch.float32) for name, shape in shapes.items()}


def real_phi_mamba(attention):
    """Phi-1.5's sizes; shapes of the tensors as the original class makes them."""
    t = {"backbone.embedding.weight": (51200, 2048), "lm_head.weight": (51200, 2048), "lm_head.bias": (51200,)}
    t |= {f"backbone.final_layernorm.{kind}": (2048,) for kind in ("weight", "bias")}
    core = {"d_state": 64, "n_v_heads": 32, "n_qk_heads": 32, "d_conv": 4, "conv_bias": True, "expand": 1,
            "chunk_size": 128, "activation": "identity", "bias": False}  # fmt: skip
    config = {"LanguageModel": {"input": {"vocab_size": 51200, "pad_vocab_size_multiple": 8}},
              "MixerModel": {"input": {"d_model": 2048, "n_layer": 24, "lm_head_prenorm": "layer"}}}  # fmt: skip
    for i in range(24):
        b = f"backbone.layers.{i}."
        t |= {f"{b}input_layernorm.{kind}": (2048,) for kind in ("weight", "bias")}
        t |= {f"{b}mlp.fc1.weight": (8192, 2048), f"{b}mlp.fc1.bias": (8192,)}
        t |= {f"{b}mlp.fc2.weight": (2048, 8192), f"{b}mlp.fc2.bias": (2048,)}
        if i in attention:
            for name in ("q_proj", "k_proj", "v_proj", "dense"):
                t |= {f"{b}mixer.self_attn.{name}.weight": (2048, 2048), f"{b}mixer.self_attn.{name}.bias": (2048,)}
        else:
            t |= real_discrete(f"{b}mixer.", 2048, 64, z_bias=True)
        kind = "phi_attention" if i in attention else "discrete_mamba2"
        config[f"Block{i}"] = {"n_layers": 1, "BlockType": "modules.phi_block", "CoreType": f"modules.mixers.{kind}",
                               "core_input": {} if i in attention else core}  # fmt: skip
    return config, t


def real_discrete(prefix, width, state, z_bias):
    channels = width + 64 * state
    return {f"{prefix}in_proj.weight": (channels + width + 32, width), f"{prefix}out_proj.weight": (width, width),
            f"{prefix}conv1d.weight": (channels, 1, 4), f"{prefix}conv1d.bias": (channels,), f"{prefix}D": (32,),
            f"{prefix}z_bias": (width,)}  # fmt: skip


def real_llamba(width, layers, inter, tied):
    t = {"backbone.embedding.weight": (128256, width), "backbone.final_layernorm.weight": (width,)}
    t |= {} if tied else {"lm_head.weight": (128256, width)}
    for i in range(layers):
        b = f"backbone.layers.{i}."
        t |= {f"{b}{name}.weight": (width,) for name in ("input_layernorm", "post_attention_layernorm")}
        t |= {f"{b}mlp.gate_proj.weight": (inter, width), f"{b}mlp.up_proj.weight": (inter, width)}
        t |= {f"{b}mlp.down_proj.weight": (width, inter)} | real_discrete(f"{b}mixer.", width, 64, z_bias=True)
    config = {"model_type": "llamba", "tie_embeddings": tied, "d_model": width, "n_layer": layers,
              "mlp_cfg": {"intermediate_size": inter, "bias": False, "act_fn": "silu"},
              "ssm_cfg": {"d_state": 64, "n_v_heads": 32, "n_qk_heads": 32, "expand": 1, "bias": False}}  # fmt: skip
    return config, t


def real_mamba_in_llama(version, m1, width, heads, kv, layers, inter, attention, tied, d=128):
    t = {"model.embed_tokens.weight": (128256, width), "model.norm.weight": (width,)}
    t |= {} if tied else {"lm_head.weight": (128256, width)}
    xb, rank = kv * d, math.ceil(width / 16)
    for i in range(layers):
        b, m = f"model.layers.{i}.", f"model.layers.{i}.mamba."
        t |= {f"{b}{name}.weight": (width,) for name in ("input_layernorm", "post_attention_layernorm")}
        t |= {f"{b}mlp.gate_proj.weight": (inter, width), f"{b}mlp.up_proj.weight": (inter, width)}
        t |= {f"{b}mlp.down_proj.weight": (width, inter)}
        if i in attention and m1:
            t |= {f"{b}mha.in_proj.weight": (width + 2 * xb, width), f"{b}mha.out_proj.weight": (width, width)}
        elif i in attention:
            t |= {f"{b}self_attn.{x}_proj.weight": (width if x in "qo" else xb, width) for x in "qkvo"}
        elif version == 2:
            c = width + 2 * xb
            t |= {f"{m}in_proj.weight": (2 * width + 2 * xb + heads, width), f"{m}out_proj.weight": (width, width)}
            t |= {f"{m}conv1d.weight": (c, 1, 4), f"{m}conv1d.bias": (c,), f"{m}norm.weight": (width,)}
            t |= {f"{m}{name}": (heads,) for name in ("dt_bias", "A_log", "D")}
        else:
            t |= {f"{m}in_proj.weight": (2 * width + 2 * xb + rank, width), f"{m}out_proj.weight": (width, width)}
            t |= {f"{m}conv1d.weight": (width, 1, 4), f"{m}conv1d.bias": (width,), f"{m}A_log": (width, 16)}
            t |= {f"{m}D": (width,), f"{m}dt_proj.weight": (width, rank), f"{m}dt_proj.bias": (width,)}
    config = {"model_type": "llama", "vocab_size": 128256, "hidden_size": width, "intermediate_size": inter,
              "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
              "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": tied}  # fmt: skip
    ssm = {"expand": 1, "ngroups": heads, "d_state": d} if version == 2 else {"expand": 1}
    mamba = {"d_model": width, "ssm_cfg": ssm, "d_inner": None, "d_xb": xb, "n_layer": layers,
             "attn_layers": list(attention)}  # fmt: skip
    return config, t, mamba


M1_ATTENTION = (3, 8, 13, 18, 23, 27)
# parameters, and the sizes of the files that the Hub lists, in bytes
SIZES = {
    "Phi-Mamba-1.5B": (real_phi_mamba(()), 1_521_097_472, 4, 6.08e9),
    "Hybrid-Phi-Mamba-1.5B": (real_phi_mamba((4, 10, 16, 22)), 1_503_959_680, 4, 6.02e9),
    "Llamba-1B": (real_llamba(2048, 16, 8192, True), 1.405e9, None, None),
    "Llamba-3B": (real_llamba(3072, 28, 8192, True), 3.657e9, 4, 14.6e9),
    "Llamba-8B": (real_llamba(4096, 32, 14336, True), 8.316e9, None, None),
    "Llamba-8B-untied": (real_llamba(4096, 32, 14336, False), 8.841e9, None, None),
    "Mamba2InLlama_1": (real_mamba_in_llama(2, False, 4096, 32, 8, 32, 14336, (), False), None, 4, 34.3e9),
    "Mamba2InLlama_0_75": (
        real_mamba_in_llama(2, False, 4096, 32, 8, 32, 14336, range(3, 32, 4), False), None, 4, 33.7e9),
    "MambaInLlama_0_875": (
        real_mamba_in_llama(1, False, 4096, 32, 8, 32, 14336, (7, 15, 23, 31), False), None, 4, 34.2e9),
    "Llama3.1-Mamba2-8B-distill": (
        real_mamba_in_llama(2, False, 4096, 32, 8, 32, 14336, range(1, 32, 2), False), None, 4, 33.2e9),
    "M1-3B": (real_mamba_in_llama(1, True, 3072, 24, 8, 28, 8192, M1_ATTENTION, True), None, 2, 6.90e9),
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_parameters_at_full_size_match_the_published_files(name):
    """The real configurations, planned without a weight: every tensor has its place, and the bytes are the files'."""
    (config, shapes, *mamba_config), parameters, itemsize, file_size = SIZES[name]
    source = ForeignCheckpoint(name, config, Headers(shapes), *mamba_config)
    known = recognise(source)
    ours = HYBRIDS[known.hybrid(source)](**known.fields(source))
    table, dropped = known.table(source, ours)
    rules = make_rules(table, tensor_shapes(ours), source.tensors, dropped, known.name)
    count = sum(math.prod(rule.shape) for rule in rules)
    assert count == sum(math.prod(shape) for shape in shapes.values())
    if parameters is not None:
        assert count == pytest.approx(parameters, rel=0 if isinstance(parameters, int) else 4e-4)
    if file_size is not None:
        assert count * itemsize == pytest.approx(file_size, rel=2e-3)
