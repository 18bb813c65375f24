"""Distil a hybrid on its own answers: it answers prompts, the teacher grades every token; TRL's DistillationTrainer.

    python -m recipes.distillation --config recipes/configs/llamba/distillation.yaml [--any_key value ...]

Data: the questions of any form in docs/guide/training.md; in turns where the tokenizer has a chat template, as text
where it has none. `beta` 0 is KL(teacher || student), 1 the reverse. Keys: TRL's DistillationConfig, ModelConfig and
data arguments, TeacherArguments and RunArguments in recipes/training/arguments.py.
"""

from typing import Any

from trl import DistillationConfig, DistillationTrainer, get_peft_config

from .training.arguments import RunArguments, TeacherArguments, TeacherLoadingArguments, parse
from .training.chat_format import not_too_long, questions
from .training.load import load_teacher
from .training.run import Run, script, to_both


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the recipe; returns what was measured before and after."""
    data, config, model_config, mixture, loading, run_arguments = parse(
        DistillationConfig, TeacherLoadingArguments, RunArguments, argv=argv
    )
    # TRL's configuration names the teacher itself, and no two classes that are parsed may share a field
    teaching = TeacherArguments(
        teacher_model_name_or_path=config.teacher_model_name_or_path,
        teacher_revision=config.teacher_model_revision,
        **vars(loading),
    )
    with Run("distillation", config, model_config, run_arguments, data, mixture, teaching) as run:
        train, held_out, student, tokenizer = run.load(data, mixture, "questions")
        teacher = load_teacher(teaching, run.source, config.trust_remote_code, student, tokenizer)
        options = config.chat_template_kwargs
        train, held_out = to_both(lambda rows: questions(rows, tokenizer, options), train, held_out)
        limit = student.config.max_position_embeddings - config.max_completion_length
        given = len(train)
        train, held_out = to_both(lambda rows: not_too_long(rows, tokenizer, limit), train, held_out)
        if len(train) < given:
            run.say(f"[yellow]{given - len(train)} of {given} prompts left out:[/] no room for an answer.")
        trainer = DistillationTrainer(
            student,
            teacher_model=teacher,
            args=config,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=tokenizer,
            peft_config=get_peft_config(model_config),
        )
        run.note_teacher(teacher)
        settings = {"beta": config.beta, "temperature": config.temperature}
        return run.train(trainer, tokenizer, data.dataset_name or "a mixture", settings)


if __name__ == "__main__":
    script(main)
