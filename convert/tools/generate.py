"""Print what a model generates as it decodes, by itself or beside its teacher."""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer
from transformers.utils import logging

from ..checkpoint.load import encode, load_model, prompt_tokenizer
from ..errors import during
from ..options import GenerateOptions
from ..teachers.teacher import recorded_teacher


class PieceStreamer(TextStreamer):
    """Passes every finished piece of the answer to a function."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """See `transformers.TextStreamer`."""
        self.on_text(text)


def sampling(temperature: float) -> dict[str, Any]:
    """Arguments for `generate` to sample, or at temperature 0 to decode greedily."""
    if temperature > 0:
        return {"do_sample": True, "temperature": temperature}
    return {"do_sample": False}


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: dict[str, torch.Tensor],
    max_new_tokens: int,
    temperature: float,
    on_text: Callable[[str], None],
) -> float:
    """Continue one prompt, passing each piece of text to `on_text`; returns the tokens per second."""
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    streamer = PieceStreamer(tokenizer, on_text)
    started = time.perf_counter()
    ids = model.generate(**inputs, **sampling(temperature), max_new_tokens=max_new_tokens, streamer=streamer)
    return (ids.shape[1] - inputs["input_ids"].shape[1]) / (time.perf_counter() - started)


def print_piece(text: str) -> None:
    """Write a piece of text to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def generate_side_by_side(
    models: dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, torch.Tensor]]],
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> dict[str, float]:
    """Print the models' answers in columns that fill one after the other; where stdout is no terminal, at the end.

    Returns:
        The tokens per second of each model, by its title.
    """
    console = Console()
    texts = dict.fromkeys(models, "")
    rates = {}

    def panels() -> Columns:
        width = max(console.width // len(texts) - 2, 20)
        return Columns([Panel(text, title=title, width=width) for title, text in texts.items()])

    with Live(panels(), console=console, transient=not console.is_terminal) as live:
        for title, parts in models.items():

            def on_text(piece: str, title: str = title) -> None:
                texts[title] += piece
                live.update(panels())

            torch.manual_seed(seed)
            rates[title] = generate(*parts, max_new_tokens, temperature, on_text)
    if not console.is_terminal:
        for title, text in texts.items():
            print_piece(f"{title}:\n{text}\n\n")
    return rates


def answer(options: GenerateOptions) -> dict[str, float]:
    """Print a model's answer to a prompt, or its teacher's and its own in two columns.

    Returns:
        The tokens per second of each model, by its title.
    """
    logging.disable_progress_bar()
    chat = not options.raw
    trusted = options.trust_remote_code
    tokenizer = prompt_tokenizer(options.model, options.revision, trusted)
    inputs = encode(tokenizer, [options.prompt], chat)
    with during(f"loading {options.model}"):
        hybrid = load_model(options.model, options.dtype, options.device, options.revision, trusted)
    if options.teacher is None:
        torch.manual_seed(options.seed)
        rate = generate(hybrid, tokenizer, inputs, options.max_new_tokens, options.temperature, print_piece)
        print_piece("\n")
        return {options.model: rate}
    teacher = options.teacher
    revision = None
    if teacher == "recorded":
        teacher, revision = recorded_teacher(getattr(hybrid.config, "conversion", None), "--teacher")
    theirs = prompt_tokenizer(teacher, revision, trusted)
    other = load_model(teacher, options.dtype, options.device, revision, trusted)
    models = {
        f"teacher ({other.config.model_type})": (other, theirs, encode(theirs, [options.prompt], chat)),
        f"hybrid ({hybrid.config.model_type})": (hybrid, tokenizer, inputs),
    }
    return generate_side_by_side(models, options.max_new_tokens, options.temperature, options.seed)
