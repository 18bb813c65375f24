"""A tiny teacher as the aligner sees it, and settings that fit it in a moment."""

import torch

from convert.alignment.closed_form import LayerData
from convert.alignment.teacher_model import TeacherModel
from convert.config import make_config
from convert.teachers.teacher import find_teacher
from tests.teachers import random_ids

LENGTH = 32


def teacher_model(folder, low_memory: bool = False, **options) -> TeacherModel:
    """The teacher in `folder`."""
    found = find_teacher(str(folder))
    settings = make_config(model=str(folder), output="unused", **options)
    return TeacherModel(found, settings, found.open_weights(), low_memory=low_memory)


def layer_data(model: TeacherModel, mixer, sequences: int = 12, held_out: int = 4) -> LayerData:
    """Random inputs and what `mixer` makes of them."""
    u = torch.randn(sequences, LENGTH, model.config.hidden_size)
    rotary = model.rotary(LENGTH)
    with torch.no_grad():
        return LayerData(u, mixer(u, rotary), rotary, held_out)


def rows(count: int, seed: int = 0) -> torch.Tensor:
    """Random token ids."""
    return random_ids(count, LENGTH, seed)
