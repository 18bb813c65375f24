"""DPO against the teacher and on-policy distillation, on tiny models."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes import distillation, dpo
from tests.helpers.tiny_chat import common_arguments, conversations, preferences, save_chat_teacher, save_hybrid


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dpo")
    teacher = save_chat_teacher(folder / "teacher")
    phi = save_chat_teacher(folder / "phi", "phi")
    return {
        "teacher": teacher,
        "phi": phi,
        "llamba": save_hybrid(teacher, folder / "llamba"),
        "phimamba": save_hybrid(phi, folder / "phimamba"),
        "beside": save_hybrid(teacher, folder / "beside", window=4, sinks=1),
        "data": preferences(folder / "pairs"),
        "chats": conversations(folder / "chats", count=4, test=2),
    }


def arguments(world, output, *more, student="llamba", data="data"):
    teacher = world["phi" if student == "phimamba" else "teacher"]
    return common_arguments(world[student], teacher, world[data], output, *more)


def answer_log_prob(model, tokenizer, prompt, answer) -> float:
    """Of one answer after one prompt, by itself."""
    start, whole = (
        tokenizer.apply_chat_template(turns, add_generation_prompt=generate, return_dict=True)["input_ids"]
        for turns, generate in ((prompt, True), (prompt + answer, False))
    )
    with torch.no_grad():
        log_probs = model(torch.tensor([whole])).logits[0, :-1].log_softmax(-1)
    picked = log_probs.gather(-1, torch.tensor(whole[1:])[:, None])[len(start) - 1 :, 0]
    return picked.sum().item()


@pytest.mark.parametrize(
    "student, precompute", [(s, p) for s in ("llamba", "phimamba") for p in ("false", "true")] + [("beside", "false")]
)
def test_rewards_are_against_the_teacher(student, precompute, world, tmp_path):
    options = ("--beta", "0.2", "--precompute_ref_log_probs", precompute, "--per_device_eval_batch_size", "4")
    report = dpo.main(arguments(world, tmp_path / "out", *options, student=student))
    teacher = AutoModelForCausalLM.from_pretrained(world["phi" if student == "phimamba" else "teacher"])
    model, tokenizer = (c.from_pretrained(world[student]) for c in (AutoModelForCausalLM, AutoTokenizer))
    margins = []
    for line in (world["data"] / "test.jsonl").read_text().splitlines():
        row = json.loads(line)
        reward = {
            name: answer_log_prob(model, tokenizer, row["prompt"], row[name])
            - answer_log_prob(teacher, tokenizer, row["prompt"], row[name])
            for name in ("chosen", "rejected")
        }
        margins.append(0.2 * (reward["chosen"] - reward["rejected"]))
    assert report["before"]["eval_rewards/margins"] == pytest.approx(sum(margins) / len(margins), rel=1e-3)
    assert report["before"]["eval_rewards/accuracies"] == sum(m > 0 for m in margins) / len(margins)
    assert report["after"]["eval_rewards/margins"] != report["before"]["eval_rewards/margins"]
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert record[-1]["settings"]["reference"] == "teacher"
    ids = torch.randint(3, 128, (1, 9))
    assert not torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits, model(ids).logits)


def test_the_students_own_copy_as_reference_starts_at_zero(world, tmp_path):
    report = dpo.main(arguments(world, tmp_path / "out", "--reference", "student"))
    assert abs(report["before"]["eval_rewards/margins"]) < 1e-6 < abs(report["after"]["eval_rewards/margins"])
    lora = ("--use_peft", "true", "--lora_r", "2", "--lora_target_modules", "in_proj", "out_proj")
    report = dpo.main(arguments(world, tmp_path / "lora", "--reference", "student", *lora))
    assert abs(report["before"]["eval_rewards/margins"]) < 1e-6
    before, after = (load_file(f / "model.safetensors") for f in (world["llamba"], tmp_path / "lora"))
    changed = {name.split(".", 3)[-1] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"mixer.in_proj.weight", "mixer.out_proj.weight"}


@pytest.mark.parametrize("recipe", (dpo, distillation))
def test_the_teacher_stays_as_it_is(recipe, world, tmp_path, monkeypatch):
    seen, load = {}, recipe.load_teacher

    def remembered(*args):
        seen["teacher"] = load(*args)
        seen["before"] = {name: p.clone() for name, p in seen["teacher"].named_parameters()}
        return seen["teacher"]

    monkeypatch.setattr(recipe, "load_teacher", remembered)
    of_recipe = {"data": "data"} if recipe is dpo else {"data": "chats"}
    more = () if recipe is dpo else ("--max_completion_length", "4")
    recipe.main(arguments(world, tmp_path / "out", "--learning_rate", "1e-2", *more, **of_recipe))
    for name, parameter in seen["teacher"].named_parameters():
        assert parameter.grad is None, name
        assert not parameter.requires_grad, name
        assert torch.equal(parameter, seen["before"][name]), name


def test_a_vocabulary_of_the_same_size_that_is_another_one(world, tmp_path):
    shuffled = shutil.copytree(world["teacher"], tmp_path / "teacher")
    stored = json.loads((shuffled / "tokenizer.json").read_text())
    words = stored["model"]["vocab"]
    stored["model"]["vocab"] = dict(zip(words, [0, 1, 2, *range(127, 2, -1)], strict=True))
    (shuffled / "tokenizer.json").write_text(json.dumps(stored))
    for recipe, data in ((dpo, "data"), (distillation, "chats")):
        with pytest.raises(ValueError, match="The teacher's vocabulary is another one"):
            recipe.main(arguments(world | {"teacher": shuffled}, tmp_path / "out", data=data))


def test_a_teacher_of_which_weights_are_missing_is_refused(world, tmp_path):
    """transformers fills them up with random ones."""
    teacher = shutil.copytree(world["teacher"], tmp_path / "teacher")
    weights = load_file(teacher / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, teacher / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="The teacher does not load: .*1 tensors are missing .*layers.1.mlp.up_proj"):
        dpo.main(arguments(world | {"teacher": teacher}, tmp_path / "out"))


def test_on_policy_distillation_comes_closer_to_the_teacher(world, tmp_path):
    more = ("--max_completion_length", "6", "--max_steps", "6", "--eval_steps", "6", "--learning_rate", "3e-3")
    report = distillation.main(arguments(world, tmp_path / "out", *more, data="chats"))
    assert 0 < report["after"]["eval_loss"] < report["before"]["eval_loss"]
    before, after = (load_file(f / "model.safetensors") for f in (world["llamba"], tmp_path / "out"))
    assert all(not torch.equal(before[name], after[name]) for name in before if ".mixer.in_proj" in name)


@pytest.mark.parametrize(
    "row, expected",
    [
        ({"prompt": "w9", "chosen": "w8"}, "needed are"),
        ({"prompt": "w9", "chosen": "w8", "rejected": ""}, "Row 0 of the data has an empty answer in rejected"),
    ],
)
def test_pairs_that_cannot_be_used(row, expected, world, tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=expected):
        dpo.main(arguments(world | {"data": tmp_path}, tmp_path / "out"))


def test_prompts_longer_than_everything_are_an_error(world, tmp_path):
    with pytest.raises(ValueError, match="Nothing is left"):
        dpo.main(arguments(world, tmp_path / "out", "--max_length", "2"))
