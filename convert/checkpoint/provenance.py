"""What a written configuration records about where it comes from."""

import importlib.metadata

import torch
import transformers


def versions() -> dict[str, str]:
    """Versions of the libraries that wrote a checkpoint."""
    return {
        "convert-to-hybrid": importlib.metadata.version("convert-to-hybrid"),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
