"""What alignment costs: one layer of a 1B and of an 8B teacher, extrapolated; and stage 1 tiled against materialised.

One block with random weights of the teacher's shape runs the converter's own code on a few sequences; the parts that
grow with the number of tokens are multiplied up to the default, the solve is not. Layers are placed evenly: choosing
them by score would add a quick fit of every layer. Peak memory is that of a process that holds one block at a time
(`--low-memory`), without the embedding.
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from convert.alignment.activations import ActivationStream
from convert.alignment.closed_form import refine, solve_out_proj
from convert.alignment.mohawk.orientation import attention_rows, matrix_orientation_loss
from convert.alignment.teacher_model import TeacherModel
from convert.options import AlignmentOptions, FitOptions, make_options
from convert.pipeline import open_teacher
from convert.placement.placement import Mixer, everywhere
from convert.plan import hybrid_config
from convert.teachers.teacher import embedded_teacher
from convert.weights.mapping import set_decay

from .measure import Report, Table, forget_peak, in_own_process, interleaved, status_bytes

TEACHERS = {
    "1B (Llama-3.2-1B)": (16, {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32}),
    "8B (Llama-3.1-8B)": (32, {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}),
}
LENGTH, HELD_OUT = 512, 1
ROWS = 3


def one_layer(num_layers: int, shape: dict[str, int], scratch: Path) -> dict[str, float]:
    """Seconds per token and per layer, and peak memory, measured on one block."""
    config = LlamaConfig(**shape, num_hidden_layers=1, num_key_value_heads=8, vocab_size=4096, dtype=torch.bfloat16)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(scratch)
    own = status_bytes("VmRSS")
    forget_peak()
    teacher = teacher_model(str(scratch), low_memory=True)
    ids = torch.randint(4096, (ROWS + HELD_OUT, LENGTH))
    stream = ActivationStream(teacher, ids, HELD_OUT, 10**12)
    teacher.block(0)
    data, streaming = timed(stream.attention_data, 0)
    mixer, settings = teacher.mixer(0), FitOptions(refine_steps=3)
    set_decay(mixer, 0.7)
    _, solving = timed(solve_out_proj, mixer, data, settings.ridges)
    _, fewer = timed(solve_out_proj, mixer, data.fewer(1), settings.ridges)
    _, refining = timed(refine, mixer.requires_grad_(True), data, settings, 0)
    return {
        "num_layers": num_layers,
        "hidden_size": shape["hidden_size"],
        "seconds_per_token": streaming / ids.numel(),
        "solve_seconds_per_token": max(solving - fewer, 0.0) / ((ROWS - 1) * LENGTH),
        "solve_fixed_seconds": fewer,
        "refine_step_seconds": refining / settings.refine_steps,
        "peak_bytes": status_bytes("VmHWM") - own,
    }


def teacher_model(name: str, **options: Any) -> TeacherModel:
    """A teacher that makes a mixer for every layer."""
    asked = make_options(name, "unused", align="closed-form", **options)
    weights = open_teacher(asked)
    teacher = TeacherModel(weights, asked)
    teacher.follow(hybrid_config(weights, everywhere(Mixer(), teacher.num_layers), asked))
    return teacher


def timed(function: Callable, *arguments: Any) -> tuple[Any, float]:
    """What a call returns, and the seconds it takes."""
    started = time.perf_counter()
    return function(*arguments), time.perf_counter() - started


def extrapolated(row: dict[str, float]) -> dict[str, float]:
    """Minutes and memory of a default alignment at 50 %: streaming every layer, fitting half of them."""
    tokens, settings = AlignmentOptions().tokens, FitOptions()
    decays = len(settings.decays) * 12 * LENGTH / tokens  # the decay is chosen on 8 + 4 sequences
    solve = row["solve_fixed_seconds"] * (len(settings.decays) + 2)
    solve += row["solve_seconds_per_token"] * tokens * (2 + decays)
    fit = solve + row["refine_step_seconds"] * settings.refine_steps
    stream = row["seconds_per_token"] * tokens * row["num_layers"]
    return {
        "stream_minutes": stream / 60,
        "fit_minutes_per_layer": fit / 60,
        "total_minutes": (stream + fit * row["num_layers"] / 2) / 60,
        "peak_bytes": row["peak_bytes"] + 8 * tokens * row["hidden_size"],  # and the activations of all tokens
    }


def tiled_over_materialised(length: int) -> float:
    """Stage 1 on one layer of 9 heads of 64: CPU time of a loss and its gradient by tiles over whole matrices."""
    gguf = embedded_teacher()
    teacher = teacher_model(str(gguf))
    mixer, attention = teacher.mixer(3), teacher.block(3).self_attn
    u, rotary = torch.randn(1, length, teacher.config.hidden_size), teacher.rotary(length)

    def materialised() -> None:
        matrix, _ = mixer.materialize(u, rotary)
        ((_, probabilities),) = attention_rows(attention, u, rotary, length)
        (matrix - probabilities).norm(dim=(-2, -1)).mean().backward()

    def tiled() -> None:
        matrix_orientation_loss(mixer, attention, u, rotary, 128)

    timings = interleaved({"tiles": tiled, "matrices": materialised}, 3)
    return timings["tiles"].median / timings["matrices"].median


def measure(output: Path) -> Report:
    """Each size in a process of its own, by the clock and with all threads; then stage 1 on one thread."""
    rows, scratch = [], output / "one-layer"
    for name, teacher in TEACHERS.items():
        costs = extrapolated(in_own_process(one_layer, *teacher, scratch))
        shutil.rmtree(scratch)
        minutes = [f"{costs[key]:.1f}" for key in ("stream_minutes", "fit_minutes_per_layer", "total_minutes")]
        rows.append([name, *minutes, f"{costs['peak_bytes'] / 1e9:.1f}"])
    columns = ["default alignment at 50 %, extrapolated", "minutes to stream", "to fit a layer", "in all", "peak GB"]
    torch.set_num_threads(1)
    tiles = [[f"{length} tokens", f"{tiled_over_materialised(length):.2f}"] for length in (512, 2048)]
    return Report(tables=[Table(columns, rows), Table(["stage 1", "time of tiles over whole matrices"], tiles)])
