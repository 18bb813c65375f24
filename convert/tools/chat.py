"""A conversation with a model whose cache carries on from turn to turn, so that nothing is read twice."""

import sys
from collections.abc import Callable

import torch
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..checkpoint.load import encode_chats, load_model, prompt_tokenizer
from ..errors import during
from ..options import ChatOptions
from .generate import PieceStreamer, print_piece, sampling


class Conversation:
    """Turns of one conversation, and the cache in which a model holds them.

    Raises:
        ValueError: the tokenizer has no chat template.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        if not tokenizer.chat_template:
            raise ValueError("This model has no chat template; continue a text with `generate --raw --prompt TEXT`.")
        self.model = model
        self.tokenizer = tokenizer
        self.messages: list[dict[str, str]] = []
        self.cache: Cache | None = None
        self.held: list[int] = []
        """Tokens in the cache."""

    def answer(
        self, said: str, max_new_tokens: int, temperature: float, on_text: Callable[[str], None] = lambda piece: None
    ) -> str:
        """The model's answer to what the user says next; each piece of it goes to `on_text` as it is decoded."""
        self.messages.append({"role": "user", "content": said})
        ids = encode_chats(self.tokenizer, [self.messages])["input_ids"].to(self.model.device)
        if ids[0, : len(self.held)].tolist() != self.held:
            self.cache = None  # a state cannot go back, so what this template changes in earlier turns is read again
        made = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=self.cache,
            **sampling(temperature),
            max_new_tokens=max_new_tokens,
            streamer=PieceStreamer(self.tokenizer, on_text),
            return_dict_in_generate=True,
        )
        self.cache = made.past_key_values
        self.held = made.sequences[0, :-1].tolist()
        answer = self.tokenizer.decode(made.sequences[0, ids.shape[1] :], skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": answer})
        return answer


def chat(options: ChatOptions) -> None:
    """Read a line, print the answer to it, until the input ends."""
    logging.disable_progress_bar()
    tokenizer = prompt_tokenizer(options.model, options.revision, options.trust_remote_code)
    with during(f"loading {options.model}"):
        model = load_model(options.model, options.dtype, options.device, options.revision, options.trust_remote_code)
    conversation = Conversation(model, tokenizer)
    torch.manual_seed(options.seed)
    if sys.stdin.isatty():
        sys.stderr.write("Say something; an empty line or Ctrl-D ends the conversation.\n")
    while said := _next_line():
        conversation.answer(said, options.max_new_tokens, options.temperature, print_piece)
        print_piece("\n")


def _next_line() -> str:
    """Read a line from the user; empty at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""
