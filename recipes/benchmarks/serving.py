"""A hybrid and its teacher in the same vLLM on a CPU: requests that fit in memory, and tokens per second.

Both are in this process and take turns, so that whatever disturbs one disturbs the other; times are the process's CPU
time on one thread, and those of a clock on several. Prompts are random tokens, of which an engine reads 2,048 in a
step, without prefix caching. `--prefix-caching` compares the hybrid with it to the hybrid without. `make bench-vllm`
runs

    python -m recipes.benchmarks.serving FOLDER --make         the project's environment: FOLDER/teacher, FOLDER/hybrid
    python -m recipes.benchmarks.serving FOLDER                that of `make test-vllm`
    python -m recipes.benchmarks.serving FOLDER --threads 2    the same
"""

import argparse
import os
import statistics
import time
from pathlib import Path
from unittest import mock

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # FITTING goes beyond the teacher's positions
    "VLLM_LOGGING_LEVEL": "ERROR",
}
FITTING = (4096, 32768)
WARM_UP, STEPS, ROUNDS = 3, 6, 4
READINGS, FEW = 3, 4096
"""Number of times that prompts of up to FEW tokens in all are timed; more are timed once, since they take minutes."""


def fit(engine, tokens: int) -> float:
    """Number of requests of so many tokens that the engine has memory for at once."""
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    config = engine.vllm_config.model_config
    scheduler = engine.engine_core.engine_core.scheduler
    with mock.patch.object(config, "max_model_len", tokens):
        return get_max_concurrency_for_kv_cache_config(engine.vllm_config, scheduler.kv_cache_config)


def now() -> float:
    """Seconds of CPU time, or of a clock where several threads share the work."""
    if os.environ["OMP_NUM_THREADS"] == "1":
        return time.process_time()
    return time.perf_counter()


def read(engine, context: int, requests: int, seed: int) -> float:
    """Begin requests that decode from then on; return the seconds that their prompts, drawn by the seed, take."""
    import torch
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(seed)
    sampling = SamplingParams(temperature=0, max_tokens=512, ignore_eos=True, detokenize=False)
    for i in range(requests):
        prompt = torch.randint(5, 40000, (context,), generator=generator).tolist()
        engine.add_request(str(i), {"prompt_token_ids": prompt}, sampling)
    started = now()
    reading = {str(i) for i in range(requests)}
    while reading:
        reading -= {output.request_id for output in engine.step() if output.outputs[0].token_ids}
    return now() - started


def steps(engine, count: int) -> list[float]:
    """Seconds of each of some steps."""
    times = []
    for _ in range(count):
        started = now()
        engine.step()
        times.append(now() - started)
    return times


def speeds(engines: list, context: int, requests: int) -> tuple[list[float], list[float]]:
    """Tokens per second of each engine: of prompts, and of the tokens after them, for which engines take turns."""
    names = [str(i) for i in range(requests)]
    readings = READINGS if context * requests <= FEW else 1
    seconds: list[list[float]] = [[] for _ in engines]
    for seed in range(readings + 1):  # the first one compiles for so many requests
        for engine, found in zip(engines, seconds, strict=True):
            engine.abort_request(names)
            engine.step()
            found.append(read(engine, context, requests, seed))
    reading = [context * requests / statistics.median(found[1:]) for found in seconds]
    for engine in engines:
        steps(engine, WARM_UP)
    times: list[list[float]] = [[] for _ in engines]
    for _ in range(ROUNDS):
        for engine, found in zip(engines, times, strict=True):
            found += steps(engine, STEPS)
    for engine in engines:
        engine.abort_request(names)
        engine.step()
        engine.reset_prefix_cache()  # the next prompts drawn by these seeds begin alike
    return reading, [requests / statistics.median(found) for found in times]


def make_models(folder: Path, gguf: str | None, caches: list[str]) -> None:
    """A teacher as vLLM reads it, and hybrids of these shares of its cache.

    Args:
        gguf: a file; None for the embedded teacher. caches: none for the hybrid that the command makes by default.
    """
    from convert.checkpoint.load import read_model
    from convert.options import make_options
    from convert.pipeline import run
    from convert.teachers.teacher import embedded_teacher, gguf_tokenizer

    file = Path(gguf) if gguf else embedded_teacher()
    teacher = read_model(str(file), dtype="auto")
    teacher.hf_quantizer = None  # the weights are whole again, and transformers writes no quantised ones
    del teacher.config.quantization_config
    teacher.save_pretrained(folder / "teacher")
    gguf_tokenizer(file.parent, file.name).save_pretrained(folder / "teacher")
    if not caches:
        run(make_options(str(file), str(folder / "hybrid"), overwrite=True))
    for cache in caches:
        run(make_options(str(file), str(folder / f"hybrid-{cache}"), cache=cache, overwrite=True))


def main() -> None:
    """Print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--make", action="store_true", help="make the models in the folder, and stop")
    parser.add_argument("--teacher", help="a GGUF file of which to make them; the embedded teacher if left out")
    parser.add_argument("--caches", nargs="*", default=[], help="shares of its cache; by default one hybrid of 8 %%")
    cells = ["512x1", "512x8", "4096x1", "4096x8", "8000x1"]  # the teacher's positions end at 8,192
    parser.add_argument("--cells", nargs="*", default=cells, help="tokens x requests; none: memory alone")
    parser.add_argument("--dtype", default="float32", help="type of the weights, and of the cache")
    parser.add_argument("--kv-cache-dtype", default="auto", help="fp8 halves the teacher's cache, and kept heads")
    parser.add_argument(
        "--prefix-caching", action="store_true", help="compare the hybrid with vLLM's prefix caching to itself without"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of both models")
    args = parser.parse_args()
    if args.make:
        make_models(args.folder, args.teacher, args.caches)
        return
    os.environ |= SETTINGS | {"OMP_NUM_THREADS": str(args.threads)}
    from vllm import LLM

    options = {
        "dtype": args.dtype,
        "kv_cache_dtype": args.kv_cache_dtype,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 8,
    }
    options |= {"skip_tokenizer_init": True, "max_model_len": max(FITTING), "enforce_eager": not args.cells}
    pair = {"without": ("hybrid", False), "with": ("hybrid", True)}
    if not args.prefix_caching:
        pair = {name: (name, False) for name in ("teacher", "hybrid")}
    engines = [
        LLM(str(args.folder / name), enable_prefix_caching=caching, **options).llm_engine
        for name, caching in pair.values()
    ]
    first, second = pair
    gibibytes = SETTINGS["VLLM_CPU_KVCACHE_SPACE"]
    print(f"Requests that fit in {gibibytes} GiB\n\n| tokens | {first} | {second} | ratio |\n|---|---|---|---|")
    for tokens in FITTING:
        fitting = [fit(engine, tokens) for engine in engines]
        print(f"| {tokens} | {fitting[0]:.1f} | {fitting[1]:.1f} | {fitting[1] / fitting[0]:.2f} |", flush=True)
    if not args.cells:
        return
    columns = ["context, requests", f"new tokens/s: {first}", second, "ratio"]
    columns += [f"prompts' tokens/s: {first}", second, "ratio"]
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for cell in args.cells:
        context, requests = map(int, cell.split("x"))
        reading, decoding = speeds(engines, context, requests)
        figures = [f"{one:.1f} | {other:.1f} | {other / one:.2f}" for one, other in (decoding, reading)]
        print(f"| {context}, {requests} | {' | '.join(figures)} |", flush=True)


if __name__ == "__main__":
    main()
