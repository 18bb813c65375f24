"""The code of a hybrid as files that work anywhere: what a checkpoint carries, so that `trust_remote_code` loads it.

A checkpoint's code is one flat folder, since transformers loads no sub-folders: the shared files, and those of the
configuration and the model of its family. In the project these lie in the folders of two packages. On the way into a
checkpoint, an import of one by another becomes an import of a neighbour. In a checkpoint all of them are neighbours
already, and are copied.

transformers finds the files it has to fetch by reading `from .name import` lines as text. The same lines are followed
here, so that what is written is what it will look for.
"""

import inspect
import os
import re
from pathlib import Path

PROJECT_IMPORT = re.compile(r"^(\s*)from (?:modeling_llamba\.|\.+)(?:\w+\.)*(\w+) import ", re.MULTILINE)
"""An import of one file of the project by another, from whatever folder."""
RELATIVE_IMPORT = re.compile(r"^\s*from \.(\w+) import ", re.MULTILINE)


def code_files(config_class: type) -> dict[str, str]:
    """File name to content, for the family that a configuration class belongs to."""
    packages = Path(inspect.getfile(config_class)).parent, Path(__file__).parent
    sources = {path.name: path for package in packages for path in (*package.glob("*.py"), *package.glob("*/*.py"))}
    waiting = [f"configuration_{config_class.model_type}.py", f"modeling_{config_class.model_type}.py"]
    files = {}
    while waiting:
        name = waiting.pop()
        files[name] = PROJECT_IMPORT.sub(r"\1from .\2 import ", sources[name].read_text(encoding="utf-8"))
        needed = (f"{module}.py" for module in RELATIVE_IMPORT.findall(files[name]))
        waiting += [file for file in needed if file not in files]
    return files


def code_in(folder: Path, auto_map: dict[str, str]) -> set[str]:
    """Names of the code files in a checkpoint's folder that its configuration refers to, directly or by imports."""
    waiting = [f"{reference.partition('.')[0]}.py" for reference in auto_map.values()]
    found = set()
    while waiting:
        name = waiting.pop()
        if name not in found and (folder / name).is_file():
            found.add(name)
            waiting += [f"{module}.py" for module in RELATIVE_IMPORT.findall((folder / name).read_text("utf-8"))]
    return found


def ship_code(config_class: type, folder: str | os.PathLike) -> None:
    """Write the code of a family into a checkpoint's folder."""
    for name, content in code_files(config_class).items():
        (Path(folder) / name).write_text(content, encoding="utf-8")
