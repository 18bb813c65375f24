"""The command in this process, and what it may say and leave behind."""

import contextlib
import functools
import io
import logging
import os
import subprocess

from convert.cli import COMMANDS, main
from convert.options import OptionParser


@functools.cache
def parser_of(name: str) -> OptionParser:
    """The parser of a command, which takes a while to make."""
    return COMMANDS[name].parser(name)


def unaligned(args):
    """The arguments, and no alignment unless they speak of it."""
    return [str(arg) for arg in args] + ([] if "--align" in args else ["--align", "none"])


def run(*args):
    """The command in this process, without alignment: importing torch anew for each case would take minutes."""
    return run_as_is(*unaligned(args))


def run_as_is(*args):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(arg) for arg in args])
            code = 0
        except SystemExit as stop:
            code = stop.code
        finally:
            logging.disable(logging.NOTSET)
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


def check_one_line_error(done, *expected, code=1):
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert done.stderr.strip().endswith(errors[0]), done.stderr
    assert "Traceback" not in done.stderr
    for text in expected:
        assert text in errors[0], errors[0]


def nothing_left(folder, *allowed):
    assert sorted(os.listdir(folder)) == sorted(allowed)
