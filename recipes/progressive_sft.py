"""Replace layers step by step, training after each: Mamba in the Llama's order (Wang et al. 2024, section 3.2).

    python -m recipes.progressive_sft --steps 4 -- --config sft.yaml --output_dir OUT ...

What follows `--` goes to recipes.sft. `model_name_or_path` there is the hybrid with all its mixers, aligned, which
lends them to the steps; layers whose turn has not come yet have the teacher's attention. Every step starts from the
step before, on its own part of the data (the n-th of the steps), and lies in OUT.steps/; the last one is OUT.

The order is Mamba in the Llama's: even layers first, then every fourth, every eighth, and so on; `--steps` groups it.
With a larger teacher, `--attention-from` names the model that the hybrid was made from.
"""

import argparse
import dataclasses
import json
import shutil
from pathlib import Path

import torch
from torch import nn

from convert import convert
from convert.hybrids.shapes import model_class
from convert.io.folder import MARKER, TRAINING_WORK, OutputFolder, make_work, remove_made, remove_work
from convert.layout.placement import Placement

from . import sft
from .training.arguments import LossArguments, RunArguments, TeacherArguments, parse
from .training.load import load_student
from .training.run import console, script


def stepwise_rank(layer: int) -> tuple[int, int]:
    """Sort key for 0, 2, 4, ..., then 1, 5, 9, ..., then 3, 11, 19, ...: the number of ones that a layer ends in."""
    return ((layer + 1) & ~layer).bit_length(), layer


def in_steps(mixers: list[int], steps: int | None) -> list[list[int]]:
    """The layers that each of `steps` steps of nearly equal size replaces; one layer in each by default."""
    order = sorted(mixers, key=stepwise_rank)
    if steps is None:
        steps = len(order)
    if not 1 <= steps <= len(order):
        raise ValueError(f"--steps must lie between 1 and {len(order)}, not {steps}.")
    edges = [round(i * len(order) / steps) for i in range(steps + 1)]
    return [order[a:b] for a, b in zip(edges, edges[1:], strict=False)]


@torch.no_grad()
def compose(lender: nn.Module, attention: nn.Module, before: nn.Module | None, mixers: set[int]) -> nn.Module:
    """A hybrid whose mixers are the layers `mixers`.

    Args:
        lender: hybrid with all mixers.
        attention: the teacher as a hybrid without mixers.
        before: model of the step before, whose weights are taken where it has them.
    """
    config = type(lender.config)(**lender.config.to_dict())
    kinds = zip(lender.config.layer_types, attention.config.layer_types, strict=True)
    config.layer_types = [ours if i in mixers else theirs for i, (ours, theirs) in enumerate(kinds)]
    if config.hybrid_full_heads is not None:
        config.hybrid_full_heads = [heads if i in mixers else [] for i, heads in enumerate(config.hybrid_full_heads)]
    if config.layer_types != lender.config.layer_types:
        # layers to come have the teacher's queries and keys, which were not made to be rounded
        config.full_attention_bits = config.window_bits = 16
    model = model_class(config.model_type)(config)
    sources = [attention.state_dict(), lender.state_dict(), {} if before is None else before.state_dict()]
    # what lies outside the mixers is the teacher's, unless the lender has been trained
    state = {}
    for name, tensor in model.state_dict().items():
        found = next((s[name] for s in reversed(sources) if name in s), None)
        if found is None or found.shape != tensor.shape:
            raise ValueError(f"{name} is neither in the hybrid nor in its teacher.")
        state[name] = found
    model.load_state_dict(state)
    model.generation_config = lender.generation_config
    return model


def write_step(model: nn.Module, lender: Path, before: Path | None, folder: Path) -> None:
    """A composed model as a checkpoint, with the lender's tokenizer and the record of the steps before."""
    with OutputFolder(folder, overwrite=True, kept=TRAINING_WORK) as owner, owner.staged() as staging:
        kept_out = shutil.ignore_patterns(MARKER, "*.safetensors*", "config.json", "training.*")
        shutil.copytree(lender, staging, dirs_exist_ok=True, ignore=kept_out)
        if before is not None:
            shutil.copyfile(before / "training.json", staging / "training.json")
        model.save_pretrained(staging)


def run(arguments: list[str], steps: int | None, attention_from: str | None = None) -> list[dict]:
    """Train all steps; returns what each measured before and after."""
    _, config, model_config, _, teaching, _, run_arguments = parse(
        sft.SFTConfig, TeacherArguments, LossArguments, RunArguments, argv=arguments
    )
    if run_arguments.data_chunk is not None:
        raise ValueError("data_chunk is set for each step; leave it out.")
    lender_folder = Path(model_config.model_name_or_path or "")
    output = Path(config.output_dir).expanduser().resolve()
    lender, _ = load_student(model_config)
    if not lender_folder.is_dir():
        raise ValueError("model_name_or_path must be a folder here; download the hybrid first.")
    if teaching.teacher_model_name_or_path is None and attention_from is None:
        raise ValueError("teacher_model_name_or_path is missing; the layers to come have its attention.")
    plan = in_steps(list(Placement.of(lender.config).replaced_layers), steps)
    work = output.with_name(f"{output.name}.steps")
    check_same_run(work, [plan, arguments, attention_from])
    if not (work / "attention" / "config.json").is_file():
        origin = attention_from
        revision = None
        if origin is None:
            origin = teaching.teacher_model_name_or_path
            revision = teaching.teacher_revision
        convert(origin, work / "attention", attention_layers="all", align="none", revision=revision)
    attention, _ = load_student(dataclasses.replace(model_config, model_name_or_path=str(work / "attention")))
    reports = []
    before = None
    mixers = set()
    for number, added in enumerate(plan, 1):
        mixers |= set(added)
        last = number == len(plan)
        target = work / f"{number}"
        if last:
            target = output
        console.print(f"step {number} of {len(plan)}: layers {added}")
        # OUT may hold another run's model, which recipes.sft replaces or refuses as for any run
        if (target / "config.json").is_file() and not last:
            reports.append(json.loads((target / "training.json").read_text())[-1])
        else:
            trained = None
            if before is not None:
                trained, _ = load_student(dataclasses.replace(model_config, model_name_or_path=str(before)))
            start = work / f"{number}.start"
            if not (start / "config.json").is_file():
                write_step(compose(lender, attention, trained, mixers), lender_folder, before, start)
            own = ["--model_name_or_path", str(start), "--output_dir", str(target)]
            if not last:
                own += ["--push_to_hub", "false"]
            reports.append(sft.main([*arguments, *own, "--data_chunk", f"{number}/{len(plan)}"]))
            remove_made(start)
        before = target
    remove_work(work, TRAINING_WORK)
    return reports


def check_same_run(work: Path, what: list) -> None:
    """Raise ValueError where the steps in `work` are those of other arguments."""
    path = work / "run.json"
    key = json.dumps(what)
    if path.is_file() and path.read_text() != key:
        raise ValueError(f"{work} holds the steps of another run; delete it, or choose another output_dir.")
    make_work(work)
    path.write_text(key)


def main(arguments: list[str]) -> None:
    """Read the command line: this recipe's own options, and after -- those of recipes.sft."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="number of steps (default: one for each layer)")
    parser.add_argument(
        "--attention-from", help="model whose attention unconverted layers have (default: the teacher)"
    )
    given, of_sft = parser.parse_known_args(arguments)
    of_sft = [argument for argument in of_sft if argument != "--"]
    for report in run(of_sft, given.steps, given.attention_from):
        print(json.dumps({key: report[key] for key in ("before", "after")}))


if __name__ == "__main__":
    script(main)
