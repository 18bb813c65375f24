"""One token at a time on one thread: the recurrent step, whole models at several contexts, what the cache takes.

CPU time. The models are SmolLM2-135M and what it becomes with mixers alone (mapped, not fitted: the same operations);
hybrid.py has those with windows. The teacher has transformers' dynamic cache, as
`generate` gives it one. Caches of a long context are filled with random numbers; the time of a step does not depend on
what is in them.
"""

import itertools
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import logging as transformers_logging

from convert.checkpoint.load import load_model
from convert.pipeline import convert
from convert.teachers.teacher import embedded_teacher
from modeling_llamba.compatibility import CACHE_NAME, cache_of
from modeling_llamba.mixers.ssd import ssd_step
from modeling_llamba.model.cache import cache_nbytes

from ..evaluation.speed import fill_cache
from .measure import Report, Table, Timing, interleaved

SIZES = ((512, 1), (4096, 1), (32768, 1), (4096, 8))  # context and batch
SHORT = 8
NEW_TOKENS = 8
STEP_LIMIT, GENERATE_LIMIT, CONSTANT_LIMIT = 0.25, 1.6, 1.1
HYBRIDS = {"0 % attention": {"attention_layers": "none"}}
PRODUCTS = "its matrix-vector products alone"


def step_timings(heads: int, calls_per_sample: int = 200) -> dict[str, Timing]:
    """One layer's recurrence for many tokens one by one, ours and transformers'; P = N = 64."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_selective_state_update

    logging.getLogger("transformers").setLevel(logging.ERROR)
    x, B, C = (torch.randn(1, heads, 64) for _ in range(3))
    log_a = -torch.rand(1, heads)
    mine = torch.zeros(1, heads, 64, 64)
    theirs = torch.zeros(1, heads, 64, 64)
    dt = -log_a[..., None].expand(1, heads, 64)
    A = -torch.ones(heads, 64, 64)

    def ours() -> None:
        for _ in range(calls_per_sample):
            ssd_step(mine, x, log_a, B, C)

    def transformers() -> None:
        for _ in range(calls_per_sample):
            mamba2_selective_state_update(theirs, x, dt, A, B, C)

    with torch.no_grad():
        return interleaved({"ours": ours, "transformers": transformers}, 15)


def load_models(scratch: Path) -> dict[str, PreTrainedModel]:
    """The teacher and its hybrids in float32."""
    gguf = str(embedded_teacher())
    models = {"teacher": load_model(gguf)}
    for name, options in HYBRIDS.items():
        convert(gguf, scratch, align="none", overwrite=True, **options)
        models[name] = load_model(str(scratch), "float32")
    for model in models.values():
        model.eval().generation_config.eos_token_id = None  # go on whatever comes
    return models


def filled_cache(model: PreTrainedModel, context: int, batch: int) -> Cache:
    """A cache as after `context` tokens, made up beyond the first few."""
    ids = torch.randint(model.config.vocab_size, (batch, SHORT))
    empty = model.new_cache() if hasattr(model, "new_cache") else DynamicCache(config=model.config)
    cache = cache_of(model(ids, use_cache=True, **{CACHE_NAME: empty}))
    fill_cache(cache, context)
    assert cache.get_seq_length() == context
    return cache


def generating(model: PreTrainedModel, cache: Cache, batch: int) -> Callable[[], torch.Tensor]:
    """A call that generates NEW_TOKENS more."""

    def run() -> torch.Tensor:
        ids = torch.full((batch, cache.get_seq_length() + 1), 100)
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0,
            **{CACHE_NAME: cache},
        )  # fmt: skip

    return run


def matrix_vector_products(model: PreTrainedModel, batch: int) -> Callable[[], None]:
    """A call that does NEW_TOKENS times what no decoder can leave out: each matrix times a vector a sequence."""
    weights = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    vectors = [torch.randn(batch, 1, weight.shape[1]) for weight in weights]

    def run() -> None:
        for _ in range(NEW_TOKENS):
            for weight, vector in zip(weights, vectors, strict=True):
                torch.nn.functional.linear(vector, weight)

    return run


@torch.no_grad()
def whole_models(models: dict[str, PreTrainedModel], report: Report) -> None:
    """Milliseconds per step of generate(), tokens per second and cache bytes for each model, context and batch."""
    rows = []
    alone = {}
    for context, batch in SIZES:
        caches = {name: filled_cache(model, context, batch) for name, model in models.items()}
        sizes = {name: f"{cache_nbytes(cache) / 1e6:.1f}" for name, cache in caches.items()}
        calls = {name: generating(models[name], cache, batch) for name, cache in caches.items()}
        calls[PRODUCTS] = matrix_vector_products(models["0 % attention"], batch)
        timings = interleaved(calls, 3)
        for name, timing in timings.items():
            step = Timing(*(value / NEW_TOKENS for value in (timing.median, timing.least, timing.most)))
            speed = f"{1e3 * batch / step.median:.1f}" if name in sizes else ""
            rows.append([f"{context}, {batch}", name, str(step), speed, sizes.get(name, "")])
        if batch == 1:
            alone[context] = {name: timing.median for name, timing in timings.items()}
    columns = ["context, batch", "model", "ms per step (least, most)", "tokens/s", "cache MB"]
    report.tables.append(Table(columns, rows))
    add_targets(alone, report)


def add_targets(alone: dict[int, dict[str, float]], report: Report) -> None:
    """Context to model to milliseconds at batch 1, as ratios."""
    without = "0 % attention"
    shortest = min(alone)
    longest = max(alone)
    for context in (shortest, longest):
        ratio = alone[context][without] / alone[context][PRODUCTS]
        name = f"generate, no attention, context {context}: time over its matrix-vector products"
        report.add(name, ratio, GENERATE_LIMIT)
    ratio = alone[longest][without] / alone[shortest][without]
    report.add(f"generate, no attention: time at {longest} over {shortest}", ratio, CONSTANT_LIMIT)
    for (context, times), name in itertools.product(alone.items(), HYBRIDS):
        report.add(f"generate, {name}, context {context}: time over the teacher", times[name] / times["teacher"], 1.0)


def measure(output: Path) -> Report:
    """The recurrent step, and generate()."""
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    report = Report()
    for heads in (9, 32):
        step = step_timings(heads)
        ratio = step["ours"].median / step["transformers"].median
        report.add(f"recurrent step, {heads} heads: time over transformers'", ratio, STEP_LIMIT)
    scratch = output / "scratch-decode"
    try:
        models = load_models(scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    whole_models(models, report)
    return report
