"""On-policy distillation of a hybrid: it answers prompts, the teacher grades every token; TRL's DistillationTrainer.

    python -m recipes.distillation --config recipes/configs/llamba/distillation.yaml [--any_key value ...]

Data: `prompt`, or `messages`. `beta` 0 is KL(teacher || student), 1 the reverse. Keys: TRL's DistillationConfig,
ModelConfig and data arguments, TeacherArguments and RunArguments in recipes/arguments.py.
"""

import sys
from dataclasses import dataclass, field
from typing import Any

from trl import DistillationConfig, DistillationTrainer, get_peft_config

from .arguments import RunArguments, TeacherArguments, parse
from .load import check_vocabularies, load_splits, load_student, load_teacher
from .run import Run, one_line_errors
from .sft_trainer import set_trainable

COLUMNS = [{"prompt"}, {"messages"}]


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
        trainer = DistillationTrainer(
            student,
            teacher_model=teacher,
            args=config,
            train_dataset=prompts_of(train),
            eval_dataset=None if held_out is None else prompts_of(held_out),
            processing_class=tokenizer,
            peft_config=get_peft_config(model_config),
        )
        run.learns_from(teacher)
        settings = {"beta": config.beta, "temperature": config.temperature, "trainable": run_arguments.trainable}
        return run.train(trainer, teacher, tokenizer, script.dataset_name or "a mixture", settings)


def prompts_of(rows: Any) -> Any:
    """The prompts alone: conversations up to their first answer."""
    if "prompt" in rows.column_names:
        return rows.select_columns(["prompt"])

    def before_the_answer(row: dict) -> dict:
        turns = row["messages"]
        return {"prompt": turns[: next((i for i, t in enumerate(turns) if t["role"] == "assistant"), len(turns))]}

    return rows.map(before_the_answer, remove_columns=rows.column_names)


if __name__ == "__main__":
    with one_line_errors("--verbose" in sys.argv):
        main([argument for argument in sys.argv[1:] if argument != "--verbose"])
