"""Publish a finished folder on the Hub: its repository is created before the conversion and filled after it.

An upload that broke off can be repeated: large files that the Hub has received already are known by their hash.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError

from ..errors import HTTPError
from ..io.folder import MARKER

REPLACED = ["*.safetensors", "*.safetensors.index.json", "*.py"]
"""Files of an earlier upload that are removed, because with other shards they would win over the new ones."""


def prepare_repository(name: str, private: bool = False) -> str:
    """Create the repository before the work, so that a refusal comes early, and return its full name.

    Raises:
        ValueError: there is no token, the Hub refuses, or the repository is public and was to be private.
    """
    if get_token() is None:
        raise ValueError("Pushing needs a Hub token: set HF_TOKEN or run `hf auth login`.")
    with push_errors(name):
        api = HfApi()
        repository = api.create_repo(name, private=private or None, exist_ok=True).repo_id
        if private and not api.model_info(repository).private:
            raise ValueError(f"{repository} exists and is public; make it private on the Hub or choose another name.")
    return repository


def upload(folder: Path, repository: str, message: str = "Add hybrid") -> None:
    """Push a whole folder to a repository.

    Raises:
        ValueError: the Hub did not take it; what it received is kept for the next attempt.
    """
    try:
        with push_errors(f"{repository} (the model is complete in {folder})"):
            HfApi().upload_folder(
                repo_id=repository,
                folder_path=folder,
                commit_message=message,
                delete_patterns=REPLACED,
                ignore_patterns=[MARKER],
            )
    except KeyboardInterrupt as error:
        error.add_note(f"the model is complete in {folder}, and `hf upload {repository} {folder}` goes on")
        raise


@contextlib.contextmanager
def push_errors(repository: str) -> Iterator[None]:
    """Turn the Hub client's errors into a ValueError of one line."""
    try:
        yield
    except (HfHubHTTPError, HTTPError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"The Hub did not take {repository}: {reason}") from error
    except RuntimeError as error:  # how the client reports a large file that did not get through
        if not isinstance(error.__cause__, (HfHubHTTPError, HTTPError, OSError)):
            raise
        reason = " ".join(f"{error} {error.__cause__}".split())
        raise ValueError(f"The upload of {repository} broke off; `hf upload` goes on: {reason}") from error
