"""Kernels as operators of PyTorch, for what traces or compiles a model and cannot look into them."""

import functools
import re
from collections.abc import Callable

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from transformers.utils import is_torchdynamo_compiling


def is_traced() -> bool:
    """Return True while PyTorch notes operations to repeat them, of which it would miss what is no operator.

    A mode that only watches them, such as a counter of operations, does not count.
    """
    return is_torchdynamo_compiling() or torch.jit.is_tracing() or get_proxy_mode() is not None


def remembered(make: Callable) -> Callable:
    """Keep the tensors of a function's latest calls for equal ones.

    While a CUDA graph is recorded, they are made anew: the graph would go on reading a tensor that was forgotten, and
    thus freed.
    """
    latest = functools.lru_cache(maxsize=64)(make)

    @functools.wraps(make)
    def run(*inputs):
        # asked where there is no device, PyTorch raises
        is_recorded = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        return make(*inputs) if is_recorded else latest(*inputs)

    return run


def as_operator(launch: Callable, changes: tuple[str, ...] = ()) -> Callable:
    """Make what launches kernels an operator of its own while a model is compiled or traced, which cannot look into
    it, and for tensors without memory.

    Otherwise it is called as it is: an operator takes as much of the host's time as a launch. Operators are named
    after the module, which is imported under two names where a checkpoint's code and the project run in one process.

    Args:
        changes: names of the arguments that are written to.
    """
    name = re.sub(r"\W", "_", launch.__module__, flags=re.ASCII)
    operator = torch.library.custom_op(f"{name}::{launch.__name__}", launch, mutates_args=changes)

    @functools.wraps(launch)
    def run(*inputs, **options):
        # subclasses, such as fake tensors, have no numbers in memory
        if is_traced() or type(inputs[0]) is not torch.Tensor:
            return operator(*inputs, **options)
        return launch(*inputs, **options)

    run.register_fake = operator.register_fake
    return run
