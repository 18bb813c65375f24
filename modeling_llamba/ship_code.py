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

EXPERTS = ("experts", "experts_beside_mlp", "experts_clamped")
LEFT_OUT = 'raise ImportError("The model of this folder needs no {0}.py; `convert-to-hybrid update` would add it.")'
"""Line that stands in place of an import of a file that is left out."""


def unneeded(config) -> set[str]:
    """Names of the files that a model does without, of those that functions import where they make a layer."""
    names = set()
    if "linear_attention" not in config.layer_types:
        names.add("mixers")
    if config.recurrent is None:
        names.add("recurrent")
    if getattr(config, "num_experts", None) is None:
        names |= {*EXPERTS}
    return names


def code_files(config_class: type, config=None) -> dict[str, str]:
    """File name to content, for the family that a configuration class belongs to.

    Args:
        config: of a model, for which files are left out that it does not need; without it, all files there are.
    """
    left_out = set() if config is None else unneeded(config)
    packages = Path(__file__).parent, Path(inspect.getfile(config_class)).parent
    sources = {path.name: path for package in packages for path in package.rglob("*.py")}
    waiting = [f"configuration_{config_class.model_type}.py", f"modeling_{config_class.model_type}.py"]
    files = {}
    while waiting:
        name = waiting.pop()
        text = PROJECT_IMPORT.sub(r"\1from .\2 import ", sources[name].read_text(encoding="utf-8"))
        for absent in left_out:
            text = re.sub(rf"^(\s+)from \.{absent} import .*$", rf"\1{LEFT_OUT.format(absent)}", text, flags=re.M)
        files[name] = text
        needed = (f"{module}.py" for module in RELATIVE_IMPORT.findall(files[name]))
        waiting += [file for file in needed if file not in files]
    return files


def auto_map_of(config_class: type) -> dict[str, str]:
    """The classes of a family that transformers' Auto classes load, and their files."""
    name, family = config_class.model_type, config_class.__name__.removesuffix("Config")
    return {
        "AutoConfig": f"configuration_{name}.{family}Config",
        "AutoModel": f"modeling_{name}.{family}Model",
        "AutoModelForCausalLM": f"modeling_{name}.{family}ForCausalLM",
        "AutoModelForSequenceClassification": f"modeling_{name}.{family}ForSequenceClassification",
    }


def code_in(folder: Path, auto_map: dict[str, str]) -> set[str]:
    """Names of the code files in a checkpoint's folder that its configuration refers to, directly or by imports."""
    # a reference may name the repository that the code came from: me/hybrid--modeling_llamba.LlambaForCausalLM
    waiting = [f"{reference.rpartition('--')[2].partition('.')[0]}.py" for reference in auto_map.values()]
    found = set()
    while waiting:
        name = waiting.pop()
        if name not in found and (folder / name).is_file():
            found.add(name)
            waiting += [f"{module}.py" for module in RELATIVE_IMPORT.findall((folder / name).read_text("utf-8"))]
    return found


def ship_code(config, folder: str | os.PathLike) -> None:
    """Write the code of a model into its checkpoint's folder."""
    for name, content in code_files(type(config), config).items():
        (Path(folder) / name).write_text(content, encoding="utf-8")
