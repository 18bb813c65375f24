"""The three stages of MOHAWK on a hybrid and its teacher, each optional, each reporting its own before and after.

matrix orientation (mixer against attention matrix) -> hidden-state alignment (outputs, per layer) -> knowledge
distillation (end to end). Stages 1 and 2 use the teacher's activations, so their layers are independent and ranks
share them; stage 3 is data-parallel.
"""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback

from .align import Progress
from .distillation import distil, mean_kl
from .layerwise import LayerwiseStage, append_jsonl, hidden_state_loss, orientation_loss, split_layers
from .settings import AlignmentSettings
from .teacher_model import TeacherModel

STAGES = {1: "matrix_orientation", 2: "hidden_state_alignment", 3: "distillation"}


@dataclass
class Stages:
    """What the stages work on.

    Args:
        teacher: to learn from. student: the hybrid, trained in place.
        train: token ids (S, L) to train on. held_out: token ids to report on.
        folder: for checkpoints and logs.
    """

    teacher: TeacherModel
    student: nn.Module
    train: torch.Tensor
    held_out: torch.Tensor
    settings: AlignmentSettings
    folder: Path
    seed: int = 0
    progress: Progress = lambda what, done, total: None

    def run(self, stages: tuple[int, ...] = (1, 2, 3)) -> dict[str, Any]:
        """Run those of `stages` that have tokens; what each reached.

        Raises:
            ValueError: there is nothing to train, the vocabularies differ, or a loss is not finite.
        """
        self.check()
        report = {}
        for number in stages:
            name = STAGES[number]
            if getattr(self.settings, name).tokens:
                report[name] = self.distil() if number == 3 else self.layerwise(name)
        return report

    def check(self) -> None:
        """Refuse a student that does not go with the teacher.

        Raises:
            ValueError: no mixers, another vocabulary, or another depth.
        """
        if not self.mixers():
            raise ValueError("Every layer of this hybrid is attention: there is no mixer to align.")
        for field in ("vocab_size", "num_hidden_layers", "hidden_size"):
            of_student, of_teacher = getattr(self.student.config, field), getattr(self.teacher.config, field)
            if of_student != of_teacher:
                raise ValueError(
                    f"The hybrid has {field} {of_student} and the teacher {of_teacher}: they do not belong together."
                )

    def mixers(self) -> dict[int, nn.Module]:
        """The student's mixers by layer."""
        layers = enumerate(self.student.model.layers)
        return {i: block.mixer for i, block in layers if block.layer_type == "linear_attention"}

    def layerwise(self, name: str) -> dict[str, Any]:
        """Stage 1 or 2. With several processes each trains its share of the layers; then all have all."""
        settings = getattr(self.settings, name)
        self.student.requires_grad_(False)
        mixers = self.mixers()
        rank, world_size = _ranks()
        mine = split_layers(sorted(mixers), rank, world_size)
        make_loss = orientation_loss if name == "matrix_orientation" else hidden_state_loss
        for layer in mine:
            mixers[layer].requires_grad_(True)
        self.folder.mkdir(parents=True, exist_ok=True)
        before, after, seconds = {}, {}, 0.0
        if mine:
            stage = LayerwiseStage(
                self.teacher,
                {layer: mixers[layer] for layer in mine},
                make_loss(self.teacher, settings),
                settings,
                self.folder / name,
                self.seed,
                append_jsonl(self.folder / f"{name}-rank{rank}.jsonl"),
            )
            done = stage.run(self.train, self.held_out, self.progress)
            before, after, seconds = done.before, done.after, done.seconds
        if world_size > 1:
            before, after = _share(mixers, sorted(mixers), before, after)
        return {
            "tokens": settings.tokens,
            "seconds": round(seconds, 1),
            "held_out_loss_before": _mean(before),
            "held_out_loss_after": _mean(after),
            "layers": {layer: [before[layer], after[layer]] for layer in sorted(before)},
        }

    def distil(self) -> dict[str, Any]:
        """Stage 3."""
        settings = self.settings.distillation
        teacher = self.teacher.whole()
        before = mean_kl(self.student, teacher, self.held_out)
        log = distil(
            self.student,
            teacher,
            self.train,
            settings,
            self.folder / "distillation",
            self.seed,
            [_ProgressCallback(self.progress)],
            use_cpu=self.teacher.device.type == "cpu",
        )
        self.student.requires_grad_(True)
        return {
            "tokens": settings.tokens,
            "seconds": round(log[-1].get("train_runtime", 0.0), 1),
            "held_out_kl_before": before,
            "held_out_kl_after": mean_kl(self.student, teacher, self.held_out),
        }


class _ProgressCallback(TrainerCallback):
    def __init__(self, progress: Progress):
        self.progress = progress

    def on_step_end(self, args, state, control, **kwargs):
        self.progress("distilling", state.global_step, state.max_steps)


def _ranks() -> tuple[int, int]:
    """This process and how many there are; joins the others when `torchrun` started it."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return 0, 1
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank(), dist.get_world_size()


def _share(mixers: dict[int, nn.Module], layers: list[int], before: dict, after: dict) -> tuple[dict, dict]:
    """Give every rank every layer's result."""
    world_size = dist.get_world_size()
    for owner in range(world_size):
        for layer in split_layers(layers, owner, world_size):
            for tensor in mixers[layer].state_dict().values():
                dist.broadcast(tensor, owner)
    gathered: list = [None] * world_size
    dist.all_gather_object(gathered, (before, after))
    merged = ({}, {})
    for part in gathered:
        for whole, piece in zip(merged, part, strict=True):
            whole.update(piece)
    return merged


def _mean(values: dict[int, float]) -> float:
    return sum(values.values()) / max(len(values), 1)


def with_tokens(settings: AlignmentSettings, number: int, tokens: int | None) -> AlignmentSettings:
    """The settings with another number of tokens for a stage."""
    if tokens is None:
        return settings
    name = STAGES[number]
    return dataclasses.replace(settings, **{name: dataclasses.replace(getattr(settings, name), tokens=tokens)})
