"""SFT with a teacher on tiny models: what is counted, what changes, resuming, adapters, remote code, bad input."""

import contextlib
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from convert.io.folder import OutputFolder
from convert.train.distillation.loss import divergence
from convert.train.distillation.trainer import DistilledSFTTrainer
from recipes import progressive_sft, sft
from recipes.training import load, run
from recipes.training.arguments import TeacherArguments
from recipes.training.run import script
from tests.helpers.tiny_chat import common_arguments, conversations, save_chat_teacher, save_hybrid


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    teacher = save_chat_teacher(folder / "teacher")
    phi = save_chat_teacher(folder / "phi", "phi")
    return {
        "teacher": teacher,
        "llamba": save_hybrid(teacher, folder / "llamba"),
        "phi": phi,
        "phimamba": save_hybrid(phi, folder / "phimamba"),
        "beside": save_hybrid(teacher, folder / "beside", window=4, sinks=1),
        "data": conversations(folder / "data"),
    }


def arguments(world, output, *more, student="llamba"):
    teacher = world["phi" if student == "phimamba" else "teacher"]
    return common_arguments(world[student], teacher, world["data"], output, *more)


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_a_run_from_data_to_an_ordinary_model(world, tmp_path, monkeypatch):
    before, load, teachers = (weights(world["llamba"]), weights(world["teacher"])), sft.load_teacher, []

    def loaded(*args):
        teachers.append(load(*args))
        return teachers[0]

    monkeypatch.setattr(sft, "load_teacher", loaded)
    report = sft.main(arguments(world, tmp_path / "out"))
    assert report["after"]["eval_kl"] < report["before"]["eval_kl"]
    assert not (tmp_path / "out.work").exists()
    trained = weights(tmp_path / "out")
    assert {k for k, v in trained.items() if torch.equal(v, before[0][k])} == set()
    assert not teachers[0].training
    for name, parameter in teachers[0].named_parameters():
        assert torch.equal(parameter, before[1][name]), name
        assert parameter.grad is None, name
        assert not parameter.requires_grad, name
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert [stage["stage"] for stage in record] == ["sft"]
    assert record[0]["after"] == report["after"]
    assert [entry["step"] for entry in record[0]["log"] if "loss" in entry] == [1, 2]
    assert [entry["step"] for entry in record[0]["log"] if "eval_loss" in entry] == [0, 2], "the end is measured once"
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert {r.metric_type: r.metric_value for r in card.data.eval_results}["kl"] == pytest.approx(
        report["after"]["eval_kl"], abs=1e-6
    )
    assert "Not aligned" not in card.text
    assert "Trained end to end" in card.text
    assert "training.png" in card.text
    monkeypatch.setattr(sft, "load_teacher", load)
    again = sft.main(arguments(world | {"llamba": tmp_path / "out"}, tmp_path / "again"))
    assert again["before"]["eval_kl"] == pytest.approx(report["after"]["eval_kl"], rel=1e-5)
    assert len(json.loads((tmp_path / "again" / "training.json").read_text())) == 2


@pytest.mark.parametrize(
    "launched, refusal",
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed is not supported; shard with FSDP"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "FSDP 1 is not supported; say fsdp_version: 2"),
    ],
)
def test_other_shards_are_refused(launched, refusal, monkeypatch):
    """The check alone: where DeepSpeed is not installed, transformers fails before it."""
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    config = SimpleNamespace(resume_from_checkpoint=None, hub_token=None)
    arguments = SimpleNamespace(config=config, model_config=SimpleNamespace(use_peft=False))
    with pytest.raises(ValueError, match=refusal):
        run.Run._check(arguments, "hybrid")


def test_what_one_process_cannot_read_for_all_is_refused(monkeypatch):
    """TRL's own trainers, which shard what each process has read, and a teacher that bitsandbytes quantises."""
    for module in (run, load):
        monkeypatch.setattr(module, "is_fsdp_enabled", lambda: True)
    with pytest.raises(ValueError, match="fsdp_cpu_ram_efficient_loading spreads no teacher of bitsandbytes"):
        load.load_teacher(TeacherArguments(teacher_model_name_or_path="teacher", teacher_load_in_4bit=True))
    config = SimpleNamespace(resume_from_checkpoint=None, hub_token=None)
    for stage in ("sft", "dpo"):
        arguments = SimpleNamespace(stage=stage, config=config, model_config=SimpleNamespace(use_peft=False))
        refused = pytest.raises(ValueError, match="fsdp_cpu_ram_efficient_loading is for recipes.sft; say false")
        with contextlib.nullcontext() if stage == "sft" else refused:
            run.Run._check(arguments, "hybrid")


@pytest.mark.parametrize("student", ("llamba", "phimamba", "beside"))
def test_only_the_answers_count_with_padding_and_with_packing(student, world, tmp_path):
    """The KL reported is that of each conversation by itself, over its answer's tokens and their end."""
    teacher = AutoModelForCausalLM.from_pretrained(world["phi" if student == "phimamba" else "teacher"])
    tokenizer = AutoTokenizer.from_pretrained(world["teacher"])
    model = AutoModelForCausalLM.from_pretrained(world[student])
    total = counted = 0
    for line in (world["data"] / "test.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompt, whole = (
            tokenizer.apply_chat_template(turns, add_generation_prompt=generate, return_dict=True)["input_ids"]
            for turns, generate in ((row["prompt"], True), (row["prompt"] + row["completion"], False))
        )
        with torch.no_grad():
            p, q = (m(torch.tensor([whole])).logits[0].log_softmax(-1) for m in (teacher, model))
        span = slice(len(prompt) - 1, len(whole) - 1)
        total += divergence("forward", p[span], q[span]).sum().item()
        counted += len(whole) - len(prompt)
    options = ("--max_length", "40", "--learning_rate", "0")
    for i, more in enumerate((options, (*options, "--packing", "true", "--per_device_eval_batch_size", "1"))):
        report = sft.main(arguments(world, tmp_path / str(i), *more, student=student))
        assert report["before"]["eval_kl"] == pytest.approx(total / counted, rel=1e-4)


def test_interrupted_in_the_middle_of_an_epoch_it_ends_with_the_same_weights(world, tmp_path, monkeypatch):
    more = ("--max_steps", "5", "--save_strategy", "steps", "--save_steps", "2", "--gradient_accumulation_steps", "2")
    sft.main(arguments(world, tmp_path / "straight", *more))
    step, calls = DistilledSFTTrainer.training_step, []

    def interrupted(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    monkeypatch.setattr(DistilledSFTTrainer, "training_step", interrupted)
    with pytest.raises(KeyboardInterrupt) as stopped:
        sft.main(arguments(world, tmp_path / "broken", *more))
    assert "broken.work, and the same command goes on from there" in " ".join(stopped.value.__notes__)
    assert not (tmp_path / "broken").exists()
    assert (tmp_path / "broken.work" / "checkpoint-2").is_dir()
    with pytest.raises(ValueError, match="checkpoints of another run"):
        sft.main(arguments(world, tmp_path / "broken", *more, "--kl_weight", "0.5"))
    report = sft.main(arguments(world, tmp_path / "broken", *more))
    straight = json.loads((tmp_path / "straight" / "training.json").read_text())[0]
    assert report["before"] == straight["before"]
    assert report["after"] == straight["after"]
    for name, tensor in weights(tmp_path / "broken").items():
        assert torch.equal(tensor, weights(tmp_path / "straight")[name]), name


def test_one_run_at_a_time(world, tmp_path, monkeypatch):
    """A second one ends before it reads anything, from the first's beginning to its end."""
    step, refusals = DistilledSFTTrainer.training_step, []
    refused = pytest.raises(ValueError, match=f"Another run is writing {tmp_path / 'out'}; wait for it")

    def while_it_trains(self, *args, **kwargs):
        with refused as refusal, OutputFolder(tmp_path / "out"):
            pass
        refusals.append(refusal)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(DistilledSFTTrainer, "training_step", while_it_trains)
    with OutputFolder(tmp_path / "out"), refused:
        sft.main(arguments(world, tmp_path / "out"))
    assert not refusals
    sft.main(arguments(world, tmp_path / "out"))
    assert len(refusals) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_run_that_has_no_checkpoint_yet_leaves_nothing(world, tmp_path, monkeypatch):
    def interrupted(self, *args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(DistilledSFTTrainer, "training_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sft.main(arguments(world, tmp_path / "out"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what, others", [("mixers", 0), ("all-but-mlp", 1), ("all", 1)])
def test_trainable_parts(what, others, world, tmp_path):
    sft.main(arguments(world, tmp_path / "out", "--trainable", what, "--other_learning_rate", "1e-4"))
    before, after = weights(world["llamba"]), weights(tmp_path / "out")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name for name in before if ".mixer." in name} <= changed
    rest = {name for name in changed if ".mixer." not in name}
    assert bool(rest) == bool(others)
    assert any(".mlp." in name for name in rest) == (what == "all")


def test_the_loss_is_what_the_weights_say(world, tmp_path):
    loss = ("--ce_weight", "0.5", "--kl_weight", "2", "--learning_rate", "0")
    before = sft.main(arguments(world, tmp_path / "a", *loss, "--per_device_eval_batch_size", "4"))["before"]
    assert before["eval_loss"] == pytest.approx(0.5 * before["eval_ce"] + 2 * before["eval_kl"], rel=1e-5)
    alone = sft.main(
        arguments(world, tmp_path / "b", "--kl_weight", "0", "--ce_weight", "1", "--per_device_eval_batch_size", "4")
    )["before"]
    assert alone["eval_loss"] == pytest.approx(alone["eval_ce"], rel=1e-5)
    assert "eval_kl" not in alone


def test_a_chat_template_may_have_any_name(world, tmp_path):
    """TRL would take a name without .jinja for a model's; the saved tokenizer has the template."""
    template = tmp_path / "template.txt"
    own = AutoTokenizer.from_pretrained(world["teacher"]).chat_template
    template.write_text(own + "{# marked #}")
    sft.main(arguments(world, tmp_path / "out", "--chat_template_path", str(template)))
    saved = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert saved.chat_template.endswith("{# marked #}")


def test_gradient_accumulation_and_checkpointing_change_nothing(world, tmp_path):
    runs = {
        "plain": ("--per_device_train_batch_size", "4"),
        "accumulated": ("--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "4"),
        "checkpointed": ("--per_device_train_batch_size", "4", "--gradient_checkpointing", "true"),
    }
    # plain SGD without clipping: a wrong factor of the loss is a wrong step
    sgd = ("--optim", "sgd", "--learning_rate", "0.1", "--max_grad_norm", "0", "--max_steps", "1", "--eval_steps", "1")
    for name, more in runs.items():
        sft.main(arguments(world, tmp_path / name, *more, *sgd))
    before, plain = weights(world["llamba"]), weights(tmp_path / "plain")
    for name in ("accumulated", "checkpointed"):
        for key, tensor in weights(tmp_path / name).items():
            step = (plain[key] - before[key]).abs().max()
            assert step > 0, (name, key)
            assert (tensor - plain[key]).abs().max() <= 1e-3 * step, (name, key)


def test_adapters_are_merged_and_survive_an_interruption(world, tmp_path, monkeypatch):
    lora = (
        "--use_peft", "true", "--lora_r", "4", "--lora_target_modules", "in_proj", "out_proj", "q_proj",
        "--lora_modules_to_save", "conv1d", "input_layernorm", "--max_steps", "4",
        "--eval_steps", "4", "--save_strategy", "steps", "--save_steps", "2",
    )  # fmt: skip
    sft.main(arguments(world, tmp_path / "out", *lora))
    before, after = weights(world["llamba"]), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {name.split(".", 3)[-1] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {
        "mixer.in_proj.weight", "mixer.out_proj.weight", "self_attn.q_proj.weight", "mixer.conv1d.weight",
        "mixer.conv1d.bias", "input_layernorm.weight",
    }  # fmt: skip
    step, calls = DistilledSFTTrainer.training_step, []

    def interrupted(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    monkeypatch.setattr(DistilledSFTTrainer, "training_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sft.main(arguments(world, tmp_path / "broken", *lora))
    sft.main(arguments(world, tmp_path / "broken", *lora))
    for name, tensor in weights(tmp_path / "broken").items():
        assert torch.equal(tensor, after[name]), name


def test_step_by_step_replacement(world, tmp_path, monkeypatch):
    steps, main = [], sft.main

    def watched(argv):
        start = argv[len(argv) - 1 - argv[::-1].index("--model_name_or_path") + 1]
        types = json.loads(open(f"{start}/config.json").read())["layer_types"]
        report = main(argv)
        steps.append((types.count("linear_attention"), argv[-1], report))
        return report

    monkeypatch.setattr(sft, "main", watched)
    progressive_sft.run(arguments(world, tmp_path / "out"), None)
    assert [(n, chunk) for n, chunk, _ in steps] == [(1, "1/2"), (2, "2/2")]
    out = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert out.config.layer_types == AutoModelForCausalLM.from_pretrained(world["llamba"]).config.layer_types
    assert len(json.loads((tmp_path / "out" / "training.json").read_text())) == 2
    assert not (tmp_path / "out.steps").exists()


def test_composing_puts_every_weight_where_it_belongs(world, tmp_path):
    from convert import convert

    convert(str(world["teacher"]), tmp_path / "attention", attention_layers=1.0, align="none")
    lender, attention = (AutoModelForCausalLM.from_pretrained(p) for p in (world["llamba"], tmp_path / "attention"))
    replaced = [i for i, kind in enumerate(lender.config.layer_types) if kind == "linear_attention"]
    whole = progressive_sft.compose(lender, attention, None, set(replaced))
    none = progressive_sft.compose(lender, attention, None, set())
    ids = torch.randint(3, 128, (1, 12))
    torch.testing.assert_close(whole(ids).logits, lender(ids).logits)
    torch.testing.assert_close(none(ids).logits, attention(ids).logits)
    teacher = AutoModelForCausalLM.from_pretrained(world["teacher"])
    torch.testing.assert_close(none(ids).logits, teacher(ids).logits, rtol=1e-4, atol=1e-4)


def test_layers_to_come_are_not_rounded(world, tmp_path):
    """Their queries and keys are the teacher's, which has no offsets; the last step rounds as the hybrid does."""
    from convert import convert

    teacher = str(world["teacher"])
    few = dict(bits=8, window=8, sinks=2, attention_layers=[0], attention_heads="1:0,1:1", text="sampled", tokens=640)
    convert(teacher, tmp_path / "hybrid", alignment={"sequence_length": 64}, **few)
    convert(teacher, tmp_path / "attention", attention_layers="all", align="none")
    lender, attention = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("hybrid", "attention"))
    assert any(name.endswith("key_offset") for name in lender.state_dict())
    replaced = [i for i, kind in enumerate(lender.config.layer_types) if kind == "hybrid"]
    ids = torch.randint(3, 128, (1, 12))
    none = progressive_sft.compose(lender, attention, None, set())
    torch.testing.assert_close(none(ids).logits, attention(ids).logits, rtol=1e-4, atol=1e-4)
    one = progressive_sft.compose(lender, attention, None, set(replaced[:1]))
    assert 0 < (one(ids).logits - attention(ids).logits).norm() < (lender(ids).logits - attention(ids).logits).norm()
    whole = progressive_sft.compose(lender, attention, one, set(replaced))
    torch.testing.assert_close(whole(ids).logits, lender(ids).logits)


def test_order_of_the_layers():
    """Mamba in the Llama's own list for 32 layers ends so."""
    order = [layer for (layer,) in progressive_sft.in_steps(list(range(32)), None)]
    assert order[16:] == [1, 5, 9, 13, 17, 21, 25, 29, 3, 11, 19, 27, 7, 23, 15, 31]
    assert progressive_sft.in_steps(list(range(8)), None) == [[i] for i in (0, 2, 4, 6, 1, 5, 3, 7)]
    assert progressive_sft.in_steps(list(range(5)), 2) == [[0, 2], [4, 1, 3]]
    with pytest.raises(ValueError, match="between 1 and 2"):
        progressive_sft.in_steps([0, 1], 3)


@pytest.mark.parametrize(
    "more, expected",
    [
        (("--dataset_name", "nowhere"), "cannot be read"),
        (("--dataset_name", "nowhere.jsonl"), "no such file"),
        (("--config", "{unknown_key}"), "Unknown key 'bogus' in the configuration file"),
        (("--teacher_model_name_or_path", "/nowhere"), "does not load"),
        (("--model_name_or_path", "{teacher}"), "not a hybrid"),
        (("--dataset_train_split", "dev"), "no split 'dev'"),
        (("--max_length", "3"), "Nothing is left"),
        (("--temperature", "0"), "temperature must be positive"),
        (("--kl_weight", "0"), "nor both zero"),
        (("--load_in_4bit", "true"), "for the teacher"),
        (("--teacher_load_in_4bit", "true"), "bitsandbytes"),
        (("--push_to_hub", "true"), "needs a Hub token"),
        (("--use_peft", "true", "--trainable", "mixers"), "leave trainable"),
        (("--loss_type", "dft"), "not for this loss"),
        (("--dataset_text_field", "body"), "rename the column"),
        (("--packing", "true", "--packing_strategy", "wrapped"), "lets one conversation see another"),
        (("--use_peft", "true", "--lora_target_modules", "lm_head", "q_proj"), "takes no adapter"),
        (("--resume_from_checkpoint", "x"), "goes on by itself"),
        (("--max_shard_size", "5XB"), "'5XB' is not a size"),
        (("--data_chunk", "13/12"), "data_chunk must be N/M"),
        (("--output_dir", "{llamba}"), "exists and is not empty"),
        (("--no_such_key", "1"), "no_such_key"),
        (("--config", "/nowhere.yaml"), "does not exist"),
    ],
)
def test_bad_input_is_one_clear_error(more, expected, world, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    (tmp_path / "unknown.yaml").write_text("bogus: 1\n")
    more = [part.format(**world, unknown_key=tmp_path / "unknown.yaml") for part in more]
    with pytest.raises(ValueError, match=expected):
        sft.main(arguments(world, tmp_path / "out", *more))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "row, expected",
    [
        ({"asked": "w9", "answer": "w10"}, "needed are"),
        ({"prompt": "w9 w8", "completion": " "}, "Row 0 of the data has an empty answer in completion"),
        ({"messages": [{"role": "user", "content": "w9"}]}, "Row 0 of the data has an empty answer in messages"),
    ],
)
def test_data_that_cannot_be_used(row, expected, world, tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=expected):
        sft.main(arguments(world | {"data": tmp_path}, tmp_path / "out"))


def test_another_vocabulary_is_refused(world, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.helpers.teachers import TINY

    LlamaForCausalLM(LlamaConfig(**TINY | {"vocab_size": 130})).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="130 tokens and the student 128"):
        sft.main(arguments(world | {"teacher": tmp_path / "other"}, tmp_path / "out"))


def test_the_command_fails_with_one_line(world, tmp_path, monkeypatch, capsys):
    argv = arguments(world, tmp_path / "out", "--dataset_name", "nowhere")
    monkeypatch.setattr(sys, "argv", ["recipes.sft", *argv])
    with pytest.raises(SystemExit, match="1"):
        script(sft.main)
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1, error
    assert error.startswith("error:"), error
    monkeypatch.setattr(sys, "argv", ["recipes.sft", *argv, "--verbose"])
    with pytest.raises(ValueError, match="nowhere"):
        script(sft.main)


def test_what_the_hub_would_refuse_in_the_end_is_said_before_the_training(world, tmp_path, monkeypatch):
    """What it refuses is tested with the conversion's push."""

    def refuse(name, private):
        raise ValueError(f"{name} exists and is public, not {private}")

    monkeypatch.setattr(run, "prepare_repository", refuse)
    push = ("--push_to_hub", "true", "--hub_model_id", "me/public", "--hub_private_repo", "true")
    with pytest.raises(ValueError, match="me/public exists and is public, not True"):
        sft.main(arguments(world, tmp_path / "out", *push))
    assert not list(tmp_path.iterdir())
