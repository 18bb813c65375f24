"""One token at a time: the recurrent step, whole models at several contexts, what the cache takes.

python -m recipes.benchmarks.decode [--output runs/bench]

One thread, CPU time, interleaved, medians. The models are SmolLM2-135M and what it becomes with no and with half of
its attention, and by default, with a quarter of the cache (mapped, not fitted: the same operations). The teacher has
transformers' dynamic cache, as `generate` gives it one. Caches of a long context are filled with random numbers; the
time of a step does not depend on what is in them.
"""

import argparse
import logging
import shutil
from dataclasses import asdict
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import logging as transformers_logging

import modeling_llamba  # noqa: F401 (registers the model)
from convert.pipeline import convert
from convert.placement.cache import cache_bytes
from convert.placement.heads import as_text, query_heads
from convert.plan import human_bytes
from convert.teachers.teacher import embedded_teacher
from modeling_llamba.hybrid_cache import cache_nbytes
from modeling_llamba.ssd import ssd_step

from ..evaluation.timing import fill_cache
from ..evaluation.timing import speed as side_by_side
from .measure import Target, Timing, interleaved, save_report

CONTEXTS = (512, 4096, 32768)
PREFILL = 512
SHORT = 8
NEW_TOKENS = 8
STEP_LIMIT, GENERATE_LIMIT, CONSTANT_LIMIT = 0.25, 1.6, 1.1
# what the default chooses for SmolLM2 (docs/hybrid_layers.md); its search is not what is measured here
KEPT = ((3, 1), (4, 0), (5, 2), (7, 2), (8, 0), (14, 1), (15, 2), (17, 0), (17, 1), (18, 2), (19, 1), (20, 1), (20, 2),
        (22, 2), (23, 0), (23, 2), (24, 0))  # fmt: skip
HEADS = as_text(query_heads(KEPT, 3))
HYBRIDS = {
    "0 % attention": {"attention_ratio": 0.0},
    "50 % attention": {"attention_ratio": 0.5, "layer_selection": "uniform"},
    "window, state, 17 heads": {
        "attention_layers": "",
        "window": 102,
        "shared_state": True,
        "attention_heads": HEADS,
    },
}


def step_timings(heads: int, calls_per_sample: int = 200) -> dict[str, Timing]:
    """One layer's recurrence for one token, ours and transformers', in microseconds; P = N = 64."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_selective_state_update

    logging.getLogger("transformers").setLevel(logging.ERROR)
    x, B, C = (torch.randn(1, heads, 64) for _ in range(3))
    log_a, mine, theirs = -torch.rand(1, heads), torch.zeros(1, heads, 64, 64), torch.zeros(1, heads, 64, 64)
    dt, A = -log_a[..., None].expand(1, heads, 64), -torch.ones(heads, 64, 64)

    def many(step):
        def run():
            for _ in range(calls_per_sample):
                step()

        return run

    with torch.no_grad():
        timings = interleaved(
            {
                "ours": many(lambda: ssd_step(mine, x, log_a, B, C)),
                "transformers": many(lambda: mamba2_selective_state_update(theirs, x, dt, A, B, C)),
            },
            15,
        )
    scale = 1e3 / calls_per_sample
    return {n: Timing(t.median * scale, t.least * scale, t.most * scale) for n, t in timings.items()}


def load_models(scratch: Path) -> dict[str, PreTrainedModel]:
    """The teacher and its hybrids in float32."""
    gguf = embedded_teacher()
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # in safetensors: a GGUF file takes ten seconds each time it is read
    plain = {k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    models = {"teacher": LlamaForCausalLM(LlamaConfig(**plain))}
    models["teacher"].load_state_dict(loaded.state_dict())
    models["teacher"].save_pretrained(scratch / "teacher")
    del loaded
    for i, (name, options) in enumerate(HYBRIDS.items()):
        folder = scratch / f"hybrid-{i}"
        convert(str(scratch / "teacher"), folder, align="none", overwrite=True, **options)
        models[name] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for model in models.values():
        model.eval().generation_config.eos_token_id = None  # go on whatever comes
    return models


def filled_cache(model: PreTrainedModel, context: int, batch: int) -> Cache:
    """A cache as after `context` tokens, made up beyond the first few."""
    first = max(SHORT, (getattr(model.config, "hybrid_window", None) or 0) + getattr(model.config, "hybrid_sinks", 0))
    ids = torch.randint(model.config.vocab_size, (batch, first))
    empty = model.new_cache() if hasattr(model, "new_cache") else DynamicCache(config=model.config)
    cache = model(ids, past_key_values=empty, use_cache=True).past_key_values
    fill_cache(cache, context)
    assert cache.get_seq_length() == context
    return cache


def generating(model: PreTrainedModel, cache: Cache, batch: int):
    """A call that generates NEW_TOKENS more."""

    def run():
        ids = torch.full((batch, cache.get_seq_length() + 1), 100)
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=NEW_TOKENS,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip

    return run


def matrix_vector_products(model: PreTrainedModel, batch: int):
    """A call that does NEW_TOKENS times what no decoder can leave out: each matrix times a vector a sequence."""
    weights = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    vectors = [torch.randn(batch, 1, weight.shape[1]) for weight in weights]

    def run():
        for _ in range(NEW_TOKENS):
            for weight, vector in zip(weights, vectors, strict=True):
                torch.nn.functional.linear(vector, weight)

    return run


def needed_bytes(models: dict[str, PreTrainedModel], context: int, batch: int) -> dict[str, int]:
    """Of each model's cache, the smallest first."""
    hybrids = {name: model for name, model in models.items() if name != "teacher"}
    sizes = {name: batch * cache_bytes(model.config, context, torch.float32)[1] for name, model in hybrids.items()}
    sizes["teacher"] = batch * cache_bytes(next(iter(hybrids.values())).config, context, torch.float32)[0]
    return dict(sorted(sizes.items(), key=lambda item: item[1]))


@torch.no_grad()
def whole_models(models: dict[str, PreTrainedModel]) -> tuple[list[dict], dict[str, str]]:
    """Milliseconds per step, tokens per second and cache bytes for each model, context and batch."""
    rows, skipped = [], {}
    for batch in (1, 8):
        for context in CONTEXTS:
            sizes, room = needed_bytes(models, context, batch), psutil.virtual_memory().available / 2.5
            fitting = [name for name in models if sum(s for s in sizes.values() if s <= sizes[name]) <= room]
            for name in models.keys() - fitting:
                skipped[f"{name}, context {context}, batch {batch}"] = f"the cache takes {human_bytes(sizes[name])}"
            caches = {name: filled_cache(models[name], context, batch) for name in fitting}
            sizes = {name: cache_nbytes(cache) for name, cache in caches.items()}
            calls = {name: generating(models[name], cache, batch) for name, cache in caches.items()}
            calls["products"] = matrix_vector_products(models["0 % attention"], batch)
            timings = interleaved(calls, 5 if batch == 1 and context < CONTEXTS[-1] else 3)
            per_step = {n: {k: v / NEW_TOKENS for k, v in asdict(t).items()} for n, t in timings.items()}
            rows.append({"context": context, "batch": batch, "ms_per_step": per_step, "cache_bytes": sizes})
    return rows, skipped


def main(output: Path) -> None:
    """Measure, print and save decode.json."""
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    console, targets, steps = Console(), [], {}
    table = Table("heads", "ours us", "transformers us", "ratio", title="one layer's recurrent step")
    for heads in (9, 32):
        steps[heads] = step_timings(heads)
        ratio = steps[heads]["ours"].median / steps[heads]["transformers"].median
        targets.append(Target(f"recurrent step, {heads} heads: time over transformers'", ratio, STEP_LIMIT))
        table.add_row(str(heads), *(f"{t.median:.0f}" for t in steps[heads].values()), f"{ratio:.2f}")
    console.print(table)
    scratch = output / "scratch-decode"
    try:
        models = load_models(scratch)
        rows, skipped = whole_models(models)
        whole = side_by_side(models, 1, PREFILL, NEW_TOKENS, 1)  # as recipes.evaluate measures it
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    table = Table("context", "batch", "model", "ms per step", "tokens/s", "cache", title="generate(), SmolLM2-135M")
    for row in rows:
        for name, times in row["ms_per_step"].items():
            speed = f"{row['batch'] * 1e3 / times['median']:.1f}"
            spread = f"{times['median']:.1f} ({times['least']:.1f}-{times['most']:.1f})"
            size = human_bytes(row["cache_bytes"][name]) if name in row["cache_bytes"] else "-"
            cells = [str(row["context"]), str(row["batch"])] if name == next(iter(row["ms_per_step"])) else ["", ""]
            table.add_row(*cells, name, spread, speed, size)
    console.print(table)
    table = Table(
        "prompt",
        "model",
        "tokens/s read",
        "said",
        "cache",
        title="prefill and decoding, as recipes.evaluate measures them",
    )
    for row in whole:
        read, said = (row[f"{what}_tokens_per_second"] for what in ("prefill", "decode"))
        size = human_bytes(row["cache_bytes"])
        table.add_row(str(row["context"]), row["which"], f"{read:.0f}", f"{said:.1f}", size)
    console.print(table)
    alone = {row["context"]: row["ms_per_step"] for row in rows if row["batch"] == 1}
    for context in (CONTEXTS[0], CONTEXTS[-1]):
        if context in alone:
            ratio = alone[context]["0 % attention"]["median"] / alone[context]["products"]["median"]
            name = f"generate, no attention, context {context}: time over its matrix-vector products"
            targets.append(Target(name, ratio, GENERATE_LIMIT))
    if {CONTEXTS[0], CONTEXTS[-1]} <= alone.keys():
        ratio = alone[CONTEXTS[-1]]["0 % attention"]["median"] / alone[CONTEXTS[0]]["0 % attention"]["median"]
        targets.append(Target("generate, no attention: time at 32k over 512", ratio, CONSTANT_LIMIT))
    for context, name in ((c, n) for c in alone for n in HYBRIDS):
        ratio = alone[context][name]["median"] / alone[context]["teacher"]["median"]
        targets.append(Target(f"generate, {name}, context {context}: time over the teacher", ratio, 1.0))
    for what, reason in skipped.items():
        console.print(f"{what}: skipped, {reason}", highlight=False)
    as_rows = {heads: {n: asdict(t) for n, t in timings.items()} for heads, timings in steps.items()}
    save_report(output, "decode", targets, step_us=as_rows, generate=rows, whole=whole, skipped=skipped)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/bench"))
    main(parser.parse_args().output)
