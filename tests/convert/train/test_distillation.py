"""Stage 3 where it goes wrong."""

import importlib.util
import subprocess
import sys

import pytest
import torch

from convert import convert
from convert.options import (
    AlignmentOptions,
    DistillationOptions,
    HiddenStateOptions,
    make_options,
)
from convert.train.distillation.trainer import DistilledSFTTrainer, last_whole_checkpoint
from convert.train.mohawk.distillation import distil
from convert.train.mohawk.stages import Stages
from convert.train.mohawk.train import load_hybrid
from tests.helpers.hybrids import make_hybrid
from tests.helpers.tiny import LENGTH, rows, teacher_model


def test_a_loss_that_is_not_finite_ends_the_training(two_layer_teacher, tmp_path):
    """In the fourth of eight steps; what was saved before stays, and nothing is saved after."""
    convert(str(two_layer_teacher("llama-gqa")), tmp_path / "hybrid", align="none", attention_layers=0.5)
    student, teacher = load_hybrid(tmp_path / "hybrid"), teacher_model(two_layer_teacher("llama-gqa")).whole()
    settings = DistillationOptions(tokens=8 * LENGTH, sequences=1, save_every=2)
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


def test_decays_and_log_masses_have_no_weight_decay():
    """Which would forget what was fitted."""
    trainer = object.__new__(DistilledSFTTrainer)
    model = make_hybrid(pattern="every", dtype=torch.float32)
    decaying = {name.partition(".mixer.")[2] for name in trainer.get_decay_parameter_names(model)}
    assert {"down.weight", "up.weight", "q_proj.weight", "in_proj.weight"} <= decaying
    assert not {"mass", "A_log_bias", "D", "z_bias"} & decaying


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_share_of_the_sequences_asks_for_a_needle(share, two_layer_teacher, tmp_path):
    """All rows are trained on once, in the student and in the teacher alike; the held-out text stays as it is."""
    folder = two_layer_teacher("llama-gqa")
    convert(str(folder), tmp_path / "hybrid", align="none", attention_layers=0.5)
    train, held_out = rows(8), rows(2, seed=1)
    settings = AlignmentOptions(
        sequence_length=LENGTH,
        hidden_state_alignment=HiddenStateOptions(tokens=0),
        distillation=DistillationOptions(tokens=8 * LENGTH, sequences=1, recall_share=share),
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
    assert len(trained) == 8
    assert len(asked) == 8 * share
    assert trained - asked <= {tuple(row.tolist()) for row in train}
    taught = {tuple(row.tolist()) for ids in seen[False] for row in ids}
    assert taught == trained | {tuple(row.tolist()) for row in held_out}
    assert report["distillation"]["tokens"] == 8 * LENGTH


def test_a_share_is_between_none_and_all():
    with pytest.raises(ValueError, match=r"recall_share must be a number of at least 0 and at most 1, not 1\.5"):
        make_options("m", "o", align="mohawk", recall_share=1.5)
    with pytest.raises(ValueError, match="decay"):
        DistillationOptions(warmup=0.8, decay=0.5)


CORE_ONLY = """
import sys
import convert.cli, convert.pipeline, convert.train.mohawk.train
print(sorted({"trl", "datasets", "matplotlib"} & set(sys.modules)))
"""


def test_a_core_install_has_all_but_the_trainer(two_layer_teacher, tmp_path, monkeypatch):
    done = subprocess.run([sys.executable, "-c", CORE_ONLY], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr[-2000:]
    folder, find = two_layer_teacher("llama-gqa"), importlib.util.find_spec
    convert(str(folder), tmp_path / "hybrid", align="none", attention_layers=0.5)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "trl" else find(name, *more))
    settings = AlignmentOptions(sequence_length=LENGTH)
    stages = Stages(
        teacher_model(folder), load_hybrid(tmp_path / "hybrid"), rows(4), rows(2), settings, tmp_path / "work"
    )
    with pytest.raises(ValueError, match=r"pip install 'convert-to-hybrid\[train\]'"):
        stages.run()
    assert not (tmp_path / "work").exists()
