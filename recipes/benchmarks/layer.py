"""One layer of SmolLM2's shape, its attention alone: reading texts of several lengths, and one token more.

CPU time on one thread, random weights. Each layer stands in a model that is all but nothing besides: no vocabulary, an
MLP of width 8. The reads are compared with the window that they stand beside, and with the teacher's own attention.
"""

from pathlib import Path

import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache

from modeling_llamba import LlambaConfig, LlambaForCausalLM

from .measure import Report, Table, interleaved

LENGTHS = (512, 2048, 8192, 32768)
LONGEST_CHUNK = 8192  # a prefill holds the scores of all its blocks
CONTEXT, STEPS, LAYERS = 1024, 16, 8
SHAPE = {
    "vocab_size": 8, "hidden_size": 576, "intermediate_size": 8, "num_attention_heads": 9, "num_key_value_heads": 3,
    "max_position_embeddings": LENGTHS[-1] + STEPS,
}  # fmt: skip
WINDOW = {"hybrid_window": 213, "hybrid_sinks": 4, "mixer_num_kv_heads": 3}
READS = {
    "window alone": {"mixer": "none", "hybrid_salient": 16},
    "linear read": {"hybrid_read": "linear", "mixer_shared_state": True},
    "normalised read": {"hybrid_read": "normalised", "hybrid_salient": 16, "hybrid_state_planes": 16},
}
STEP_LIMIT = 1.15
SDPA = "SDPA over everything"


def models(layers: int) -> dict[str, nn.Module]:
    """The teacher's layers, and what replaces them, by name."""
    torch.manual_seed(0)
    teacher = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=layers))
    hybrids = {
        name: LlambaForCausalLM(
            LlambaConfig(**SHAPE, **WINDOW, **read, num_hidden_layers=layers, layer_types=["hybrid"] * layers)
        )
        for name, read in READS.items()
    }
    return {name: model.model.eval() for name, model in {SDPA: teacher, **hybrids}.items()}


def read(model: nn.Module, length: int) -> Cache | None:
    """Read so many tokens, a hybrid in chunks where they are many; returns the cache."""
    teacher = isinstance(model.config, LlamaConfig)
    cache = DynamicCache(config=model.config) if teacher else None
    for part in torch.zeros(1, length, dtype=torch.long).split(length if teacher else LONGEST_CHUNK, dim=1):
        cache = model(part, past_key_values=cache, use_cache=True).past_key_values
    return cache


def steps(model: nn.Module, cache: Cache) -> None:
    """Read STEPS tokens one by one."""
    for _ in range(STEPS):
        model(torch.zeros(1, 1, dtype=torch.long), past_key_values=cache, use_cache=True)


@torch.no_grad()
def measure(output: Path) -> Report:
    """Milliseconds of each layer, and the ratio that has a target."""
    torch.set_num_threads(1)
    report, one, several = Report(), models(1), models(LAYERS)
    names, rows = [SDPA, *READS], []
    for length in LENGTHS:
        calls = {name: lambda name=name, length=length: read(one[name], length) for name in names}
        timings = interleaved(calls, 1 if length == LENGTHS[-1] else 5)
        rows.append([f"{length:,}", *(f"{timings[name].median:.1f}" for name in names)])
    calls = {}
    for name in names:
        cache = read(several[name], CONTEXT)
        calls[name] = lambda name=name, cache=cache: steps(several[name], cache)
    timings = interleaved(calls, 9)
    rows.append([f"a token after {CONTEXT:,}", *(f"{timings[n].median / STEPS / LAYERS:.2f}" for n in names)])
    report.tables.append(Table(["one layer, ms: tokens", *names], rows))
    ratio = timings["normalised read"].median / timings["linear read"].median
    report.add("a step of the normalised read: time over the linear read's", ratio, STEP_LIMIT)
    return report
