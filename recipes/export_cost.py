"""What a mixer that stock architectures hold costs: KL to the teacher after the same alignment on the same tokens.

python -m recipes.validation_text runs/text
python -m recipes.export_cost runs/export_cost --train runs/text/wikipedia_5.jsonl --validation runs/text/owt_5.jsonl

Every other layer keeps its attention, whatever the mixer. Hybrids and results.jsonl stay in OUT, and what is there is
not computed again; an interrupted fit goes on.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from convert import convert
from convert.alignment.divergence import kl_of_logits
from convert.loading import load_tokenizer
from convert.teacher import embedded_teacher

from .arguments import TeacherArguments
from .fidelity import append, text_rows
from .load import load_teacher

LENGTH = 512
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "mamba2": {"mixer": "mamba2"},
    "export-ready": {"export_ready": True},
    "export-ready without biases": {"export_ready": True, "gate_bias": False, "out_bias": False},
}


@torch.no_grad()
def main(arguments: argparse.Namespace) -> None:
    """Convert once per variant and measure each on the validation text."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    results, name_of_teacher = arguments.output / "results.jsonl", arguments.model or str(embedded_teacher())
    arguments.output.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line)["variant"] for line in results.read_text().splitlines()] if results.is_file() else []
    named = TeacherArguments(teacher_model_name_or_path=name_of_teacher, teacher_dtype="float32")
    teacher, tokenizer = load_teacher(named, None), load_tokenizer(name_of_teacher)
    ids = text_rows(arguments.validation, tokenizer, LENGTH, arguments.validation_rows)
    for name in arguments.only or VARIANTS:
        if name in done:
            continue
        folder = arguments.output / name.replace(" ", "-")
        if not folder.is_dir():
            convert(
                name_of_teacher, folder, layer_pattern="MA", calibration_dataset=str(arguments.train),
                calibration_tokens=arguments.calibration_tokens, work_dir=f"{folder}.work", **VARIANTS[name],
            )  # fmt: skip
        student = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
        per_row = [kl_of_logits(teacher(row[None]).logits, student(row[None]).logits).mean().item() for row in ids]
        kl = torch.tensor(per_row)
        report = json.loads((folder / "alignment.json").read_text())
        fits = report["held_out_error"].values()
        record = {
            "variant": name,
            "kl": kl.mean().item(),
            "kl_95": 1.96 * kl.std().item() / math.sqrt(len(kl)),
            "held_out_error": {
                step: sum(fit[step] for fit in fits) / len(fits) for step in ("mapped", "solved", "refined")
            },
            "calibration_tokens": report["tokens"],
            "fit_seconds": report["fit_seconds"],
        }
        append(results, record)
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--validation", type=Path, required=True)
    parser.add_argument("--calibration-tokens", type=int, default=8192)
    parser.add_argument("--validation-rows", type=int, default=8)
    parser.add_argument("--model", help="teacher (default: the embedded one)")
    parser.add_argument("--only", choices=VARIANTS, action="append")
    main(parser.parse_args())
