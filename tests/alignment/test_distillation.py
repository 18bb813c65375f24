"""Stage 3 where it goes wrong."""

import pytest
import torch

from convert import convert
from convert.alignment.distillation import distil, last_whole_checkpoint
from convert.alignment.hybrid_training import load_hybrid
from convert.alignment.settings import DistillationSettings
from tests.alignment.tiny import LENGTH, rows, teacher_model


def test_a_loss_that_is_not_finite_ends_the_training(saved_teacher, tmp_path):
    """In the fourth of eight steps; what was saved before stays, and nothing is saved after."""
    convert(str(saved_teacher("llama-gqa")), tmp_path / "hybrid", align="none", attention_ratio=0.5)
    student, teacher = load_hybrid(tmp_path / "hybrid"), teacher_model(saved_teacher("llama-gqa")).whole()
    settings = DistillationSettings(tokens=8 * LENGTH, sequences=1, save_every=2)
    passes = []

    def poison(module, args, output):
        passes.append(1)
        return output * float("nan") if len(passes) == 4 else output

    student.model.norm.register_forward_hook(poison)
    with pytest.raises(ValueError, match="not finite at step 4; lower the learning rate"):
        distil(student, teacher, rows(8), settings, tmp_path / "work")
    assert len(passes) == 4
    (folder,) = (tmp_path / "work").iterdir()
    assert last_whole_checkpoint(folder).endswith("checkpoint-2")
    saved = torch.load(folder / "checkpoint-2" / "optimizer.pt", weights_only=True)
    assert all(torch.isfinite(v).all() for s in saved["state"].values() for v in s.values() if torch.is_tensor(v))
