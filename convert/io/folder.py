"""The folder a command writes: refused before any work if it cannot be, written beside, put in place whole.

`OutputFolder` owns OUT and its work folder for as long as a command runs. A lock beside OUT, which the system drops
when its holder dies, keeps other runs away, on whichever host or in whichever container they are. What this project
made carries a marker that lists its files, and nothing else is ever deleted.
"""

import contextlib
import ctypes
import errno
import fcntl
import glob
import json
import os
import re
import shutil
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import KEPT, during

MARKER = ".convert-to-hybrid"
"""File in every folder that this project makes. It lists the folder's files; while these are written it lists none."""
ALIGNMENT_WORK = re.compile(
    r"[0-9a-f]{20}|\.activations-.*|stages|matrix_orientation.*|hidden_state_alignment.*|distillation.*"
)
"""Names in the work folder of an alignment: fits under a hash, stages."""
TRAINING_WORK = re.compile(
    r"checkpoint-\d+|tmp-checkpoint-\d+|runs|run\.(json|txt)|answers\.jsonl|attention|\d+(\.start)?|README\.md"
)
"""Names in the work folder of a recipe: checkpoints and what transformers writes beside them, answers, steps."""
RUN_NAMES = ("key.json", "run.json", "run.txt")
"""Files in a work folder that only say whose it is."""
LOCK = b"convert-to-hybrid\n"
"""Content of every lock that this project makes."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2


class OutputFolder:
    """OUT, and the folder beside it in which an interrupted run resumes.

    Args:
        output: OUT, resolved.
        work_dir: a work folder of the user's own, which stays. By default OUT.work, which is removed in the end.
        kept: names of what the command keeps in OUT.work; nothing else there is deleted.

    Raises:
        ValueError: OUT exists or cannot be written, another run is writing it, or OUT.work is somebody else's.
    """

    def __init__(
        self,
        output: Path,
        overwrite: bool = False,
        work_dir: str | None = None,
        kept: re.Pattern[str] = ALIGNMENT_WORK,
    ):
        self.output = output
        self.overwrite = overwrite
        self.kept = kept
        self.owns_work = work_dir is None
        if work_dir is None:
            self.work = output.with_name(f"{output.name}.work")
        else:
            self.work = Path(work_dir).expanduser()

    def __enter__(self) -> "OutputFolder":
        check_output(self.output, self.overwrite)
        if self.owns_work:
            check_work(self.work)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_parents_of(self.output))
            locked = stack.enter_context(_lock(self.output))
            stack.enter_context(_terminations_interrupt())
            if locked:
                _sweep(self.output)
            stack.push(self._leave_work)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error) -> None:
        self._stack.__exit__(*error)

    def _leave_work(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        if self.owns_work and (self.work / MARKER).is_file() and (error is None or not self._is_worth_keeping):
            remove_work(self.work, self.kept)
        if isinstance(error, KeyboardInterrupt):
            error.add_note("OUT is as it was")
        if error is not None and self._is_worth_keeping:
            error.add_note(f"{KEPT} in {self.work}, and the same command goes on from there")
        elif isinstance(error, KeyboardInterrupt):
            error.add_note("no part of the work was done yet that could be kept")

    @property
    def _is_worth_keeping(self) -> bool:
        """True if the work folder holds anything that a later run can use."""
        found = (path.name for path in self.work.rglob("*") if path.is_file())
        return any(name not in (MARKER, *RUN_NAMES) for name in found)

    def make_work(self) -> Path:
        """The work folder, made if it is not there."""
        if self.owns_work:
            make_work(self.work)
        return self.work

    @contextlib.contextmanager
    def staged(self) -> Iterator[Path]:
        """A folder beside OUT that takes its name when the block ends well, and vanishes when it does not.

        Raises:
            ValueError: OUT appeared, or got files that are not this project's, while the block ran.
        """
        folder = self.output.with_name(f".{self.output.name}.partial-{uuid.uuid4().hex[:8]}")
        try:
            folder.mkdir()
            # what a killed run leaves has this marker, by which the next one knows that all in it may go
            mark(folder, None)
            yield folder
            mark(folder, {str(path.relative_to(folder)) for path in _files_below(folder)})
            self._put_in_place(folder)
        finally:
            remove_made(folder)

    def _put_in_place(self, folder: Path) -> None:
        check_output(self.output, self.overwrite)  # hours may have passed
        try:
            folder.rename(self.output)  # which an empty folder does not hinder
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            check_output(self.output, self.overwrite)
            replaced = _swap(folder, self.output)
            if replaced != folder:
                remove_made(replaced)


def _sweep(output: Path) -> None:
    """Remove what killed runs left, or put back the OUT that one had just taken away."""
    for stale in output.parent.glob(f".{glob.escape(output.name)}.*"):
        match = re.fullmatch(rf"\.{re.escape(output.name)}\.(partial|replaced)-[0-9a-f]{{8}}", stale.name)
        if match is None or not _marked(stale):
            continue
        if match[1] == "replaced" and not output.exists():
            stale.rename(output)
        else:
            remove_made(stale)


@contextlib.contextmanager
def rewriting(output: Path) -> Iterator[Path]:
    """A folder beside OUT that takes its place, files of others included, when the block ends well.

    The block marks the folder if OUT has a marker.

    Raises:
        ValueError: another run is writing OUT.
    """
    with _lock(output) as locked, _terminations_interrupt():
        if locked:
            _sweep(output)
        folder = output.with_name(f".{output.name}.partial-{uuid.uuid4().hex[:8]}")
        try:
            folder.mkdir()
            mark(folder, None)  # as in `staged`
            yield folder
            if _marked(folder) == {"files": None}:
                (folder / MARKER).unlink()
            folder = _swap(folder, output)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _swap(folder: Path, output: Path) -> Path:
    """Put a folder in the place of another, in one step where the system can; returns where that one lies now."""
    if _exchange(folder, output):
        return folder
    # a kill in between is mended by the next run's `_sweep`
    replaced = output.with_name(f".{output.name}.replaced-{uuid.uuid4().hex[:8]}")
    output.rename(replaced)
    try:
        folder.rename(output)
    except BaseException:
        replaced.rename(output)
        raise
    return replaced


def check_output(output: Path, overwrite: bool) -> None:
    """Refuse an output that exists or cannot be written.

    Raises:
        ValueError: naming what is in the way.
    """
    if os.path.lexists(output) and not output.is_dir():
        kind = "a file"
        if output.is_symlink():
            kind = "a link in a circle"
        raise ValueError(f"{output} is {kind}; OUT must be a folder that does not exist yet.")
    if _holds_anything(output):
        if not overwrite:
            raise ValueError(f"{output} exists and is not empty; choose another OUT or say --overwrite.")
        made = _made_files(output)
        if made is None:
            raise ValueError(f"{output} was not made by this project, so --overwrite will not replace it.")
        if foreign := sorted(_files_below(output) - made):
            raise ValueError(
                f"{output} holds {foreign[0].relative_to(output)}, which this project did not put there, so "
                "--overwrite will not replace it; move the file away, or choose another OUT."
            )
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


def check_work(work: Path) -> None:
    """Refuse a work folder that this project did not make."""
    if work.is_symlink() or (_holds_anything(work) and not (work / MARKER).is_file()):
        raise ValueError(
            f"{work} exists, and is not a folder that this run may delete. If an earlier run keeps its fits there, "
            f"name it (--alignment.work_dir {work}); otherwise move it away, or choose another OUT."
        )


def make_work(work: Path) -> None:
    """Make a work folder that may be deleted once its command is done; one that is there already stays as it is."""
    check_work(work)
    work.mkdir(parents=True, exist_ok=True)
    (work / MARKER).touch()


def remove_work(work: Path, kept: re.Pattern[str]) -> None:
    """Delete what a command keeps in its work folder, by name, and the folder if nothing else is in it."""
    if not (work / MARKER).is_file():
        return
    for entry in work.iterdir():
        if not kept.fullmatch(entry.name) or entry.is_symlink():
            continue
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink()
    if [entry.name for entry in work.iterdir()] == [MARKER]:
        (work / MARKER).unlink()
        work.rmdir()


def remove_made(folder: Path) -> None:
    """Delete a folder's files that its marker lists, all where it was not finished, and it if nothing else is left."""
    if _marked(folder) == {"files": None}:  # nobody else knows its name
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in _made_files(folder) or ():
        path.unlink(missing_ok=True)
    for inner, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(inner)


def mark(folder: Path, files: set[str] | None) -> None:
    """Write the marker of a folder that this project makes: all of its files, or None while it is being written."""
    content = json.dumps({"files": files and sorted({*files, MARKER})}, indent=1) + "\n"
    write_beside(folder / MARKER, lambda path: path.write_text(content))


def note_made(folder: Path, name: str) -> None:
    """Add a file to those that a folder's marker lists."""
    made = _made_files(folder)
    if made is not None:
        mark(folder, {*(str(path.relative_to(folder)) for path in made), name})


def write_beside(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside, then rename, so that an interruption leaves no half file."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with during(f"writing {path}"):
            write(partial)
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _marked(folder: Path) -> dict[str, list[str] | None]:
    """Read a folder's marker: its files, or None for them while it is written; empty where it has no marker."""
    try:
        names = json.loads((folder / MARKER).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    inside = names is None or (
        isinstance(names, list)
        and all(isinstance(name, str) and not {"..", "/"} & set(Path(name).parts) for name in names)
    )
    if not inside:
        return {}
    return {"files": names}


def _made_files(folder: Path) -> set[Path] | None:
    """The files that a finished folder's marker lists; None where there is no such marker."""
    names = _marked(folder).get("files")
    if names is None:
        return None
    return {folder / name for name in names}


def _files_below(folder: Path) -> set[Path]:
    """Every file and link below a folder."""
    # os.walk counts links to folders among the folders, and does not go into them
    return {Path(inner, name) for inner, folders, files in os.walk(folder) for name in files} | {
        Path(inner, name)
        for inner, folders, _ in os.walk(folder)
        for name in folders
        if Path(inner, name).is_symlink()
    }


def _holds_anything(folder: Path) -> bool:
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step; False where the system or the file system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    if ctypes.get_errno() in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), os.fspath(other))


@contextlib.contextmanager
def _parents_of(output: Path) -> Iterator[None]:
    """OUT's parents, of which those that had to be made go again if nothing came into them."""
    missing = [parent for parent in output.parents if not parent.exists()]
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the first that is not empty ends it
            for parent in missing:
                parent.rmdir()


@contextlib.contextmanager
def _lock(output: Path) -> Iterator[bool]:
    """Hold the lock of OUT; False on a file system that has none, where unique names and the last check must do."""
    path = output.with_name(f".{output.name}.lock")
    held = False
    while not held:
        with contextlib.suppress(FileExistsError):
            _create_lock(path)
        try:
            # a link of that name may lead to any file of the user's
            lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:  # its holder removed it just now
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):  # its holder removed it after we had opened it
                held = os.path.samestat(os.fstat(lock), os.stat(path))
        except BlockingIOError as error:
            raise ValueError(f"Another run is writing {output}; wait for it, or choose another OUT.") from error
        except OSError:
            break
        finally:
            if not held:
                os.close(lock)
    try:
        yield held
    finally:
        with contextlib.suppress(OSError), open(path, "rb") as mine:
            if mine.read(len(LOCK) + 1) == LOCK:  # not somebody's file of that name
                path.unlink()  # before it is let go, so that nobody's lock is taken from them
        if held:
            os.close(lock)


def _create_lock(path: Path) -> None:
    """Create the lock of OUT together with its content.

    A run that ends in between must leave nothing: an empty file might be anybody's, and no later run would remove it.
    Where the file system has no unnamed files, the content follows the name.

    Raises:
        FileExistsError: there is a file of that name.
    """
    try:
        unnamed = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY, 0o666) if hasattr(os, "O_TMPFILE") else None
    except OSError:
        unnamed = None
    if unnamed is not None:
        with open(unnamed, "wb", buffering=0) as new:
            new.write(LOCK)
            with contextlib.suppress(FileNotFoundError):  # a system without /proc
                # Python follows the link only if it is given a folder's descriptor, which a whole path has no use for
                os.link(f"/proc/self/fd/{unnamed}", path, src_dir_fd=unnamed)
                return
    with open(path, "xb", buffering=0) as new:
        try:
            new.write(LOCK)
        except BaseException:
            path.unlink()
            raise


@contextlib.contextmanager
def _terminations_interrupt() -> Iterator[None]:
    """Have SIGTERM and SIGHUP interrupt as Ctrl-C does; what ignores them, as `nohup` has it, goes on to."""
    previous = {}
    if threading.current_thread() is threading.main_thread():
        kinds = [kind for kind in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(kind) is not signal.SIG_IGN]
        previous = {kind: signal.signal(kind, signal.default_int_handler) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in previous.items():
            signal.signal(kind, handler)
