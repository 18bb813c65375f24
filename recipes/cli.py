"""The installed command: the commands of `convert.cli`, and `compare`, which measures."""

import json
import sys
from collections.abc import Sequence

import convert.cli
from convert.cli import AS_JSON, COMMANDS, Command, Switches, console, flags_of, progress_bars
from convert.errors import during

from .compare_options import CompareOptions


def compare_command(options: CompareOptions, switches: Switches) -> None:
    from .compare import compare, markdown

    with progress_bars(switches["quiet"]) as progress, during("comparing", lower="--length or --rows"):
        found = compare(options, progress)
    sys.stdout.write(json.dumps(found, indent=2) + "\n" if switches["json"] else markdown(found))
    if not switches["quiet"]:
        console.print(f"[green]done[/] {options.output}")


COMPARE = Command(
    CompareOptions,
    compare_command,
    {"TEACHER": "teacher", "HYBRID...": "hybrids"},
    {"--out": "output", **flags_of("html", "real", "beside", "text", "quick", "length", "rows", "first", "needle_rows",
                                   "needles", "speed", "ruler", "ruler_rows", "continuations", "dtype", "device",
                                   "trust_remote_code")},
    {**AS_JSON, "-q --quiet": "Print the tables, but no progress."},
)  # fmt: skip

INSTALLED = COMMANDS | {"compare": COMPARE}
"""All commands of the console script."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console script."""
    convert.cli.main(argv, INSTALLED)


if __name__ == "__main__":
    main()
