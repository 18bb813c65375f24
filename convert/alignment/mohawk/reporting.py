"""Figures of stages 1 and 2, which no Trainer runs, to a file and through the Trainer's reporters."""

from pathlib import Path

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from .layerwise import append_jsonl


class Reporter:
    """Keeps every record as a line of FOLDER/NAME.jsonl, and gives it to TensorBoard, W&B, ... as a Trainer would.

    Args:
        report_to: what `TrainingArguments` takes: none, tensorboard, wandb, ...

    Raises:
        ValueError: there is no such reporter, or it is not installed.
    """

    def __init__(self, folder: Path, name: str, report_to: str):
        self.keep = append_jsonl(folder / f"{name}.jsonl")
        self.state, self.control = TrainerState(), TrainerControl()
        self.callbacks = reporters(report_to)
        self.arguments = TrainingArguments(output_dir=str(folder), run_name=name, report_to="none", use_cpu=True)
        self._tell("on_train_begin")

    def __call__(self, record: dict) -> None:
        """Report a step: its number, the tokens so far, tokens per second, and the loss of each layer."""
        self.keep(record)
        if not self.callbacks:
            return
        self.state.global_step = record["step"]
        losses = record["loss"]
        figures = {key: record[key] for key in ("tokens", "tokens_per_second")}
        figures["loss"] = sum(losses.values()) / len(losses)
        self._tell("on_log", logs=figures | {f"loss/layer_{layer}": loss for layer, loss in losses.items()})

    def close(self) -> None:
        """Tell the reporters that it is over."""
        self._tell("on_train_end")

    def _tell(self, event: str, **more) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self.arguments, self.state, self.control, **more)


def reporters(report_to: str) -> list:
    """The Trainer's callbacks of that name.

    Raises:
        ValueError: there is no such reporter, or it is not installed.
    """
    try:
        return [callback() for callback in get_reporting_integration_callbacks(report_to)]
    except (ImportError, RuntimeError) as error:
        raise ValueError(f"report_to: {report_to} cannot be used: {str(error).strip().splitlines()[0]}") from error
