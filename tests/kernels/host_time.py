"""Launches and host time of a layer with Triton's kernels, beside the teacher's, without a GPU.

    python -m tests.kernels.host_time

prints JSON. Kernels are compiled for an H100, and their launches do nothing: Python, PyTorch's dispatch and Triton's
arguments remain. Models are so small that PyTorch's operations, which run on the CPU, take little more than their
call. What a launch costs in CUDA's driver is missing, for both models alike.
"""

import collections
import contextlib
import json
import statistics
import sys
import time
import types
import warnings

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from transformers import LlamaConfig, LlamaForCausalLM
from triton.backends.compiler import GPUTarget

from modeling_llamba import LlambaConfig, LlambaForCausalLM
from modeling_llamba.kernels import backend, flex
from modeling_llamba.kernels.torch_backend import TorchBackend
from modeling_llamba.model import norms
from tests.doubles.device.rules import launches, name_of

COUNTS: collections.Counter = collections.Counter()
SIZES = dict(
    vocab_size=97, hidden_size=48, intermediate_size=16, num_hidden_layers=12, num_attention_heads=3,
    num_key_value_heads=3, head_dim=16, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
KEPT = [[], [], [2], [], [], [1], [], [], [0], [], [], [2]]
"""One head of every third layer, as a default conversion of SmolLM2 keeps them."""
PROMPT = 140
ROUNDS = 40


class Driver:
    """What Triton asks of a GPU, on which nothing runs."""

    utils = types.SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448, "multiprocessor_count": 132},
        load_binary=lambda *kernel: (object(), object(), 32, 0, 1024),
        unload_module=lambda module: None,
    )
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_active_torch_device = staticmethod(lambda: torch.device("cpu"))

    @staticmethod
    def launcher_cls(source, metadata):
        """Count launches of one kernel."""
        name = f"triton {source.fn.__name__}"
        return lambda *arguments: COUNTS.update((name,))


class Launches(TorchDispatchMode):
    """Counts PyTorch's operations that launch a kernel."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if launches(op):
            COUNTS[name_of(op)] += 1
        return op(*args, **(kwargs or {}))


def as_on_cuda() -> None:
    """Take the backend of Triton for CPU tensors, and norms and flex_attention as one launch."""
    triton.runtime.driver._default = triton.runtime.driver._active = Driver()
    torch.cuda.current_device = lambda: 0
    torch.cuda.device = lambda index: contextlib.nullcontext()
    from modeling_llamba.kernels.triton.triton_backend import make_backend

    backend.FOUND |= {"torch": TorchBackend(), "cpu": make_backend()}
    flex.IS_THERE = True

    def norm(x, weight, eps):
        COUNTS["rms_norm"] += 1
        return torch.empty_like(x)

    norms.rms_norm = norm

    def compiled_once(graph, inputs):
        """Compute the first result, and return it again."""
        found = []

        def run(*arguments):
            if not found:
                found.append(graph(*arguments))
            return found[0]

        return run

    compiled = torch.compile(flex.flex_attention, backend=compiled_once)

    def attend(*args, **kwargs):
        if _get_current_dispatch_mode() is None:
            return compiled(*args, **kwargs)
        COUNTS["flex_attention"] += 1
        with _disable_current_modes():  # in which Dynamo would not run
            return compiled(*args, **kwargs)

    flex.compiled_flex_attention = lambda: attend


def models() -> dict[str, torch.nn.Module]:
    """A teacher, and a hybrid with the cache of a default conversion."""
    torch.manual_seed(0)
    config = LlambaConfig(
        **SIZES, layer_types=["hybrid"] * 12, hybrid_full_heads=KEPT, hybrid_window=32, hybrid_block=16,
        hybrid_sinks=4, hybrid_salient=12, hybrid_rank=8, hybrid_state_planes=4, window_bits=8,
        full_attention_bits=[6, 4], key_offsets=True, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    made = {"teacher": LlamaForCausalLM(LlamaConfig(**SIZES)), "hybrid": LlambaForCausalLM(config)}
    return {name: model.eval().bfloat16() for name, model in made.items()}


@torch.no_grad()
def measure(model: torch.nn.Module, length: int) -> tuple[float, collections.Counter]:
    """Microseconds and launches of a layer, for a prompt, or for one token after it."""
    ids = torch.randint(3, 97, (1, PROMPT))
    cache = model(ids, use_cache=True).past_key_values if length == 1 else None

    def run():
        model(ids[:, :length], past_key_values=cache, use_cache=True, logits_to_keep=1)

    for _ in range(5):
        run()
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    COUNTS.clear()
    with Launches():
        run()
    layers = len(model.model.layers)
    per_layer = collections.Counter({name: count / layers for name, count in COUNTS.items()})
    return statistics.median(times) / layers * 1e6, per_layer


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    as_on_cuda()
    found: dict[str, dict[str, dict]] = {}
    for name, model in models().items():
        for what, length in (("prompt", PROMPT), ("token", 1)):
            time_of_layer, counts = measure(model, length)
            found.setdefault(what, {})[name] = {
                "launches": round(counts.total(), 1),
                "microseconds": round(time_of_layer),
                "by kernel": {kernel: round(count, 2) for kernel, count in counts.most_common()},
            }
    json.dump(found, sys.stdout, indent=1)
