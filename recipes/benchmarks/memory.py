"""Peak memory of one sequence of 32,768 tokens, weights included, each model in a process of its own.

The teacher with caches of 16 and of 8 bits beside its default hybrid, all in bfloat16, as resident memory above that
of the interpreter with its libraries. A model reads CHUNK tokens, its cache is made up to the context less CHUNK, and
then CHUNK tokens are read and a few are decoded: a whole prompt, read in chunks, would take the teacher half an hour
and no more memory.
"""

import json
import shutil
from pathlib import Path

import torch

from convert.checkpoint.load import load_model
from convert.memory import return_free_memory
from convert.pipeline import convert
from convert.resolve import few_bits
from convert.teachers.teacher import embedded_teacher
from modeling_llamba.compatibility import CACHE_NAME, cache_of

from ..evaluation.speed import fill_cache
from . import hybrid
from .measure import Report, Table, forget_peak, in_own_process, status_bytes

CONTEXTS = (4096, 32_768)
CHUNK, STEPS = 1024, 4
LIMIT = 1.0
"""Hybrid over the teacher, of either cache."""
INT8 = "teacher, int8 cache"


def make_models(scratch: Path) -> dict[str, str]:
    """Folders or files of the models to measure."""
    teacher = str(embedded_teacher())
    rounded, own = scratch / "int8", scratch / "hybrid"
    convert(teacher, rounded, align="none", overwrite=True, attention_layers="all", placement={"bits": 8})
    convert(teacher, own, align="none", overwrite=True, **hybrid.DEFAULT)
    config = own / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps(fields | few_bits(fields["head_dim"]).config_fields()))
    return {"teacher": teacher, INT8: str(rounded), "hybrid": str(own)}


@torch.no_grad()
def resident_bytes(model: str, context: int) -> int:
    """Peak of resident memory from the loaded model on, above what was resident before it was loaded.

    Args:
        model: its folder or file.
        context: tokens before the first that is decoded.
    """
    torch.set_num_threads(1)
    before = status_bytes("VmRSS")
    loaded = load_model(model, "bfloat16")
    return_free_memory()
    forget_peak()
    ids = torch.arange(CHUNK)[None] % loaded.config.vocab_size
    cache = cache_of(loaded(ids, use_cache=True, logits_to_keep=1))
    fill_cache(cache, context - CHUNK)
    loaded(ids, use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache})
    for token in ids[:, :STEPS].split(1, dim=1):
        loaded(token, use_cache=True, **{CACHE_NAME: cache})
    return status_bytes("VmHWM") - before


def measure(output: Path) -> Report:
    """Measure every model at every context."""
    report = Report()
    scratch = output / "scratch-memory"
    try:
        models = make_models(scratch)
        rows = []
        for context in CONTEXTS:
            peaks = {name: in_own_process(resident_bytes, model, context) for name, model in models.items()}
            rows.append([f"{context:,}", *(f"{peak / 1e6:.0f}" for peak in peaks.values())])
            for other in ("teacher", INT8):
                name = f"{context:,} tokens: peak memory over that of the {other}"
                report.add(name, peaks["hybrid"] / peaks[other], LIMIT)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    report.tables.append(Table(["peak memory, MB, after tokens", *models], rows))
    return report
