"""Configuration of a hybrid, from the teacher's, a placement and the mixer."""

import copy
from typing import Any

from transformers import PreTrainedConfig

from modeling_llamba.model.hybrid_config import mixer_defaults

from ..options import MixerOptions
from ..teachers.weights import TeacherWeights
from .placement import Placement, half_of_planes


def hybrid_config(weights: TeacherWeights, placement: Placement, mixer: dict[str, Any]) -> PreTrainedConfig:
    """The hybrid's configuration.

    Args:
        mixer: fields of the mixers (`mixer_fields`).
    """
    hybrid = placement.hybrid
    teacher_types = weights.config.layer_types
    for layer, width in placement.windows.items():
        if teacher_types[layer] == "sliding_attention" and width > weights.config.sliding_window:
            raise ValueError(
                f"A window of {width} tokens is wider than the teacher's sliding_window of "
                f"{weights.config.sliding_window}; make it narrower."
            )
    assert hybrid is None or hybrid.state == (mixer["mixer"] != "none"), f"{mixer['mixer']} beside {hybrid}"
    fields = copy.deepcopy(weights.fields) | mixer
    fields |= placement.config_fields(teacher_types)
    fields["key_offsets"] &= placement.bits.rounds
    if hybrid is not None and hybrid.state:
        # for keys far away the slower half of the rotary frequencies suffices (docs/guide/normalised_readout.md)
        fields["hybrid_state_planes"] = hybrid.planes or half_of_planes(weights.config)
    return type(weights.config)(**fields, conversion={"teacher_layer_types": list(teacher_types)})


def mixer_fields(teacher: PreTrainedConfig, mixer: MixerOptions, measured: bool = True) -> dict[str, Any]:
    """The mixer's part of the hybrid's configuration.

    Args:
        teacher: the configuration of the hybrid with every layer kept as attention.
        measured: True if offsets of keys are measured.
    """
    head_dim = teacher.head_dim
    heads = teacher.num_attention_heads
    kv_heads = teacher.num_key_value_heads
    if mixer.expand_kv_heads:
        kv_heads = heads
    defaults = mixer_defaults(mixer.kind, head_dim)
    d_state = mixer.d_state or defaults["mixer_d_state"]
    # mamba1 cuts a head into pieces of N channels, and a piece of a rotated head is not a rotated piece
    can_rotate = d_state >= head_dim
    rotary = mixer.rotary
    if rotary is None:
        rotary = can_rotate
    if rotary and not can_rotate:
        raise ValueError(
            f"d_state {d_state} is smaller than the head dimension {head_dim}, and rotary embedding needs all of it; "
            "say rotary: false."
        )
    if teacher.qk_norm and mixer.kind != "mamba1" and d_state != head_dim:
        raise ValueError(f"This teacher normalises queries and keys per head, so d_state must be {head_dim}.")
    absolute = teacher.learned_sinks or teacher.attn_logit_softcapping is not None or mixer.export_ready
    return {
        "key_offsets": measured and not absolute,
        "mixer": mixer.kind,
        "mixer_num_heads": heads,
        "mixer_num_kv_heads": kv_heads,
        "mixer_head_dim": head_dim,
        "mixer_d_state": d_state,
        # not the published default, since identity alone keeps the mapping from attention exact
        "mixer_activation": mixer.activation or "identity",
        "mixer_gate_bias": mixer.gate_bias,
        "mixer_shared_state": mixer.shared_state,
        "mixer_norm": mixer.norm or defaults["mixer_norm"],
        "mixer_rotary": rotary,
        "mixer_qk_norm": teacher.qk_norm,
        "mixer_decay_bias": mixer.decay_bias and mixer.kind == "discrete_mamba2",
        # other mixers hold these biases in their convolution, which mamba1's B and C do not pass
        "mixer_in_bias": teacher.attention_bias and mixer.kind == "mamba1",
        "mixer_out_bias": mixer.out_bias and mixer.kind != "none",
    }
