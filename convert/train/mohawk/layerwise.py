"""Stages 1 and 2: every mixer learns from the teacher's own activations, layers independent of each other.

One pass of the teacher per step gives every layer its input and target; every layer has its own optimizer, so what one
layer does never depends on which others are trained beside it. That is why ranks can share the layers (`torchrun`):
each trains its own and the result is the same to the last bit.

A stage reports its loss on held-out text before and after.
"""

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import get_scheduler

from ...fit.teacher_model import TeacherModel, replaced
from ...io.folder import write_beside
from ...io.writer import Progress
from ...options import HiddenStateOptions, OrientationOptions, StageOptions
from .orientation import matrix_orientation_loss

MAX_GRAD_NORM = 1.0


class Activations(NamedTuple):
    """Activations of the teacher at one layer, each (B, L, D).

    The block's input and output (the residual stream, before any final norm), the attention's input u and output y.
    """

    block_input: torch.Tensor
    block_output: torch.Tensor
    u: torch.Tensor
    y: torch.Tensor


LayerLoss = Callable[[int, nn.Module, Activations], float]
"""Loss of one layer; adds gradients where autograd is on."""


@dataclass
class StageReport:
    """Mean held-out loss of each layer before and after, tokens and seconds."""

    before: dict[int, float]
    after: dict[int, float]
    tokens: int
    seconds: float


class LayerwiseStage:
    """Train mixers side by side.

    Args:
        mixers: of the layers this process trains.
        layer_loss: what they minimise.
        folder: where checkpoints go; None keeps none.
        log: called with a record every few steps.
    """

    def __init__(
        self,
        teacher: TeacherModel,
        mixers: dict[int, nn.Module],
        layer_loss: LayerLoss,
        settings: StageOptions,
        folder: Path | None = None,
        seed: int = 0,
        log: Callable[[dict], None] = lambda record: None,
    ):
        self.teacher = teacher
        self.mixers = mixers
        self.layer_loss = layer_loss
        self.settings = settings
        self.folder = folder
        self.seed = seed
        self.log = log

    def run(
        self, ids: torch.Tensor, held_out: torch.Tensor, progress: Progress = lambda what, done, total: None
    ) -> StageReport:
        """Train on token ids (B, L), in epochs of a seeded order, until the tokens are used."""
        started = time.perf_counter()
        per_step = self.settings.sequences * ids.shape[1]
        steps = max(self.settings.tokens // per_step, 1)
        optimizers = {layer: self._optimizer(mixer, steps) for layer, mixer in self.mixers.items()}
        self._key = run_key(self.settings, ids, self.seed, self.mixers)
        first, before = self._resume(optimizers)
        before = before or self.evaluate(held_out)
        for layer, loss in before.items():
            if not math.isfinite(loss):
                raise ValueError(f"Layer {layer}: the loss is not finite before any training.")
        for step in range(first, steps):
            progress("training, tokens", step * per_step, steps * per_step)
            with torch.enable_grad():
                losses = self._step(ids[self._rows(step, len(ids))], optimizers)
            pace = (step + 1 - first) * per_step / (time.perf_counter() - started)
            self.log({"step": step + 1, "tokens": (step + 1) * per_step, "tokens_per_second": pace, "loss": losses})
            every = self.settings.save_every
            # in the end, too, or a run that stops in a later stage would train this one again
            if (every and (step + 1) % every == 0) or step + 1 == steps:
                self._save(step + 1, before, optimizers)
        progress("training, tokens", steps * per_step, steps * per_step)
        return StageReport(before, self.evaluate(held_out), steps * per_step, time.perf_counter() - started)

    @torch.no_grad()
    def evaluate(self, ids: torch.Tensor) -> dict[int, float]:
        """Mean loss of each layer."""
        totals = dict.fromkeys(self.mixers, 0.0)
        batches = ids.split(self.settings.sequences)
        for batch in batches:
            for layer, activations in self._activations(batch):
                totals[layer] += self.layer_loss(layer, self.mixers[layer], activations) * len(batch)
        return {layer: total / len(ids) for layer, total in totals.items()}

    def _step(self, batch: torch.Tensor, optimizers) -> dict[int, float]:
        losses = {}
        for layer, activations in self._activations(batch):
            optimizer, schedule = optimizers[layer]
            losses[layer] = self.layer_loss(layer, self.mixers[layer], activations)
            if not math.isfinite(losses[layer]):
                raise ValueError(f"Layer {layer}: the loss is not finite; lower the learning rate.")
            nn.utils.clip_grad_norm_(self.mixers[layer].parameters(), MAX_GRAD_NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return losses

    def _activations(self, batch: torch.Tensor) -> Iterator[tuple[int, Activations]]:
        """The layers to train, one teacher block after the other: one pass of the teacher serves them all."""
        with torch.no_grad():
            hidden = self.teacher.embed(batch)
        inputs = self.teacher.block_inputs(hidden)
        # blocks behind the last mixer of this process change nothing of what it needs
        for layer in range(max(self.mixers) + 1):
            block = self.teacher.block(layer)
            seen = []
            hook = block.attention.register_forward_hook(
                lambda m, args, out, seen=seen: seen.append((args[0], out[0]))
            )
            with torch.no_grad():
                output = block(hidden, **inputs)
            hook.remove()
            if layer in self.mixers:
                yield layer, Activations(hidden, output, *seen[0])
            # the teacher's own output goes on, so layers do not meet each other's errors
            hidden = output

    def _optimizer(self, mixer: nn.Module, steps: int):
        rate = self.settings.learning_rate
        optimizer = torch.optim.AdamW(mixer.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0)
        return optimizer, wsd_schedule(optimizer, self.settings, steps)

    def _rows(self, step: int, count: int) -> torch.Tensor:
        """Row indices of a step: epochs in a seeded order, a function of the step alone, so that resuming is exact."""
        size = self.settings.sequences
        wanted = range(step * size, (step + 1) * size)
        orders = {epoch: self._order(epoch, count) for epoch in {i // count for i in wanted}}
        return torch.stack([orders[i // count][i % count] for i in wanted])

    def _order(self, epoch: int, count: int) -> torch.Tensor:
        return torch.randperm(count, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + epoch))

    def _save(self, step: int, before: dict[int, float], optimizers) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for layer, (optimizer, schedule) in optimizers.items():
            state = {
                "run": self._key,
                "step": step,
                "before": before[layer],
                "mixer": self.mixers[layer].state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
            }
            write_beside(self._path(layer), lambda path, state=state: torch.save(state, path))

    def _resume(self, optimizers) -> tuple[int, dict[int, float]]:
        """The step to continue from, and the losses before the stage; 0 and nothing at a fresh start.

        What another run left behind, with other settings, text or initial mixers, is not ours to continue.
        """
        if self.folder is None or not all(self._path(layer).is_file() for layer in self.mixers):
            return 0, {}
        states = {layer: torch.load(self._path(layer), weights_only=True) for layer in self.mixers}
        is_ours = all(state.get("run") == self._key for state in states.values())
        if not is_ours or len({state["step"] for state in states.values()}) > 1:  # or interrupted while saving
            return 0, {}
        for layer, state in states.items():
            self.mixers[layer].load_state_dict(state["mixer"])
            optimizers[layer][0].load_state_dict(state["optimizer"])
            optimizers[layer][1].load_state_dict(state["schedule"])
        return next(iter(states.values()))["step"], {layer: state["before"] for layer, state in states.items()}

    def _path(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:03d}.pt"


def wsd_schedule(optimizer: torch.optim.Optimizer, settings: StageOptions, steps: int):
    """Warm-up, stable, decay to zero."""
    specific = {"num_decay_steps": int(settings.decay * steps), "decay_type": "linear", "warmup_type": "linear"}
    return get_scheduler(
        "warmup_stable_decay", optimizer, int(settings.warmup * steps), steps, scheduler_specific_kwargs=specific
    )


def orientation_loss(teacher: TeacherModel, settings: OrientationOptions) -> LayerLoss:
    """Stage 1's loss of one layer."""

    def loss(layer: int, mixer: nn.Module, seen: Activations) -> float:
        rotary = teacher.rotary(seen.u.shape[1], layer)
        return matrix_orientation_loss(mixer, teacher.block(layer).self_attn, seen.u, rotary, settings.tile)

    return loss


def hidden_state_loss(teacher: TeacherModel, settings: HiddenStateOptions) -> LayerLoss:
    """Stage 2's loss of one layer: mean over tokens of the distance to the teacher, relative to the teacher's norm.

    The distance ||student - teacher||_2 (Bick et al. 2024, eq. 6) is squared and divided by the mean squared norm of
    the target, which makes layers comparable. The mixer is compared with the attention, or the block with the block;
    a block's output is the residual stream before the final norm, the last block's too. In "block", what is compared
    is what the block adds to the stream.
    """

    def loss(layer: int, mixer: nn.Module, seen: Activations) -> float:
        inputs = teacher.block_inputs(seen.block_input)
        with torch.autocast(seen.u.device.type, torch.bfloat16, enabled=settings.bf16):
            if settings.target == "block":
                target = seen.block_output - seen.block_input
                with replaced(teacher.model, {layer: mixer}):
                    output = teacher.block(layer)(seen.block_input, **inputs) - seen.block_input
            else:
                target = seen.y
                output = mixer(seen.u, teacher.rotary(seen.u.shape[1], layer))
        value = (output.float() - target.float()).square().mean() / target.float().square().mean()
        if torch.is_grad_enabled():
            value.backward()
        return value.item()

    return loss


def run_key(settings: StageOptions, ids: torch.Tensor, seed: int, modules: dict[int, nn.Module] | nn.Module) -> str:
    """A digest of what a run depends on: settings, text, seed, and the weights it starts from (samples of each)."""
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(settings) | {"seed": seed}, sort_keys=True).encode())
    digest.update(str(tuple(ids.shape)).encode() + ids.cpu().numpy().tobytes())
    for module in modules.values() if isinstance(modules, dict) else [modules]:
        for name, tensor in module.state_dict().items():
            # a thousand values of each tensor are enough to tell other weights apart
            flat = tensor.detach().reshape(-1)
            digest.update(name.encode() + flat[:: max(len(flat) // 1024, 1)].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def split_layers(layers: list[int], rank: int, world_size: int) -> list[int]:
    """The layers a rank trains: every world_size-th, so that all ranks have early and late ones."""
    return layers[rank::world_size]


def append_jsonl(path: Path) -> Callable[[dict], None]:
    """A log that appends records to a file."""

    def log(record: dict) -> None:
        with open(path, "a") as file:
            file.write(json.dumps(record) + "\n")

    return log
