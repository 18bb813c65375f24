"""Estimate a run before it starts: memory by part, and time from this machine's own matrix product.

Memory: weights, gradients and AdamW's two moments in float32 for what is trained (16 bytes a parameter), the rest and
the teacher at their own size, all of it over the processes where FSDP or ZeRO-3 spread it; a block's activations
(every block's inputs with gradient checkpointing), the loss's chunk, and the head's gradient in float32, twice, while
the chunks add to it. Time: 6 operations per trained weight and token, 2 more when blocks are recomputed, 2 per weight
of the teacher, over what a matrix product reaches here, of which training reaches about a third.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from convert.alignment.distillation.loss import CHUNK_ELEMENTS
from convert.weights.writer import human_bytes

SHARE_OF_PEAK = 0.33
ACTIVATIONS_PER_BLOCK = 16
"""Tensors of (tokens, D) that a Llama block keeps for its backward pass, MLP and mixer together."""


@dataclass(frozen=True)
class Estimate:
    """Memory of one process, and time of the whole run."""

    parts: dict[str, int]
    """Bytes."""
    tokens: int
    """Training tokens of the whole run, over all processes."""
    seconds: float | None

    def __str__(self) -> str:
        total = sum(self.parts.values())
        parts = ", ".join(f"{name} {human_bytes(size)}" for name, size in self.parts.items() if size)
        spent = "" if self.seconds is None else f"; about {self.seconds / 60:.0f} min for {self.tokens:,} tokens"
        return f"memory about {human_bytes(total)} a process ({parts}){spent}"


def estimate(
    model: nn.Module, teacher: nn.Module | None, arguments: Any, tokens_per_step: int, steps: int, shards: int = 1
) -> Estimate:
    """Estimate the training of `model` with a Trainer's arguments.

    Args:
        tokens_per_step: tokens of a step over all processes, padding included.
        steps: number of optimizer steps.
        shards: number of processes that the weights are spread over.
    """
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    config = model.config
    rows = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    local_tokens = tokens_per_step * arguments.per_device_train_batch_size // max(rows, 1)
    width = local_tokens * config.hidden_size * (2 if arguments.bf16 else 4)
    blocks = config.num_hidden_layers
    kept = blocks + ACTIVATIONS_PER_BLOCK if arguments.gradient_checkpointing else blocks * ACTIVATIONS_PER_BLOCK
    head = model.get_output_embeddings().weight
    of_teacher = 0 if teacher is None else sum(p.numel() * p.element_size() for p in teacher.parameters())
    parts = {
        "weights": sum(p.numel() * p.element_size() for p in model.parameters()) // shards,
        "gradients and moments": 12 * trained // shards,
        "teacher": of_teacher // shards,
        "activations": kept * width,
        "loss": 6 * 4 * min(CHUNK_ELEMENTS, local_tokens * config.vocab_size),
        "the head's gradient": 2 * 4 * head.numel() if head.requires_grad else 0,
    }
    return Estimate(
        parts, tokens_per_step * steps, _seconds(model, teacher, arguments, tokens_per_step * steps, trained)
    )


def _seconds(model: nn.Module, teacher: nn.Module | None, arguments: Any, tokens: int, trained: int) -> float:
    every = sum(p.numel() for p in model.parameters())
    per_token = 2 * every + 2 * every + 2 * trained  # forward; through everything; into what is trained
    per_token += 2 * every if arguments.gradient_checkpointing else 0
    per_token += 2 * sum(p.numel() for p in teacher.parameters()) if teacher is not None else 0
    dtype = torch.bfloat16 if arguments.bf16 else torch.float32
    speed = SHARE_OF_PEAK * matmul_speed(arguments.device, dtype) * arguments.world_size
    return per_token * tokens / speed


def matmul_speed(device: torch.device, dtype: torch.dtype, size: int = 1024, rounds: int = 4) -> float:
    """Operations per second of a square matrix product, the best of a few."""
    size = 8 * size if device.type == "cuda" else size  # a small one is over before a GPU is busy
    a = torch.randn(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        product = a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
        del product
    return 2 * size**3 / best
