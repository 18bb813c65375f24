"""MOHAWK stage 3: knowledge distillation, end to end, with the loss and the trainer of SFT.

Everything outside the mixers comes from the teacher (it was moved when the model was converted). The student learns
the teacher's next-token distribution: the loss is KL(teacher || student) per token, whose gradient is that of the
cross entropy to the teacher's distribution (Bick et al. 2024, eq. 7).
"""

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import TrainerCallback

from ...options import DistillationOptions
from ..distillation.loss import LossWeights
from .layerwise import run_key

if TYPE_CHECKING:
    from ..distillation.trainer import Outcome


def check_can_train() -> None:
    """Refuse stage 3 where its trainer is not installed."""
    if importlib.util.find_spec("trl") is None:
        raise ValueError("Distillation (stage 3) trains with TRL: pip install 'convert-to-hybrid[train]'.")


def distil(
    student: nn.Module,
    teacher: nn.Module,
    ids: torch.Tensor,
    settings: DistillationOptions,
    folder: Path,
    held_out: torch.Tensor | None = None,
    seed: int = 0,
    callbacks: list[TrainerCallback] | None = None,
    use_cpu: bool = True,
) -> tuple[nn.Module, "Outcome"]:
    """Train the student on token ids (B, L), in place where its weights are not spread over processes.

    Checkpoints lie in `folder`, under a name that belongs to this run; interrupted, it continues from the last whole
    one with the results it would have had.

    Args:
        held_out: token ids to measure on before and after.

    Returns:
        The trained student, in evaluation mode, and what was measured. Only the main process gets the whole student
        under FSDP.

    Raises:
        ValueError: TRL is not installed, the vocabularies differ, or a loss is not finite.
    """
    check_can_train()
    from datasets import Dataset

    from ..distillation import trainer as training

    eval_dataset = None
    if held_out is not None:
        eval_dataset = Dataset.from_dict({"input_ids": held_out.tolist()})
    training.set_trainable(student, settings.trainable)
    folder = folder / run_key(settings, ids, seed, student)[:16]
    try:
        trainer = training.DistilledSFTTrainer(
            student,
            training_config(settings, ids, folder, seed, use_cpu),
            teacher=teacher,
            weights=LossWeights(temperature=settings.temperature),
            other_learning_rate=settings.other_learning_rate,
            train_dataset=Dataset.from_dict({"input_ids": ids.tolist()}),
            eval_dataset=eval_dataset,
            data_collator=stacked,
            processing_class=no_tokenizer(),
            callbacks=callbacks,
        )
        trainer.processing_class = None  # its tokens are not the student's
        with torch.enable_grad():
            outcome = training.train_and_evaluate(trainer, training.last_whole_checkpoint(folder))
        trained = training.whole_model(trainer)
    finally:
        for model in (student, teacher):
            model.__dict__.pop("forward", None)  # the trainer's
        student.eval()
        student.activation_checkpointing_disable()
    return trained.eval(), outcome


def stacked(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A batch of rows of one length, in which every token counts."""
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids}


def no_tokenizer() -> Any:
    """A tokenizer without words, because SFTTrainer requires one and rows of token ids need none."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0}, "<pad>")))


def training_config(settings: DistillationOptions, ids: torch.Tensor, folder: Path, seed: int, use_cpu: bool) -> Any:
    """The stage's settings as TRL's SFTConfig; tokens count over all processes."""
    from trl import SFTConfig

    per_step = settings.sequences * ids.shape[1] * int(os.environ.get("WORLD_SIZE", 1))
    steps = max(settings.tokens // per_step, 1)
    return SFTConfig(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=settings.sequences,
        per_device_eval_batch_size=settings.sequences,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": int(settings.decay * steps), "decay_type": "linear"},
        warmup_steps=int(settings.warmup * steps),
        adam_beta2=0.95,
        bf16=settings.bf16,
        gradient_checkpointing=settings.gradient_checkpointing,
        seed=seed,
        data_seed=seed,
        use_cpu=use_cpu,
        logging_steps=max(steps // 100, 1),
        save_strategy="steps" if settings.save_every else "no",
        save_steps=settings.save_every or 500,
        save_total_limit=1,
        eval_strategy="no",
        report_to=settings.report_to,
        disable_tqdm=True,
        dataloader_pin_memory=not use_cpu,
        # rows are token ids already
        dataset_kwargs={"skip_prepare_dataset": True},
        ddp_find_unused_parameters=False,
    )
