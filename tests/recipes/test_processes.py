"""Two processes train what one trains: DDP over gloo on the CPU."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from recipes import dpo, sft
from tests.recipes.tiny_chat import common_arguments, conversations, preferences, save_chat_teacher, save_hybrid


@pytest.mark.parametrize("recipe", (sft, dpo))
def test_two_processes_equal_one(recipe, tmp_path):
    teacher = save_chat_teacher(tmp_path / "teacher")
    hybrid = save_hybrid(teacher, tmp_path / "hybrid")
    data = conversations(tmp_path / "data") if recipe is sft else preferences(tmp_path / "data")

    def arguments(processes: int) -> list[str]:
        # plain SGD: AdamW's step is the sign of a gradient, however small, and rounding decides those near zero
        more = ("--per_device_train_batch_size", str(4 // processes), "--optim", "sgd", "--learning_rate", "0.5")
        return common_arguments(hybrid, teacher, data, tmp_path / str(processes), *more)

    alone = recipe.main(arguments(1))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", recipe.__name__, *arguments(2), "--verbose"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    before, one, two = (load_file(f / "model.safetensors") for f in (hybrid, tmp_path / "1", tmp_path / "2"))
    for name, tensor in one.items():
        step = (tensor - before[name]).abs().max()
        assert step > 0 and (two[name] - tensor).abs().max() <= 1e-3 * step, name
    assert torch.isfinite(torch.tensor(list(alone["after"].values()))).all()
