"""Direct preference optimisation of a hybrid against its teacher, with TRL's DPOTrainer.

    python -m recipes.dpo --config recipes/configs/llamba/dpo.yaml [--any_key value ...]

The reference is the teacher (`reference: teacher`, Wang et al. 2024 keep it close to the original model) or the
student as it was (`reference: student`). Data: `chosen` and `rejected` with `prompt`, `question`, or the question in
them (docs/guide/training.md). `precompute_ref_log_probs: true` runs the reference once and lets it go. Keys: TRL's
DPOConfig, ModelConfig and data arguments, TeacherArguments and RunArguments in recipes/training/arguments.py.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from trl import DPOConfig, DPOTrainer, get_peft_config

from .training.arguments import RunArguments, TeacherArguments, parse
from .training.chat_format import pairs
from .training.load import load_student, load_teacher
from .training.run import Run, script, to_both


@dataclass
class ReferenceArguments:
    """The model that the student is held close to."""

    reference: Literal["teacher", "student"] = field(
        default="teacher", metadata={"help": "teacher, or student for a copy of the student as it is now."}
    )


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the recipe; returns what was measured before and after."""
    data, config, model_config, mixture, teaching, reference, run_arguments = parse(
        DPOConfig, TeacherArguments, ReferenceArguments, RunArguments, argv=argv
    )
    with Run("dpo", config, model_config, run_arguments, data, mixture, teaching, reference) as run:
        train, held_out, student, tokenizer = run.load(data, mixture, "pairs")
        if reference.reference == "teacher":
            teacher = load_teacher(teaching, run.source, config.trust_remote_code, student, tokenizer)
        elif model_config.use_peft:
            teacher = None  # the student without its adapters
        else:
            teacher = load_student(model_config)[0].eval().requires_grad_(False)
        train, held_out = to_both(lambda rows: pairs(rows, tokenizer), train, held_out)
        trainer = DPOTrainer(
            student,
            ref_model=teacher,
            args=config,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=tokenizer,
            peft_config=get_peft_config(model_config),
        )
        run.note_teacher(teacher)
        if config.precompute_ref_log_probs:
            # its log probabilities were computed when the trainer was made
            trainer.ref_model = None
        run.check_rows(len(train), trainer)
        settings = {"reference": reference.reference}
        return run.train(trainer, tokenizer, data.dataset_name or "a mixture", settings)


if __name__ == "__main__":
    script(main)
