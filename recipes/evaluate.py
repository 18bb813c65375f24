"""Measure a hybrid beside its teacher: text, recall, generation, tasks, speed.

python -m recipes.evaluate MODEL [--teacher T] [--output DIR] [--parts text,recall,generation,tasks,speed]
python -m recipes.evaluate runs/demo/hybrid --lengths 512,2048 --tasks arc_easy,piqa --update-card

Results go to DIR/evaluation.json and DIR/evaluation.md. Every finished cell is kept in DIR, so the same command goes
on where it was interrupted. docs/evaluation.md says what each figure is.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from transformers.utils import logging

from convert.checkpoint.load import load_config
from convert.cli import console, one_line_errors, progress_bars, set_verbosity
from convert.tools.generate import recorded_teacher

from .commit import project_commit
from .evaluation.folder import EvaluationFolder
from .evaluation.parts import PARTS, Evaluation, Settings
from .evaluation.results import markdown, update_card
from .evaluation.texts import SHIPPED, TextSource

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
ROW_KEYS = {
    "text": ("name", "length"),
    "recall": ("probe", "length", "distance"),
    "tasks": ("task", "metric"),
    "speed": ("which", "batch", "context"),
}
TEXT, RECALL, GENERATION, TASKS, SPEED, RUN = "Text", "Recall", "Generation", "Tasks", "Speed", "Run"


def _option(panel: str, help: str, *names: str, **more: Any):
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def numbers(flag: str, text: str, kind: type = int) -> tuple:
    """512,2048 as numbers.

    Raises:
        ValueError: it is no such list.
    """
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"{flag} takes numbers with commas between them; got {text!r}.") from error


def names(text: str | None) -> tuple[str, ...]:
    """a,b as names."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def parse_chances(given: list[str]) -> dict[str, float]:
    """TASK=0.25 of each.

    Raises:
        ValueError: one is not of that form.
    """
    chances = {}
    for text in given:
        task, separator, chance = text.rpartition("=")
        if not separator or not task:
            raise ValueError(f"--chance takes TASK=NUMBER; got {text!r}.")
        chances[task] = numbers("--chance", chance, float)[0]
    return chances


def find_teacher_of(model: str, teacher: str | None, trust_remote_code: bool) -> str | None:
    """The teacher named, none, or the one the checkpoint records.

    Raises:
        ValueError: none is named and none recorded.
    """
    if teacher == "none":
        return None
    if teacher is not None:
        return teacher
    try:
        return recorded_teacher(load_config(model, trust_remote_code=trust_remote_code))
    except ValueError as error:
        raise ValueError(f"{error} Or measure the model alone: --teacher none.") from error


@contextmanager
def narrate() -> Iterator:
    """Progress as bars in a terminal, and as lines elsewhere."""
    if console.is_terminal:
        with progress_bars(quiet=False) as (_, _, on_align):
            yield on_align
    else:
        yield lambda what, done, total: console.print(f"{what}: {done}/{total}", markup=False)


def merged(before: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Results of this run beside those of earlier ones in the same folder, row by row."""
    parts = {part: found.get(part, before.get(part)) for part in PARTS}
    for part, keys in ROW_KEYS.items():
        new = {tuple(row[key] for key in keys) for row in found.get(part, [])}
        kept = [row for row in before.get(part, []) if tuple(row[key] for key in keys) not in new]
        parts[part] = kept + found.get(part, []) or None
    return {part: rows for part, rows in parts.items() if rows is not None}


def evaluate(settings: Settings, output: Path, overwrite: bool = False) -> dict[str, Any]:
    """Run what is not done yet, and write all results.

    Raises:
        ValueError: something cannot be measured; what was finished before is kept.
    """
    by_part = settings.by_part()
    folder = EvaluationFolder(output, by_part, overwrite)
    with narrate() as progress:
        found = Evaluation(settings, folder, progress).run()
    earlier = folder.results()
    results = {
        "model": settings.model,
        "teacher": settings.teacher,
        "commit": project_commit(),
        "environment": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "device": settings.device,
            "threads": torch.get_num_threads(),
        },
        "settings": earlier.get("settings", {}) | by_part,
    } | merged(earlier, found)
    folder.finish(results, markdown(results))
    return results


@app.command(no_args_is_help=True)
def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hybrid: folder, Hub id (or any causal model).")],
    teacher: Annotated[
        str | None, _option(RUN, "Compare with this model; none for MODEL alone. Default: the one MODEL records.")
    ] = None,
    output: Annotated[Path | None, _option(RUN, "Folder for results (default: runs/evaluation/NAME).")] = None,
    parts: Annotated[str | None, _option(RUN, f"Some of {','.join(PARTS)} (default: all; tasks if --tasks).")] = None,
    text: Annotated[
        list[str] | None, _option(TEXT, "shipped, python-docs, a .jsonl or .txt file, a Hub data set; repeatable.")
    ] = None,
    text_column: Annotated[str, _option(TEXT, "Column that holds the text.")] = "text",
    text_config: Annotated[str | None, _option(TEXT, "Configuration of a Hub data set.")] = None,
    text_split: Annotated[str, _option(TEXT, "Split of a Hub data set.")] = "train",
    lengths: Annotated[str, _option(TEXT, "Tokens per sequence: 512,2048.")] = "512",
    sequences: Annotated[int, _option(TEXT, "Sequences of each text and length.", min=1)] = 8,
    recall_lengths: Annotated[str | None, _option(RECALL, "Tokens per probe (default: --lengths).")] = None,
    recall_sequences: Annotated[int, _option(RECALL, "Sequences per probe.", min=1)] = 8,
    depths: Annotated[str, _option(RECALL, "Where needle and passkey hide: 0 first, 1 last.")] = "0.1,0.5,0.9",
    max_new_tokens: Annotated[int, _option(GENERATION, "Tokens to say at most.", min=1)] = 64,
    tasks: Annotated[str | None, _option(TASKS, "lm-eval's tasks: a,b.")] = None,
    include_path: Annotated[str | None, _option(TASKS, "Folder with tasks of your own as YAML files.")] = None,
    num_fewshot: Annotated[int | None, _option(TASKS, "Examples shown before each question.", min=0)] = None,
    apply_chat_template: Annotated[
        bool, _option(TASKS, "Ask in the model's chat format.", "--apply-chat-template")
    ] = False,
    chance: Annotated[list[str] | None, _option(TASKS, "TASK=0.25: what guessing scores; repeatable.")] = None,
    contexts: Annotated[str | None, _option(SPEED, "Tokens in the cache (default: --lengths).")] = None,
    speed_batches: Annotated[str, _option(SPEED, "Sequences at once: 1,8.")] = "1",
    speed_tokens: Annotated[int, _option(SPEED, "Steps of decoding that are timed.", min=1)] = 32,
    speed_repeats: Annotated[int, _option(SPEED, "Runs; the median counts.", min=1)] = 3,
    limit: Annotated[int | None, _option(RUN, "At most so many sequences, prompts, documents.", min=1)] = None,
    batch_size: Annotated[int, _option(RUN, "Sequences at once.", min=1)] = 8,
    seed: Annotated[int, _option(RUN, "Of the probes.")] = 0,
    dtype: Annotated[str, _option(RUN, "auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, _option(RUN, "cpu or cuda.")] = "cpu",
    trust_remote_code: Annotated[bool, _option(RUN, "Run a repository's code.", "--trust-remote-code")] = False,
    overwrite: Annotated[
        bool, _option(RUN, "Drop what another evaluation left in the folder.", "--overwrite")
    ] = False,
    update_model_card: Annotated[bool, _option(RUN, "Put the figures into MODEL/README.md.", "--update-card")] = False,
    as_json: Annotated[bool, _option(RUN, "Print evaluation.json instead of the tables.", "--json")] = False,
    verbose: Annotated[bool, _option(RUN, "Tracebacks and library messages.", "--verbose", "-v")] = False,
) -> None:
    """Measure MODEL beside its teacher. The same command goes on after an interruption."""
    set_verbosity(verbose, quiet=False)
    with one_line_errors(verbose, "the same command goes on from here"):
        logging.disable_progress_bar()
        if update_model_card and not Path(model).expanduser().is_dir():
            raise ValueError(f"--update-card writes into a model's folder, and {model} is none.")
        default_parts = [part for part in PARTS if part != "tasks" or tasks]
        of_lengths = numbers("--lengths", lengths)
        sources = tuple(TextSource(name, text_column, text_config, text_split) for name in text or [SHIPPED])
        if len({source.label for source in sources}) < len(sources):
            raise ValueError("Two --text have the same name; rename one, since results are told apart by it.")
        settings = Settings(
            model=model,
            teacher=find_teacher_of(model, teacher, trust_remote_code),
            parts=tuple(default_parts) if parts is None else names(parts),
            texts=sources,
            lengths=of_lengths,
            sequences=sequences,
            recall_lengths=numbers("--recall-lengths", recall_lengths) if recall_lengths else of_lengths,
            recall_sequences=recall_sequences,
            depths=numbers("--depths", depths, float),
            max_new_tokens=max_new_tokens,
            tasks=names(tasks),
            include_path=include_path,
            num_fewshot=num_fewshot,
            apply_chat_template=apply_chat_template,
            chances=parse_chances(chance or []),
            contexts=numbers("--contexts", contexts) if contexts else of_lengths,
            speed_batches=numbers("--speed-batches", speed_batches),
            speed_tokens=speed_tokens,
            speed_repeats=speed_repeats,
            limit=limit,
            batch_size=batch_size,
            seed=seed,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
        )
        place = output or Path("runs/evaluation") / Path(model).expanduser().resolve().name
        results = evaluate(settings, place, overwrite)
        if update_model_card:
            update_card(Path(model).expanduser(), results)
        if as_json:
            sys.stdout.write(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
        else:
            sys.stdout.write(markdown(results))
            console.print(f"[green]done[/] {place}")


if __name__ == "__main__":
    app()
