"""python -m recipes.publish FOLDER REPOSITORY [--private]: push a finished model; again, after an interruption.

What the Hub has already received of an interrupted upload is not sent again: it knows large files by their hash.
"""

from pathlib import Path
from typing import Annotated

import typer
from huggingface_hub import HfApi, get_token

from convert.cli import one_line_errors
from convert.config import ConversionConfig
from convert.pipeline import prepare_repository, push_errors

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def repository_for(name: str, private: bool | None) -> str:
    """Make sure the Hub will take a model, before it is trained rather than after.

    Raises:
        ValueError: there is no token, the Hub refuses, or the repository is public and was to be private.
    """
    if get_token() is None:
        raise ValueError("Pushing needs a Hub token: set HF_TOKEN or run `hf auth login`.")
    options = ConversionConfig(model="unused", output="unused", push_to_hub=name, private=bool(private))
    return prepare_repository(options)


def upload(folder: Path, repository: str, message: str) -> None:
    """Push a whole folder; files of an earlier upload that would win over this one's are removed."""
    HfApi().upload_folder(
        repo_id=repository,
        folder_path=folder,
        commit_message=message,
        delete_patterns=["*.safetensors", "*.safetensors.index.json", "*.py"],
    )


def publish(folder: Path, repository: str, private: bool = False) -> str:
    """Push a finished model; the repository's full name.

    Raises:
        ValueError: the folder is no checkpoint, there is no token, or the Hub refuses.
    """
    if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} is no finished model: it needs config.json and safetensors files.")
    repository = repository_for(repository, private)
    with push_errors(repository):
        upload(folder, repository, "Add hybrid")
    return repository


@app.command()
def command(
    folder: Annotated[Path, typer.Argument(help="Finished model.")],
    repository: Annotated[str, typer.Argument(help="NAME or USER/NAME.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Tracebacks.")] = False,
) -> None:
    """Push a finished model to the Hub; again, after an interruption."""
    with one_line_errors(verbose):
        print(publish(folder, repository, private))


if __name__ == "__main__":
    app()
