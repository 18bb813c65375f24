"""What alignment costs: one layer of a 1B and of an 8B teacher, extrapolated; and stage 1 tiled against materialised.

python -m recipes.benchmarks.alignment [--large] [--output runs/bench]

One block with random weights of the teacher's shape runs the converter's own code on a few sequences; the parts that
grow with the number of tokens are multiplied up to the default, the solve is not. Layers are placed evenly: choosing
them by score would add a quick fit of every layer. Peak memory is that of a process that holds one block at a time
(`--low-memory`), without the embedding.
"""

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from convert.config import ConversionConfig, make_config
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from convert.alignment.activations import ActivationStream
from convert.alignment.closed_form import FitSettings, refine, solve_out_proj
from convert.alignment.mohawk.orientation import attention_rows, matrix_orientation_loss
from convert.alignment.teacher_model import TeacherModel
from convert.teachers.teacher import find_teacher
from convert.weights.mapping import set_decay
from convert.weights.writer import human_bytes

from .measure import forget_peak, status_bytes

TEACHERS = {
    "1B (Llama-3.2-1B)": (16, {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32}),
    "8B (Llama-3.1-8B)": (32, {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}),
}
LENGTH, HELD_OUT = 512, 1
ROWS = 3


def one_layer(name: str, scratch: Path) -> dict:
    """Seconds per token and per layer, and peak memory, measured on one block."""
    num_layers, shape = TEACHERS[name]
    config = LlamaConfig(**shape, num_hidden_layers=1, num_key_value_heads=8, vocab_size=4096, dtype=torch.bfloat16)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(scratch)
    found, options = find_teacher(str(scratch)), make_config(model=str(scratch), output="unused", attention_ratio=0.5)
    own = status_bytes("VmRSS")
    forget_peak()
    teacher = TeacherModel(found, options, found.open_weights(), low_memory=True)
    ids = torch.randint(4096, (ROWS + HELD_OUT, LENGTH))
    stream = ActivationStream(teacher, ids, HELD_OUT, 10**12)
    teacher.block(0)
    started = time.perf_counter()
    data = stream.attention_data(0)
    streaming = (time.perf_counter() - started) / ids.numel()
    mixer, settings = teacher.mixer(0), FitSettings(refine_steps=3)
    started = time.perf_counter()
    set_decay(mixer, 0.7)
    solve_out_proj(mixer, data, settings.ridges)
    solving = time.perf_counter() - started
    started = time.perf_counter()
    solve_out_proj(mixer, data.fewer(1), settings.ridges)
    fewer = time.perf_counter() - started
    per_token = max(solving - fewer, 0.0) / ((ROWS - 1) * LENGTH)
    started = time.perf_counter()
    refine(mixer.requires_grad_(True), data, settings, 0)
    step = (time.perf_counter() - started) / settings.refine_steps
    return {"num_layers": num_layers, "seconds_per_token": streaming, "solve_seconds_per_token": per_token,
            "solve_fixed_seconds": fewer, "refine_step_seconds": step,
            "peak_bytes": status_bytes("VmHWM") - own}  # fmt: skip


def extrapolated(row: dict) -> dict:
    """Seconds of a default alignment at 50 %: streaming every layer, fitting half of them."""
    defaults = {field.name: field.default for field in dataclasses.fields(ConversionConfig)}
    tokens, settings = defaults["calibration_tokens"], FitSettings()
    decays = len(settings.decays) * 12 * LENGTH / tokens  # the decay is chosen on 8 + 4 sequences
    solve = row["solve_fixed_seconds"] * (len(settings.decays) + 2)
    solve += row["solve_seconds_per_token"] * tokens * (2 + decays)
    fit = solve + row["refine_step_seconds"] * settings.refine_steps
    stream = row["seconds_per_token"] * tokens * row["num_layers"]
    activations = tokens * row["hidden_size"] * 8 if "hidden_size" in row else 0
    return {
        "stream_minutes": stream / 60,
        "fit_minutes_per_layer": fit / 60,
        "total_minutes": (stream + fit * row["num_layers"] / 2) / 60,
        "activation_bytes": activations,
    }


def tiled_against_materialised(length: int) -> dict:
    """Stage 1 on one layer of 9 heads of 64: seconds of a loss and its gradient, whole matrices and tiles."""
    from convert.teachers.teacher import embedded_teacher

    gguf = embedded_teacher()
    found, options = find_teacher(str(gguf)), make_config(model=str(gguf), output="unused", attention_ratio=0.5)
    teacher = TeacherModel(found, options, found.open_weights())
    mixer, attention = teacher.mixer(3), teacher.block(3).self_attn
    u, rotary = torch.randn(1, length, teacher.config.hidden_size), teacher.rotary(length)

    def materialised() -> None:
        matrix, _ = mixer.materialize(u, rotary)
        ((_, probabilities),) = attention_rows(attention, u, rotary, length)
        (matrix - probabilities).norm(dim=(-2, -1)).mean().backward()

    def seconds(function) -> float:
        function()
        started = time.perf_counter()
        for _ in range(3):
            function()
        return (time.perf_counter() - started) / 3

    whole, tiles = seconds(materialised), seconds(lambda: matrix_orientation_loss(mixer, attention, u, rotary, 128))
    return {"length": length, "materialised_seconds": whole, "tiled_seconds": tiles, "ratio": tiles / whole}


def main(output: Path, large: bool = False) -> None:
    """Measure each size in a process of its own and save alignment.json; the 8B one, `large`, takes minutes."""
    output.mkdir(parents=True, exist_ok=True)
    console, rows = Console(), []
    table = Table(
        "teacher", "stream", "one layer", "in all", "peak memory", title="default alignment at 50 %, this CPU"
    )
    for name, (_, shape) in list(TEACHERS.items())[: None if large else 1]:
        scratch = output / "one-layer"
        command = [sys.executable, "-m", "recipes.benchmarks.alignment", "--one-layer", name, "--output", str(scratch)]
        measured = json.loads(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        )
        row = {"teacher": name, "hidden_size": shape["hidden_size"]} | measured
        rows.append(row | extrapolated(row))
        shutil.rmtree(scratch, ignore_errors=True)
        peak = rows[-1]["peak_bytes"] + rows[-1]["activation_bytes"]
        table.add_row(
            name,
            f"{rows[-1]['stream_minutes']:.0f} min",
            f"{rows[-1]['fit_minutes_per_layer']:.1f} min",
            f"{rows[-1]['total_minutes']:.0f} min",
            human_bytes(peak),
        )
    console.print(table)
    tiles = [tiled_against_materialised(length) for length in (512, 2048)]
    table = Table("length", "materialised s", "tiled s", "ratio", title="stage 1, one layer, loss and gradient")
    for row in tiles:
        table.add_row(str(row["length"]), f"{row['materialised_seconds']:.2f}", f"{row['tiled_seconds']:.2f}",
                      f"{row['ratio']:.2f}")  # fmt: skip
    console.print(table)
    (output / "alignment.json").write_text(json.dumps({"one_layer": rows, "stage_1": tiles}, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/bench"))
    parser.add_argument("--large", action="store_true", help="the 8B teacher as well")
    parser.add_argument("--one-layer", choices=TEACHERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one_layer:
        print(json.dumps(one_layer(arguments.one_layer, arguments.output)))
    else:
        main(arguments.output, arguments.large)
