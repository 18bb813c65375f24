"""What training changes in a card, and what is tried before it."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Trainer

from convert.checkpoint.card import KL_ROW, NO_FIGURES, NOT_MEASURED, NOTES
from convert.checkpoint.load import load_model
from recipes import distillation, dpo, sft
from recipes.training.save import TRAINED_NOTE, new_card, with_training
from tests.helpers.tiny_chat import common_arguments, conversations, preferences, save_chat_teacher, save_hybrid

STAGE = {"stage": "sft", "teacher": None, "data": "chats", "settings": {}, "before": {}, "after": {}}


@pytest.mark.parametrize("note", NOTES, ids=range(len(NOTES)))
def test_a_trained_model_no_longer_says_that_nothing_was_trained(note):
    card = new_card("name")
    card.text += note + "\n"
    text = with_training(card, [STAGE], "name").text
    assert note not in text
    assert text.count(TRAINED_NOTE) == 1


def test_a_trained_model_no_longer_has_the_figures_of_before():
    card = new_card("name")
    card.text += f"| {KL_ROW} | 0.123 |\n"
    assert f"| {KL_ROW} | {NOT_MEASURED} |" in with_training(card, [STAGE], "name").text
    assert KL_ROW in NO_FIGURES


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("save")
    teacher = save_chat_teacher(folder / "teacher")
    pairs, chats = preferences(folder / "pairs"), conversations(folder / "chats")
    return {"teacher": teacher, "hybrid": save_hybrid(teacher, folder / "hybrid"), dpo: pairs, sft: chats} | {
        distillation: chats
    }


SAMPLING = json.dumps({"temperature": 0.9, "top_p": 0.6})


@pytest.mark.parametrize(
    "recipe, name, content",
    [
        (sft, "generation_config.json", SAMPLING),
        (dpo, "generation_config.json", SAMPLING),
        (distillation, "generation_config.json", SAMPLING),
        (sft, "README.md", "---\na: [\n---\n"),
        (sft, "training.json", "[{"),
    ],
)
def test_what_cannot_be_written_in_the_end_is_said_before_the_training(
    recipe, name, content, world, tmp_path, monkeypatch
):
    """Llama-2's generation settings are refused once training sets the token that pads, which it has not either."""
    hybrid = shutil.copytree(world["hybrid"], tmp_path / "hybrid")
    (hybrid / name).write_text(content)
    settings = json.loads((hybrid / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (hybrid / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr(Trainer, "train", None)  # which must not be reached
    more = ("--max_completion_length", "6") if recipe is distillation else ()
    arguments = common_arguments(hybrid, world["teacher"], world[recipe], tmp_path / "out", *more)
    with pytest.raises(
        ValueError, match=f"With .*/hybrid/{name} the trained model cannot be written .*; mend that file"
    ):
        recipe.main(arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["hybrid"]


@pytest.mark.parametrize("settings", ['{"max_new_tokens": -1}', '{"watermarking_config": {"a": 1}}'])
@pytest.mark.parametrize("which", ["hybrid", "teacher"])
def test_settings_that_keep_a_model_from_loading_come_with_their_file(which, settings, world, tmp_path):
    folder = shutil.copytree(world[which], tmp_path / which)
    (folder / "generation_config.json").write_text(settings)
    names = world | {which: folder}
    with pytest.raises(ValueError, match=f"{which} does not load: its generation_config.json is refused"):
        sft.main(common_arguments(names["hybrid"], names["teacher"], world[sft], tmp_path / "out"))
    with pytest.raises(ValueError, match=f"{which} does not load: its generation_config.json is refused"):
        load_model(str(folder))


def test_weights_that_are_not_finite_are_no_matter_of_the_learning_rate(world, tmp_path, monkeypatch):
    hybrid = shutil.copytree(world["hybrid"], tmp_path / "hybrid")
    weights = load_file(hybrid / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, hybrid / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(Trainer, "train", None)
    with pytest.raises(ValueError, match="model.norm.weight is not finite before any training; convert or download"):
        sft.main(common_arguments(hybrid, world["teacher"], world[sft], tmp_path / "out"))


DORA = ("--use_peft", "true", "--use_dora", "true", "--lora_r", "2", "--lora_target_modules", "q_proj", "o_proj")


def test_adapters_that_divide_by_rows_of_zeros_are_refused(world, tmp_path, monkeypatch):
    """DoRA on a gate that was begun with zeros: 0 / 0 in the first batch."""
    arguments = common_arguments(world["hybrid"], world["teacher"], world[sft], tmp_path / "out", *DORA)
    sft.main(arguments)
    monkeypatch.setattr(Trainer, "train", None)
    with pytest.raises(ValueError, match="2 weights have rows of zeros, .* leave in_proj out of lora_target_modules"):
        sft.main([*arguments, "in_proj", "--output_dir", str(tmp_path / "other")])


@pytest.mark.parametrize("recipe", [sft, dpo])
@pytest.mark.parametrize("evaluated", ["steps", "no"])
def test_a_loss_that_is_not_finite_from_the_start_is_no_matter_of_the_learning_rate(
    recipe, evaluated, world, tmp_path
):
    hybrid = shutil.copytree(world["hybrid"], tmp_path / "hybrid")
    weights = load_file(hybrid / "model.safetensors")
    weights["model.norm.weight"] *= 1e38
    save_file(weights, hybrid / "model.safetensors", {"format": "pt"})
    arguments = common_arguments(hybrid, world["teacher"], world[recipe], tmp_path / "out", "--logging_steps", "9")
    with pytest.raises(ValueError, match="not finite before any weight was changed"):
        recipe.main([*arguments, "--eval_strategy", evaluated])


def test_a_trained_model_generates_with_its_cache(world, tmp_path):
    """A trainer switches it off in the configuration."""
    sft.main(common_arguments(world["hybrid"], world["teacher"], world[sft], tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["use_cache"] is True
