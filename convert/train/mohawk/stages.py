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

from modeling_llamba.model.hybrid_model import freeze_fixed

from ...errors import during
from ...fit.probes import plain_tokens, with_needles
from ...fit.teacher_model import TeacherModel
from ...io.writer import Progress
from ...layout.placement import Placement
from ...options import AlignmentOptions
from .distillation import check_can_train, distil
from .layerwise import LayerwiseStage, StageReport, append_jsonl, hidden_state_loss, orientation_loss, split_layers
from .orientation import check_has_matrix_per_head

STAGES = {1: "matrix_orientation", 2: "hidden_state_alignment", 3: "distillation"}


@dataclass
class Stages:
    """Models, text and settings that the stages share.

    Args:
        teacher: to learn from. student: the hybrid, trained in place.
        train: token ids (B, L) to train on. held_out: token ids to report on.
        folder: for checkpoints and logs.
        begin: number of first tokens of every row that the tokenizer begins a text with.
    """

    teacher: TeacherModel
    student: nn.Module
    train: torch.Tensor
    held_out: torch.Tensor
    settings: AlignmentOptions
    folder: Path
    seed: int = 0
    progress: Progress = lambda what, done, total: None
    begin: int = 0

    def run(self) -> dict[str, Any]:
        """Run the stages that have tokens; what each reached."""
        self.check()
        report = {}
        for number, name in STAGES.items():
            if getattr(self.settings, name).tokens:
                with during(f"training ({name})", lower=f"alignment.{name}.sequences or alignment.sequence_length"):
                    if number == 3:
                        report[name] = self.distil()
                    else:
                        report[name] = self.layerwise(name)
        return report

    def check(self) -> None:
        """Refuse a student that does not go with the teacher, and stages that cannot run."""
        windowed = Placement.of(self.student.config).hybrid is not None
        check_stages(self.settings, self.student.config.mixer, windowed)
        if not self.mixers():
            raise ValueError("Every layer of this hybrid is attention: there is no mixer to align.")
        for field in ("vocab_size", "num_hidden_layers", "hidden_size"):
            of_student = getattr(self.student.config, field)
            of_teacher = getattr(self.teacher.config, field)
            if of_student != of_teacher:
                raise ValueError(
                    f"The hybrid has {field} {of_student} and the teacher {of_teacher}: they do not belong together."
                )

    def mixers(self) -> dict[int, nn.Module]:
        """The student's mixers by layer."""
        return {i: self.student.model.layers[i].mixer for i in Placement.of(self.student.config).replaced_layers}

    def layerwise(self, name: str) -> dict[str, Any]:
        """Stage 1 or 2. With several processes each trains its share of the layers; then all have all."""
        settings = getattr(self.settings, name)
        self.student.requires_grad_(False)
        self.teacher.whole()  # every step runs through all blocks
        mixers = self.mixers()
        rank, world_size = _ranks(self.teacher.device)
        mine = split_layers(sorted(mixers), rank, world_size)
        make_loss = hidden_state_loss
        if name == "matrix_orientation":
            make_loss = orientation_loss
        for layer in mine:
            freeze_fixed(mixers[layer].requires_grad_(True))
        self.folder.mkdir(parents=True, exist_ok=True)
        done = StageReport({}, {}, 0, 0.0)
        # of more processes than layers some have none
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
        before = done.before
        after = done.after
        if world_size > 1:
            before, after = _share(mixers, sorted(mixers), before, after)
        return {
            "tokens": done.tokens,
            "seconds": round(done.seconds, 1),
            "held_out_loss_before": sum(before.values()) / len(before),
            "held_out_loss_after": sum(after.values()) / len(after),
            "layers": {layer: [before[layer], after[layer]] for layer in sorted(before)},
        }

    def distil(self) -> dict[str, Any]:
        """Stage 3, data-parallel over the processes."""
        settings = self.settings.distillation
        teacher = self.teacher.whole()
        vocabulary = plain_tokens(teacher.config.vocab_size)
        rows = self.train.clone()
        # a first token such as BOS stays
        rows[:, self.begin :] = with_needles(rows[:, self.begin :], settings.recall_share, vocabulary, self.seed)
        self.student, outcome = distil(
            self.student,
            teacher,
            rows,
            settings,
            self.folder / "distillation",
            self.held_out,
            self.seed,
            [_ProgressCallback(self.progress, self.train.shape[1])],
            use_cpu=self.teacher.device.type == "cpu",
        )
        freeze_fixed(self.student.requires_grad_(True))
        per_step = settings.sequences * self.train.shape[1] * int(os.environ.get("WORLD_SIZE", 1))
        seconds = next((entry["train_runtime"] for entry in outcome.log if "train_runtime" in entry), 0.0)
        return {
            "tokens": max(settings.tokens // per_step, 1) * per_step,
            "seconds": round(seconds, 1),
            "held_out_kl_before": outcome.before["eval_kl"],
            "held_out_kl_after": outcome.after["eval_kl"],
        }


class _ProgressCallback(TrainerCallback):
    def __init__(self, progress: Progress, length: int):
        self.progress = progress
        self.length = length

    def on_step_end(self, args, state, control, **kwargs):
        per_step = args.per_device_train_batch_size * args.world_size * self.length
        self.progress("distilling, tokens", state.global_step * per_step, state.max_steps * per_step)


def check_stages(settings: AlignmentOptions, mixer: str, windowed: bool) -> None:
    """Refuse, before any work, stages that cannot run."""
    if settings.matrix_orientation.tokens:
        check_has_matrix_per_head(mixer)
        if windowed:
            raise ValueError(
                "Matrix orientation compares one matrix with another; a layer with a window has none of its own. "
                "Leave the stage out (matrix_orientation: {tokens: 0})."
            )
    if settings.distillation.tokens:
        check_can_train()
        if settings.distillation.trainable == "beyond-window" and not windowed:
            raise ValueError("trainable 'beyond-window' needs a window in every replaced layer; train the mixers.")


def _ranks(device: torch.device) -> tuple[int, int]:
    """This process and how many there are; joins the others when `torchrun` started it."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return 0, 1
    if not dist.is_initialized():
        backend = "gloo"
        if device.type == "cuda":
            backend = "nccl"
        dist.init_process_group(backend)
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


def only_stages(settings: AlignmentOptions, stages: tuple[int, ...], tokens: int | None) -> AlignmentOptions:
    """The settings with tokens for `stages` alone, or for all that have some; `tokens` is for each of them."""
    stages = stages or tuple(number for number, name in STAGES.items() if getattr(settings, name).tokens)
    changed = {}
    for number, name in STAGES.items():
        stage = getattr(settings, name)
        wanted = stage.tokens
        if tokens is not None:
            wanted = tokens
        if number not in stages:
            wanted = 0
        elif wanted < 1:
            raise ValueError(f"Stage {number} has no tokens; say --stage-tokens, or {name}: {{tokens: ...}} in YAML.")
        changed[name] = dataclasses.replace(stage, tokens=wanted)
    if not stages:
        raise ValueError("No stage has tokens; name one with --stages and --stage-tokens, or in the YAML file.")
    return dataclasses.replace(settings, **changed)
