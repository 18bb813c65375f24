"""On-policy distillation of a hybrid: it answers prompts, the teacher grades every token; TRL's DistillationTrainer.

    python -m recipes.distillation --config recipes/configs/llamba/distillation.yaml [--any_key value ...]

Data: `messages`, up to the first answer, or `prompt`, or `instruction` and `input`; in turns where the tokenizer has a
chat template, as text where it has none. `beta` 0 is KL(teacher || student), 1 the reverse. Keys: TRL's
DistillationConfig, ModelConfig and data arguments, TeacherArguments and RunArguments in recipes/arguments.py.
"""

import sys
from dataclasses import dataclass, field
from typing import Any

from trl import DistillationConfig, DistillationTrainer, get_peft_config

from .training.arguments import RunArguments, TeacherArguments, parse
from .training.chat_format import not_too_long, questions
from .training.load import check_vocabularies, load_splits, load_student, load_teacher
from .training.run import Run, one_line_errors
from .training.trainer import set_trainable

COLUMNS = [{"messages"}, {"prompt"}, {"instruction"}]


@dataclass
class OnPolicyTeacherArguments:
    """What DistillationConfig does not say of the teacher already."""

    teacher_dtype: str = field(default="auto", metadata={"help": "Of the teacher's weights: auto, float32, bfloat16."})
    teacher_load_in_8bit: bool = field(default=False, metadata={"help": "Needs bitsandbytes and CUDA."})
    teacher_load_in_4bit: bool = field(default=False, metadata={"help": "Needs bitsandbytes and CUDA."})


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run it; the figures before and after."""
    script, config, model_config, mixture, more, run_arguments = parse(
        DistillationConfig, OnPolicyTeacherArguments, RunArguments, argv=argv
    )
    teaching = TeacherArguments(config.teacher_model_name_or_path, config.teacher_model_revision, **vars(more))
    with Run("distillation", config, model_config, run_arguments, script, mixture, teaching) as run:
        train, held_out = load_splits(script, mixture, config.eval_strategy != "no", COLUMNS)
        run.refuse("other_learning_rate")
        train = run_arguments.chunk_of(train)
        student, tokenizer = load_student(model_config, config.trust_remote_code)
        teacher = load_teacher(teaching, run.source, config.trust_remote_code)
        check_vocabularies(student, tokenizer, teacher, teaching, run.source, config.trust_remote_code)
        if not model_config.use_peft:
            set_trainable(student, run_arguments.trainable)
        train, held_out = (None if rows is None else questions(rows, tokenizer) for rows in (train, held_out))
        limit = student.config.max_position_embeddings - config.max_completion_length
        given, train = len(train), not_too_long(train, tokenizer, limit)
        if len(train) < given:
            run.say(f"[yellow]{given - len(train)} of {given} prompts left out:[/] no room for an answer.")
        run.announce(student, teacher, tokenizer, train)
        trainer = DistillationTrainer(
            student,
            teacher_model=teacher,
            args=config,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=tokenizer,
            peft_config=get_peft_config(model_config),
        )
        run.learns_from(teacher)
        settings = {"beta": config.beta, "temperature": config.temperature, "trainable": run_arguments.trainable}
        return run.train(trainer, tokenizer, script.dataset_name or "a mixture", settings)


if __name__ == "__main__":
    with one_line_errors("--verbose" in sys.argv):
        main([argument for argument in sys.argv[1:] if argument != "--verbose"])
