"""Cartesia's Llamba 1B, 3B and 8B (Bick et al. 2025), tied and untied: every layer a discrete Mamba-2 mixer.

A flat configuration with ssm_cfg and mlp_cfg; tensors as goombalab names them. Block norms have an epsilon of 1e-5
whatever the configuration says. Special tokens are not in it: they come from the base model.
"""

from typing import Any

from .base import Published, PublishedFormat
from .goombalab import EMBEDDING, NORM_EPS, mixer_fields, table

TRAINED_CONTEXT = 4096


def fields(source: Published) -> dict[str, Any]:
    """Fields of our configuration.

    Raises:
        ValueError: something that ours cannot hold.
    """
    config, ssm, mlp = source.config, source.config["ssm_cfg"], source.config.get("mlp_cfg", {})
    rows, hidden = source.shape(EMBEDDING)
    if config.get("norm_epsilon", NORM_EPS) != NORM_EPS:
        raise ValueError(
            f"norm_epsilon is {config['norm_epsilon']}, but the block norms' is {NORM_EPS}; ours share one."
        )
    if mlp.get("bias", False):
        raise ValueError("mlp_cfg asks for biases, which no published Llamba has; they are not supported.")
    if source.base is None and source.token_ids()["eos_token_id"] is None:
        source.notes.append("no special tokens: the checkpoint names none and no base model was given (--base)")
    heads = ssm.get("n_v_heads", 32)
    return {
        "vocab_size": rows,
        "hidden_size": hidden,
        "intermediate_size": mlp.get("intermediate_size"),
        "hidden_act": mlp.get("act_fn", "silu"),
        "num_hidden_layers": config["n_layer"],
        "num_attention_heads": heads,
        "layer_types": ["linear_attention"] * config["n_layer"],
        "rms_norm_eps": NORM_EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": source.base.max_position_embeddings if source.base else TRAINED_CONTEXT,
        "tie_word_embeddings": source.is_tied(EMBEDDING, bool(config.get("tie_embeddings", False))),
        "lm_head_bias": "lm_head.bias" in source.tensors,
        **source.token_ids(),
        **mixer_fields(source, [ssm], hidden),
    }


LLAMBA = PublishedFormat(
    name="cartesia Llamba",
    sign="backbone.* tensors, a config.json with ssm_cfg",
    student=lambda source: "llamba",
    recognises=lambda source: EMBEDDING in source.tensors and "ssm_cfg" in source.config,
    fields=fields,
    table=table,
)
