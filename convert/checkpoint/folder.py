"""The folder a command writes: refused before any work if it cannot be, written beside, put in place whole."""

import contextlib
import glob
import os
import re
import shutil
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path


def check_output(output: Path, overwrite: bool) -> None:
    """Refuse an output that exists or cannot be written, before any work."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file; OUT must be a folder that does not exist yet.")
    if output.is_dir() and any(output.iterdir()):
        if not overwrite:
            raise ValueError(f"{output} exists and is not empty; choose another OUT or say --overwrite.")
        if not (output / "config.json").is_file():
            raise ValueError(f"{output} is not a checkpoint (no config.json), so --overwrite will not replace it.")
    parent = output.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise ValueError(f"{output} cannot be written: {parent} is a file.")
    if not os.access(parent, os.W_OK):
        raise ValueError(f"{output} cannot be written: no permission in {parent}.")


def check_apart(output: Path, teacher_folder: Path) -> None:
    """Refuse an output folder whose replacement would delete the teacher or the working directory.

    Raises:
        ValueError: OUT is the teacher's folder or contains it, or contains the working directory.
    """
    for kept, what in ((teacher_folder.resolve(), "the teacher"), (Path.cwd(), "the working directory")):
        if kept == output or output in kept.parents:
            raise ValueError(f"{output} is or contains {what}; choose another OUT.")


@contextlib.contextmanager
def staged(output: Path) -> Iterator[Path]:
    """A folder beside OUT that takes its name when the block ends well, and vanishes when it does not.

    What an earlier, killed run left behind is removed first: such a folder has no config.json, which is written last,
    so nothing takes it for a checkpoint. Had it died between taking the old OUT away and putting the new one in its
    place, the old one is put back.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    _clean_up_after_killed_runs(output)
    folder = output.with_name(f".{output.name}.partial-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    folder.mkdir()
    in_main_thread = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler) if in_main_thread else None
    try:
        yield folder
        _put_in_place(folder, output)
    finally:
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)
        shutil.rmtree(folder, ignore_errors=True)


def _put_in_place(folder: Path, output: Path) -> None:
    if not output.exists():
        folder.rename(output)
        return
    replaced = output.with_name(f".{output.name}.replaced-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    output.rename(replaced)
    try:
        folder.rename(output)
    except BaseException:
        replaced.rename(output)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _clean_up_after_killed_runs(output: Path) -> None:
    for stale in output.parent.glob(f".{glob.escape(output.name)}.*"):
        match = re.fullmatch(rf"\.{re.escape(output.name)}\.(partial|replaced)-(\d+)-[0-9a-f]{{8}}", stale.name)
        if match is None or _is_running(int(match[2])):
            continue
        if match[1] == "replaced" and not output.exists():
            stale.rename(output)
        else:
            shutil.rmtree(stale, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it belongs to somebody else
        pass
    return True


def write_beside(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside, then rename, so that an interruption leaves no half file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
