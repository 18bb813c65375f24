"""A report to look at: one HTML page that loads nothing, its figures as PNG, and a summary in the terminal.

python -m recipes.report RUN... --output runs/report

RUN is a folder as this project's commands write them, or one that holds such folders: a converted hybrid, scores of
layers and heads, ladders, matrices (`recipes.mixer_matrices`), evaluations, training records, benchmarks. Several are
compared. Everything comes from the saved files; no model is loaded. What is not there is listed with the command that
writes it.
"""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from convert.cli import console, one_line_errors, set_verbosity

from .commit import project_commit
from .report_data import Run, RunError, read_runs

# what figures made of data of another shape than expected end in
UNREADABLE = (KeyError, TypeError, IndexError, AttributeError, ValueError, ZeroDivisionError)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def build(runs: list[Run], title: str):
    """The report on some runs.

    Raises:
        ValueError: a file does not hold what its command writes.
    """
    from . import report_evaluation, report_overview, report_quality, report_sections, report_training
    from .report_page import Report, name_apart

    makers = (
        report_sections.layer_section,
        report_sections.head_section,
        report_sections.matrix_section,
        report_sections.distance_section,
        report_training.training_section,
        report_quality.quality_section,
        report_evaluation.evaluation_section,
        report_evaluation.speed_section,
        report_quality.bench_section,
        report_quality.pipeline_section,
        report_quality.study_section,
    )
    sections = [section for make in makers if not (section := _checked(make, runs)).empty]
    name_apart(sections)
    commit = project_commit()
    made = f"{len(runs)} run{'s' * (len(runs) > 1)}, {time.strftime('%-d %B %Y, %H:%M')}"
    return Report(
        title=title,
        made=made + (f", convert-to-hybrid at commit {commit}." if commit else "."),
        headlines=_checked(report_overview.headlines, runs),
        models=_checked(report_overview.models, runs),
        sections=sections,
        missing=report_overview.missing(runs),
        files=[(str(part.path), part.kind.command, _when(part.path)) for run in runs for part in run.parts.values()],
    )


def _checked(make: Callable, runs: list[Run]):
    """What `make` returns; where it stumbles over a run's data, an error that names the run."""
    try:
        return make(runs)
    except RunError:
        raise
    except UNREADABLE as error:
        for run in runs:
            try:
                make([run])
            except UNREADABLE:
                files = ", ".join(str(part.path) for part in run.parts.values())
                raise RunError(
                    f"{run.folder} does not hold what our commands write: {type(error).__name__} {error} in one of "
                    f"{files}; write it again or leave the run out."
                ) from error
        raise


def _when(path: Path) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))


def write(report, output: Path, overwrite: bool) -> None:
    """The page and the PNGs, beside, then renamed; what was there before stays until all is well."""
    from .report_page import write_files

    output.parent.mkdir(parents=True, exist_ok=True)
    staging = output.with_name(f".{output.name}.{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        write_files(report, staging)
        if overwrite and output.is_dir():
            replaced = output.with_name(f"{staging.name}.replaced")
            shutil.rmtree(replaced, ignore_errors=True)
            output.rename(replaced)
            staging.rename(output)
            shutil.rmtree(replaced)
        else:
            if output.is_dir():
                output.rmdir()
            staging.rename(output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_output(output: Path, overwrite: bool) -> None:
    """Refuse to replace anything but an earlier report, and that only when asked.

    Raises:
        ValueError: what is in the way.
    """
    from .report_page import PAGE

    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file; give a folder.")
    if not output.is_dir() or not any(output.iterdir()):
        return
    if not (output / PAGE).is_file():
        raise ValueError(f"{output} is not empty and holds no report; choose another --output.")
    if not overwrite:
        raise ValueError(f"{output} holds a report already; say --overwrite or choose another --output.")


def show(report, output: Path, left_out: list[Path]) -> None:
    """Headlines, models, sections and what is missing, in the terminal."""
    terminal = Console(highlight=False)
    if report.headlines:
        grid = RichTable.grid(padding=(0, 2))
        for headline in report.headlines:
            grid.add_row(
                f"[bold]{escape(headline.value)}[/]", escape(headline.what), f"[dim]{escape(headline.note)}[/]"
            )
        terminal.print(grid)
    for model in report.models:
        terminal.print(f"\n[bold]{escape(model.name)}[/]  {escape(model.letters)}\n{escape(model.description)}")
    table = RichTable("section", "pictures", "what is seen", title_justify="left")
    for section in report.sections:
        count = len(section.pictures) + sum(len(m.layers) for m in section.matrices)
        titles = "; ".join(picture.title for picture in section.pictures) or "tables"
        table.add_row(escape(section.title), str(count), escape(titles))
    terminal.print(table)
    for what, command in report.missing:
        terminal.print(f"[dim]not measured: {escape(what)}: {escape(command)}[/]")
    if left_out:
        terminal.print(f"[dim]nothing to report in {escape(', '.join(map(str, left_out)))}[/]")


@app.command()
def report_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or of folders of runs.")],
    output: Annotated[Path, typer.Option(help="Folder to write.")] = Path("runs/report"),
    title: Annotated[str | None, typer.Option(help="Of the page (default: the runs' names).")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier report.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was shown and what is missing as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Errors only.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Tracebacks and library messages.")] = False,
) -> None:
    """Make a page of what runs have left behind."""
    set_verbosity(verbose, quiet)
    with one_line_errors(verbose):
        from .report_page import PAGE, plain

        output = output.resolve()
        check_output(output, overwrite)
        found, left_out = read_runs(runs)
        names = [run.name for run in found]
        report = build(found, plain(title or (names[0] if len(names) == 1 else f"{len(names)} runs compared")))
        write(report, output, overwrite)
        if as_json:
            shown = {s.key: [picture.name for picture in s.pictures] for s in report.sections}
            print(
                json.dumps({"page": str(output / PAGE), "sections": shown, "missing": dict(report.missing)}, indent=2)
            )
        elif not quiet:
            show(report, output, left_out)
        if not quiet:
            console.print(f"[green]done[/] {escape(str(output / PAGE))}")


if __name__ == "__main__":
    app()
