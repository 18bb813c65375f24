"""TRL's SFTTrainer with a teacher: cross entropy to the answers and divergence from the teacher, per token, masked."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from trl import SFTConfig, SFTTrainer
from trl.models import prepare_deepspeed, prepare_fsdp

from convert.alignment.mohawk.distillation import is_mixer

from .loss import (
    STATISTICS,
    LossWeights,
    add_distillation_head,
    add_hidden_output,
    head_of,
)
from .offline_logits import ROW, OfflineLogits, WithTeacherRows, teacher_inputs


class DistilledSFTTrainer(SFTTrainer):
    """Fine-tunes a student on the teacher's distribution and on answers.

    Args:
        model, args, train_dataset, eval_dataset, processing_class, peft_config, callbacks: as for `SFTTrainer`.
        teacher: predicts over the same vocabulary; stays as it is. None for cross entropy alone.
        weights: what the loss is made of.
        other_learning_rate: peak of everything but the mixers; `args.learning_rate` if None.
        offline_top_k: keep so many of the teacher's likeliest tokens on disk (in `offline_folder`) instead of it.
    """

    _tag_names = ["trl", "sft", "distillation"]
    _name = "SFT with a teacher"

    def __init__(
        self,
        model: nn.Module,
        args: SFTConfig,
        *,
        teacher: nn.Module | None,
        weights: LossWeights,
        other_learning_rate: float | None = None,
        offline_top_k: int = 0,
        offline_folder: Path | None = None,
        **of_sft_trainer: Any,
    ):
        if teacher is None and weights.kl_weight:
            raise ValueError("kl_weight needs a teacher; set kl_weight to 0 to train on the answers alone.")
        self._sums: dict[str, dict[str, float]] = {"train": defaultdict(float), "eval": defaultdict(float)}
        self.weights, self.other_learning_rate, self.offline = weights, other_learning_rate, None
        super().__init__(model, args, **of_sft_trainer)
        add_distillation_head(self.accelerator.unwrap_model(self.model) if not self._is_peft else _base(self.model))
        if offline_top_k and teacher is not None:
            self._to_disk(teacher, offline_folder, offline_top_k)
            teacher = None
        self.teacher = None if teacher is None else self._prepare_teacher(teacher)

    @property
    def _is_peft(self) -> bool:
        return hasattr(self.model, "get_base_model")

    def _to_disk(self, teacher: nn.Module, folder: Path, k: int) -> None:
        self.offline = OfflineLogits(folder, k)
        teacher = self._placed(teacher)
        self.train_dataset = self.offline.add(self.train_dataset, teacher, self.data_collator, "training")
        if self.eval_dataset is not None:
            self.eval_dataset = self.offline.add(self.eval_dataset, teacher, self.data_collator, "evaluation")
        self.data_collator = WithTeacherRows(self.data_collator)

    def _prepare_teacher(self, teacher: nn.Module) -> nn.Module:
        teacher = teacher.eval().requires_grad_(False)
        add_hidden_output(teacher)
        if self.is_deepspeed_enabled:
            return prepare_deepspeed(teacher, self.accelerator)
        if self.is_fsdp_enabled:
            return prepare_fsdp(teacher, self.accelerator)
        return self._placed(teacher)

    def _placed(self, teacher: nn.Module) -> nn.Module:
        if getattr(teacher, "is_loaded_in_8bit", False) or getattr(teacher, "is_loaded_in_4bit", False):
            return teacher  # placed when it was loaded
        return teacher.to(self.args.device)

    def _set_signature_columns_if_needed(self):
        super()._set_signature_columns_if_needed()
        if ROW not in self._signature_columns:
            self._signature_columns = [*self._signature_columns, ROW]

    def _signal(self, inputs: dict[str, Any]):
        """From the mask of counting positions (B, L - 1) to `distillation_loss`'s `teacher_of`."""
        rows = inputs.pop(ROW, None)
        if self.offline is not None:
            kept = self.offline[rows.tolist()]

            def from_disk(counts: torch.Tensor):
                if len(kept.ids) != counts.sum():
                    raise ValueError("The teacher's figures on disk do not belong to this data; delete them.")
                ids, log_probs = kept.ids.to(counts.device), kept.log_probs.to(counts.device)
                return lambda span: type(kept)(ids[span], log_probs[span])

            return from_disk
        if self.teacher is None:
            return None
        with torch.no_grad():
            hidden = self.teacher(**teacher_inputs(inputs), hidden_only=True)[:, :-1]
            head = head_of(self.accelerator.unwrap_model(self.teacher))

        def from_teacher(counts: torch.Tensor):
            chosen = hidden[counts]
            return lambda span: head(chosen[span])

        return from_teacher

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """See `transformers.Trainer.compute_loss`; `num_items_in_batch` counts all processes' tokens of the step."""
        if return_outputs:
            raise ValueError("The logits are not kept; set prediction_loss_only.")
        with self.compute_loss_context_manager():
            signal = self._signal(inputs)
        outputs = model(**inputs, distillation=(signal, self.weights))
        count = outputs.tokens if num_items_in_batch is None else num_items_in_batch
        loss = outputs.loss / torch.as_tensor(count).clamp(min=1)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # DDP will divide by it
        self._record(inputs, outputs)
        return loss

    def _record(self, inputs: dict[str, Any], outputs: Any) -> None:
        mode = "train" if self.model.training else "eval"
        seen = int(inputs["attention_mask"].sum()) if "attention_mask" in inputs else inputs["labels"].numel()
        own = torch.cat([outputs.statistics, torch.stack([outputs.tokens, torch.tensor(seen)]).to(outputs.statistics)])
        totals = self.accelerator.gather(own[None]).sum(0).tolist()
        for name, value in zip((*STATISTICS, "tokens"), totals, strict=False):
            self._sums[mode][name] += value
        if mode == "train":
            self._total_train_tokens += int(totals[-1])

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds CE, KL and agreement per token since the last time, over all processes."""
        mode = "train" if self.model.training else "eval"
        sums = self._sums[mode]
        if sums["tokens"] and (mode == "train" or "eval_loss" in logs):
            names = STATISTICS if self.teacher is not None or self.offline is not None else STATISTICS[:1]
            prefix = "eval_" if mode == "eval" else ""
            logs |= {prefix + name: sums[name] / sums["tokens"] for name in names}
            if mode == "train":
                logs["num_tokens"] = self._total_train_tokens
        if not mode == "train" or sums["tokens"]:
            sums.clear()
        super().log(logs, start_time)

    def create_optimizer(self, model=None):
        """With a learning rate of its own for everything but the mixers, where one is given."""
        if self.other_learning_rate is None or self.optimizer is not None:
            return super().create_optimizer(*([] if model is None else [model]))
        decays = set(self.get_decay_parameter_names(self.model))
        groups: dict[tuple[bool, bool], list] = defaultdict(list)
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                groups[is_mixer(name), name in decays].append(parameter)
        optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        self.optimizer = optimizer_class(
            [
                {
                    "params": parameters,
                    "lr": self.args.learning_rate if of_mixer else self.other_learning_rate,
                    "weight_decay": self.args.weight_decay if decay else 0.0,
                }
                for (of_mixer, decay), parameters in groups.items()
            ],
            **options,
        )
        return self.optimizer


def set_trainable(model: nn.Module, what: str) -> None:
    """Freeze what is not to be trained: "all", "all-but-mlp", or "mixers" only."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_mixer(name) or what == "all" or (what == "all-but-mlp" and ".mlp." not in name))


def _base(model: nn.Module) -> nn.Module:
    return model.get_base_model()
