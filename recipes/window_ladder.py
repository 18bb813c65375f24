"""Window and sinks alone, the mixer alone, and both in one layer, at equal bytes: likelihood by position, recall.

python -m recipes.validation_text runs/text
python -m recipes.window_ladder runs/window --train runs/text/wikipedia_5.jsonl --validation runs/text/owt_5.jsonl

Rows: softmax attention to a window and 4 sinks in the replaced layers, for several windows, with nothing fitted; the
closed-form mixer alone; both in one layer, fitted. Columns: the layers of `--layers` replaced, and all of them.
Results go to OUT/results.jsonl with the bytes that a replaced layer keeps for one sequence; what is there is not
computed again.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import yaml
from transformers.utils import logging

from convert.alignment import ClosedFormAligner
from convert.alignment.alignment import load_tokenizer
from convert.cache_size import cache_bytes
from convert.config import make_config
from convert.teacher import embedded_teacher, find_teacher

from .alignment_ladder import windowed
from .fidelity import Yardstick, append, summary, text_rows

SINKS = 4
# chosen by `recipes.layer_scores`: kl+recall in three rounds, half of SmolLM2's layers
LAYERS = (0, 4, 5, 6, 7, 9, 13, 14, 15, 21, 24, 25, 26, 27, 28)


def layer_bytes(config, length: int) -> int:
    """Bytes a replaced layer keeps for a sequence of so many tokens, in float32."""
    return cache_bytes(config, length, torch.float32)[1] // config.num_hidden_layers


def aligner_for(arguments: argparse.Namespace, window: int | None) -> ClosedFormAligner:
    """Fits of every layer's mixer, beside that window or alone, kept in OUT/work."""
    settings = arguments.output / "align.yaml"
    held_out = max(2, 2048 // arguments.length)
    fit = {"refine_steps": arguments.refine_steps, "refine_sequences": max(1, 1024 // arguments.length)}
    settings.write_text(
        yaml.safe_dump({"sequence_length": arguments.length, "held_out_sequences": held_out, "fit": fit})
    )
    options = make_config(
        model=arguments.model or str(embedded_teacher()), output="unused", attention_ratio=0.0,
        layer_selection="uniform", calibration_dataset=str(arguments.train), window=window,
        shared_state=arguments.shared_state, calibration_tokens=arguments.calibration_tokens,
        work_dir=str(arguments.output / "work"), align_config=str(settings),
    )  # fmt: skip
    found = find_teacher(options.model)

    def progress(what: str, done: int, total: int) -> None:
        if done % 10 == 0:
            print(f"  {time.strftime('%H:%M:%S')} {what} {done}/{total}", flush=True)

    return ClosedFormAligner(found, options, found.open_weights(), progress)


def main(arguments: argparse.Namespace) -> None:
    """Fit what is not fitted, measure what is not measured, print."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    arguments.output.mkdir(parents=True, exist_ok=True)
    results_file = arguments.output / "results.jsonl"
    lines = results_file.read_text().splitlines() if results_file.is_file() else []
    done = {(record["row"], tuple(record["layers"])) for record in map(json.loads, lines)}
    alone = aligner_for(arguments, None)
    teacher, tokenizer = alone.model, load_tokenizer(alone.teacher, trust_remote_code=False)
    short = text_rows(arguments.validation, tokenizer, 512, arguments.short_rows)
    long = text_rows(arguments.validation, tokenizer, arguments.long, arguments.long_rows)
    yardstick = Yardstick(teacher.whole(), tokenizer, short, long)
    choices = [list(arguments.layers), list(range(teacher.num_layers))]

    def record(row: str, layers: list[int], nbytes: int, seconds: float, figures: dict) -> None:
        append(results_file, {"row": row, "layers": layers, "bytes": nbytes, "seconds": round(seconds)} | figures)
        print(f"{row}, {len(layers)} layers, {nbytes / 1e3:.0f} kB: {summary(figures)}", flush=True)

    per_token = 2 * teacher.config.num_key_value_heads * teacher.config.head_dim * 4
    for window in arguments.windows:
        for layers in choices:
            row = f"window {window} + {SINKS} sinks"
            if (row, tuple(layers)) not in done:
                figures = yardstick.measure(windowed(teacher, layers, window, SINKS))
                record(row, layers, per_token * (window + SINKS - 1), 0, figures)
    for window in arguments.beside:
        row = "mixer alone" if window == 0 else f"mixer beside window {window} + {SINKS} sinks"
        row += ", shared state" if arguments.shared_state else ""
        if all((row, tuple(layers)) in done for layers in choices):
            continue
        started, aligner = time.perf_counter(), alone if window == 0 else aligner_for(arguments, window)
        fits = aligner.fit(list(range(teacher.num_layers)), aligner.settings.fit)
        seconds = time.perf_counter() - started
        errors = [fit.refined for _, fit in fits.values()]
        print(f"{row}: mean held-out error {sum(errors) / len(errors):.3f}, {seconds:.0f} s", flush=True)
        for layers in choices:
            student = aligner.model.hybrid({layer: fits[layer][0] for layer in layers})
            figures = yardstick.measure(Yardstick.final_hidden(student), student)
            record(row, layers, layer_bytes(aligner.model.mixer_plan.config, arguments.long), seconds, figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--validation", type=Path, required=True)
    parser.add_argument("--model", help="teacher (default: the embedded one)")
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS, help="layers to replace")
    parser.add_argument("--windows", type=int, nargs="*", default=(32, 92, 128, 160), help="windows alone")
    parser.add_argument("--beside", type=int, nargs="*", default=(32, 0), help="windows beside a mixer; 0 is none")
    parser.add_argument("--shared-state", action="store_true", help="one state per key/value head")
    parser.add_argument("--length", type=int, default=1024, help="tokens per calibration sequence")
    parser.add_argument("--calibration-tokens", type=int, default=30720)
    parser.add_argument("--refine-steps", type=int, default=120)
    parser.add_argument("--short-rows", type=int, default=8)
    parser.add_argument("--long", type=int, default=2048)
    parser.add_argument("--long-rows", type=int, default=3)
    main(parser.parse_args())
