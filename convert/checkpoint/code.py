"""The configuration of a finished checkpoint, and the model code that it refers to."""

from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig

from ..hybrids.shapes import model_class
from ..io.version import project_version

NEEDED = "transformers>=5.16.1,<6"
"""Versions of libraries that load a checkpoint, as in pyproject.toml, which a test compares."""
KERNELS = """\
Its code is PyTorch alone. Where convert-to-hybrid is installed, its kernels make the model faster. Those for a CPU are
compiled by the machine's C compiler when a hybrid first runs, and kept in transformers' cache of modules, in
`hybrid_kernels`; `HYBRID_COMPILE_C=0` forbids that."""
"""Paragraph of a card on kernels, and on what a machine compiles."""


def write_code_and_config(config: PreTrainedConfig, folder: Path, dtype: torch.dtype) -> None:
    """Write config.json, whose presence makes the folder a checkpoint, and the code that it names."""
    config.architectures = [model_class(config.model_type).__name__]
    config.dtype = dtype
    config.save_pretrained(folder)


def versions() -> dict[str, str]:
    """Versions of the libraries that write a checkpoint, which its configuration records."""
    return {
        "convert-to-hybrid": project_version(),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
