"""The script that runs all recipes in a row, on a tiny teacher."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.tiny_chat import conversations, preferences, save_chat_teacher

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_from_a_teacher_to_preferences(tmp_path):
    teacher = save_chat_teacher(tmp_path / "teacher")
    prompts, pairs = conversations(tmp_path / "prompts"), preferences(tmp_path / "pairs")
    command = ["sh", ROOT / "recipes/pipeline.sh", teacher, prompts, pairs, tmp_path / "out"]
    options = "--max_length 128 --max_steps 2 --per_device_train_batch_size 2"
    setting = os.environ | {
        "PYTHON": sys.executable,
        "OPTIONS": options,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
    }
    subprocess.run(command, check=True, env=setting, cwd=tmp_path)
    for stage in ("hybrid", "sft", "dpo"):
        assert (tmp_path / "out" / stage / "model.safetensors").is_file()
    before = (tmp_path / "out" / "dpo" / "config.json").stat().st_mtime_ns
    subprocess.run(command, check=True, env=setting, cwd=tmp_path)
    assert (tmp_path / "out" / "dpo" / "config.json").stat().st_mtime_ns == before
