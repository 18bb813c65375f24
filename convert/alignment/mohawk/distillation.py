"""MOHAWK stage 3: knowledge distillation, end to end, with transformers' Trainer.

Everything outside the mixers comes from the teacher (it was moved when the model was converted). The student learns
the teacher's next-token distribution: the loss is KL(teacher || student) per token, whose gradient is that of the
cross entropy to the teacher's distribution (Bick et al. 2024, eq. 7). Logits exist a few hundred tokens at a time.
"""

import math
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from ...options import DistillationOptions
from ..divergence import distillation_loss, kl_of_hidden
from .layerwise import run_key


class TokenRows(Dataset):
    """Rows of token ids."""

    def __init__(self, ids: torch.Tensor):
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index]}


class DistillingMixin:
    """Makes a causal language model's forward return the distillation loss.

    The loss is computed inside `forward` so that wrappers (DDP, FSDP, DeepSpeed) see every use of the weights.
    """

    def forward(
        self,
        input_ids: torch.Tensor,
        teacher_hidden_states: torch.Tensor,
        teacher_head: nn.Module,
        temperature: float,
        attention_mask: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """{"loss": mean KL per token that is not padding}."""
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        keep = None if attention_mask is None else attention_mask.flatten().bool()
        loss = distillation_loss(
            teacher_hidden_states.flatten(0, 1), hidden.flatten(0, 1), teacher_head, self.lm_head, keep, temperature
        )
        return {"loss": loss}


class StopAtNaN(TrainerCallback):
    """Ends the training at a loss that is not finite; what was saved before is whole."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        """See `TrainerCallback`."""
        if not math.isfinite((logs or {}).get("loss", 0.0)):
            raise ValueError(f"The loss is not finite at step {state.global_step}; lower the learning rate.")


class DistillationTrainer(Trainer):
    """Trainer whose loss is the divergence from a teacher."""

    def __init__(self, *args, teacher: nn.Module, settings: DistillationOptions, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher, self.settings = teacher, settings
        self.model_accepts_loss_kwargs = False  # the loss is a mean already

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """See `transformers.Trainer.compute_loss`."""
        mask = inputs.get("attention_mask")
        with torch.no_grad(), self.compute_loss_context_manager():
            hidden = self.teacher.model(inputs["input_ids"], attention_mask=mask, use_cache=False).last_hidden_state
        outputs = model(
            input_ids=inputs["input_ids"],
            teacher_hidden_states=hidden,
            teacher_head=self.teacher.lm_head,
            temperature=self.settings.temperature,
            attention_mask=mask,
        )
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def create_optimizer(self, model=None):
        """AdamW with the mixers' learning rate and everyone else's."""
        if self.optimizer is None:
            named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
            groups = [
                ([p for n, p in named if is_mixer(n) and p.ndim > 1], self.settings.learning_rate, True),
                ([p for n, p in named if is_mixer(n) and p.ndim <= 1], self.settings.learning_rate, False),
                ([p for n, p in named if not is_mixer(n) and p.ndim > 1], self.settings.other_learning_rate, True),
                ([p for n, p in named if not is_mixer(n) and p.ndim <= 1], self.settings.other_learning_rate, False),
            ]
            self.optimizer = torch.optim.AdamW(
                [
                    {"params": params, "lr": lr, "weight_decay": self.settings.weight_decay if decays else 0.0}
                    for params, lr, decays in groups
                    if params
                ],
                betas=(0.9, 0.95),
            )
        return self.optimizer


def is_mixer(name: str) -> bool:
    """Whether a parameter belongs to a mixer."""
    return ".mixer." in name


def set_trainable(student: nn.Module, settings: DistillationOptions) -> None:
    """Mixers always; the rest where it has a learning rate, MLPs only if they are to take part."""
    for name, parameter in student.named_parameters():
        rest = settings.other_learning_rate > 0 and (settings.train_mlp or ".mlp." not in name)
        parameter.requires_grad_(is_mixer(name) or rest)


def distil(
    student: nn.Module,
    teacher: nn.Module,
    ids: torch.Tensor,
    settings: DistillationOptions,
    folder: Path,
    seed: int = 0,
    callbacks: list[TrainerCallback] | None = None,
    use_cpu: bool = True,
) -> list[dict]:
    """Train the student in place on token ids (S, L); the Trainer's log.

    Checkpoints lie in `folder`, under a name that belongs to this run; interrupted, it continues from the last whole
    one with the results it would have had. The student comes back in evaluation mode.

    Raises:
        ValueError: the vocabularies differ, or a loss is not finite.
    """
    if student.config.vocab_size != teacher.config.vocab_size:
        raise ValueError(
            f"The teacher has {teacher.config.vocab_size} tokens and the student {student.config.vocab_size}; "
            "distillation needs one vocabulary."
        )
    set_trainable(student, settings)
    folder = folder / run_key(settings, ids, seed, student)[:16]
    plain = student.__class__
    student.__class__ = type(plain.__name__, (DistillingMixin, plain), {"__module__": plain.__module__})
    try:
        trainer = DistillationTrainer(
            student,
            training_arguments(settings, ids, folder, seed, use_cpu),
            train_dataset=TokenRows(ids),
            teacher=teacher,
            settings=settings,
            callbacks=[*(callbacks or []), StopAtNaN()],
        )
        trainer.remove_callback(PrinterCallback)
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise ValueError(
                "Stage 3 runs on one process or with DDP; sharded weights (FSDP, DeepSpeed) are not handled."
            )
        with torch.enable_grad():
            trainer.train(resume_from_checkpoint=last_whole_checkpoint(folder))
    finally:
        student.__class__ = plain
        student.__dict__.pop("forward", None)  # accelerate's, under bf16
        student.eval()
    return trainer.state.log_history


def last_whole_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that was written to its end: the Trainer's state is written last."""
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return str(max(whole, key=lambda path: int(path.name.split("-")[1]))) if whole else None


def training_arguments(
    settings: DistillationOptions, ids: torch.Tensor, folder: Path, seed: int, use_cpu: bool
) -> TrainingArguments:
    """The stage's settings in the Trainer's terms; tokens count over all processes."""
    arguments = TrainingArguments(output_dir=str(folder), use_cpu=use_cpu, report_to="none")
    steps = max(settings.tokens // (settings.sequences * ids.shape[1] * arguments.world_size), 1)
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=settings.sequences,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": int(settings.decay * steps), "decay_type": "linear"},
        warmup_steps=int(settings.warmup * steps),
        max_grad_norm=settings.max_grad_norm,
        bf16=settings.bf16,
        activation_checkpointing=settings.gradient_checkpointing or None,
        seed=seed,
        data_seed=seed,
        use_cpu=use_cpu,
        logging_steps=max(steps // 100, 1),
        logging_nan_inf_filter=False,
        save_strategy="steps" if settings.save_every else "no",
        save_steps=settings.save_every or 500,
        save_total_limit=1,
        report_to=settings.report_to,
        disable_tqdm=True,
        dataloader_pin_memory=not use_cpu,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
    )


@torch.no_grad()
def mean_kl(student: nn.Module, teacher: nn.Module, ids: torch.Tensor, batch: int = 2) -> float:
    """KL(teacher || student) in nats per token over token ids (S, L)."""
    total = 0.0
    for rows in ids.to(next(student.parameters()).device).split(batch):
        of_teacher, of_student = (
            m.model(rows, use_cache=False).last_hidden_state.flatten(0, 1) for m in (teacher, student)
        )
        total += kl_of_hidden(of_teacher, of_student, student.lm_head, teacher.lm_head).sum().item()
    return total / ids.numel()
