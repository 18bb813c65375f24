"""The commands that use a checkpoint: inspect, env, generate. Flags in, text out; cli.py turns errors to one line."""

import json
import os
import sys
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="As JSON on stdout.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub repository.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Tracebacks and library messages.")]


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
    """Say what a checkpoint is: layers, mixers, sizes, cache, provenance. Loads no weights."""
    from .inspect import describe_model, inspect_model

    _print(inspect_model(model, revision), describe_model, as_json)


def env_command(as_json: AsJson = False, verbose: Verbose = False) -> None:
    """Say what this machine has: versions, kernels, and which code runs and why."""
    from .env import describe_environment, environment

    _print(environment(), describe_environment, as_json)


def generate_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, Hub id or GGUF file.")],
    prompt: Annotated[str, typer.Option(help="What to answer.")],
    teacher: Annotated[
        str | None, typer.Option(help="Answer beside this model; `recorded` is the one the checkpoint names.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to say at most.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="Above 0: sample.", min=0.0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text; no chat template.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    revision: Revision = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code from the model's repository.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Answer a prompt, streaming; beside the teacher on request."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported: the bar of dequantising
    import torch
    from transformers.utils import logging

    from ..checkpoint.load import encode, load_model, load_tokenizer
    from .generate import print_stream, recorded_teacher, side_by_side, speak

    logging.disable_progress_bar()
    tokenizer = load_tokenizer(model, revision, trust_remote_code)
    inputs = encode(tokenizer, [prompt], chat=not raw)
    own = load_model(model, dtype, device, revision, trust_remote_code)
    if teacher is None:
        torch.manual_seed(seed)
        _, rate = speak(own, tokenizer, inputs, max_new_tokens, temperature, print_stream)
        print_stream("\n")
        said = [(model, "", rate)]
    else:
        teacher = recorded_teacher(own.config) if teacher == "recorded" else teacher
        theirs = load_tokenizer(teacher, trust_remote_code=trust_remote_code)
        other = load_model(teacher, dtype, device, trust_remote_code=trust_remote_code)
        speakers = [
            (f"teacher ({other.config.model_type})", other, theirs, encode(theirs, [prompt], chat=not raw)),
            (f"hybrid ({own.config.model_type})", own, tokenizer, inputs),
        ]
        said = side_by_side(speakers, max_new_tokens, temperature, seed)
    for name, _, rate in said:
        sys.stderr.write(f"{name}: {rate:.1f} tokens per second\n")


COMMANDS = {"inspect": inspect_command, "env": env_command, "generate": generate_command}
