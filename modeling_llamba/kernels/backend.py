"""Choice of the code that computes the operations of a hybrid: one decision for a device, a type and a setting.

PyTorch's operations (torch_backend.py) are the reference, and all that a checkpoint carries. Faster ones are in the
installed package: functions in C for a CPU, Triton kernels for a GPU. A backend is a class with the operations of
`TorchBackend`, and a line of `BACKENDS`. Nothing else asks where something runs, but for softmax.py and by_device.py,
which choose among PyTorch's own functions.
"""

import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from transformers.utils import logging

from ..model.config_values import BACKEND_NAMES

if TYPE_CHECKING:
    from .torch_backend import TorchBackend

logger = logging.get_logger(__name__)
BACKEND_VARIABLE = "HYBRID_BACKEND"
"""Environment variable that overrides the configuration's `backend`."""
FORMER_VARIABLE = "HYBRID_SSD_BACKEND"
"""Name of that variable up to version 0.2."""
INTERFACE = 3
"""Number of the operations' signatures, and of the tuples that they read; another one means another package."""
BACKENDS = {"cpu": "kernels.c.c_backend", "cuda": "kernels.triton.triton_backend"}
"""Module of the package with the backend of a kind of device."""
PACKAGE = "modeling_llamba"
FOUND: dict[str, "TorchBackend"] = {}


def requested_backend(configured: str) -> str:
    """Return the backend that the environment variable HYBRID_BACKEND asks for, else the configuration's.

    Raises:
        ValueError: there is none of that name.
    """
    asked = os.environ.get(BACKEND_VARIABLE) or os.environ.get(FORMER_VARIABLE) or configured
    if asked not in BACKEND_NAMES:
        raise ValueError(f"Unknown backend {asked!r} in {BACKEND_VARIABLE}; choose one of {', '.join(BACKEND_NAMES)}.")
    return asked


def backend_for(like: torch.Tensor, setting: str, dtype: torch.dtype | None = None) -> "TorchBackend":
    """The backend for the device of a tensor, and numbers of its type or another.

    Args:
        setting: `backend` of the configuration, of which "torch" keeps to the reference.
    """
    kind = "torch" if requested_backend(setting) == "torch" else like.device.type
    _find(kind)  # before any look at what was found, which a graph would keep as it was
    found = FOUND[kind]
    return found if found.computes(dtype or like.dtype) else FOUND["torch"]


@torch.compiler.assume_constant_result  # an import could not be traced
def _find(kind: str) -> bool:
    if kind in FOUND and "torch" in FOUND:
        return True
    from .flex import FlexBackend
    from .torch_backend import TorchBackend

    FOUND.setdefault("torch", TorchBackend())
    if kind not in FOUND:
        found = FlexBackend() if kind == "cuda" else FOUND["torch"]
        FOUND[kind] = (_kernels(BACKENDS[kind]) if kind in BACKENDS else None) or found
    return True


def _kernels(module: str) -> "TorchBackend | None":
    """The backend of a module of the package; None, which is said once, where that is not installed."""
    try:
        installed = _import("kernels.backend")
    except ImportError:
        logger.warning_once("This hybrid runs by PyTorch's operations; with convert-to-hybrid installed it is faster.")
        return None
    if getattr(installed, "INTERFACE", None) != INTERFACE:
        logger.warning_once(
            "This hybrid runs by PyTorch's operations, as the installed convert-to-hybrid has kernels for another "
            "version of its code; `convert-to-hybrid update FOLDER` renews that."
        )
        return None
    try:
        return _import(module).make_backend()
    except ImportError:  # there is no Triton
        return None


def _import(module: str) -> ModuleType:
    """Import a module of the installed package.

    From a checkpoint's code under another name: by its own, the package would register its classes, and the next
    checkpoint would be loaded with them in place of the code in its folder.

    Raises:
        ImportError: it is not installed.
    """
    name = PACKAGE
    if not __name__.startswith(f"{PACKAGE}."):
        name = "convert_to_hybrid_kernels"
        found = importlib.util.find_spec(PACKAGE)
        if found is None or found.submodule_search_locations is None:  # a checkpoint's own file, in its folder
            raise ImportError(f"{PACKAGE} is not installed.")
        package = ModuleType(name)
        package.__path__ = [*found.submodule_search_locations]
        sys.modules.setdefault(name, package)
    return importlib.import_module(f"{name}.{module}")
