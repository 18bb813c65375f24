"""Put the code of today into the folder of a hybrid that an earlier version wrote."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from modeling_llamba.ship_code import code_files, code_in

from ..checkpoint.code import KERNELS, NEEDED, versions
from ..checkpoint.load import load_config
from ..errors import during
from ..hybrids.shapes import HYBRIDS
from ..io.folder import MARKER, mark, rewriting
from ..io.reader import read_json

NEEDS = re.compile(r"(It loads with `)[^`]*(`)")
"""Sentence of a card on the versions that load the model."""


def update(folder: str) -> tuple[str, str]:
    """Replace code, configuration and the card's sentence on versions; weights and all other files stay as they are.

    The folder is written anew beside itself, with links to the files that stay, and then takes its own place.

    Returns:
        The version of this project that wrote the folder's code, and today's.

    Raises:
        ValueError: it is no hybrid's folder, has weights of a format that this code does not read, or has a file of
            the user with a name of today's code.
    """
    output = Path(os.path.realpath(Path(folder).expanduser()))
    written = read_json(output / "config.json")
    if written is None or written.get("model_type") not in HYBRIDS or "auto_map" not in written:
        raise ValueError(f"{folder} is not the folder of a hybrid that carries its code; there is nothing to update.")
    if Path.cwd() == output or output in Path.cwd().parents:
        raise ValueError(f"{output} is or contains the working directory; run update from another folder.")
    config = load_config(str(output))
    before = _last_versions(config.conversion or {}).get("convert-to-hybrid", "an earlier version")
    after = versions()
    config.conversion = (config.conversion or {}) | {"updated_with": after}
    marker = output / MARKER
    made = set(json.loads(marker.read_text())["files"]) if marker.is_file() else set()
    old_code = code_in(output, written["auto_map"])
    code = {*code_files(type(config), config)}
    if foreign := sorted(name for name in code - old_code - made if os.path.lexists(output / name)):
        raise ValueError(
            f"{output} has a file {foreign[0]} that is not the hybrid's, and today's code needs that name."
        )

    def written_anew(place: str, names: list[str]) -> set[str]:
        """Names of files that are written below; files of these names in folders inside stay."""
        return {"config.json", "README.md", MARKER, *old_code, *code} & set(names) if Path(place) == output else set()

    with during(f"updating {output}"), rewriting(output) as staged:
        shutil.copytree(output, staged, symlinks=True, ignore=written_anew, copy_function=_link, dirs_exist_ok=True)
        card = output / "README.md"
        if card.is_file():
            (staged / card.name).write_text(_renewed(card.read_text()))
        config.save_pretrained(staged)
        if marker.is_file():
            mark(staged, made - old_code | code_in(staged, config.auto_map))
    return before, after["convert-to-hybrid"]


def _renewed(card: str) -> str:
    """A card with today's sentences on versions and kernels."""
    card = NEEDS.sub(rf"\g<1>{NEEDED}\2", card)
    if KERNELS in card or "\n| | |\n" not in card:
        return card
    return card.replace("\n| | |\n", f"\n{KERNELS}\n\n| | |\n", 1)


def _last_versions(conversion: dict[str, Any]) -> dict[str, str]:
    return conversion.get("updated_with") or conversion.get("versions") or {}


def _link(source: str, target: str) -> None:
    """Link a file, or copy it where the file system has no links."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
