"""Two processes train what one trains: DDP over gloo on the CPU."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from recipes import dpo, sft
from tests.recipes.tiny_chat import common_arguments, conversations, preferences, save_chat_teacher, save_hybrid

TWO_PROCESSES = """
import json, sys, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from convert.train.distillation.loss import LossWeights, add_distillation_head, add_hidden_output, head_of
from recipes import dpo, sft
from tests.students import make_student
from tests.teachers import make_teacher, random_ids

for recipe, arguments in zip((sft, dpo), json.loads(sys.argv[1])):
    recipe.main(arguments)

def gradients(sharded, rows):
    model, teacher = make_student("llamba", dtype=torch.float32), make_teacher("llama-gqa")
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

ids = random_ids(4, 20)
ours = gradients(True, ids[dist.get_rank() * 2 : dist.get_rank() * 2 + 2])
for name, gradient in gradients(False, ids).items():
    torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-6, msg=name)
print("equal", len(ours))
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Both recipes in this process (folders sft-1 and dpo-1), and in two that were started once (sft-2 and dpo-2)."""
    folder = tmp_path_factory.mktemp("processes")
    teacher = save_chat_teacher(folder / "teacher")
    hybrid = save_hybrid(teacher, folder / "hybrid")
    data = {"sft": conversations(folder / "chats"), "dpo": preferences(folder / "pairs")}

    def arguments(recipe: str, processes: int) -> list[str]:
        # plain SGD: AdamW's step is the sign of a gradient, however small, and rounding decides those near zero
        more = ("--per_device_train_batch_size", str(2 // processes), "--gradient_accumulation_steps", "2")
        more += ("--optim", "sgd", "--learning_rate", "0.5", "--max_grad_norm", "0")
        return common_arguments(hybrid, teacher, data[recipe], folder / f"{recipe}-{processes}", *more)

    sft.main(arguments("sft", 1))
    dpo.main(arguments("dpo", 1))
    (folder / "two.py").write_text(TWO_PROCESSES)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, str(folder / "two.py"), json.dumps([arguments(recipe, 2) for recipe in ("sft", "dpo")])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    process = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    return folder, process.stdout


@pytest.mark.parametrize("recipe", ("sft", "dpo"))
def test_two_processes_equal_one(recipe, done):
    folder, _ = done
    names = ("hybrid", f"{recipe}-1", f"{recipe}-2")
    before, one, two = (load_file(folder / name / "model.safetensors") for name in names)
    for name, tensor in one.items():
        step = (tensor - before[name]).abs().max()
        assert step > 0 and (two[name] - tensor).abs().max() <= 1e-3 * step, name
    figures = [json.loads((folder / name / "training.json").read_text())[-1] for name in names[1:]]
    assert figures[0]["after"].keys() == figures[1]["after"].keys() and len(figures[0]["after"]) > 1
    for when in ("before", "after"):
        for name, value in figures[0][when].items():
            assert figures[1][when][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_the_loss_under_fsdp2_has_the_gradients_of_one_process(done):
    """`fully_shard` on the CPU: the head's weight is sharded, gathered for the loss, its gradient spread again."""
    assert done[1].count("equal") == 2


SHARDED = """
import os, sys, torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import Trainer

init = PartialState.__init__
def on_cpus(self, *args, **kwargs):  # accelerate shards nothing on CPUs by itself
    init(self, *args, **kwargs)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    if self.distributed_type in (DistributedType.MULTI_CPU, DistributedType.NO):
        self.distributed_type = DistributedType.MULTI_GPU
PartialState.__init__ = on_cpus

def say(what, trainer):
    moments = [state["exp_avg"] for state in trainer.optimizer.state.values()]
    shards = [*trainer.model.parameters(), *moments]
    assert all(isinstance(t, torch.distributed.tensor.DTensor) for t in shards)
    whole = [t.full_tensor().double().norm().item() for t in shards]
    if dist.get_rank() == 0:
        print(what, dist.get_world_size(), len(whole), *(f"{norm:.9e}" for norm in whole), flush=True)

save, load = Trainer._save_checkpoint, Trainer._load_optimizer_and_scheduler
def save_and_stop(self, *args, **kwargs):
    save(self, *args, **kwargs)
    say("saved", self)
    if dist.get_world_size() == 2:
        dist.barrier()
        os._exit(3)
def load_and_tell(self, checkpoint):
    load(self, checkpoint)
    if checkpoint is not None:
        say("loaded", self)
Trainer._save_checkpoint, Trainer._load_optimizer_and_scheduler = save_and_stop, load_and_tell

from recipes import sft
sft.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_sharded_run_goes_on_with_another_number_of_processes(tmp_path):
    """FSDP2 by accelerate and the recipe, cut off after the first of two steps on two processes, ended on one."""
    teacher = save_chat_teacher(tmp_path / "teacher")
    hybrid = save_hybrid(teacher, tmp_path / "hybrid", attention_layers="none")
    more = ("--per_device_train_batch_size", "1", "--save_strategy", "steps", "--save_steps", "1")
    arguments = common_arguments(hybrid, teacher, conversations(tmp_path / "chats"), tmp_path / "trained", *more)
    (tmp_path / "sharded.py").write_text(SHARDED)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--mixed_precision", "no"]
    launch += ["--config_file", "recipes/configs/accelerate/fsdp2.yaml", "--num_processes"]
    told = {}
    for processes in ("2", "1"):
        command = [*launch, processes, str(tmp_path / "sharded.py"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
        assert done.returncode == (1 if processes == "2" else 0), done.stderr[-3000:]
        told |= {tuple(line.split()[:2]): line.split()[2:] for line in done.stdout.splitlines() if "e" in line}
    assert told["loaded", "1"] == told["saved", "2"] != told["saved", "1"] and len(told["loaded", "1"]) > 50
    trained = json.loads((tmp_path / "trained" / "training.json").read_text())[-1]
    assert [entry["step"] for entry in trained["log"] if "kl" in entry] == [1, 2]
    before, after = (load_file(folder / "model.safetensors") for folder in (hybrid, tmp_path / "trained"))
    assert before.keys() == after.keys() and all(not torch.equal(before[name], after[name]) for name in before)
