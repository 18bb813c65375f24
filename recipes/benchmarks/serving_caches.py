"""A teacher with the caches that vLLM has, and its hybrids, in one vLLM on a CPU: requests that fit, quality, speed.

    python -m recipes.benchmarks.serving FOLDER --make [--teacher FILE] --caches 0.15 0.08    the project's environment
    python -m recipes.benchmarks.serving_caches FOLDER [--text WEB,python-code]               that of `make test-vllm`

The teacher is FOLDER/teacher; all other folders are hybrids, which are held beside it one after another. vLLM's caches
of 8 and 4 bits need a CPU with AVX-512 or a GPU; here keys and values are rounded as they would be, and kept in the
type of the weights. So their speed is not measured, and their bytes are counted by vLLM's sizes.

Shapes: L length, K key/value heads, P head dim, D model width, V vocabulary.
"""

import argparse
import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch

from convert.checkpoint.load import prompt_tokenizer
from convert.fit.probes import plain_tokens
from recipes.evaluation.metrics import Reader, per_token, remembered
from recipes.evaluation.recall import hits, needles_probe
from recipes.evaluation.texts import TextSource

from .serving import SETTINGS, fit, speeds

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
    if args.length <= FIRST + NEEDLES[0]:
        parser.error(f"--length: needles need more than {FIRST + NEEDLES[0]} tokens.")
    os.environ |= SETTINGS | {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM

    tokenizer = prompt_tokenizer(str(args.folder / "teacher"))
    sources = [TextSource(name) for name in args.text.split(",")]
    texts = [source.rows(tokenizer, args.length, args.rows) for source in sources]
    options = {"dtype": "float32", "max_num_batched_tokens": 2048, "max_num_seqs": 1,
               "enable_prefix_caching": False, "skip_tokenizer_init": True, "max_model_len": args.length + 512,
               "enforce_eager": True}  # fmt: skip

    def requests(folder: Path) -> float:
        """Number of requests that fit where the model's type is bfloat16, in which the teacher's cache is held."""
        llm = LLM(str(folder), **options | {"dtype": "bfloat16"})
        found = fit(llm.llm_engine, args.length)
        del llm
        gc.collect()
        return found

    whole = requests(args.folder / "teacher")
    teacher = LLM(str(args.folder / "teacher"), **options)
    config = teacher.llm_engine.model_config
    head_dim = config.get_head_size()
    prose = sources[0].rows(tokenizer, args.length, args.needle_rows)
    distances = [distance for distance in NEEDLES if distance < args.length - FIRST]
    needles = needles_probe(prose, plain_tokens(config.get_vocab_size()), distances, seed=0)
    exact = remembered(reader(teacher))

    def show(name: str, cache: str, fitting: float, own: Reader, speed: list[str]) -> None:
        cells = [name, cache, f"{fitting:.1f}", *quality(own, exact, texts, needles), *speed]
        print("|", " | ".join(cells), "|", flush=True)

    head = ["model", "cache", f"requests of {args.length} tokens in 1 GiB"]
    head += [*(f"KL on {source.label}" for source in sources), "needles found", "prompt's speed", "answer's speed"]
    print("|", " | ".join(head), "|\n" + "|---" * len(head) + "|")
    for cache, (rounded, size) in CACHES.items():
        fitting = whole * torch.bfloat16.itemsize * head_dim / size(head_dim)
        if rounded is None:
            show("teacher", cache, fitting, exact, ["1", "1"])
        else:
            show("teacher", cache, fitting, reader(teacher, rounded), ["", ""])
    for folder in sorted(args.folder.iterdir()):
        if folder.name != "teacher" and (folder / "config.json").exists():
            fitting = requests(folder)
            llm = LLM(str(folder), **options)
            pairs = speeds([teacher.llm_engine, llm.llm_engine], args.length, 1)
            show(folder.name, "its own", fitting, reader(llm), [f"{own / other:.2f}" for other, own in pairs])
            del llm
            gc.collect()


if __name__ == "__main__":
    main()
