"""Cartesia's Llamba 1B, 3B and 8B (Bick et al. 2025), tied and untied: every layer a discrete Mamba-2 mixer.

A flat configuration with ssm_cfg and mlp_cfg; tensors as goombalab names them. Block norms have an epsilon of 1e-5
whatever the configuration says. Special tokens are not in it: they come from the base model.
"""

from typing import Any

from transformers import PreTrainedConfig

from .base import ANY, TOKEN_IDS, ForeignCheckpoint, Format
from .goombalab import EMBEDDING, NORM_EPS, mixer_fields, table

TRAINED_CONTEXT = 4096
MLP_WIDTH = 14336  # where mlp_cfg is null; a null ssm_cfg has the defaults of the mixer's own class
UNDERSTOOD = ("model_type", "vocab_size", "tie_embeddings", "lm_head_bias", "d_model", "n_layer", "norm_epsilon",
              "mlp_cfg", "ssm_cfg", *TOKEN_IDS)  # fmt: skip
HARMLESS = dict.fromkeys(
    ("pad_vocab_size_multiple", "resid_dropout", "architectures", "transformers_version", "dtype", "torch_dtype",
     "auto_map", "max_position_embeddings", "use_cache", "_name_or_path"), ANY,
) | {"lm_head_prenorm": "rms"}  # fmt: skip


def fields(source: ForeignCheckpoint) -> dict[str, Any]:
    """Fields of the hybrid's configuration; what it cannot hold is a ValueError."""
    config, rows, hidden = source.section, *source.shape(EMBEDDING, 2)
    config.only(UNDERSTOOD, PreTrainedConfig().to_dict() | HARMLESS)
    ssm = config.section("ssm_cfg")
    depth = source.depth(config.need("n_layer", int))
    mlp = config.section("mlp_cfg").only(("intermediate_size", "bias", "act_fn"))
    eps = config.get("norm_epsilon", float, NORM_EPS)
    if eps != NORM_EPS:
        raise ValueError(f"{config.file}: norm_epsilon is {eps}, but the block norms' is {NORM_EPS}; ours share one.")
    if mlp.get("bias", bool, False):
        raise ValueError(
            f"{config.file}: mlp_cfg asks for biases, which no published Llamba has; they are not supported."
        )
    if source.base is None and source.token_ids()["eos_token_id"] is None:
        source.note(
            f"no special tokens: the checkpoint names none and no base model was given ({source.base_flag})",
            "eos_token_id",
        )
    mixer = mixer_fields(source, ssm, hidden, is_mohawk=False)
    intermediate_size = MLP_WIDTH
    if mlp.values:
        intermediate_size = mlp.need("intermediate_size", int)
    context = TRAINED_CONTEXT
    if source.base:
        context = source.base.max_position_embeddings
    return {
        "vocab_size": rows,
        "hidden_size": hidden,
        "intermediate_size": intermediate_size,
        "hidden_act": mlp.get("act_fn", str, "silu"),
        "num_hidden_layers": depth,
        "num_attention_heads": mixer["mixer_num_heads"],
        "layer_types": ["linear_attention"] * depth,
        "rms_norm_eps": NORM_EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": context,
        "tie_word_embeddings": source.is_tied(EMBEDDING, config.get("tie_embeddings", bool, False)),
        "lm_head_bias": "lm_head.bias" in source.tensors,
        **source.token_ids(),
        **mixer,
    }


LLAMBA = Format(
    name="cartesia Llamba",
    sign="backbone.* tensors, a config.json with ssm_cfg",
    hybrid=lambda source: "llamba",
    recognises=lambda source: EMBEDDING in source.tensors and "ssm_cfg" in source.config,
    fields=fields,
    table=table,
)
