"""Supervised fine-tuning of a hybrid with its teacher: CE on answers + KL to the teacher (SeqKD with its own answers).

    python -m recipes.sft --config recipes/configs/llamba/sft.yaml [--any_key value ...]
    accelerate launch --config_file recipes/configs/accelerate/fsdp2.yaml -m recipes.sft --config ...

The keys are those of TRL's ScriptArguments, SFTConfig, ModelConfig (LoRA among them) and DatasetMixtureConfig, and of
TeacherArguments, LossArguments and RunArguments in recipes/training/arguments.py. Data: `messages`, `prompt` and
`completion`, `text`, and other forms that docs/guide/training.md lists. The finished model lies in output_dir;
checkpoints in OUTPUT_DIR.work, from which the same command goes on after an interruption.
"""

import dataclasses
from pathlib import Path
from typing import Any

from trl import ModelConfig, SFTConfig, get_peft_config

from convert.train.distillation.trainer import DistilledSFTTrainer

from .training.arguments import LossArguments, RunArguments, TeacherArguments, parse
from .training.chat_format import faithful_answers
from .training.load import load_teacher
from .training.run import Run, script, to_both


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the recipe; returns what was measured before and after."""
    data, config, model_config, mixture, teaching, loss, run_arguments = parse(
        SFTConfig, TeacherArguments, LossArguments, RunArguments, argv=argv
    )
    with Run("sft", config, model_config, run_arguments, data, mixture, teaching, loss) as run:
        check_options(config, model_config)
        train, held_out, student, tokenizer = run.load(data, mixture, "answers")
        if not config.assistant_only_loss and "messages" in train.column_names:
            run.say("[yellow]messages: every token counts, the questions' too;[/] say assistant_only_loss: true where "
                    "the chat template marks answers, or use prompt and completion.")  # fmt: skip
        if config.chat_template_path is not None:
            # read here, since rows are compared with what it makes of them, and TRL takes some names for a model's
            tokenizer.chat_template = Path(config.chat_template_path).read_text()
            config.chat_template_path = None
        if "completion" in train.column_names:
            config.completion_only_loss = config.completion_only_loss is not False
        completion_only = config.completion_only_loss is not False
        train, held_out = to_both(lambda rows: faithful_answers(rows, tokenizer, completion_only), train, held_out)
        if "labels" in train.column_names:
            config.assistant_only_loss = False  # a completion of one message is that of an assistant
        teacher = None
        if loss.kl_weight:
            teacher = load_teacher(teaching, run.source, config.trust_remote_code, student, tokenizer)
        trainer = DistilledSFTTrainer(
            student,
            config,
            teacher=teacher,
            weights=loss.weights(),
            other_learning_rate=loss.other_learning_rate,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=tokenizer,
            peft_config=get_peft_config(model_config),
        )
        run.note_teacher(teacher)
        run.check_rows(len(train), trainer)
        return run.train(trainer, tokenizer, data.dataset_name or "a mixture", dataclasses.asdict(loss.weights()))


def check_options(config: SFTConfig, model_config: ModelConfig) -> None:
    """Refuse options of SFTTrainer that this loss does not follow."""
    if config.loss_type != "nll" or config.label_smoothing_factor:
        raise ValueError("loss_type and label_smoothing_factor are not for this loss: see ce_weight and kl_weight.")
    if config.dataset_text_field != "text":
        raise ValueError("dataset_text_field is text; rename the column instead.")
    if config.packing and config.packing_strategy == "wrapped":
        raise ValueError("packing_strategy: wrapped lets one conversation see another; use bfd.")
    if config.chat_template_path is not None and not Path(config.chat_template_path).is_file():
        raise ValueError(f"chat_template_path must be a file, and {config.chat_template_path} is none.")
    if model_config.use_peft and "lm_head" in (model_config.lora_target_modules or ()):
        raise ValueError("lm_head takes no adapter: the loss uses its weight directly; use lora_modules_to_save.")


if __name__ == "__main__":
    script(main)
