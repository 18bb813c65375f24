"""Two processes train what one trains: DDP over gloo on the CPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import modeling_utils

from recipes import dpo, sft
from recipes.training import load
from tests.helpers.gguf_file import write_gguf
from tests.helpers.teachers import make_teacher
from tests.helpers.tiny_chat import (
    chat_tokenizer,
    common_arguments,
    conversations,
    preferences,
    save_chat_teacher,
    save_hybrid,
)

TWO_PROCESSES = """
import json, sys, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from convert.train.distillation.loss import LossWeights, add_distillation_head, add_hidden_output, head_of
from recipes import dpo, sft
from tests.helpers.hybrids import make_hybrid
from tests.helpers.teachers import make_teacher, random_ids

for recipe, arguments in zip((sft, dpo), json.loads(sys.argv[1])):
    recipe.main(arguments)

def gradients(sharded, rows):
    model, teacher = make_hybrid("llamba", dtype=torch.float32), make_teacher("llama-gqa")
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


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ("sft", "dpo"))
def test_two_processes_equal_one(recipe, done):
    assert_same_training(done[0], f"{recipe}-1", f"{recipe}-2")


def assert_same_training(folder: Path, *names: str) -> None:
    """The weights and the figures of two runs from folder / "hybrid" are the same, rounding aside."""
    before, one, two = (load_file(folder / name / "model.safetensors") for name in ("hybrid", *names))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        step = (tensor - before[name]).abs().max()
        assert step > 0 or name.endswith("salience"), name
        assert (two[name] - tensor).abs().max() <= 1e-3 * step, name
    figures = [json.loads((folder / name / "training.json").read_text())[-1] for name in names]
    assert figures[0]["after"].keys() == figures[1]["after"].keys()
    assert len(figures[0]["after"]) > 1
    for when in ("before", "after"):
        for name, value in figures[0][when].items():
            assert figures[1][when][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


@pytest.mark.slow
def test_the_loss_under_fsdp2_has_the_gradients_of_one_process(done):
    """`fully_shard` on the CPU: the head's weight is sharded, gathered for the loss, its gradient spread again."""
    assert done[1].count("equal") == 2


ON_CPUS = """
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
"""

SHARDED = f"""{ON_CPUS}
def say(what, trainer):
    moments = [state["exp_avg"] for state in trainer.optimizer.state.values()]
    shards = [*trainer.model.parameters(), *moments]
    assert all(isinstance(t, torch.distributed.tensor.DTensor) for t in shards)
    whole = [t.full_tensor().double().norm().item() for t in shards]
    if dist.get_rank() == 0:
        print(what, dist.get_world_size(), len(whole), *map("{{:.9e}}".format, whole), flush=True)

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


def launch(script: Path, arguments: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    """Run a script under FSDP2, as the guide says."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--mixed_precision", "no"]
    command += ["--config_file", "recipes/configs/accelerate/fsdp2.yaml", *options, str(script), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


@pytest.mark.slow
def test_a_sharded_run_goes_on_with_another_number_of_processes(tmp_path):
    """FSDP2 by accelerate and the recipe, cut off after the first of two steps on two processes, ended on one."""
    teacher = save_chat_teacher(tmp_path / "teacher")
    hybrid = save_hybrid(teacher, tmp_path / "hybrid", attention_layers="none")
    more = ("--per_device_train_batch_size", "1", "--save_strategy", "steps", "--save_steps", "1")
    arguments = common_arguments(hybrid, teacher, conversations(tmp_path / "chats"), tmp_path / "trained", *more)
    (tmp_path / "sharded.py").write_text(SHARDED)
    told = {}
    for processes in ("2", "1"):
        done = launch(tmp_path / "sharded.py", arguments, "--num_processes", processes)
        assert done.returncode == (1 if processes == "2" else 0), done.stderr[-3000:]
        told |= {tuple(line.split()[:2]): line.split()[2:] for line in done.stdout.splitlines() if "e" in line}
    assert told["loaded", "1"] == told["saved", "2"] != told["saved", "1"]
    assert len(told["loaded", "1"]) > 50
    trained = json.loads((tmp_path / "trained" / "training.json").read_text())[-1]
    assert [entry["step"] for entry in trained["log"] if "kl" in entry] == [1, 2]
    before, after = (load_file(folder / "model.safetensors") for folder in (hybrid, tmp_path / "trained"))
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)


READ_ONCE = f"""{ON_CPUS}
from convert.memory import return_free_memory
from recipes import sft
from recipes.benchmarks.measure import forget_peak, status_bytes

def say(what, memory):
    print(what, dist.get_rank(), memory - start, flush=True)
def begin(*args):
    global start
    check(*args)
    forget_peak()
    start = status_bytes("VmRSS")
def loaded(*args, **kwargs):
    say("loaded", status_bytes("VmHWM"))
    return trainer(*args, **kwargs)
def sharded(*args, **kwargs):
    return_free_memory()
    say("sharded", status_bytes("VmRSS"))
    return scheduler(*args, **kwargs)
check, trainer, scheduler = sft.check_options, sft.DistilledSFTTrainer, Trainer.create_scheduler
sft.check_options, sft.DistilledSFTTrainer, Trainer.create_scheduler = begin, loaded, sharded
sft.main(sys.argv[1:])
"""


def test_another_process_has_no_weights_but_all_else(tmp_path, monkeypatch):
    """Types, shapes, ties and rotary frequencies of a checkpoint; a GGUF file, which is quantised, is read."""
    make_teacher("llama-mha-tied").bfloat16().save_pretrained(tmp_path)
    write_gguf(tmp_path / "t.gguf", "llama-gqa")
    whole, dequantised = (load.read_once(str(tmp_path / name), dtype="auto") for name in (".", "t.gguf"))
    for module, name in ((load, "is_fsdp_enabled"), (modeling_utils, "is_fsdp_enabled")):
        monkeypatch.setattr(module, name, lambda: True)
    monkeypatch.setattr(load, "PartialState", lambda: SimpleNamespace(is_local_main_process=False))
    torch.use_deterministic_algorithms(True)  # fills new memory by NaN, which else may hold what was read before
    try:
        empty, read = (load.read_once(str(tmp_path / name), dtype="auto") for name in (".", "t.gguf"))
    finally:
        torch.use_deterministic_algorithms(False)
    kinds = [[(name, p.dtype, p.device, p.shape) for name, p in m.named_parameters()] for m in (empty, whole)]
    assert kinds[0] == kinds[1]
    assert empty.lm_head.weight.isnan().all()
    assert empty.lm_head.weight is empty.model.embed_tokens.weight
    for ours, theirs in ((empty, whole), (read, dequantised)):
        torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()), rtol=0, atol=0)
    torch.testing.assert_close(read.state_dict(), dequantised.state_dict(), rtol=0, atol=0)


@pytest.mark.slow
def test_one_process_reads_what_fsdp_spreads(tmp_path):
    """The weights and figures of one process, from a run in which the other process never holds a whole model."""
    # qwen3-5 names a block of its vision tower among those to shard, which a language model has not
    teacher = make_teacher("qwen3-5", hidden_size=512, intermediate_size=6144, tie_word_embeddings=True)
    teacher.bfloat16().save_pretrained(tmp_path / "teacher")
    chat_tokenizer().save_pretrained(tmp_path / "teacher")
    window = {"window": 4, "block": 2, "sinks": 1, "salient": 2}
    hybrid = save_hybrid(tmp_path / "teacher", tmp_path / "hybrid", attention_layers="none", **window)
    weights = load_file(hybrid / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in weights:
        if name.endswith("salience"):  # a buffer, which reaches the other process as well
            weights[name].normal_(generator=generator)
    save_file(weights, hybrid / "model.safetensors", metadata={"format": "pt"})
    data = conversations(tmp_path / "chats")
    more = ("--teacher_dtype", "float32", "--gradient_accumulation_steps", "2")
    more += ("--optim", "sgd", "--learning_rate", "0.5", "--max_grad_norm", "0", "--per_device_train_batch_size")
    one, two = (
        common_arguments(hybrid, tmp_path / "teacher", data, tmp_path / f"sft-{processes}", *more, str(2 // processes))
        for processes in (1, 2)
    )
    sft.main(one)
    (tmp_path / "once.py").write_text(READ_ONCE)
    done = launch(tmp_path / "once.py", two, "--num_processes", "2", "--fsdp_cpu_ram_efficient_loading", "true")
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_training(tmp_path, "sft-1", "sft-2")
    # what the other process prints may stand on the same line
    lines = re.findall(r"(loaded|sharded) (\d+) (-?\d+)", done.stdout)
    memory = {(what, int(rank)): int(grown) for what, rank, grown in lines}
    whole = 2 * 4 * sum(tensor.numel() for tensor in weights.values())
    assert memory["loaded", 0] > whole, memory
    assert memory["loaded", 1] < 0.2 * whole, memory
    assert memory["sharded", 1] < 0.7 * whole, memory
