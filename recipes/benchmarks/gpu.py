"""Measure on a GPU: parity, then the scan, training steps, prefill and decoding, beside other kernels and the teacher.

    make bench-gpu        or        python -m recipes.benchmarks.run --only gpu

Wall time between two synchronisations, medians of rounds. The models have random weights: teachers of the shapes of
SmolLM2-135M and Llama-3.2-1B in bfloat16, and what the default makes of them. What comes first matters most; what
BUDGET seconds do not reach is named as skipped.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

import modeling_llamba.mixers.ssd as ssd
from modeling_llamba import LlambaConfig, LlambaForCausalLM
from modeling_llamba.hybrid.naive import ssd_recurrence
from modeling_llamba.kernels.triton.scans import chunk_simple_gla, mamba_chunk_scan_combined

from ..evaluation.speed import now, speed
from .measure import Report, Table

BUDGET = 420.0
SIZE = 64  # P and N
SHAPES = {
    "135M": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
    },
    "1B": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
}  # fmt: skip
CONTEXTS = (512, 2048, 8192, 32768, 131072)
TRAINED = 2048  # tokens of a training step
TORCH_CONTEXT = 8192  # the chunked scan in PyTorch launches several kernels a chunk
LIMITS = {torch.float32: 2e-3, torch.bfloat16: 2e-2}


def default_hybrid(shape: dict[str, int]) -> LlambaConfig:
    """The default hybrid of a teacher: windows in 8 bits, salient tokens, a state, and in every fifth layer kept
    heads, whose keys are in 6 bits and values in 4."""
    layers = shape["num_hidden_layers"]
    shared = shape["num_attention_heads"] // shape["num_key_value_heads"]
    return LlambaConfig(
        **shape, layer_types=["hybrid"] * layers, mixer_num_kv_heads=shape["num_key_value_heads"],
        hybrid_window=224, hybrid_sinks=4, hybrid_salient=16, hybrid_rank=64,
        hybrid_state_planes=shape["hidden_size"] // shape["num_attention_heads"] // 4,
        hybrid_full_heads=[[*range(shared)] if i % 5 == 0 else [] for i in range(layers)],
        full_attention_bits=[6, 4], window_bits=8,
        max_position_embeddings=max(CONTEXTS) + 1024,
    )  # fmt: skip


def build(shape: dict[str, int], device: str) -> dict[str, nn.Module]:
    """The teacher and its hybrid, with random weights in bfloat16."""
    with torch.device(device):
        models = {
            "teacher": LlamaForCausalLM(teacher_config(shape)),
            "default": LlambaForCausalLM(default_hybrid(shape)),
        }
    return {name: model.to(torch.bfloat16).eval() for name, model in models.items()}


def backends(device: str) -> list[str]:
    """List the backends that can run there."""
    installed = {"fla": chunk_simple_gla, "mamba_ssm": mamba_chunk_scan_combined}
    return ["torch", *(name for name, kernel in installed.items() if device == "cuda" and kernel is not None)]


def timed(call: Callable[[], object], device: str, rounds: int = 5) -> float:
    """Median milliseconds, after a call that compiles."""
    call()
    times = []
    for _ in range(rounds):
        started = now(torch.device(device))
        call()
        times.append(1e3 * (now(torch.device(device)) - started))
    return statistics.median(times)


def scan_inputs(heads: int, length: int, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, log_a, B, C with decays from 1e-8 to 1, most of them long."""
    torch.manual_seed(0)
    x, B, C = (torch.randn(1, length, heads, SIZE, device=device, dtype=dtype) for _ in range(3))
    return [x, -18 * torch.rand(1, length, heads, device=device) ** 4, B, C]


def parity(device: str, length: int = 1000) -> Iterator[tuple[str, float, float]]:
    """(what, the worst relative error of an output, state or gradient, its limit), against the float64 recurrence."""
    for dtype, backend in itertools.product(LIMITS, backends(device)):
        inputs = [t.requires_grad_(backend != "mamba_ssm") for t in scan_inputs(4, length, device, dtype)]
        results = []
        for scan in (lambda *t, backend=backend: ssd.ssd_scan(*t, backend=backend), ssd_recurrence):
            outputs = scan(*inputs)
            torch.manual_seed(1)
            weighted = sum((t * torch.randn(t.shape).to(device)).sum() for t in outputs)
            results.append((*outputs, *(torch.autograd.grad(weighted, inputs) if backend != "mamba_ssm" else ())))
        worst = max(((got - exact).norm() / exact.norm()).item() for got, exact in zip(*results, strict=True))
        yield f"{backend}, {str(dtype).removeprefix('torch.')}: error against float64", worst, LIMITS[dtype]


def scans(device: str, heads: int, length: int) -> list[str]:
    """Milliseconds of each backend and of causal SDPA, forward, and forward and backward where it has one."""
    cells = []
    x, log_a, B, C = scan_inputs(heads, length, device, torch.bfloat16)
    attended = [t.transpose(1, 2) for t in (C, B, x)]
    calls = {
        backend: (lambda *t, backend=backend: ssd.ssd_scan(*t, backend=backend)[0], (x, log_a, B, C))
        for backend in ("torch", "fla", "mamba_ssm")
    }
    calls["SDPA"] = (lambda *t: nn.functional.scaled_dot_product_attention(*t, is_causal=True), attended)
    for name, (call, inputs) in calls.items():
        if name != "SDPA" and (name not in backends(device) or (name == "torch" and length > TORCH_CONTEXT)):
            cells.append("")
            continue
        with torch.no_grad():
            cell = f"{timed(lambda call=call, inputs=inputs: call(*inputs), device):.2f}"
        if name != "mamba_ssm":
            leaves = [t.detach().requires_grad_() for t in inputs]
            both = timed(lambda call=call, leaves=leaves: torch.autograd.grad(call(*leaves).sum(), leaves), device)
            cell += f", {both:.2f}"
        cells.append(cell)
    return cells


def teacher_config(shape: dict[str, int]) -> LlamaConfig:
    """A Llama of this shape."""
    return LlamaConfig(**shape, max_position_embeddings=max(CONTEXTS) + 1024)


def step_cost(configure: Callable[[dict], LlambaConfig | LlamaConfig], shape: dict, tokens: int) -> dict[str, float]:
    """Cost of a training step on one sequence, counted on the meta device; six layers stand for all.

    Returns:
        parameters; flops, forward and backward; activation_bytes, what is kept for the backward pass in bfloat16
        without checkpointing, and without attention's score matrices, which flash attention does not keep.
    """
    # of five more layers one has kept heads, which is the share of all (`default_hybrid`)
    one, six = (_counted(configure(shape | {"num_hidden_layers": layers}), tokens) for layers in (1, 6))
    return {key: one[key] + (shape["num_hidden_layers"] - 1) / 5 * (six[key] - one[key]) for key in one}


def _counted(config: LlambaConfig | LlamaConfig, tokens: int) -> dict[str, int]:
    kept: dict[int, int] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        if t.shape[-2:] != (tokens, tokens):
            kept[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    model_class = LlambaForCausalLM if isinstance(config, LlambaConfig) else LlamaForCausalLM
    with torch.device("meta"):
        model = model_class(config).to(torch.bfloat16).train()
        ids = torch.zeros(1, tokens, dtype=torch.long)
    counter = FlopCounterMode(display=False)
    # which would ask for values
    unpacked = mock.patch("transformers.masking_utils.find_packed_sequence_indices", lambda positions: None)
    with unpacked, counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            loss = model(ids, use_cache=False).logits.float().logsumexp(-1).sum()
        loss.backward()
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "flops": counter.get_total_flops(),
        "activation_bytes": sum(size for storage, size in kept.items() if storage not in weights),
    }


def training(name: str, model: nn.Module, flops: float, length: int) -> list[str]:
    """A row: milliseconds of forward and backward, TFLOP counted and per second, peak memory beyond the weights."""
    device = model.device.type
    ids = torch.randint(model.config.vocab_size, (1, length), device=device)

    def step() -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    held = torch.cuda.memory_allocated() if device == "cuda" else 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    milliseconds = timed(step, device, rounds=3)
    peak = f"{(torch.cuda.max_memory_allocated() - held) / 1e9:.1f}" if device == "cuda" else ""
    return [name, f"{milliseconds:.0f}", f"{flops / 1e12:.2f}", f"{flops / 1e9 / milliseconds:.0f}", peak]


@torch.no_grad()
def generation(model: nn.Module, context: int, static: bool, tokens: int = 80, fewer: int = 16) -> tuple[float, float]:
    """Milliseconds to the first token of `generate`, and for each after it.

    Args:
        static: with a static cache; on CUDA transformers compiles a step for it and captures that in a CUDA graph.
    """
    ids = torch.randint(model.config.vocab_size, (1, context), device=model.device)
    cache = "static" if static else None

    def generate(count: int) -> None:
        model.generate(
            ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0,
            cache_implementation=cache,
        )  # fmt: skip

    first, short, long = (
        timed(functools.partial(generate, count), model.device.type, rounds=3) for count in (1, fewer, tokens)
    )
    # prompt and recording are in both, and fall out of the difference
    return first, (long - short) / (tokens - fewer)


def measure(output: Path, device: str = "cuda", shapes: dict | None = None, contexts: tuple = CONTEXTS) -> Report:
    """Measure everything above, in the order of worth, for as long as BUDGET lasts; tests take other arguments."""
    started = time.perf_counter()
    report = Report()
    shapes = SHAPES if shapes is None else shapes

    def left(what: str) -> bool:
        if time.perf_counter() - started > BUDGET:
            report.skipped[what] = f"{BUDGET:.0f} s were over"
            return False
        return True

    where = device
    if device == "cuda":
        where = torch.cuda.get_device_name()
        # it plans anew for every length of a cache, which takes the host longer than a teacher's token
        torch.backends.cuda.enable_cudnn_sdp(False)
    report.tables.append(Table(["device", "backends"], [[where, ", ".join(backends(device))]]))
    for found in parity(device):
        report.add(*found)
    of_scans = Table(["scan of bf16: heads, tokens", "torch, ms", "fla", "mamba_ssm", "causal SDPA"], [])
    of_steps = Table(["training step", "ms", "TFLOP", "TFLOP/s", "peak GB beyond the weights"], [])
    of_models = Table(["model, context", "prefill tokens/s", "ms per token", "cache MB", "peak GB"], [])
    report.tables += [of_scans, of_steps, of_models]
    for context, (size, shape) in itertools.product(contexts, shapes.items()):
        heads = shape["num_attention_heads"]
        if left(f"{size} at {context}, scan"):
            of_scans.rows.append([f"{heads}, {context}", *scans(device, heads, context)])
        models = build(shape, device) if left(f"{size} at {context}, models") else {}
        if context == max(c for c in contexts if c <= TRAINED):
            for (name, model), configure in zip(models.items(), (teacher_config, default_hybrid), strict=bool(models)):
                flops = step_cost(configure, shape, context)["flops"]
                of_steps.rows.append(training(f"{size}, {name}", model, flops, context))
        for row in speed(models, 1, context, 16, repeats=2) if models else []:
            cells = row["prefill_tokens_per_second"], 1e3 * row["seconds_per_token"], row["cache_bytes"] / 1e6
            peak = f"{row['peak_bytes'] / 1e9:.1f}" if "peak_bytes" in row else ""
            of_models.rows.append([f"{size}, {row['which']}, {context}", *(f"{cell:.1f}" for cell in cells), peak])
    of_graphs = Table(["generate: model, cache, context", "ms to the first token", "ms per token"], [])
    report.tables.append(of_graphs)
    for context, (size, shape) in itertools.product(contexts, shapes.items()):
        if left(f"{size} at {context}, generate"):
            for (which, model), static in itertools.product(build(shape, device).items(), (False, True)):
                times = generation(model, context, static)
                cache = "static" if static else "growing"
                of_graphs.rows.append([f"{size}, {which}, {cache}, {context}", *(f"{ms:.2f}" for ms in times)])
    return report
