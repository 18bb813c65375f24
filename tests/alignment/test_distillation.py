"""Stage 3 where it goes wrong."""

import json

import pytest
import torch
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from convert import convert
from convert.alignment.mohawk.distillation import DistillationTrainer, distil, last_whole_checkpoint, mean_kl
from convert.alignment.mohawk.stages import Stages
from convert.alignment.mohawk.train import load_hybrid
from convert.alignment.mohawk.window_dropout import hybrid_mixers, without
from convert.alignment.settings import (
    AlignmentSettings,
    DistillationSettings,
    HiddenStateSettings,
    OrientationSettings,
)
from modeling_llamba.hybrid_mixer import HybridMixer
from tests.alignment.tiny import LENGTH, rows, teacher_model
from tests.students import make_student
from tests.teachers import random_ids


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


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_share_of_the_sequences_asks_for_a_needle(share, saved_teacher, tmp_path):
    """All rows are trained on once, in the student and in the teacher alike; the held-out text stays as it is."""
    folder = saved_teacher("llama-gqa")
    convert(str(folder), tmp_path / "hybrid", align="none", attention_ratio=0.5)
    train, held_out = rows(8), rows(2, seed=1)
    settings = AlignmentSettings(
        sequence_length=LENGTH,
        matrix_orientation=OrientationSettings(),
        hidden_state_alignment=HiddenStateSettings(),
        distillation=DistillationSettings(tokens=8 * LENGTH, sequences=1, recall_share=share),
    )
    teacher, seen = teacher_model(folder), {True: [], False: []}
    student = load_hybrid(tmp_path / "hybrid")
    for model in (student, teacher.whole()):
        model.model.register_forward_pre_hook(
            lambda module, args, kwargs: seen[module.training].append((args or (kwargs.get("input_ids"),))[0]),
            with_kwargs=True,
        )
    report = Stages(teacher, student, train, held_out, settings, tmp_path / "work").run()
    trained = {tuple(ids[0].tolist()) for ids in seen[True]}
    asked = {row for row in trained if any(row[-8:] == row[i : i + 8] for i in range(LENGTH - 15))}
    assert len(trained) == 8 and len(asked) == 8 * share
    assert trained - asked <= {tuple(row.tolist()) for row in train}
    taught = {tuple(row.tolist()) for ids in seen[False] for row in ids}
    assert taught == trained | {tuple(row.tolist()) for row in held_out}
    assert report["distillation"]["tokens"] == 8 * LENGTH


def test_a_share_is_between_none_and_all():
    with pytest.raises(ValueError, match=r"recall_share must lie between 0 and 1, not 1\.5"):
        DistillationSettings(recall_share=1.5)
    with pytest.raises(ValueError, match="decay"):
        DistillationSettings(warmup=0.8, decay=0.5)


def test_windows_are_dropped_at_first_and_each_branch_is_weighed(saved_teacher, tmp_path, monkeypatch):
    folder = saved_teacher("llama-gqa")
    options = {"window": 8, "sinks": 2, "attention_ratio": 0.5, "align": "closed-form", "calibration_tokens": 512}
    settings = {"sequence_length": LENGTH, "fit": {"refine_steps": 0}, "selection": {"probe_length": 8}}
    (tmp_path / "align.yaml").write_text(json.dumps(settings))
    convert(
        str(folder), tmp_path / "hybrid", layer_selection="uniform", align_config=str(tmp_path / "align.yaml"),
        calibration_dataset="sampled", **options,
    )  # fmt: skip
    student, teacher, chances = load_hybrid(tmp_path / "hybrid"), teacher_model(folder), []
    layers, step = hybrid_mixers(student), DistillationTrainer.training_step

    def watched(self, *args, **kwargs):
        chances.append({layer.window_dropout for layer in layers})
        return step(self, *args, **kwargs)

    monkeypatch.setattr(DistillationTrainer, "training_step", watched)
    stage = DistillationSettings(tokens=8 * LENGTH, sequences=2, window_dropout=0.6)
    settings = AlignmentSettings(
        sequence_length=LENGTH, hidden_state_alignment=HiddenStateSettings(), distillation=stage
    )
    stages = Stages(teacher, student, rows(8), rows(2, seed=1), settings, tmp_path / "work")
    report = stages.run()["distillation"]
    assert len(layers) == 2 and chances == [{0.6}, {0.3}, {0.0}, {0.0}]
    kl, without_window, without_mixer = (
        report[f"held_out_kl_{n}"] for n in ("after", "without_window", "without_mixer")
    )
    assert without_window > kl and abs(without_mixer - kl) > 1e-6
    with without(student, "window"):
        assert mean_kl(student, teacher.whole(), stages.held_out) == pytest.approx(without_window)
    assert mean_kl(student, teacher.whole(), stages.held_out) == pytest.approx(kl)
    convert(str(folder), tmp_path / "mixers", align="none", attention_ratio=0.5)
    with pytest.raises(ValueError, match="no window beside a mixer"):
        Stages(teacher, load_hybrid(tmp_path / "mixers"), rows(8), rows(2), settings, tmp_path / "other").run()


def test_hybrid_layers_are_found_in_models_of_a_folders_own_code(tmp_path):
    """Whose classes are not the installed ones; dropping the window changes what they compute, and only inside."""
    make_student("phimamba", pattern="beside", dtype=torch.float32).save_pretrained(tmp_path)
    own = get_class_from_dynamic_module("modeling_phimamba.PhiMambaForCausalLM", tmp_path)
    model, ids = own.from_pretrained(tmp_path).eval(), random_ids(1, 20)
    layers = hybrid_mixers(model)
    assert [layer.layer_idx for layer in layers] == [0, 2] and not isinstance(layers[0], HybridMixer)
    with torch.no_grad():
        whole = model(ids).logits
        with without(model, "window"):
            assert not torch.allclose(model(ids).logits, whole)
        torch.testing.assert_close(model(ids).logits, whole)
    installed = make_student("phimamba", pattern="beside")
    assert all(isinstance(layer, HybridMixer) for layer in hybrid_mixers(installed))
