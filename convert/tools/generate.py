"""Let a model speak as it decodes, by itself or beside its teacher."""

import sys
import time
from collections.abc import Callable

import torch
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from ..teachers.teacher import EMBEDDED_TEACHER, embedded_teacher


class Listener(TextStreamer):
    """Collects what is said, and tells `on_text` of every piece."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text, self.text = on_text, ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called by transformers with each finished piece."""
        self.text += text
        self.on_text(text)


def recorded_teacher(config: PreTrainedConfig) -> str:
    """The teacher a checkpoint names, as far as it can be found again.

    Raises:
        ValueError: none is recorded, or it was a local path, of which only the last part is.
    """
    conversion = getattr(config, "conversion", None) or {}
    name = conversion.get("teacher")
    if name is None:
        raise ValueError("This checkpoint records no teacher; name one: --teacher MODEL.")
    if conversion.get("teacher_revision") is not None:
        return name
    if name == EMBEDDED_TEACHER:
        return str(embedded_teacher())
    raise ValueError(f"The recorded teacher, {name}, was a local path; say where it is: --teacher MODEL.")


def speak(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: dict[str, torch.Tensor],
    max_new_tokens: int,
    temperature: float,
    on_text: Callable[[str], None],
) -> tuple[str, float]:
    """Continue one prompt; `on_text` hears each piece. Greedy at temperature 0.

    Returns:
        The text and the tokens per second.
    """
    listener = Listener(tokenizer, on_text)
    options = {"do_sample": temperature > 0} | ({"temperature": temperature} if temperature > 0 else {})
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    started = time.perf_counter()
    ids = model.generate(**inputs, **options, max_new_tokens=max_new_tokens, streamer=listener)
    seconds = time.perf_counter() - started
    return listener.text, (ids.shape[1] - inputs["input_ids"].shape[1]) / seconds


def print_stream(text: str) -> None:
    """A piece on stdout, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def side_by_side(
    speakers: list[tuple[str, PreTrainedModel, PreTrainedTokenizerBase, dict[str, torch.Tensor]]],
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> list[tuple[str, str, float]]:
    """One after the other into columns that fill as they speak; where stdout is no terminal, printed at the end.

    Returns:
        Name, text and tokens per second of each.
    """
    console = Console()
    texts = {name: "" for name, *_ in speakers}

    def panels() -> Columns:
        width = max(console.width // len(texts) - 2, 20)
        return Columns([Panel(text, title=name, width=width) for name, text in texts.items()])

    said = []
    with Live(panels(), console=console, transient=not console.is_terminal) as live:
        for name, model, tokenizer, inputs in speakers:

            def on_text(piece: str, name: str = name) -> None:
                texts[name] += piece
                live.update(panels())

            torch.manual_seed(seed)
            text, rate = speak(model, tokenizer, inputs, max_new_tokens, temperature, on_text)
            said.append((name, text, rate))
    if not console.is_terminal:
        for name, text, _ in said:
            print_stream(f"{name}:\n{text}\n\n")
    return said
