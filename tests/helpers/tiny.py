"""A tiny teacher as the aligner sees it, and settings that fit it in a moment."""

import torch
from transformers import PreTrainedConfig

from convert.fit.layer_data import LayerData
from convert.fit.teacher_model import TeacherModel
from convert.layout.config import hybrid_config, mixer_fields
from convert.layout.placement import Placement, everywhere
from convert.options import MixerOptions, make_options
from convert.resolve import resolve
from convert.teachers.teacher import find_teacher
from convert.teachers.weights import TeacherWeights
from tests.helpers.teachers import random_ids

LENGTH = 32


def teacher_model(folder, **options) -> TeacherModel:
    """The teacher in `folder`, which makes mixers for every layer, or for those that can be replaced."""
    settings = make_options(str(folder), "unused", **{"attention_layers": "none"} | options)
    weights = TeacherWeights.of(find_teacher(str(folder)))
    resolved = resolve(settings, weights)
    model = TeacherModel(weights, resolved.alignment.device, resolved.initial_decay, resolved.seed)
    placement = everywhere(resolved.replacement, model.num_layers)
    if weights.config.sliding_heads is not None:
        placement = placement.keeping(resolved.bounded)
    model.follow(hybrid_config(weights, placement, resolved.mixer))
    return model


def config_of(weights: TeacherWeights, placement: Placement) -> PreTrainedConfig:
    """The configuration of a hybrid with this placement, whose mixers are the default ones, or none."""
    stateless = placement.hybrid is not None and not placement.hybrid.state
    mixer = MixerOptions(kind="none") if stateless else MixerOptions()
    return hybrid_config(weights, placement, mixer_fields(weights.config, mixer))


def layer_data(model: TeacherModel, mixer, sequences: int = 12, held_out: int = 4) -> LayerData:
    """Random inputs and what `mixer` makes of them."""
    u = torch.randn(sequences, LENGTH, model.config.hidden_size)
    rotary = model.rotary(LENGTH, mixer.layer_idx)
    with torch.no_grad():
        return LayerData(u, mixer(u, rotary), rotary, held_out)


def rows(count: int, seed: int = 0) -> torch.Tensor:
    """Random token ids."""
    return random_ids(count, LENGTH, seed)
