"""Turn an exception into one line: what failed, during which step, and what the user can do."""

import contextlib
import errno
from collections.abc import Iterator

from huggingface_hub.errors import HfHubHTTPError

HTTPError = HfHubHTTPError.__mro__[1]
"""Base of all errors of the library that huggingface_hub talks HTTP with: httpx before version 2, httpx2 since."""
KEPT = "what is done so far is kept"
"""Beginning of the note that an exception carries if the work folder is kept and the next run resumes from it."""
DISK_IS_FULL = ("No space left on device", "PytorchStreamWriter failed writing")
OUT_OF_MEMORY = ("out of memory", "allocate memory", "not enough memory", "failed to map segment", "start new thread")


LOWER = "lower "
"""Beginning of a note that names the options to lower if memory runs out."""


@contextlib.contextmanager
def during(what: str, lower: str | None = None) -> Iterator[None]:
    """Add a note on the current step to any exception; `message_of` shows the innermost note.

    Args:
        lower: names of the options to lower if memory runs out.
    """
    try:
        yield
    except Exception as error:
        error.add_note(f"while {what}")
        if lower is not None:
            error.add_note(LOWER + lower)
        raise


def message_of(error: Exception) -> str:
    """Describe an error in one line; an unexpected one comes with its type and the step that failed."""
    text = " ".join(str(error).split())
    kind = type(error).__name__
    notes = getattr(error, "__notes__", ())
    doing = next((f", {note}" for note in notes if note.startswith("while ")), "")
    kept = next((f"; {note}" for note in notes if note.startswith(KEPT)), "")
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or any(said in text for said in DISK_IS_FULL):
        return f"the disk is full{doing}; OUT is as it was{kept}. Free some space, or choose another place."
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"no permission for {getattr(error, 'filename', None) or 'a file'}{doing}."
    if is_out_of_memory(error):
        way_out = "use shorter sequences or smaller batches"
        way_out = next((note for note in notes if note.startswith(LOWER)), way_out)
        return f"out of memory{doing}; {way_out}{kept}."
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError):
        if len(text) > 1000:
            return f"{text[:1000]}..."
        return text or kind
    if isinstance(error, OSError):
        return f"{text or kind}{doing}."
    return f"unexpected {kind}{doing}: {text[:300] or 'no message'} (--verbose shows where)."


def is_out_of_memory(error: Exception) -> bool:
    """Return True if there was not enough memory, of the host or of a device."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    text = " ".join(str(error).split()).lower()
    return any(said in text for said in OUT_OF_MEMORY)


def printable(text: str) -> str:
    """Replace control characters, which a terminal would follow: names come from files that others wrote."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
