"""The commands that use a checkpoint: inspect, env, generate. Flags in, text out; cli.py turns errors to one line."""

import json
import os
import sys
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub repository.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show tracebacks and library messages.")]


def _print(report, describe, as_json: bool) -> None:
    from rich.console import Console

    if as_json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        Console(highlight=False).print(describe(report), markup=False)


def inspect_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder or Hub id of a hybrid.")],
    revision: Revision = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Show the layers, mixers, sizes, cache and provenance of a hybrid, without loading its weights."""
    from .inspect import describe_model, inspect_model

    _print(inspect_model(model, revision), describe_model, as_json)


def env_command(as_json: AsJson = False, verbose: Verbose = False) -> None:
    """Show versions, devices and kernels of this machine, and which code runs here and why."""
    from .env import describe_environment, environment

    _print(environment(), describe_environment, as_json)


def generate_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, Hub id or GGUF file.")],
    prompt: Annotated[str, typer.Option(help="Text to answer.")],
    teacher: Annotated[
        str | None, typer.Option(help="Answer beside this model; `recorded` is the one the checkpoint names.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Largest number of tokens to generate.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.", min=0.0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text without a chat template.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    revision: Revision = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code from the model's repository.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Answer a prompt, printing as it is generated; beside the teacher on request."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported: the bar of dequantising
    import torch
    from transformers.utils import logging

    from ..checkpoint.load import encode, load_model, load_tokenizer
    from .generate import generate, generate_side_by_side, print_piece, recorded_teacher

    logging.disable_progress_bar()
    tokenizer = load_tokenizer(model, revision, trust_remote_code)
    inputs = encode(tokenizer, [prompt], chat=not raw)
    hybrid = load_model(model, dtype, device, revision, trust_remote_code)
    if teacher is None:
        torch.manual_seed(seed)
        rates = {model: generate(hybrid, tokenizer, inputs, max_new_tokens, temperature, print_piece)}
        print_piece("\n")
    else:
        teacher = recorded_teacher(hybrid.config) if teacher == "recorded" else teacher
        theirs = load_tokenizer(teacher, trust_remote_code=trust_remote_code)
        other = load_model(teacher, dtype, device, trust_remote_code=trust_remote_code)
        models = {
            f"teacher ({other.config.model_type})": (other, theirs, encode(theirs, [prompt], chat=not raw)),
            f"hybrid ({hybrid.config.model_type})": (hybrid, tokenizer, inputs),
        }
        rates = generate_side_by_side(models, max_new_tokens, temperature, seed)
    for name, rate in rates.items():
        sys.stderr.write(f"{name}: {rate:.1f} tokens per second\n")


COMMANDS = {"inspect": inspect_command, "env": env_command, "generate": generate_command}
