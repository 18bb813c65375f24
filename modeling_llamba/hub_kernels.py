"""Compiled kernels from the Hub in place of packages that are not installed, where the user allows it.

With HYBRID_HUB_KERNELS=1 in the environment when the model's code is imported, mamba_ssm's scan and the causal
convolution come from the repository that transformers takes them from. That downloads compiled code and runs it, so
nothing happens unasked, nor without a CUDA device to run it on.
"""

import functools
import os
import warnings
from collections.abc import Callable

import torch

HUB_VARIABLE = "HYBRID_HUB_KERNELS"
HUB_REPOSITORY, HUB_VERSION = "kernels-community/mamba-ssm", 4


def hub_kernels_allowed() -> bool:
    """Whether the environment variable HYBRID_HUB_KERNELS says so, and there is a CUDA device."""
    return os.environ.get(HUB_VARIABLE, "0") not in ("", "0") and torch.cuda.is_available()


def hub_function(name: str) -> Callable | None:
    """A function of the Hub's kernel, or None where it is not allowed or cannot be had, which warns."""
    kernel = _kernel() if hub_kernels_allowed() else None
    return getattr(kernel, name, None)


@functools.cache
def _kernel() -> object | None:
    try:
        from transformers.integrations.hub_kernels import get_kernel

        return get_kernel(HUB_REPOSITORY, version=HUB_VERSION)
    except (ImportError, OSError, ValueError, RuntimeError, AssertionError) as error:
        warnings.warn(
            f"{HUB_VARIABLE} has no effect: {HUB_REPOSITORY} cannot be loaded ({' '.join(str(error).split())[:200]}); "
            "it takes the package kernels (pip install kernels) and the network.",
            stacklevel=2,
        )
        return None
