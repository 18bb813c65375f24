"""The model code that a checkpoint carries, and the configuration that refers to it."""

import shutil
from pathlib import Path

import torch
from transformers import PreTrainedConfig

import modeling_llamba
import modeling_phimamba

PACKAGES = {"llamba": (modeling_llamba, "Llamba"), "phimamba": (modeling_phimamba, "PhiMamba")}


def code_names(model_type: str) -> set[str]:
    """Names of the files that ship with a hybrid of this type."""
    return {path.name for path in Path(PACKAGES[model_type][0].__file__).parent.glob("*.py")}


def add_code(config: PreTrainedConfig, folder: Path, dtype: torch.dtype) -> None:
    """Copy the remote code, then write config.json, whose presence makes the folder a checkpoint."""
    package, prefix = PACKAGES[config.model_type]
    for path in Path(package.__file__).parent.glob("*.py"):
        if path.name != "__init__.py":
            shutil.copyfile(path, folder / path.name)
    name = config.model_type
    config.architectures = [f"{prefix}ForCausalLM"]
    config.dtype = dtype
    config.auto_map = {
        "AutoConfig": f"configuration_{name}.{prefix}Config",
        "AutoModel": f"modeling_{name}.{prefix}Model",
        "AutoModelForCausalLM": f"modeling_{name}.{prefix}ForCausalLM",
    }
    config.to_json_file(folder / "config.json")
