"""Every configuration that ships is understood by the TRL installed, and runs a step on a tiny model."""

import json
import re
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig

import recipes
from recipes import distillation, dpo, seqkd, sft
from tests.helpers.tiny_chat import conversations, preferences, save_chat_teacher, save_hybrid

CONFIGS = Path(recipes.__file__).with_name("configs")
RECIPES = {"seqkd": seqkd, "sft": sft, "dpo": dpo, "distillation": distillation}
FILES = sorted(path for path in CONFIGS.glob("*/*.yaml") if path.parent.name != "accelerate")
SMALL = [
    "--max_steps", "1", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "1", "--use_cpu",
    "true", "--bf16", "false", "--report_to", "none", "--save_strategy", "no", "--eval_strategy", "no",
    "--teacher_dtype", "float32", "--dataset_train_split", "train", "--dataset_test_split", "test",
]  # fmt: skip


def questions_with_both_columns(folder):
    """As UltraChat has them: the question as a text, and the conversation."""
    folder.mkdir()
    for split in ("train", "test"):
        turns = [{"role": "user", "content": "w9 w10"}, {"role": "assistant", "content": "w11"}]
        rows = [{"prompt": "w9 w10", "messages": turns}] * 4
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("configs")
    # Phi-1.5 has no chat template
    llama, phi = save_chat_teacher(folder / "llama"), save_chat_teacher(folder / "phi", "phi", template=None)
    (folder / "plain").mkdir()
    for split in ("train", "test"):
        rows = [{"prompt": f"w{10 + i} w9", "completion": "w11 w12"} for i in range(4)]
        (folder / "plain" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"w{10 + i} w9"}) + "\n" for i in range(3)))
    return {
        "llamba": (llama, save_hybrid(llama, folder / "llamba")),
        "phimamba": (phi, save_hybrid(phi, folder / "phimamba")),
        "prompts": folder / "prompts.jsonl",
        "chats": conversations(folder / "chats", count=4, test=2),
        "plain": folder / "plain",
        "questions": questions_with_both_columns(folder / "questions"),
        "pairs": preferences(folder / "pairs", count=4, test=2),
    }


def test_there_is_one_for_every_recipe():
    for family in ("llamba", "tiny"):
        assert {path.stem for path in FILES if path.parent.name == family} == set(RECIPES)
    of_phi = {path.stem for path in FILES if path.parent.name == "phimamba"}
    assert of_phi == {"seqkd", "sft"}, "no paper has the others for Phi: they are Llamba's with other names"


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_it_runs(path, world, tmp_path):
    teacher, hybrid = world["llamba" if path.parent.name == "tiny" else path.parent.name]
    argv = ["--config", str(path), "--teacher_model_name_or_path", str(teacher), "--output_dir", str(tmp_path / "out")]
    if path.stem == "seqkd":
        more = ["--dataset_name", str(world["prompts"]), "--max_new_tokens", "6", "--truncated", "keep",
                "--dataset_train_split", "train", "--teacher_dtype", "float32"]  # fmt: skip
        report = RECIPES["seqkd"].main([*argv, *more])
        assert report["rows"]["train"] == 3
        return
    data = {"dpo": world["pairs"], "distillation": world["questions"], "sft": world["chats"]}[path.stem]
    if path.parent.name == "phimamba" and path.stem == "sft":
        data = world["plain"]  # what seqkd.yaml makes of a teacher without turns
    more = ["--model_name_or_path", str(hybrid), "--dataset_name", str(data), *SMALL]
    more += ["--max_completion_length", "4"] if path.stem == "distillation" else ["--max_length", "64"]
    RECIPES[path.stem].main([*argv, *more])
    record = json.loads((tmp_path / "out" / "training.json").read_text())[-1]
    given = yaml.safe_load(path.read_text())
    if path.parent.name != "tiny":
        assert record["settings"]["learning_rate"] == given["learning_rate"]
        assert record["settings"].get("beta") == given.get("beta", record["settings"].get("beta"))


@pytest.mark.parametrize("path", [p for p in FILES if p.stem not in ("seqkd",) and p.parent.name != "tiny"], ids=str)
def test_the_batch_is_the_one_it_names(path):
    """On the processes of `accelerate/ddp.yaml`, which its first lines launch it with."""
    given, processes = yaml.safe_load(path.read_text()), 8
    (named,) = re.findall(r"(\d+) (?:sequences|pairs|prompts) a\s+#? ?step", path.read_text())
    assert given["per_device_train_batch_size"] * given["gradient_accumulation_steps"] * processes == int(named)


@pytest.mark.parametrize("path", sorted((CONFIGS / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_its_configurations(path):
    config = ClusterConfig.from_yaml_file(str(path))
    assert config.num_processes == 8
    assert config.mixed_precision == "bf16"
