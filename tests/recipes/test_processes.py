"""Two processes train what one trains: DDP over gloo on the CPU."""

import json
import os
import subprocess
import sys

import pytest
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
        more = ("--per_device_train_batch_size", str(2 // processes), "--gradient_accumulation_steps", "2")
        more += ("--optim", "sgd", "--learning_rate", "0.5", "--max_grad_norm", "0")
        return common_arguments(hybrid, teacher, data, tmp_path / str(processes), *more)

    recipe.main(arguments(1))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", recipe.__name__, *arguments(2), "--verbose"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    before, one, two = (load_file(f / "model.safetensors") for f in (hybrid, tmp_path / "1", tmp_path / "2"))
    for name, tensor in one.items():
        step = (tensor - before[name]).abs().max()
        assert step > 0 and (two[name] - tensor).abs().max() <= 1e-3 * step, name
    figures = [json.loads((tmp_path / n / "training.json").read_text())[-1] for n in "12"]
    assert figures[0]["after"].keys() == figures[1]["after"].keys() and len(figures[0]["after"]) > 1
    for when in ("before", "after"):
        for name, value in figures[0][when].items():
            assert figures[1][when][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


SHARDED = """
import sys, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from convert.alignment.distillation.loss import LossWeights, add_distillation_head, add_hidden_output, head_of
from tests.students import make_student
from tests.teachers import make_teacher, random_ids

def gradients(sharded, rows):
    model, teacher = make_student(sys.argv[1], dtype=torch.float32), make_teacher("llama-gqa")
    add_distillation_head(model)
    add_hidden_output(teacher)
    if sharded:
        fully_shard(teacher, reshard_after_forward=True)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    def signal(counts):
        hidden, head = teacher(rows, hidden_only=True)[:, :-1][counts], head_of(teacher)
        return lambda span: head(hidden[span])
    out = model(input_ids=rows, labels=rows, distillation=(signal, LossWeights(ce_weight=0.5)))
    (out.loss / out.tokens).backward()
    return {n: p.grad.full_tensor() if sharded else p.grad for n, p in model.named_parameters()}

dist.init_process_group("gloo")
ids = random_ids(4, 20)
ours = gradients(True, ids[dist.get_rank() * 2 : dist.get_rank() * 2 + 2])
for name, gradient in gradients(False, ids).items():
    torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-6, msg=name)
print("equal", len(ours))
"""


def test_the_loss_under_fsdp2_has_the_gradients_of_one_process(tmp_path):
    """`fully_shard` on the CPU: the head's weight is sharded, gathered for the loss, its gradient spread again."""
    (tmp_path / "sharded.py").write_text(SHARDED)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    command = [*launch, str(tmp_path / "sharded.py"), "llamba"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == 2
