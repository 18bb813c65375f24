"""The commands: flags and YAML to options, and errors to one line. No other logic.

convert-to-hybrid MODEL OUT converts; the other commands have names.
"""

import contextlib
import errno
import functools
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text
from typer.core import TyperGroup

from .tools.commands import COMMANDS

# flags of the command itself, not of the conversion
SWITCHES = ("config", "dry_run", "as_json", "quiet", "verbose")
TEACHER, LAYERS, MIXER, ALIGN, OUTPUT, RUN = "Teacher", "Layers", "Mixer", "Alignment", "Output", "Run"
console = Console(stderr=True, highlight=False, soft_wrap=True)


class ConvertByDefault(TyperGroup):
    """Without the name of a command, the conversion."""

    def parse_args(self, ctx, args):
        """See click."""
        named = bool(args) and args[0] in self.commands
        return super().parse_args(ctx, args if named else ["convert", *args])


app = typer.Typer(cls=ConvertByDefault, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)


def _option(panel: str, help: str, *names: str):
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False)


@app.command(
    "convert",
    no_args_is_help=True,
    epilog="Other commands, each with its own --help: import, export, inspect, env, generate.",
)
def convert_command(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Hub id, local folder or GGUF file.", show_default=False)
    ] = None,
    output: Annotated[str | None, typer.Argument(metavar="OUT", help="Folder to write.", show_default=False)] = None,
    revision: Annotated[str | None, _option(TEACHER, "Branch, tag or commit of a Hub repository.")] = None,
    gguf_file: Annotated[str | None, _option(TEACHER, "GGUF file inside the folder or repository.")] = None,
    trust_remote_code: Annotated[
        bool | None, _option(TEACHER, "Run code from the teacher's repository.", "--trust-remote-code")
    ] = None,
    attention_layers: Annotated[
        str | None, _option(LAYERS, "Layers that stay attention: 1,3,5, or a published choice by name.")
    ] = None,
    attention_ratio: Annotated[
        float | None, _option(LAYERS, "Share of layers that stay attention; mixers in the others.")
    ] = None,
    cache_bytes: Annotated[
        str | None, _option(LAYERS, "Choose layers, heads, window and state to keep the cache within this size: 50MB.")
    ] = None,
    cache_ratio: Annotated[
        float | None,
        _option(LAYERS, "The same as a share of the teacher's cache; 0.25 where no layer option is given."),
    ] = None,
    context: Annotated[int | None, _option(LAYERS, "Tokens that both speak of (default 4096).")] = None,
    measure: Annotated[int | None, _option(LAYERS, "Best choices to measure before one is taken (default 3).")] = None,
    layer_selection: Annotated[
        str | None, _option(LAYERS, "uniform, kl or kl+recall (default): which layers stay attention.")
    ] = None,
    layer_pattern: Annotated[
        str | None, _option(LAYERS, "M (mixer) and A (attention), repeated over the layers: MA, MMMA.")
    ] = None,
    window: Annotated[
        int | None, _option(MIXER, "Softmax attention to this many last tokens beside the mixer (default none).")
    ] = None,
    sinks: Annotated[int | None, _option(MIXER, "First tokens it sees as well (default 4).")] = None,
    attention_heads: Annotated[
        str | None,
        _option(MIXER, "Heads that see everything beside the window: 16:3,18:0, a JSON file, a number, or a share."),
    ] = None,
    mixer_sees: Annotated[str | None, _option(MIXER, "Beside a window: beyond it (default) or all tokens.")] = None,
    mixer: Annotated[
        str | None, _option(MIXER, "discrete_mamba2 (default), mamba2, mamba1, or none (a window alone).")
    ] = None,
    d_state: Annotated[int | None, _option(MIXER, "State size per head (default: the head dimension).")] = None,
    norm: Annotated[str | None, _option(MIXER, "Gated norm of mamba2: none, head (default) or whole.")] = None,
    activation: Annotated[str | None, _option(MIXER, "After the convolution: identity (default) or silu.")] = None,
    shared_state: Annotated[
        bool | None, _option(MIXER, "One state per key/value head instead of per head.", "--shared-state")
    ] = None,
    gate_bias: Annotated[
        bool | None, _option(MIXER, "A bias that opens the gate.", "--gate-bias/--no-gate-bias")
    ] = None,
    expand_kv_heads: Annotated[
        bool | None,
        _option(
            MIXER,
            "One head of x and B per query head, as published checkpoints have it.",
            "--expand-kv-heads/--share-kv-heads",
        ),
    ] = None,  # fmt: skip
    rotary: Annotated[
        bool | None, _option(MIXER, "Keep the teacher's rotary embedding on B and C.", "--rotary/--no-rotary")
    ] = None,
    decay_bias: Annotated[
        bool | None, _option(MIXER, "A bias on the decay of discrete_mamba2.", "--decay-bias/--no-decay-bias")
    ] = None,
    out_bias: Annotated[bool | None, _option(MIXER, "A bias on out_proj.", "--out-bias/--no-out-bias")] = None,
    export_ready: Annotated[
        bool | None, _option(MIXER, "A mixer that `export` can write as a stock architecture.", "--export-ready")
    ] = None,
    initial_decay: Annotated[float | None, _option(MIXER, "Decay per token before alignment (default 0.9).")] = None,
    align: Annotated[str | None, _option(ALIGN, "none, closed-form (default) or mohawk.")] = None,
    align_config: Annotated[str | None, _option(ALIGN, "YAML file with the alignment's settings.")] = None,
    calibration_dataset: Annotated[
        str | None,
        _option(ALIGN, "Text: default (in the package), sampled (from the teacher), a file, a Hub data set."),
    ] = None,
    calibration_column: Annotated[str | None, _option(ALIGN, "Column that holds the text (default text).")] = None,
    calibration_config: Annotated[str | None, _option(ALIGN, "Configuration (subset) of a Hub data set.")] = None,
    calibration_split: Annotated[str | None, _option(ALIGN, "Split of a Hub data set (default train).")] = None,
    calibration_tokens: Annotated[int | None, _option(ALIGN, "Tokens to align on (default 30720).")] = None,
    activation_memory: Annotated[str | None, _option(ALIGN, "Memory for activations; more goes to disk.")] = None,
    low_memory: Annotated[
        bool | None, _option(ALIGN, "Hold one block of the teacher at a time.", "--low-memory")
    ] = None,
    work_dir: Annotated[
        str | None,
        _option(ALIGN, "Folder that keeps fits and scores, to resume (default OUT.work, removed at the end)."),
    ] = None,
    device: Annotated[str | None, _option(ALIGN, "Where alignment runs (default cpu).")] = None,
    dtype: Annotated[str | None, _option(OUTPUT, "auto (default), float32, bfloat16 or float16.")] = None,
    max_shard_size: Annotated[str | None, _option(OUTPUT, "Largest weights file (default 5GB).")] = None,
    overwrite: Annotated[bool | None, _option(OUTPUT, "Replace OUT, once all is well.", "--overwrite")] = None,
    push_to_hub: Annotated[str | None, _option(OUTPUT, "Upload the result to this repository.")] = None,
    private: Annotated[bool | None, _option(OUTPUT, "Make that repository private.", "--private")] = None,
    config: Annotated[str | None, _option(RUN, "YAML file with the same options; flags win.")] = None,
    seed: Annotated[int | None, _option(RUN, "Of tensors the teacher says nothing about.")] = None,
    dry_run: Annotated[bool, _option(RUN, "Print the plan; read no weights, write nothing.", "--dry-run")] = False,
    as_json: Annotated[bool, _option(RUN, "Print the plan as JSON on stdout.", "--json")] = False,
    quiet: Annotated[bool, _option(RUN, "Errors only.", "--quiet", "-q")] = False,
    verbose: Annotated[bool, _option(RUN, "Tracebacks and library messages.", "--verbose", "-v")] = False,
) -> None:
    """Turn a pretrained Transformer into a hybrid Mamba/attention model.

    The result loads with AutoModelForCausalLM.from_pretrained(OUT, trust_remote_code=True).
    """
    flags = {name: value for name, value in locals().items() if name not in SWITCHES}
    set_verbosity(verbose, quiet)
    with one_line_errors(verbose):
        # after the verbosity is set, and inside: importing torch takes seconds
        from .config import make_config
        from .pipeline import plan_conversion, run
        from .plan import describe, human_bytes

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            options = make_config(config, **flags)
        for warning in caught:
            console.print(f"[yellow]warning:[/] {escape(str(warning.message))}")
        if dry_run:
            plan = plan_conversion(options)
            _print_plan(plan, describe, as_json, quiet)
            return
        with progress_bars(quiet) as (set_total, advance, on_align):

            def on_plan(plan) -> None:
                _print_plan(plan, describe, False, quiet or as_json)
                set_total(plan.summary()["bytes_to_write"])

            plan = run(options, on_plan, advance, on_align)
        if as_json:
            sys.stdout.write(json.dumps(plan.summary() | {"output": options.output}, indent=2) + "\n")
        if not quiet:
            size = human_bytes(plan.summary()["bytes_to_write"])
            console.print(f"[green]done[/] {escape(options.output)} ({size})")
            if options.push_to_hub:
                console.print(f"[green]pushed[/] {options.push_to_hub}")


@app.command("import", no_args_is_help=True)
def import_command(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Hub id or folder of a published hybrid.")],
    output: Annotated[str, typer.Argument(metavar="OUT", help="Folder to write.")],
    base: Annotated[
        str | None, typer.Option(help="Model it was made from, for the tokenizer and what the checkpoint leaves out.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub repository.")] = None,
    settings: Annotated[
        list[str],
        typer.Option("--set", metavar="NAME=VALUE", help="A field of the configuration, over what is derived."),
    ] = (),
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    max_shard_size: Annotated[str, typer.Option(help="Largest weights file.")] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT, once all is well.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Errors only.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Tracebacks and library messages.")] = False,
) -> None:
    """Import a published hybrid (Phi-Mamba, mohawk, Llamba, Mamba in the Llama, M1) as an ordinary checkpoint."""
    set_verbosity(verbose, quiet)
    with one_line_errors(verbose):
        from .formats.import_ import ImportOptions, describe, import_checkpoint, parse_settings, plan_import

        options = ImportOptions(
            source=source, output=output, base=base, revision=revision, settings=parse_settings(settings),
            dtype=dtype, max_shard_size=max_shard_size, overwrite=overwrite,
        )  # fmt: skip
        _carry_out(options, plan_import, import_checkpoint, describe, dry_run, quiet)


@app.command("export", no_args_is_help=True)
def export_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id or folder of a hybrid of this project.")],
    output: Annotated[str, typer.Argument(metavar="OUT", help="Folder to write.")],
    to: Annotated[str, typer.Option(help="granitemoehybrid, or bamba (the one for llama.cpp).")] = "granitemoehybrid",
    expand: Annotated[
        int | None,
        typer.Option(help="Width of the mixers over the model's, filled up with zero heads (llama.cpp: 2)."),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub repository.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    max_shard_size: Annotated[str, typer.Option(help="Largest weights file.")] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT, once all is well.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Errors only.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Tracebacks and library messages.")] = False,
) -> None:
    """Write a hybrid made with --export-ready as one of transformers' own architectures."""
    set_verbosity(verbose, quiet)
    with one_line_errors(verbose):
        from .formats.export import ExportOptions, describe, export_checkpoint, plan_export

        options = ExportOptions(
            model=model, output=output, to=to, expand=expand, revision=revision, dtype=dtype,
            max_shard_size=max_shard_size, overwrite=overwrite,
        )  # fmt: skip
        _carry_out(options, plan_export, export_checkpoint, describe, dry_run, quiet)


def _carry_out(options, plan, run, describe, dry_run: bool, quiet: bool) -> None:
    """Print the plan, and unless that is all, carry it out under a progress bar."""
    if dry_run:
        console.print(describe(plan(options)), markup=False)
        return
    with progress_bars(quiet) as (set_total, advance, _):

        def on_plan(plan) -> None:
            if not quiet:
                console.print(describe(plan), markup=False)
            set_total(plan.summary()["bytes_to_write"])

        run(options, on_plan, advance)
    if not quiet:
        console.print(f"[green]done[/] {escape(options.output)}")


def _print_plan(plan, describe, as_json: bool, quiet: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(plan.summary(), indent=2) + "\n")
    elif not quiet:
        console.print(describe(plan), markup=False)


class TokenRate(ProgressColumn):
    """Tokens per second, where a task counts tokens."""

    def render(self, task: Task) -> Text:
        """See `rich.progress.ProgressColumn`."""
        counts = task.description.endswith("tokens") and task.speed
        return Text(f"{task.speed:,.0f}/s" if counts else "")


@contextlib.contextmanager
def progress_bars(quiet: bool) -> Iterator:
    """Bars over alignment and over the bytes of weights; yields what sets the total, advances, and notes alignment."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TokenRate())
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def on_align(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        def set_total(total: int) -> None:
            tasks["writing"] = bar.add_task("writing", total=total)

        yield set_total, lambda nbytes: bar.advance(tasks["writing"], nbytes), on_align


@contextlib.contextmanager
def one_line_errors(verbose: bool, interrupted: str = "no half-written checkpoint is left") -> Iterator[None]:
    """What went wrong and what to do, in one line, with a non-zero exit; the traceback with --verbose."""
    try:
        yield
    except KeyboardInterrupt:
        _fail(f"interrupted; {interrupted}.", 130)
    except (ValueError, OSError) as error:
        if verbose:
            raise
        _fail(_message(error), 1)
    except RuntimeError as error:
        if verbose or "out of memory" not in str(error):
            raise
        _fail("out of memory; use fewer calibration tokens, shorter sequences, or --low-memory.", 1)


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "the disk is full; nothing was written. Free some space or choose another OUT."
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"no permission for {error.filename}."
    return " ".join(str(error).split()) or type(error).__name__


def _fail(message: str, code: int) -> None:
    console.print(f"[red]error:[/] {escape(message)}")
    raise SystemExit(code)


def set_verbosity(verbose: bool, quiet: bool) -> None:
    """Set before the libraries are imported, which is when they look."""
    if not verbose:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        logging.disable(logging.WARNING)
    if quiet:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _guarded(command: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(command)
    def run_command(**flags) -> None:
        set_verbosity(flags["verbose"], quiet=False)
        with one_line_errors(flags["verbose"]):
            command(**flags)

    return run_command


for _name, _command in COMMANDS.items():
    app.command(_name, no_args_is_help=_name != "env")(_guarded(_command))


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
