"""The stages: what they lower, what they touch, resuming, ranks."""

import dataclasses
import json
import os

import pytest
import torch
import yaml
from transformers import TrainerCallback

from convert import convert
from convert.fit.divergence import kl_of_logits
from convert.options import (
    AlignmentOptions,
    DistillationOptions,
    HiddenStateOptions,
    MohawkOptions,
    OrientationOptions,
    OutputOptions,
)
from convert.train.mohawk.distillation import distil
from convert.train.mohawk.layerwise import (
    Activations,
    LayerwiseStage,
    hidden_state_loss,
    orientation_loss,
    split_layers,
)
from convert.train.mohawk.stages import Stages, check_stages, only_stages
from convert.train.mohawk.train import load_hybrid, train_existing
from modeling_llamba import LlambaConfig, LlambaForCausalLM
from tests.helpers.command import run_as_is
from tests.helpers.forked import run_forked
from tests.helpers.teachers import TINY, make_teacher
from tests.helpers.tiny import LENGTH, rows, teacher_model

TOKENS = 20 * 2 * LENGTH
SETTINGS = AlignmentOptions(
    sequence_length=LENGTH,
    matrix_orientation=OrientationOptions(tokens=TOKENS, tile=8),
    hidden_state_alignment=HiddenStateOptions(tokens=TOKENS),
    distillation=DistillationOptions(tokens=2 * TOKENS, learning_rate=1e-3, other_learning_rate=1e-4),
)


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory):
    """name -> folder of a mapped hybrid of three layers, attention in the middle; NAME-teacher its teacher."""
    folder = tmp_path_factory.mktemp("hybrids")
    for name in ("llama-gqa", "phi"):
        make_teacher(name, layers=3).save_pretrained(folder / f"{name}-teacher")
        convert(str(folder / f"{name}-teacher"), folder / name, align="none", attention_layers="MAM")
    return folder


def stages(hybrids, name, tmp_path, settings=SETTINGS, **options):
    teacher = teacher_model(hybrids / f"{name}-teacher", **options)
    return Stages(teacher, load_hybrid(hybrids / name), rows(16), rows(4, seed=1), settings, tmp_path / "work")


def run_only(work, *numbers):
    return dataclasses.replace(work, settings=only_stages(SETTINGS, numbers, None)).run()


def changed(before, model):
    return {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}


def copied(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", ["llama-gqa", "phi"])
def test_each_stage_lowers_its_loss_and_touches_only_what_it_should(hybrids, tmp_path, name):
    work = stages(hybrids, name, tmp_path)
    student = work.student
    assert not student.training
    start = copied(student)
    report = run_only(work, 1)["matrix_orientation"]
    assert report["held_out_loss_after"] < 0.9 * report["held_out_loss_before"]
    touched = changed(start, student)
    assert {n.split(".mixer.")[1] for n in touched} == {
        "in_proj.weight", "conv1d.weight", "conv1d.bias", "D", "A_log_bias"
    }  # fmt: skip
    x_rows = student.model.layers[0].mixer.x_size
    in_proj = "model.layers.0.mixer.in_proj.weight"
    assert torch.equal(student.state_dict()[in_proj][:x_rows], start[in_proj][:x_rows])  # stage 1 cannot see x

    start = copied(student)
    report = run_only(work, 2)["hidden_state_alignment"]
    assert report["held_out_loss_after"] < 0.97 * report["held_out_loss_before"]
    assert all(".mixer." in n for n in changed(start, student))
    assert {n.split(".")[2] for n in changed(start, student)} == {"0", "2"}

    start = copied(student)
    report = run_only(work, 3)["distillation"]
    assert report["held_out_kl_after"] < 0.97 * report["held_out_kl_before"]
    assert changed(start, student) == set(start)  # everything takes part
    assert not student.training
    assert type(student).__name__ in ("LlambaForCausalLM", "PhiMambaForCausalLM")


def test_block_target_is_the_blocks_output(saved_teacher):
    """With the block as target, a mixer that equals the attention's output gives loss 0 and the last block too."""
    teacher = teacher_model(saved_teacher("llama-gqa"))
    hidden = torch.randn(2, LENGTH, 32)

    def seen(layer):
        block, inputs = teacher.block(layer), teacher.block_inputs(hidden)
        u = block.input_layernorm(hidden)
        y = block.self_attn(u, inputs["position_embeddings"]["main"], inputs["masks"]["full_attention"])[0]
        return Activations(hidden, block(hidden, **inputs), u, y)

    class Exact(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.attention, self.layer = [teacher.block(layer).self_attn], layer

        def forward(self, u, rotary, *rest):
            return self.attention[0](u, rotary, teacher.block_inputs(u)["masks"]["full_attention"])[0]

    for target in ("mixer", "block"):
        loss = hidden_state_loss(teacher, HiddenStateOptions(target=target))
        for layer in (0, 3):
            with torch.no_grad():
                assert loss(layer, Exact(layer), seen(layer)) < 1e-12
                assert loss(layer, teacher.mixer(layer), seen(layer)) > 0.01
    assert teacher.model.model.layers[3].layer_type == "full_attention"


def test_layers_do_not_depend_on_each_other(hybrids, tmp_path):
    """What makes ranks able to share layers: training some of them gives the same bits as training all."""
    results = []
    for layers in ([0, 1, 2], split_layers([0, 1, 2], 0, 2), split_layers([0, 1, 2], 1, 2)):
        teacher = teacher_model(hybrids / "llama-gqa-teacher")
        mixers = {layer: teacher.mixer(layer) for layer in layers}
        settings = OrientationOptions(tokens=8 * 2 * LENGTH)
        LayerwiseStage(teacher, mixers, orientation_loss(teacher, settings), settings).run(rows(16), rows(4))
        results.append({layer: mixer.state_dict() for layer, mixer in mixers.items()})
    whole, *parts = results
    assert {layer for part in parts for layer in part} == {0, 1, 2}
    for part in parts:
        for layer, state in part.items():
            assert all(torch.equal(state[name], whole[layer][name]) for name in state)


@pytest.mark.parametrize("interrupted_at", [5, 9])
def test_layerwise_stage_resumes_to_the_same_bits(hybrids, tmp_path, interrupted_at):
    settings = HiddenStateOptions(tokens=10 * 2 * LENGTH, save_every=4)

    def run(folder, log=lambda record: None):
        teacher = teacher_model(hybrids / "llama-gqa-teacher")
        mixers = {layer: teacher.mixer(layer) for layer in (0, 2)}
        stage = LayerwiseStage(teacher, mixers, hidden_state_loss(teacher, settings), settings, folder, log=log)
        return stage.run(rows(6), rows(4)), mixers

    def stop(record):
        if record["step"] == interrupted_at:
            raise KeyboardInterrupt

    report, whole = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", stop)
    steps = []
    resumed_report, resumed = run(tmp_path / "cut", lambda record: steps.append(record["step"]))
    assert steps[0] == interrupted_at // 4 * 4 + 1  # it did continue, and not from the start
    assert (resumed_report.before, resumed_report.after) == (report.before, report.after)
    for layer in whole:
        for name, tensor in whole[layer].state_dict().items():
            assert torch.equal(tensor, resumed[layer].state_dict()[name]), name
    # what is there now is that run's end: asked again, it trains no further, and another run does not take it up
    steps = []
    run(tmp_path / "cut", lambda record: steps.append(record["step"]))
    assert steps == []
    settings = dataclasses.replace(settings, learning_rate=1e-4)
    run(tmp_path / "cut", lambda record: steps.append(record["step"]))
    assert steps[0] == 1


def test_distillation_resumes_to_the_same_bits(hybrids, tmp_path):
    settings = DistillationOptions(tokens=12 * 2 * LENGTH, other_learning_rate=1e-4, save_every=5)

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 8:
                raise KeyboardInterrupt

    class Count(TrainerCallback):
        steps = 0

        def on_step_end(self, args, state, control, **kwargs):
            self.steps += 1

    def run(folder, callbacks=None):
        student = load_hybrid(hybrids / "llama-gqa")
        teacher = teacher_model(hybrids / "llama-gqa-teacher").whole()
        _, outcome = distil(student, teacher, rows(10), settings, folder, callbacks=callbacks)
        return student.state_dict(), outcome.log

    whole, _ = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", [Stop()])
    (checkpoint,) = (tmp_path / "cut").rglob("checkpoint-5")
    (checkpoint.parent / "checkpoint-7").mkdir()  # one that was cut off while it was written
    count = Count()
    resumed, log = run(tmp_path / "cut", [count])
    assert [r["step"] for r in log if "loss" in r][-1] == 12
    assert count.steps == 12 - 5
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


@pytest.mark.parametrize("trainable", ["all", "all-but-mlp", "mixers"])
def test_what_distillation_freezes(hybrids, tmp_path, trainable):
    student = load_hybrid(hybrids / "llama-gqa")
    start = copied(student)
    settings = DistillationOptions(tokens=4 * LENGTH, trainable=trainable)
    distil(student, teacher_model(hybrids / "llama-gqa-teacher").whole(), rows(4), settings, tmp_path)
    touched = changed(start, student)
    assert any(".mixer." in name for name in touched)
    assert any(".mlp." in name for name in touched) == (trainable == "all")
    assert any("self_attn" in name for name in touched) == (trainable != "mixers")
    assert trainable != "mixers" or all(".mixer." in name for name in touched)


@pytest.mark.parametrize("name", ["llama-gqa", "phi"])
def test_what_the_window_sees_stays_exact(hybrids, tmp_path, name):
    """Trained beyond the window alone, the hybrid gives the very logits that it gave within the narrowest window."""
    teacher = hybrids / f"{name}-teacher"
    heads = {0: [0, 1]} if name == "llama-gqa" else {2: [1]}
    placed = dict(attention_layers=[1], window=6, sinks=1, rank=4, attention_heads=heads)
    convert(str(teacher), tmp_path / "hybrid", align="none", **placed)
    student, ids = load_hybrid(tmp_path / "hybrid"), rows(4)
    start = copied(student)
    before = student(ids).logits.detach()
    settings = DistillationOptions(tokens=4 * LENGTH, learning_rate=1e-2, trainable="beyond-window")
    distil(student, teacher_model(teacher).whole(), ids, settings, tmp_path / "work")
    touched, after = changed(start, student), student(ids).logits.detach()
    trained = ("mass", "down.weight", "up.weight")
    assert touched == {f"model.layers.{layer}.mixer.{part}" for layer in (0, 2) for part in trained}
    assert torch.equal(after[:, :6], before[:, :6])
    assert ((after - before)[:, 6:].abs().amax(-1) > 0).all()


def test_a_rate_for_what_is_not_trained_is_refused():
    for trainable in ("mixers", "beyond-window"):
        with pytest.raises(ValueError, match="other_learning_rate has no effect"):
            DistillationOptions(trainable=trainable, other_learning_rate=1e-3)


def test_beyond_the_window_there_must_be_something(hybrids, tmp_path):
    with pytest.raises(ValueError, match="needs a window in every replaced layer"):
        check_stages(AlignmentOptions(distillation=DistillationOptions(trainable="beyond-window")), "mamba2", False)
    convert(
        str(hybrids / "llama-gqa-teacher"), tmp_path / "window", align="none", window=6, mixer="none",
        attention_layers="none",
    )  # fmt: skip
    teacher = teacher_model(hybrids / "llama-gqa-teacher").whole()
    settings = DistillationOptions(tokens=4 * LENGTH, trainable="beyond-window")
    for folder in (hybrids / "llama-gqa", tmp_path / "window"):
        with pytest.raises(ValueError, match="'beyond-window' needs a window and a state"):
            distil(load_hybrid(folder), teacher, rows(4), settings, tmp_path / "work")


def test_tied_embeddings_stay_tied(tmp_path, saved_teacher):
    convert(str(saved_teacher("llama-mha-tied")), tmp_path / "hybrid", align="none")
    student = load_hybrid(tmp_path / "hybrid")
    settings = DistillationOptions(tokens=4 * LENGTH, other_learning_rate=1e-3)
    before = student.lm_head.weight.detach().clone()
    distil(student, teacher_model(saved_teacher("llama-mha-tied")).whole(), rows(4), settings, tmp_path / "work")
    assert student.lm_head.weight is student.model.embed_tokens.weight
    assert not torch.equal(student.lm_head.weight, before)


def test_vocabularies_must_agree(hybrids, tmp_path):
    other = LlambaForCausalLM(
        LlambaConfig(**TINY | {"vocab_size": 64, "num_hidden_layers": 3}, layer_types=["linear_attention"] * 3)
    )
    teacher = teacher_model(hybrids / "llama-gqa-teacher")
    with pytest.raises(ValueError, match="vocab_size 64 and the teacher 128"):
        Stages(teacher, other, rows(4), rows(4), SETTINGS, tmp_path).run()
    with pytest.raises(ValueError, match="one vocabulary"):
        distil(other, teacher.whole(), rows(4), SETTINGS.distillation, tmp_path)


def test_loss_that_is_not_finite_stops_the_stage(hybrids):
    teacher = teacher_model(hybrids / "llama-gqa-teacher")
    mixer = teacher.mixer(0)
    with torch.no_grad():
        mixer.out_proj.weight[0, 0] = float("nan")
    settings = HiddenStateOptions(tokens=LENGTH)
    with pytest.raises(ValueError, match="Layer 0: the loss is not finite before any training"):
        LayerwiseStage(teacher, {0: mixer}, hidden_state_loss(teacher, settings), settings).run(rows(4), rows(4))


def yaml_file(path, settings=SETTINGS):
    """The stages as a user would write them."""
    names = ("matrix_orientation", "hidden_state_alignment", "distillation")
    stages = {name: dataclasses.asdict(getattr(settings, name)) for name in names}
    path.write_text(yaml.safe_dump({"alignment": {"sequence_length": LENGTH, **stages}}))
    return path


def test_command_trains_an_existing_hybrid(hybrids, tmp_path):
    done = run_as_is(
        "mohawk", hybrids / "llama-gqa", tmp_path / "out", "--teacher", hybrids / "llama-gqa-teacher", "--stages",
        "2,3", "--stage-tokens", 8 * LENGTH, "--text", "sampled", "--config", yaml_file(tmp_path / "stages.yaml"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "hidden_state_alignment" in done.stderr
    assert "held_out_kl_after" in done.stderr
    report = json.loads((tmp_path / "out" / "alignment.json").read_text())["stages"][0]
    assert report.keys() == {"hidden_state_alignment", "distillation"}
    assert report["distillation"]["settings"]["tokens"] == 8 * LENGTH
    before, after = load_hybrid(hybrids / "llama-gqa"), load_hybrid(tmp_path / "out")
    teacher = teacher_model(hybrids / "llama-gqa-teacher").whole()
    ids = rows(4, 9)
    with torch.no_grad():
        kl_after, kl_before = (kl_of_logits(teacher(ids).logits, m(ids).logits).mean() for m in (after, before))
    assert kl_after < kl_before
    assert after.config.conversion["align"] == "mohawk"
    assert not (tmp_path / "out.work").exists()
    assert "Aligned with MOHAWK" in (tmp_path / "out" / "README.md").read_text()
    assert sorted(os.listdir(tmp_path)) == ["out", "stages.yaml"]


def test_what_cannot_be_trained_is_said_and_nothing_is_left(hybrids, tmp_path, saved_teacher):
    hybrid, teacher = hybrids / "llama-gqa", hybrids / "llama-gqa-teacher"
    convert(str(saved_teacher("llama-gqa")), tmp_path / "all", attention_layers="all", align="none")

    def refused(expected, hybrid=hybrid, out=tmp_path / "out", overwrite=False, device="cpu", **options):
        alignment = dataclasses.replace(SETTINGS, text="sampled", sequence_length=None, device=device)
        alignment = dataclasses.replace(alignment, matrix_orientation=OrientationOptions())
        output = OutputOptions(folder=str(out), overwrite=overwrite)
        given = dict(hybrid=str(hybrid), teacher=str(teacher), alignment=alignment, output=output) | options
        with pytest.raises(ValueError, match=expected):
            train_existing(MohawkOptions(**given))

    refused("no hybrid", hybrid=tmp_path / "no")
    refused("llama model, not a hybrid", hybrid=teacher)
    refused("no stage 4", stages=[4])
    refused("exists and is not empty", out=hybrid)
    refused("no mixer to align", hybrid=tmp_path / "all", teacher=str(saved_teacher("llama-gqa")), stage_tokens=600)
    refused("Stage 1 has no tokens", stages=1)
    refused("device tpu9", device="tpu9")
    refused("not made by this project", out=teacher, overwrite=True)
    refused("is or contains", out=hybrid, overwrite=True)
    assert os.listdir(tmp_path) == ["all"]


def test_from_teacher_to_trained_hybrid(two_layer_teacher, tmp_path):
    """The closed form and all three stages in one command; each starts where the one before it ended."""
    stages = yaml.safe_load(yaml_file(tmp_path / "stages.yaml").read_text())["alignment"]
    stages["fit"] = {"refine_steps": 0}
    convert(
        str(two_layer_teacher("llama-gqa")), tmp_path / "out", align="mohawk", mixer="mamba2", text="sampled",
        tokens=16 * LENGTH, attention_layers=[1], alignment=stages,
    )  # fmt: skip
    report = json.loads((tmp_path / "out" / "alignment.json").read_text())
    assert report["held_out_error"].keys() == {"0"}
    assert report["tokens"] == 16 * LENGTH
    assert load_hybrid(tmp_path / "out").config.conversion["seconds"]["training"] > 0
    (trained,) = report["stages"]
    assert trained["matrix_orientation"]["held_out_loss_after"] < trained["matrix_orientation"]["held_out_loss_before"]
    assert trained["distillation"]["held_out_kl_after"] < trained["distillation"]["held_out_kl_before"]


def test_two_ranks_equal_one(hybrids, tmp_path):
    """Stages 1 and 2 share the layers, bit for bit; stage 3 shares the batch, to rounding."""
    halved = dataclasses.replace(SETTINGS.distillation, sequences=1)
    one = yaml_file(tmp_path / "one.yaml")
    two = yaml_file(tmp_path / "two.yaml", dataclasses.replace(SETTINGS, distillation=halved))

    def arguments(stages, ranks, settings):
        return [str(argument) for argument in (
            "mohawk", hybrids / "llama-gqa", tmp_path / f"{stages}-{ranks}", "--teacher",
            hybrids / "llama-gqa-teacher", "--text", "sampled", "--stages", stages, "--stage-tokens", 8 * LENGTH,
            "-q", "--config", settings,
        )]  # fmt: skip

    printed = tmp_path / "printed"
    printed.mkdir()
    for stages in ("1,2", "3"):
        run_forked(arguments(stages, 2, two), 2, printed)
    start = load_hybrid(hybrids / "llama-gqa").state_dict()
    for stages, exact in (("1,2", True), ("3", False)):
        done = run_as_is(*arguments(stages, 1, one))
        assert done.returncode == 0, done.stderr
        alone, shared = (load_hybrid(tmp_path / f"{stages}-{ranks}").state_dict() for ranks in (1, 2))
        assert any(not torch.equal(alone[name], start[name]) for name in alone)
        for name in alone:
            if exact:
                assert torch.equal(alone[name], shared[name]), name
            else:
                torch.testing.assert_close(alone[name], shared[name], atol=1e-4, rtol=1e-3, msg=name)


def test_gradient_checkpointing_changes_nothing(hybrids, tmp_path):
    results, recomputed = [], []
    for checkpointing in (False, True):
        student = load_hybrid(hybrids / "llama-gqa")
        calls = []
        student.model.layers[0].mixer.in_proj.register_forward_hook(lambda *args, calls=calls: calls.append(1))
        recomputed.append(calls)
        settings = DistillationOptions(tokens=8 * LENGTH, gradient_checkpointing=checkpointing)
        teacher = teacher_model(hybrids / "llama-gqa-teacher").whole()
        distil(student, teacher, rows(8), settings, tmp_path / str(checkpointing))
        results.append(student.state_dict())
    assert len(recomputed[1]) == 2 * len(recomputed[0]) > 0
    for name, tensor in results[0].items():
        torch.testing.assert_close(tensor, results[1][name], atol=1e-5, rtol=1e-4)


def test_bf16_trains_and_leaves_an_ordinary_model(hybrids, tmp_path):
    settings = dataclasses.replace(
        SETTINGS,
        matrix_orientation=OrientationOptions(),
        hidden_state_alignment=HiddenStateOptions(tokens=TOKENS, bf16=True),
        distillation=DistillationOptions(tokens=TOKENS, learning_rate=1e-3, bf16=True),
    )
    work = stages(hybrids, "llama-gqa", tmp_path, settings)
    report = work.run()
    for name, kind in (("hidden_state_alignment", "loss"), ("distillation", "kl")):
        assert report[name][f"held_out_{kind}_after"] < report[name][f"held_out_{kind}_before"]
    logits = work.student(rows(2), use_cache=False).logits
    assert logits.dtype == torch.float32
    assert torch.isfinite(logits).all()
    assert all(p.dtype == torch.float32 for p in work.student.parameters())
