"""Define the commands: parse arguments into options, show progress, and print every error as one line.

convert-to-hybrid MODEL OUT converts; the other commands have names. The installed command has one more, `compare`,
which is defined in recipes/cli.py.
"""

import _thread
import contextlib
import difflib
import functools
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
)
from rich.text import Text

from .errors import message_of, printable
from .io.version import project_version
from .options import (
    CONVERSION_FLAGS,
    MOHAWK_FLAGS,
    ChatOptions,
    ConversionOptions,
    EnvOptions,
    ExportOptions,
    FamiliesOptions,
    GenerateOptions,
    ImportOptions,
    InspectOptions,
    MohawkOptions,
    OptionParser,
    UpdateOptions,
)

Switches = Mapping[str, bool]
console = Console(stderr=True, highlight=False, soft_wrap=True)

DRY_RUN = {
    "--dry-run": "Print the plan and write nothing; almost no weights are read. Safetensors are not downloaded, but "
    ".bin and GGUF files are downloaded."
}
DRY_TRANSFER = {"--dry-run": "Print the plan; write nothing. A Hub repository is downloaded."}
AS_JSON = {"--json": "Print as JSON on stdout."}
QUIET = {"-q --quiet": "Print errors only."}
VERBOSE = {"-v --verbose": "Print tracebacks and the libraries' messages."}
WRITING = {"--dtype": "output.dtype", "--max-shard-size": "output.max_shard_size", "--overwrite": "output.overwrite"}


def flags_of(*names: str) -> dict[str, str]:
    """The flags of options that the command line calls by their own names."""
    return {f"--{name.replace('_', '-')}": name for name in names}


@dataclass(frozen=True)
class Command:
    """A command: its options, the flags that the command line offers, and the function that carries it out."""

    options: type
    run: Callable[[Any, Switches], None]
    positionals: Mapping[str, str]
    flags: Mapping[str, str] = field(default_factory=dict)
    switches: Mapping[str, str] = field(default_factory=dict)

    def parser(self, name: str) -> OptionParser:
        """Make the parser of this command's options; `name` is the command's, which its help shows."""
        prog = "convert-to-hybrid"
        if name != "convert":
            prog += f" {name}"
        return OptionParser(self.options, self.flags, self.positionals, {**self.switches, **VERBOSE}, prog)


def convert_command(options: ConversionOptions, switches: Switches) -> None:
    as_json = switches["json"]
    quiet = switches["quiet"]
    if switches["dry_run"]:
        from .dry_run import plan_conversion
        from .plan import describe_decided

        _print(plan_conversion(options), describe_decided, as_json, quiet)
        return
    from .fit.processes import rank_of_process
    from .io.writer import human_bytes
    from .pipeline import run
    from .plan import describe_seconds, plan_printer

    if rank_of_process() > 0:  # only the first process prints
        run(options)
        return
    print_plan = plan_printer(lambda text: console.print(printable(text), markup=False))
    with progress_bars(quiet) as progress:
        plan = run(options, (lambda plan: None) if quiet or as_json else print_plan, progress)
    if as_json:
        sys.stdout.write(json.dumps(plan.summary() | {"output": options.output.folder}, indent=2) + "\n")
    if not quiet:
        console.print(
            f"[green]done[/] {escape(printable(options.output.folder))} ({human_bytes(plan.bytes_to_write)})"
        )
        console.print(describe_seconds(plan))
        if options.output.push_to_hub:
            console.print(f"[green]pushed[/] {options.output.push_to_hub}")


def mohawk_command(options: MohawkOptions, switches: Switches) -> None:
    from .train.mohawk.train import train_existing

    with progress_bars(switches["quiet"]) as progress:
        report = train_existing(options, progress)
    if switches["quiet"]:
        return
    for name, figures in report.items():
        shown = {key: value for key, value in figures.items() if key not in ("layers", "settings")}
        console.print(f"[green]{name}[/] {json.dumps(shown)}", highlight=False)


def import_command(options: ImportOptions, switches: Switches) -> None:
    from .formats.import_ import import_checkpoint, plan_import

    _plan_and_run(options, plan_import, import_checkpoint, switches)


def export_command(options: ExportOptions, switches: Switches) -> None:
    from .formats.export import export_checkpoint, plan_export

    _plan_and_run(options, plan_export, export_checkpoint, switches)


def inspect_command(options: InspectOptions, switches: Switches) -> None:
    from .tools.inspect import describe_model, inspect_model

    report = inspect_model(options.model, options.revision)
    _print_report(report, describe_model, switches["json"])
    if options.html is not None:
        from .tools.page import inspect_page, write_page

        write_page(options.html, inspect_page(report, options.revision))


def update_command(options: UpdateOptions, switches: Switches) -> None:
    from .tools.update import update

    before, after = update(options.folder)
    if not switches["quiet"]:
        console.print(f"[green]updated[/] {escape(printable(options.folder))}: code of {before}, now of {after}")


def env_command(options: EnvOptions, switches: Switches) -> None:
    from .tools.env import describe_environment, environment

    _print_report(environment(), describe_environment, switches["json"])


def families_command(options: FamiliesOptions, switches: Switches) -> None:
    from .tools.families import describe_families, families

    _print_report(families(), describe_families, switches["json"])


def generate_command(options: GenerateOptions, switches: Switches) -> None:
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported: the bar of dequantising
    from .tools.generate import answer

    for name, rate in answer(options).items():
        sys.stderr.write(f"{name}: {rate:.1f} tokens per second\n")


def chat_command(options: ChatOptions, switches: Switches) -> None:
    os.environ.setdefault("TQDM_DISABLE", "1")
    from .tools.chat import chat

    chat(options)


COMMANDS = {
    "convert": Command(
        ConversionOptions,
        convert_command,
        {"MODEL": "model", "OUT": "output.folder"},
        CONVERSION_FLAGS,
        {**DRY_RUN, **AS_JSON, **QUIET},
    ),
    "mohawk": Command(
        MohawkOptions, mohawk_command, {"HYBRID": "hybrid", "OUT": "output.folder"}, MOHAWK_FLAGS, QUIET
    ),
    "import": Command(
        ImportOptions,
        import_command,
        {"SOURCE": "model", "OUT": "output.folder"},
        {**flags_of("base", "revision", "trust_remote_code"), "--set": "fields", **WRITING},
        {**DRY_TRANSFER, **QUIET},
    ),
    "export": Command(
        ExportOptions,
        export_command,
        {"MODEL": "model", "OUT": "output.folder"},
        {**flags_of("to", "expand", "revision", "trust_remote_code"), **WRITING},
        {**DRY_TRANSFER, **QUIET},
    ),
    "inspect": Command(InspectOptions, inspect_command, {"MODEL": "model"}, flags_of("revision", "html"), AS_JSON),
    "update": Command(UpdateOptions, update_command, {"FOLDER": "folder"}, {}, QUIET),
    "env": Command(EnvOptions, env_command, {}, {}, AS_JSON),
    "families": Command(FamiliesOptions, families_command, {}, {}, AS_JSON),
    "generate": Command(
        GenerateOptions,
        generate_command,
        {"MODEL": "model"},
        flags_of("prompt", "teacher", "max_new_tokens", "temperature", "seed", "raw", "dtype", "device", "revision",
                 "trust_remote_code"),
    ),
    "chat": Command(
        ChatOptions,
        chat_command,
        {"MODEL": "model"},
        flags_of("tools", "max_new_tokens", "temperature", "seed", "dtype", "device", "revision", "trust_remote_code"),
    ),
}  # fmt: skip


COMPARE = "compare"
COMPARE_IS_ELSEWHERE = "compare needs the installed command: convert-to-hybrid compare TEACHER [HYBRID...]"


def other_commands(commands: Mapping[str, Command]) -> str:
    """A line for each command but the first, for its help."""
    others = {name: command.options.__doc__.split("\n")[0] for name, command in commands.items() if name != "convert"}
    lines = [f"  convert-to-hybrid {name:<9} {what}" for name, what in others.items()]
    if COMPARE not in commands:
        lines.append(f"  {COMPARE_IS_ELSEWHERE}")
    lines.append("  convert-to-hybrid --version")
    return "\n".join(["", "other commands, each with its own --help:", *lines, ""])


def main(argv: Sequence[str] | None = None, commands: Mapping[str, Command] = COMMANDS) -> None:
    """Run a command; ends the process with 0, 1 for an error, or 130 for an interruption."""
    if argv is None:
        argv = sys.argv[1:]
    argv = list(argv)
    word = "".join(argv[:1])
    if word == "--version":
        sys.stdout.write(f"convert-to-hybrid {project_version()}\n")
        return
    name = "convert"
    if word in commands:
        name = argv.pop(0)
    command = commands[name]
    verbose = bool({"-v", "--verbose"} & set(argv))
    with one_line_errors(verbose):
        set_verbosity(verbose, quiet=bool({"-q", "--quiet"} & set(argv)))
        nearest = [known for known in commands if len(word) > 1 and known.startswith(word)]
        nearest += difflib.get_close_matches(word, commands, 1)
        if name != word and not os.path.exists(word):
            if word == COMPARE:
                raise ValueError(f"{COMPARE_IS_ELSEWHERE}.")
            if nearest:
                raise ValueError(f"There is no command {word!r}, nor a model there; did you mean {nearest[0]}?")
        parser = command.parser(name)
        if {"-h", "--help"} & set(argv) or (not argv and command.positionals):
            sys.stdout.write(parser.help())
            if name == "convert":
                sys.stdout.write(other_commands(commands))
            return
        options, switches = parser.from_command_line(argv)
        command.run(options, switches)


def _plan_and_run(options: Any, plan: Callable, run: Callable, switches: Switches) -> None:
    """Print the plan, and unless this is a dry run, carry it out under a progress bar."""
    from .formats.transfer import describe

    if switches["dry_run"]:
        console.print(printable(describe(plan(options))), markup=False)
        return
    quiet = switches["quiet"]
    with progress_bars(quiet) as progress:
        run(options, lambda plan: _print(plan, describe, False, quiet), progress)
    if not quiet:
        console.print(f"[green]done[/] {escape(printable(options.output.folder))}")


def _print(plan: Any, describe: Callable[[Any], str], as_json: bool, quiet: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(plan.summary(), indent=2) + "\n")
    elif not quiet:
        console.print(printable(describe(plan)), markup=False)


def _print_report(report: Any, describe: Callable[[Any], Any], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        Console(highlight=False).print(describe(report), markup=False)


def pace(done: int, seconds: float) -> str:
    """Describe a speed: seconds for each step done, or steps per second if they are quick."""
    each = seconds / done
    if each >= 0.1:
        return f"{each:,.1f} s each"
    return f"{done / max(seconds, 1e-9):,.0f} a second"


class Pace(ProgressColumn):
    """Column that shows a bar's speed."""

    def render(self, task: Task) -> Text:
        if not task.speed:
            return Text()
        return Text(pace(1, 1 / task.speed))


@contextlib.contextmanager
def progress_bars(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function of a step's name, the amount done and the total; it draws one progress bar per step."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), Pace())
    if not quiet and not console.is_terminal:
        with _progress_lines() as report:
            yield report
        return
    with Progress(*columns, console=console, disable=quiet, transient=True) as bar:
        task = functools.cache(lambda what: bar.add_task(what))
        yield lambda what, done, total: bar.update(task(what), completed=done, total=total)


LINE_EVERY = 20
"""Seconds between lines if there is no terminal; a log without new lines for longer looks as if the run hung."""
INTERRUPT_AGAIN_AFTER = 0.01
"""Seconds to wait before an interrupt is raised again, after which the destructor that swallowed it has returned."""


@contextlib.contextmanager
def _progress_lines() -> Iterator[Callable[[str, int, int], None]]:
    """Print progress as log lines from a thread, so that a long step still shows output."""
    stop = threading.Event()
    now: tuple[str, int, int, float] = ("reading", 0, 0, time.monotonic())

    def line(what: str, done: int, total: int, since: float) -> str:
        took = time.monotonic() - since
        if not done:
            return f"{what}: {took:,.0f} s so far"
        return f"{what}: {done:,} of {total:,} after {took:,.1f} s, {pace(done, took)}"

    def report(what: str, done: int, total: int) -> None:
        nonlocal now
        if done == total and now[0] == f"after {what}":  # its last line is printed already
            return
        now = (what, done, total, now[3] if what == now[0] else time.monotonic())
        if 0 < done == total:
            console.print(line(*now), markup=False)
            now = (f"after {what}", 0, 0, time.monotonic())

    def speak() -> None:
        while not stop.wait(LINE_EVERY):
            console.print(line(*now), markup=False)

    threading.Thread(target=speak, daemon=True).start()
    try:
        yield report
    finally:
        stop.set()


@contextlib.contextmanager
def one_line_errors(verbose: bool, interrupted: str = "") -> Iterator[None]:
    """Print any error as one line and exit with a non-zero status; with --verbose let the traceback through.

    Args:
        interrupted: text on what an interruption leaves behind, printed before the notes that the exception carries.
    """
    try:
        with _interrupts_are_not_lost():
            yield
    except KeyboardInterrupt as error:
        parts = ["interrupted", interrupted, *getattr(error, "__notes__", ())]
        _fail(f"{'; '.join(filter(None, parts))}.", 130)
    except Exception as error:
        if verbose:
            raise
        _fail(message_of(error), 1)


@contextlib.contextmanager
def _interrupts_are_not_lost() -> Iterator[None]:
    """Raise KeyboardInterrupt again if it was raised in a destructor, in which Python discards all exceptions."""
    hook = sys.unraisablehook

    def interrupt_again(ignored: Any) -> None:
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            hook(ignored)
            return
        # later, since an exception raised here would be discarded, too
        again = threading.Timer(INTERRUPT_AGAIN_AFTER, _thread.interrupt_main)
        again.daemon = True
        again.start()

    sys.unraisablehook = interrupt_again
    try:
        yield
    finally:
        sys.unraisablehook = hook


def _fail(message: str, code: int) -> None:
    # without rich, which imports modules when it first prints; after an interruption that can fail
    sys.stderr.write(f"error: {printable(message)}\n")
    raise SystemExit(code)


def set_verbosity(verbose: bool, quiet: bool) -> None:
    """Set how much transformers and huggingface_hub print; they read this when they are imported."""
    if not verbose:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        logging.disable(logging.WARNING)
    if quiet:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


if __name__ == "__main__":
    main()
