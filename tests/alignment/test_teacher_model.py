"""Hybrids that live in the teacher's own tensors."""

import torch

from convert.alignment.teacher_model import replaced
from tests.alignment.tiny import teacher_model
from tests.teachers import make_teacher, random_ids


def test_hybrid_shares_the_teachers_tensors(tmp_path):
    """`TeacherModel.hybrid` is the saved hybrid without a copy of anything."""
    make_teacher("llama-gqa").save_pretrained(tmp_path)
    model = teacher_model(tmp_path)
    mixers = {0: model.mixer(0), 2: model.mixer(2)}
    student = model.hybrid(mixers)
    assert student.model.layers[0].mixer.out_proj.weight is mixers[0].out_proj.weight
    assert student.model.layers[1].mlp.up_proj.weight is model.whole().model.layers[1].mlp.up_proj.weight
    ids = random_ids(2, 40)
    with torch.no_grad():
        found = student(ids, use_cache=False).logits
        with replaced(model.whole(), mixers) as other:
            torch.testing.assert_close(found, other(ids, use_cache=False).logits)
