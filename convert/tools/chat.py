"""A conversation with a model whose cache carries on from turn to turn, so that nothing is read twice.

What a turn changes of the text before it (an answer that is made anew, a question that is edited, a template that
leaves out the reasoning of earlier answers) is read from the last checkpoint on that the texts have in common. There
are two in each turn: where its question begins, and where its answer does, whatever either says.
"""

import json
import re
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from modeling_llamba.compatibility import CACHE_NAME, cache_of
from modeling_llamba.hybrid.cache_checkpoint import CacheCheckpoint

from ..checkpoint.load import encode_chats, function_tools, load_model, parsed_answer, prompt_tokenizer
from ..errors import during
from ..options import ChatOptions
from .generate import PieceStreamer, print_piece, sampling

CHECKPOINTS = 8
"""Checkpoints that are kept, the last ones: those of four turns."""


class Mark(NamedTuple):
    """A checkpoint and its number of tokens."""

    length: int
    checkpoint: CacheCheckpoint


class Conversation:
    """Turns of one conversation, and the cache in which a model holds them.

    Args:
        checkpoints: how many are kept; without any, a conversation that is not the last one going on is read anew.
        tools: functions that the model may call, as chat templates take them.

    Raises:
        ValueError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        checkpoints: int = CHECKPOINTS,
        tools: list[dict[str, Any]] | None = None,
    ):
        if not tokenizer.chat_template:
            raise ValueError("This model has no chat template; continue a text with `generate --raw --prompt TEXT`.")
        self.model = model
        self.tokenizer = tokenizer
        self.tools = tools
        self.messages: list[dict[str, Any]] = []
        self.cache: Cache | None = None
        self.held: list[int] = []
        """Tokens in the cache."""
        self.marks: deque[Mark] = deque(maxlen=checkpoints)

    def answer(
        self,
        said: str,
        max_new_tokens: int,
        temperature: float,
        on_text: Callable[[str], None] = lambda piece: None,
        role: Literal["user", "tool"] = "user",
    ) -> str:
        """The model's answer to what is said next; each piece of it goes to `on_text` as it is decoded.

        Args:
            role: of the message, "tool" for the result of a function (see `shows_result`).
        """
        messages = [*self.messages, {"role": role, "content": said}]
        ids = self._tokens(messages)
        self._go_back(ids)
        inputs = torch.tensor([ids], device=self.model.device)
        try:
            if self.marks.maxlen:
                self._read_with_marks(messages, ids)
            made = self.model.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                **{CACHE_NAME: self.cache},
                **sampling(temperature),
                max_new_tokens=max_new_tokens,
                streamer=PieceStreamer(self.tokenizer, on_text),
                return_dict_in_generate=True,
            )
        except BaseException:
            self._forget()  # the cache may hold more tokens than `held` says
            raise
        self.cache = cache_of(made)
        self.held = made.sequences[0, :-1].tolist()
        new = made.sequences[0, len(ids) :].tolist()
        answer = self._with_marks(new) if self.tools else self.tokenizer.decode(new, skip_special_tokens=True)
        parsed = parsed_answer(self._with_marks(new), self.tokenizer, ids, self.tools)
        self.messages = [*messages, {"role": "assistant", "content": answer} | parsed]
        return answer

    def answer_again(
        self,
        said: str | None,
        max_new_tokens: int,
        temperature: float,
        on_text: Callable[[str], None] = lambda piece: None,
    ) -> str:
        """`answer` in place of the last turn, to what the user said there or to `said`.

        Raises:
            ValueError: there is no turn yet.
        """
        if not self.messages:
            raise ValueError("There is no turn yet to take back; say something first.")
        last = self.messages[-2]
        before = self.messages
        self.messages = before[:-2]
        try:
            return self.answer(
                last["content"] if said is None else said, max_new_tokens, temperature, on_text, last["role"]
            )
        except BaseException:
            self.messages = before
            raise

    def shows_result(self, said: str) -> bool:
        """Return True if the chat template renders this result of a function as the next message."""
        try:
            ids = self._tokens([*self.messages, {"role": "tool", "content": said}])
        except ValueError:  # as gpt-oss's template, where no function was called
            return False
        return "".join(said.split()) in "".join(self.tokenizer.decode(ids).split())

    def _with_marks(self, ids: list[int]) -> str:
        """The text of an answer with the special tokens that mark reasoning or a call, without its end."""
        ends = self.model.generation_config.eos_token_id
        ends = {*(ends if isinstance(ends, list) else [ends]), self.tokenizer.eos_token_id}
        return self.tokenizer.decode([token for token in ids if token not in ends])

    def _tokens(self, messages: list[dict[str, str]]) -> list[int]:
        return encode_chats(self.tokenizer, [messages], self.tools)["input_ids"][0].tolist()

    def _go_back(self, ids: list[int]) -> None:
        """Take the cache back to a beginning of these tokens, of which one at least is left to read."""
        common = min(shared_beginning(self.held, ids), len(ids) - 1)
        if common == len(self.held):
            return
        while self.marks and self.marks[-1].length > common:
            self.marks.pop()
        if not self.marks:
            self._forget()
            return
        self.marks[-1].checkpoint.restore(self.cache)
        self.held = ids[: self.marks[-1].length]

    def _forget(self) -> None:
        """Begin anew, with no token read."""
        self.cache = None
        self.held = []
        self.marks.clear()

    def _read_with_marks(self, turns: list[dict[str, str]], ids: list[int]) -> None:
        """Read the tokens up to where this turn's question begins, and up to where its answer does; keep both."""
        # an answer and a question that begin unlike the real ones, so that only what any would follow is shared
        other = "B" if turns[-1]["content"].startswith("A") else "A"
        question = turns[-1] | {"content": other}
        conversations = [turns[:-1] + [question]]
        conversations.append([*turns, {"role": "assistant", "content": other}, question])
        for messages in conversations:
            try:
                example = self._tokens(messages)
            except ValueError:  # the template takes no result without a call before it
                continue
            length = min(shared_beginning(example, ids), len(ids) - 1)
            if length > len(self.held):
                self._read(ids, length)
            if length == len(self.held) and (not self.marks or self.marks[-1].length < length):
                self.marks.append(Mark(length, CacheCheckpoint(self.cache)))

    @torch.no_grad()
    def _read(self, ids: list[int], length: int) -> None:
        """Let the cache hold the first `length` of these tokens."""
        new = torch.tensor([ids[len(self.held) : length]], device=self.model.device)
        read = self.model(input_ids=new, use_cache=True, logits_to_keep=1, **{CACHE_NAME: self.cache})
        self.cache = cache_of(read)
        self.held = ids[:length]


def shared_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of tokens at the beginning that two texts have in common."""
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length


def chat(options: ChatOptions) -> None:
    """Read a line, print the answer to it, until the input ends."""
    logging.disable_progress_bar()
    tokenizer = prompt_tokenizer(options.model, options.revision, options.trust_remote_code)
    tools = None if options.tools is None else read_tools(options.tools, tokenizer)
    with during(f"loading {options.model}"):
        model = load_model(options.model, options.dtype, options.device, options.revision, options.trust_remote_code)
    conversation = Conversation(model, tokenizer, tools=tools)
    torch.manual_seed(options.seed)
    if sys.stdin.isatty():
        sys.stderr.write(
            "Say something. /retry answers the last line again, /edit TEXT answers TEXT in its place, /result TEXT is "
            "the result of a function that was called; an empty line or Ctrl-D ends the conversation.\n"
        )
    while said := _next_line():
        _take_turn(conversation, said, options)


def read_tools(path: str, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """The functions in a JSON file, all of which the chat template has to tell the model of.

    Raises:
        ValueError: there is no such file, it holds no list of functions, or the template leaves them out.
    """
    try:
        tools = function_tools(json.loads(Path(path).expanduser().read_text()))
        names = [tool["function"]["name"] for tool in tools]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{path} must hold a JSON list of functions, each with a name.") from error
    question = [{"role": "user", "content": "?"}]
    told, bare = (
        tokenizer.decode(encode_chats(tokenizer, [question], each)["input_ids"][0]) for each in (tools, None)
    )
    if not names or not all(told.count(name) > bare.count(name) for name in names):
        raise ValueError(f"This model's chat template does not tell it of the functions in {path}; leave --tools out.")
    return tools


def _take_turn(conversation: Conversation, said: str, options: ChatOptions) -> None:
    """Print the answer to a line, or to what a command makes of the last one."""
    how = options.max_new_tokens, options.temperature, print_piece
    command, _, text = said.partition(" ")
    text = text.strip()
    again = said == "/retry" or (command == "/edit" and text != "")
    if again and not conversation.messages:
        sys.stderr.write("Nothing to retry or edit yet.\n")
    elif again:
        conversation.answer_again(text or None, *how)
        print_piece("\n")
    elif command == "/result" and text and not conversation.shows_result(text):
        sys.stderr.write("This model's chat template leaves out the result here; say it as a question.\n")
    elif command == "/result" and text:
        conversation.answer(text, *how, role="tool")
        print_piece("\n")
    elif re.fullmatch("/[a-z]+", command):
        sys.stderr.write(f"{command} is no command as it stands here; there are /retry, /edit and /result TEXT.\n")
    else:
        conversation.answer(said, *how)
        print_piece("\n")


def _next_line() -> str:
    """Read a line from the user; empty at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""
