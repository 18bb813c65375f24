"""A tiny teacher as the aligner sees it, and settings that fit it in a moment."""

import torch

from convert.alignment.closed_form import LayerData
from convert.alignment.teacher_model import TeacherModel
from convert.options import make_options
from convert.placement.decide import replaced_layer
from convert.placement.placement import everywhere
from convert.plan import TeacherWeights, hybrid_config
from convert.teachers.teacher import find_teacher
from tests.teachers import random_ids

LENGTH = 32


def teacher_model(folder, **options) -> TeacherModel:
    """The teacher in `folder`, which makes mixers for every layer."""
    settings = make_options(str(folder), "unused", **{"attention_layers": "none"} | options)
    weights = TeacherWeights.of(find_teacher(str(folder)))
    model = TeacherModel(weights, settings)
    model.follow(hybrid_config(weights, everywhere(replaced_layer(settings), model.num_layers), settings))
    return model


def layer_data(model: TeacherModel, mixer, sequences: int = 12, held_out: int = 4) -> LayerData:
    """Random inputs and what `mixer` makes of them."""
    u = torch.randn(sequences, LENGTH, model.config.hidden_size)
    rotary = model.rotary(LENGTH, mixer.layer_idx)
    with torch.no_grad():
        return LayerData(u, mixer(u, rotary), rotary, held_out)


def rows(count: int, seed: int = 0) -> torch.Tensor:
    """Random token ids."""
    return random_ids(count, LENGTH, seed)
