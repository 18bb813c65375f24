"""TRL's SFTTrainer with a teacher: cross entropy to the answers and divergence from the teacher, per token, masked.

Needs the `train` extra; import it only where training begins.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import fsdp2_prepare_model
from torch import nn
from transformers import PrinterCallback, Trainer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from modeling_llamba.model.hybrid_model import freeze_fixed

from ...memory import keep_free_memory
from ...options import Trainable
from .loss import STATISTICS, LossWeights, add_distillation_head, add_hidden_output, head_of

TeacherOf = Callable[[slice], torch.Tensor]

MIXER_VECTORS = ("A_log", "A_log_bias", "dt_bias", "D", "z_bias", "mass", "sinks")
"""Parameters that belong to no layer: a mixer's decays, step biases, skip and gate; a state's log mass; sinks."""


PACKED = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Inputs of a packed batch that any Transformer takes; a sequence index is for recurrent layers alone."""


class DistilledSFTTrainer(SFTTrainer):
    """Fine-tunes a student on the teacher's distribution and on answers.

    Args:
        model, args: the student and the settings, as for `SFTTrainer`.
        teacher: model over the same vocabulary, which is not changed; None for cross entropy alone.
        weights: weights of the loss's terms.
        other_learning_rate: peak learning rate of everything but the mixers; `args.learning_rate` if None.
        sft_options: the other arguments of `SFTTrainer`, such as its data sets and callbacks.
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
        **sft_options: Any,
    ):
        if teacher is None and weights.kl_weight:
            raise ValueError("kl_weight needs a teacher; set kl_weight to 0 to train on the answers alone.")
        if teacher is not None:
            check_vocabulary_sizes(model, teacher)
        self._sums: dict[str, dict[str, float]] = {"train": defaultdict(float), "eval": defaultdict(float)}
        self.weights = weights
        self.other_learning_rate = other_learning_rate
        super().__init__(model, args, **sft_options)
        inner = self.model
        if hasattr(inner, "get_base_model"):  # it has adapters
            inner = inner.get_base_model()
        add_distillation_head(inner)
        if self.is_fsdp_enabled and self.accelerator.state.fsdp_plugin.cpu_ram_efficient_loading:
            for broadcast in (inner, teacher):
                if broadcast is not None:
                    buffers_to_parameters(broadcast)
        self.teacher = None
        if teacher is not None:
            self.teacher = self._prepare_teacher(teacher)

    def _prepare_teacher(self, teacher: nn.Module) -> nn.Module:
        teacher = teacher.eval().requires_grad_(False)
        add_hidden_output(teacher)
        if self.is_fsdp_enabled:
            return self._shard(teacher)
        if getattr(teacher, "is_loaded_in_8bit", False) or getattr(teacher, "is_loaded_in_4bit", False):
            return teacher  # placed when it was loaded
        return teacher.to(self.args.device)

    def _shard(self, teacher: nn.Module) -> nn.Module:
        plugin = self.accelerator.state.fsdp_plugin
        of_student = plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap
        # without the vision tower's, which a language model lacks and accelerate misses
        present = {type(module).__name__ for module in teacher.modules()} & set(teacher._no_split_modules or ())
        plugin.transformer_cls_names_to_wrap = sorted(present)
        try:
            return fsdp2_prepare_model(self.accelerator, teacher)
        finally:
            plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap = of_student

    def _signal(self, inputs: dict[str, Any]) -> Callable[[torch.Tensor], TeacherOf] | None:
        """Function from the mask of counting positions (B, L - 1) to the `teacher_of` of `distillation_loss`."""
        if self.teacher is None:
            return None
        with torch.no_grad():
            given = {name: inputs[name] for name in ("input_ids", "attention_mask", *PACKED) if name in inputs}
            hidden = self.teacher(**given, hidden_only=True)[:, :-1]
            head = head_of(self.accelerator.unwrap_model(self.teacher))

        def from_teacher(counts: torch.Tensor):
            chosen = hidden[counts]
            return lambda span: head(chosen[span])

        return from_teacher

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Loss of a batch per token; `num_items_in_batch` counts the tokens of all processes in the step."""
        if return_outputs:
            raise ValueError("The logits are not kept; set prediction_loss_only.")
        outputs = model(**inputs, distillation=(self._signal(inputs), self.weights))
        count = num_items_in_batch
        if num_items_in_batch is None:
            count = outputs.tokens
        loss = outputs.loss / torch.as_tensor(count).clamp(min=1)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # DDP will divide by it
        self._record(inputs, outputs)
        return loss

    @property
    def _mode(self) -> str:
        if self.model.training:
            return "train"
        return "eval"

    def _record(self, inputs: dict[str, Any], outputs: Any) -> None:
        mode = self._mode
        mask = inputs.get("attention_mask")
        if mask is None:
            # no mask, no padding: rows are packed, or all of one length
            seen = torch.full_like(outputs.tokens, inputs["labels"].numel())
        else:
            seen = mask.sum()
        own = torch.cat([outputs.statistics, torch.stack([outputs.tokens, seen]).to(outputs.statistics)])
        totals = self.accelerator.gather(own[None]).sum(0).tolist()
        for name, value in zip((*STATISTICS, "tokens"), totals, strict=False):
            self._sums[mode][name] += value
        check_finite_loss(math.fsum(totals), self.state.global_step)
        if mode == "train":
            self._total_train_tokens += int(totals[-1])

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log CE, KL and agreement per token since the last time, over all processes, beside the trainer's figures."""
        mode = self._mode
        sums = self._sums[mode]
        prefix = ""
        if mode == "eval":  # of several sets of data each has a prefix of its own
            prefix = next((k.removesuffix("loss") for k in logs if k.endswith("_loss")), None)
        if sums["tokens"] and prefix is not None:
            names = STATISTICS
            if self.teacher is None:
                names = STATISTICS[:1]
            logs |= {prefix + name: sums[name] / sums["tokens"] for name in names}
            if mode == "train":
                logs["num_tokens"] = self._total_train_tokens
        sums.clear()
        super().log(logs, start_time)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters with weight decay: the trainer's, without the mixers' own vectors."""
        return [n for n in super().get_decay_parameter_names(model) if n.rsplit(".", 1)[-1] not in MIXER_VECTORS]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer, with a learning rate for everything but the mixers where one is given."""
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


def is_mixer(name: str) -> bool:
    """Return True if a parameter of this name belongs to a mixer."""
    return ".mixer." in name


def buffers_to_parameters(model: nn.Module) -> None:
    """Make the buffers that a checkpoint holds, as Gemma 4's scalars of layers, frozen parameters of the same names.

    What one process has read reaches the others through accelerate, which sends parameters alone. As such they are
    rounded with the weights in a mixed precision.
    """
    recomputed = {name for name, _ in model.named_non_persistent_buffers()}
    for name, buffer in list(model.named_buffers()):
        if name not in recomputed:
            owner, _, last = name.rpartition(".")
            module = model.get_submodule(owner)
            delattr(module, last)
            module.register_parameter(last, nn.Parameter(buffer, requires_grad=False))


def set_trainable(model: nn.Module, what: Trainable) -> None:
    """Freeze what is not to be trained: nothing, the MLPs, everything but the mixers, or all but what reads a state.

    Raises:
        ValueError: "beyond-window", and a replaced layer has no state beside a window.
    """
    for name, parameter in model.named_parameters():
        chosen = is_mixer(name) or what == "all" or (what == "all-but-mlp" and ".mlp." not in name)
        parameter.requires_grad_(chosen)
    freeze_fixed(model)
    if what == "beyond-window":
        for mixer in (layer.mixer for layer in model.base_model.layers if hasattr(layer, "mixer")):
            if getattr(mixer, "mass", None) is None:
                raise ValueError(
                    "trainable 'beyond-window' needs a window and a state in every replaced layer; train the mixers "
                    "instead."
                )
            for name, parameter in mixer.named_parameters():
                parameter.requires_grad_(name.startswith(("mass", "down", "up")))


def check_vocabulary_sizes(student: nn.Module, teacher: nn.Module) -> None:
    """Refuse a teacher that predicts over another number of tokens."""
    ours, theirs = (model.get_output_embeddings().weight.shape[0] for model in (student, teacher))
    if ours != theirs:
        raise ValueError(f"The teacher has {theirs} tokens and the student {ours}; distillation needs one vocabulary.")


def check_finite_loss(loss: float, steps: int) -> None:
    """Raise ValueError where a loss after so many steps is not finite, and say what may be the cause."""
    if not math.isfinite(loss) and steps:
        raise ValueError(f"The loss is not finite at step {steps + 1}; lower the learning rate.")
    if not math.isfinite(loss):
        raise ValueError(
            "The loss is not finite before any weight was changed, so that the learning rate is not to blame; look at "
            "what the untrained model gives for this data, and try bf16: false."
        )


class FiniteLoss(TrainerCallback):
    """Ends a training whose loss is not finite, be it measured or trained on."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        """Look at the losses among the figures; that of a step was computed before it."""
        for name, steps in (("loss", state.global_step - 1), ("eval_loss", state.global_step)):
            check_finite_loss(logs.get(name, 0.0), steps)


def last_whole_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that was written to its end: the trainer's state is written last."""
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    if not whole:
        return None
    return str(max(whole, key=lambda path: int(path.name.split("-")[1])))


@dataclass
class Outcome:
    """The evaluation data's figures before and after training, and the trainer's log; empty without such data."""

    before: dict[str, float]
    after: dict[str, float]
    log: list[dict[str, Any]]


def train_and_evaluate(trainer: Trainer, checkpoint: str | None = None) -> Outcome:
    """Train from the beginning or from a checkpoint; measure before and after."""
    keep_free_memory()
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(FiniteLoss)
    # the filter would log the mean of earlier losses in the place of NaN
    trainer.args.logging_nan_inf_filter = False
    trainer.args.logging_first_step = True
    if checkpoint is not None and hasattr(trainer, "_total_train_tokens"):
        # TRL begins to count at zero, in a run that goes on as well
        state = json.loads((Path(checkpoint) / "trainer_state.json").read_text())
        trainer._total_train_tokens = max((entry.get("num_tokens", 0) for entry in state["log_history"]), default=0)
    # inside `train`, because a model that was evaluated before it does not become distributed any more
    trainer.args.eval_on_start = checkpoint is None and trainer.eval_dataset is not None
    trainer.train(resume_from_checkpoint=checkpoint)
    log = trainer.state.log_history
    if trainer.eval_dataset is None:
        return Outcome({}, {}, list(log))
    steps = trainer.state.global_step
    # with it the weights in place may be of an earlier step than those last evaluated
    best = trainer.args.load_best_model_at_end
    # eval_strategy may have measured these very weights already
    last = next((entry for entry in log if "eval_loss" in entry and entry["step"] == steps > 0 and not best), None)
    if last is None:
        last = trainer.evaluate()
    first = next((entry for entry in log if entry["step"] == 0), {})
    return Outcome(_figures(first), _figures(last), list(log))


def _figures(metrics: dict[str, Any]) -> dict[str, float]:
    skip = ("runtime", "per_second", "epoch", "num_tokens", "preparation_time", "step")
    return {k: v for k, v in metrics.items() if isinstance(v, (int, float)) and not any(s in k for s in skip)}


def whole_model(trainer: Trainer) -> nn.Module:
    """The trained model in one piece, adapters merged and shards gathered; every process must call this.

    Where weights are spread over processes, only the main process gets the whole model.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "merge_and_unload"):
        return model.merge_and_unload()
    if trainer.is_fsdp_enabled:
        state = trainer.accelerator.get_state_dict(trainer.model)
        if not trainer.accelerator.is_main_process:
            return model
        # a new model, since the trained one's parameters are shards
        whole = type(model)(model.config)
        whole.generation_config = model.generation_config
        whole.load_state_dict(state)
        return whole
    return model
