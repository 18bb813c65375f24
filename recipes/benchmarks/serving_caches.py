"""A teacher with the caches that vLLM has, and its hybrids, in one vLLM on a CPU: requests that fit, quality, speed.

    python -m recipes.benchmarks.serving FOLDER --make [--teacher FILE] --caches 0.15 0.08    in the environment of `make`
    python -m recipes.benchmarks.serving_caches FOLDER [--text WEB,python-code]    in that of `make test-vllm`

The teacher is FOLDER/teacher; all other folders are hybrids. vLLM's caches of 8 and 4 bits need a CPU with AVX-512
or a GPU; here keys and values are rounded as they would be, and kept in the type of the weights. So their speed is not
measured, and their bytes are counted by vLLM's sizes.

Shapes: L length, K key/value heads, P head dim, D model width, V vocabulary.
"""

import argparse
import contextlib
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch

from convert.checkpoint.load import prompt_tokenizer
from convert.fit.probes import plain_tokens
from recipes.evaluation.metrics import Reader, per_token
from recipes.evaluation.recall import hits, needles_probe
from recipes.evaluation.texts import TextSource

from .serving import ROUNDS, SETTINGS, STEPS, WARM_UP, fit, read, steps

FIRST = 512
"""Position from which on tokens are judged."""
NEEDLES = [400, 1500, 3000]
"""Tokens between a needle and the question for it."""
LARGEST_FP8 = 448.0
"""Largest number of float8_e4m3fn; vLLM's scale is 1 unless a checkpoint brings another."""
Round = Callable[[torch.Tensor], torch.Tensor]


def to_fp8(vectors: torch.Tensor) -> torch.Tensor:
    """Keys or values (L, K, P) after `--kv-cache-dtype fp8`."""
    return vectors.clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn).to(vectors.dtype)


def to_int4(vectors: torch.Tensor) -> torch.Tensor:
    """Keys or values (L, K, P) after `--kv-cache-dtype int4_per_token_head`.

    vLLM multiplies by signs and a Hadamard matrix, then rounds each vector to whole numbers from its least to its
    largest (vllm/v1/attention/ops/int4_per_token_head.py). The zero point is a whole number from 0 to 15.
    """
    from vllm.utils.math_utils import largest_power_of_2_divisor
    from vllm.v1.attention.ops.int4_per_token_head import single_rht

    turned = single_rht(vectors.float())
    least, largest = turned.aminmax(dim=-1, keepdim=True)
    scale = ((largest - least) / 15).clamp(min=1e-6)
    zero = (0.5 - least / scale).floor().clamp(0, 15)
    whole = (turned * (1 / scale) + zero + 0.5).floor().clamp(0, 15)
    norm = largest_power_of_2_divisor(vectors.shape[-1])
    return (single_rht((whole - zero) * scale, inverse=True) / norm).to(vectors.dtype)


CACHES: dict[str, tuple[Round | None, Callable[[int], float]]] = {
    "bfloat16": (None, lambda dim: 2 * dim),
    "fp8": (to_fp8, lambda dim: dim),
    "int4_per_token_head": (to_int4, lambda dim: dim / 2 + 4),
}
"""Caches of the teacher: their rounding, and the bytes of a key or a value of so many numbers."""


@contextlib.contextmanager
def rounding(rounded: Round | None) -> Iterator[None]:
    """Round the keys and values of all of vLLM's own attention layers."""
    from vllm.model_executor.layers.attention import Attention

    attend = Attention.forward

    def forward(self, query, key, value, *args, **kwargs):
        key, value = (rounded(t.view(len(t), self.num_kv_heads, -1)).view_as(t) for t in (key, value))
        return attend(self, query, key, value, *args, **kwargs)

    with mock.patch.object(Attention, "forward", forward) if rounded else contextlib.nullcontext():
        yield


def reader(llm, rounded: Round | None = None) -> Reader:
    """vLLM's model in the two steps of `Reader`: hidden states (1, L, D) of a prompt (1, L), and logits (L, V)."""
    (model,) = llm.apply_model(lambda model: model)

    def states(ids: torch.Tensor) -> torch.Tensor:
        from vllm import SamplingParams

        parts = []
        hook = model.register_forward_hook(lambda module, inputs, output: parts.append(output.clone()))
        sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        with rounding(rounded):
            llm.generate([{"prompt_token_ids": ids[0].tolist()}], sampling, use_tqdm=False)
        hook.remove()
        found = torch.cat(parts)
        assert len(found) == ids.shape[1], "vLLM padded a step"
        return found[None]

    return Reader(states, model.compute_logits)


def quality(own: Reader, reference: Reader, texts: list[torch.Tensor], needles) -> list[str]:
    """KL from the reference on each text (rows of token ids), and the share of needles that are found."""
    found = []
    for rows in texts:
        kl = per_token(own, reference, rows, 1).kl[:, FIRST:-1]
        found.append(f"{kl.double().mean().item():.4f}")
    said = hits(own, needles, 1, torch.device("cpu"))
    return [*found, f"{said[needles.answers].double().mean().item():.0%}"]


def speeds(engines: dict[str, object], context: int) -> dict[str, list[str]]:
    """Tokens per second of one request, of its prompt and then of its answer; engines take turns with the answers."""
    times = {name: [] for name in engines}
    prompts = {}
    for name, engine in engines.items():
        read(engine, context, 1, seed=0)
        engine.abort_request(["0"])
        engine.step()
        prompts[name] = context / read(engine, context, 1, seed=1)
        steps(engine, WARM_UP)
    for _ in range(ROUNDS):
        for name, engine in engines.items():
            times[name] += steps(engine, STEPS)
    for engine in engines.values():
        engine.abort_request(["0"])
    return {name: [f"{prompts[name]:.0f}", f"{1 / statistics.median(t):.1f}"] for name, t in times.items()}


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", default="shipped,python-code", help="texts to judge on, with commas between them")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row, and of the prompts that are timed")
    parser.add_argument("--rows", type=int, default=2, help="rows of each text")
    parser.add_argument(
        "--needle-rows", type=int, default=4, help="rows of the first text in which needles are hidden"
    )
    args = parser.parse_args()
    os.environ |= SETTINGS | {"OMP_NUM_THREADS": "1"}
    from vllm import LLM

    tokenizer = prompt_tokenizer(str(args.folder / "teacher"))
    sources = [TextSource(name) for name in args.text.split(",")]
    texts = [source.rows(tokenizer, args.length, args.rows) for source in sources]
    options = {"dtype": "float32", "kv_cache_memory_bytes": 2**30, "max_num_batched_tokens": 2048, "max_num_seqs": 1,
               "enable_prefix_caching": False, "skip_tokenizer_init": True, "max_model_len": args.length + 512,
               "enforce_eager": True}  # fmt: skip
    hybrids = sorted(folder.name for folder in args.folder.iterdir() if folder.name != "teacher")
    llms = {name: LLM(str(args.folder / name), **options) for name in ("teacher", *hybrids)}

    config = llms["teacher"].llm_engine.model_config.hf_config
    prose = sources[0].rows(tokenizer, args.length, args.needle_rows)
    distances = [distance for distance in NEEDLES if distance < args.length - FIRST]
    needles = needles_probe(prose, plain_tokens(config.vocab_size), distances, seed=0)
    reference = reader(llms["teacher"])
    measured = speeds({name: llm.llm_engine for name, llm in llms.items()}, args.length)
    fitting = {name: fit(llm.llm_engine, args.length) for name, llm in llms.items()}

    texts_head = [f"KL on {source.label}" for source in sources]
    head = ["model", "cache", f"requests of {args.length} tokens in 1 GiB", *texts_head, "needles found"]
    print("|", " | ".join([*head, "prompt, tokens/s", "answer, tokens/s"]), "|\n" + "|---" * (len(head) + 2) + "|")
    in_type = torch.float32.itemsize * config.head_dim
    rows = [("teacher", cache, fitting["teacher"] * in_type / size(config.head_dim), reader(llms["teacher"], rounded))
            for cache, (rounded, size) in CACHES.items()]  # fmt: skip
    rows += [(name, "its own", fitting[name], reader(llms[name])) for name in hybrids]
    for name, cache, requests, own in rows:
        speed = ["", ""] if cache in ("fp8", "int4_per_token_head") else measured[name]
        cells = [name, cache, f"{requests:.1f}", *quality(own, reference, texts, needles), *speed]
        print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
