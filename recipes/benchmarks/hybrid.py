"""The default hybrid beside its teacher on one thread: prompts, single tokens, eight texts at once, training steps.

CPU time, and the ratio to the teacher's, beside that of the same hybrid with a cache of 16 bits. The hybrid of
SmolLM2-135M is made with the sizes that the default chooses and is not fitted, which changes no operation. A token's
mean counts, since every sixteenth opens a block. Keys and values of long contexts are made up; the time of a step does
not depend on them.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import Cache
from transformers.utils import logging as transformers_logging

from convert.checkpoint.load import load_model
from convert.layout.presets import query_heads
from convert.pipeline import convert
from convert.resolve import few_bits
from convert.teachers.teacher import embedded_teacher
from modeling_llamba.compatibility import CACHE_NAME

from ..evaluation.speed import fill_cache
from .measure import Report, Table, Timing, in_own_process, interleaved, peak_bytes

KEPT = (
    (7, 2), (14, 0), (17, 1), (18, 2), (20, 1), (20, 2), (21, 2), (22, 2), (23, 0), (23, 2), (24, 0), (26, 1),
)  # fmt: skip
"""Layers and key/value heads that the default keeps for SmolLM2."""
DEFAULT = {
    "attention_layers": "none", "attention_heads": query_heads(list(KEPT), 3), "window": 192,
    "placement": {"salient": 48, "rank": 31},
}  # fmt: skip
PROMPTS = {128: 1.15, 512: 1.15, 2048: 1.0, 4096: 0.75, 8192: 0.5}
"""Tokens, and the ratio that is good enough."""
TOKENS = {128: 1.15, 512: 1.15, 2048: 1.0, 4096: 0.75, 8192: 0.55, 32768: 0.3}
BATCH, TOGETHER = 8, (512, 4096)
FILLED = 1024
"""Tokens that are read before a cache is made up."""
STEPS, TRAINED, TRAINING_LIMIT = 16, 2048, 1.2
PACKED = (600, 900, 548)
"""Lengths of the sequences that one training step packs."""


def load_models(scratch: Path) -> dict[str, nn.Module]:
    """The teacher and its default hybrid in float32, and that with a cache of 16 bits."""
    gguf = str(embedded_teacher())
    convert(gguf, scratch, align="none", overwrite=True, **DEFAULT)
    unrounded = load_model(str(scratch), "float32").eval()
    few = few_bits(unrounded.config.head_dim).config_fields() | {"key_offsets": True}
    # offsets of keys, which no conversion has fitted here, begin as zeros
    hybrid = type(unrounded).from_pretrained(scratch, dtype=torch.float32, **few).eval()
    hybrid.save_pretrained(scratch)  # for the processes that measure memory
    return {"teacher": load_model(gguf).eval(), "hybrid": hybrid, "16 bits": unrounded}


def reading(model: nn.Module, ids: torch.Tensor) -> Callable[[], object]:
    """A call that reads a prompt into a new cache."""
    return lambda: model(ids, use_cache=True, logits_to_keep=1)


def cache_after(model: nn.Module, length: int, batch: int) -> Cache:
    """A cache as after `length` tokens, read up to FILLED and made up beyond."""
    first = min(length, FILLED + length % 16)
    cache = model.new_cache() if hasattr(model, "new_cache") else DynamicCache(config=model.config)
    ids = torch.zeros(batch, first, dtype=torch.long)
    model(ids, use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache})
    if length > first:
        fill_cache(cache, length)
    return cache


def decoding(model: nn.Module, cache: Cache, batch: int) -> Callable[[], object]:
    """A call that reads STEPS tokens one by one."""
    token = torch.zeros(batch, 1, dtype=torch.long)

    def run() -> None:
        for _ in range(STEPS):
            model(token, use_cache=True, **{CACHE_NAME: cache})

    return run


def add_row(
    rows: list, report: Report, name: str, timings: dict[str, Timing], limit: float | None, per: int = 1
) -> None:
    """Note the times of all models, and the hybrid's over the teacher's as a target where it has a limit."""
    teacher, hybrid, unrounded = (timings[which].median for which in ("teacher", "hybrid", "16 bits"))
    ratio = hybrid / teacher
    rows.append([name, f"{teacher / per:.1f}", f"{hybrid / per:.1f}", f"{ratio:.2f}", f"{unrounded / teacher:.2f}"])
    if limit is not None:
        report.add(f"{name}: time over the teacher's", ratio, limit)


@torch.no_grad()
def generation(models: dict[str, nn.Module], report: Report) -> None:
    """Prompts and single tokens, alone and eight at once."""
    rows = []
    generator = torch.Generator().manual_seed(0)
    sizes = [(length, 1) for length in sorted(PROMPTS.keys() | TOKENS.keys())]
    sizes += [(length, BATCH) for length in TOGETHER]
    for length, batch in sizes:
        ids = torch.randint(1000, 40_000, (batch, length), generator=generator)
        texts = f"{length} tokens" if batch == 1 else f"{batch} texts of {length} tokens"
        limits = (PROMPTS, TOKENS) if batch == 1 else ({length: None}, {length: None})
        if length in limits[0]:
            calls = {which: reading(model, ids) for which, model in models.items()}
            rounds = 1  # eight long prompts take minutes
            if length * batch <= 8192:
                rounds = 2
            if length * batch <= 2048:
                rounds = 5
            add_row(rows, report, f"a prompt, {texts}", interleaved(calls, rounds), limits[0][length])
        if length in limits[1]:
            calls = {
                which: decoding(model, cache_after(model, length, batch), batch) for which, model in models.items()
            }
            add_row(rows, report, f"a token after {texts}", interleaved(calls, 5), limits[1][length], STEPS)
    report.tables.append(Table(["one thread, ms of CPU time", "teacher", "hybrid", "ratio", "ratio in 16 bits"], rows))


def training_step(model: nn.Module) -> Callable[[], object]:
    """A call that runs forward and backward on one packed row."""
    ids = torch.randint(1000, 40_000, (1, TRAINED), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in PACKED])[None]

    def run() -> None:
        model(ids, position_ids=positions, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    return run


def _training_call(folder: str, which: str) -> tuple[Callable, Callable]:
    model = load_model(folder, "float32").train()
    step = training_step(model)
    return step, lambda: model(torch.zeros(1, 8, dtype=torch.long)).logits.sum().backward()


def training(models: dict[str, nn.Module], scratch: Path, report: Report) -> None:
    """Time and peak memory of a training step on TRAINED packed tokens."""
    rows = []
    calls = {which: training_step(model.train()) for which, model in models.items()}
    add_row(rows, report, "a training step, packed", interleaved(calls, 3), TRAINING_LIMIT)
    folders = {"teacher": str(embedded_teacher()), "hybrid": str(scratch)}
    peaks = {which: in_own_process(peak_bytes, _training_call, (folder, which)) for which, folder in folders.items()}
    ratio = peaks["hybrid"] / peaks["teacher"]
    rows.append(
        ["its peak memory, MB", *(f"{peaks[which] / 1e6:.0f}" for which in ("teacher", "hybrid")), f"{ratio:.2f}", ""]
    )
    report.add("a training step, packed: peak memory over the teacher's", ratio, TRAINING_LIMIT)
    report.tables.append(Table(["training, ms of CPU time", "teacher", "hybrid", "ratio", "ratio in 16 bits"], rows))


def measure(output: Path) -> Report:
    """Measure everything above, and the number of weights."""
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    report = Report()
    scratch = output / "scratch-hybrid"
    try:
        models = load_models(scratch)
        sizes = {which: sum(p.numel() for p in model.parameters()) for which, model in models.items()}
        report.add("parameters over the teacher's", sizes["hybrid"] / sizes["teacher"], 1.035)
        generation(models, report)
        training(models, scratch, report)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return report
