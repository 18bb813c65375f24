"""Rows of chat data as the tokenizer at hand can read them: in turns, or as text where it has no chat template.

A chat template may leave out part of what a row says, as those of reasoning models leave out the reasoning. What it
makes of every row is compared with the row: what would be lost is kept, or the row is named in an error.
"""

import json
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from trl import is_conversational, maybe_convert_to_chatml, maybe_extract_prompt

from convert.teachers.teacher import first_line

BETWEEN_TURNS = "\n\n"
PLACEHOLDER = "ANSWER"
SAID = ("content", "reasoning_content", "reasoning", "thinking")
"""Fields of a message that hold what is said."""
Turns = list[dict[str, Any]]


def content_of(turn: dict[str, Any]) -> str:
    """The text of a message."""
    content = turn.get("content")
    if not isinstance(content, str):
        raise ValueError(
            f"A message of the data has {type(content).__name__} for its content; only text is understood, so leave "
            "such rows out."
        )
    return content


def question_of(row: dict[str, Any]) -> list[dict[str, str]]:
    """The messages before the first answer, from `instruction` and `input`, `messages`, or `prompt`; may be empty."""
    if "instruction" in row:
        parts = (row["instruction"], row.get("input"))
        return [{"role": "user", "content": BETWEEN_TURNS.join(p for p in parts if p)}]
    turns = row.get("messages") or row.get("prompt") or []
    if isinstance(turns, str):
        return [{"role": "user", "content": turns}]
    first_answer = next((i for i, turn in enumerate(turns) if turn["role"] == "assistant"), len(turns))
    return [{"role": turn["role"], "content": content_of(turn)} for turn in turns[:first_answer]]


def as_text(turns: list[dict[str, str]] | str) -> str:
    """The turns' texts one after another, for a model that was never taught turns."""
    if isinstance(turns, str):
        return turns
    return BETWEEN_TURNS.join(content_of(turn) for turn in turns)


def question_ids(question: list[dict[str, str]] | str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a question as the model is asked it: turns with the beginning of an answer, or text as it is."""
    if isinstance(question, str):
        return tokenizer(question).input_ids
    return tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)["input_ids"]


def questions(rows: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    """A data set of prompts alone: messages, or text for a tokenizer without a chat template."""

    def question(row: dict[str, Any], number: int) -> dict[str, Any]:
        turns = question_of(row)
        if tokenizer.chat_template is None:
            return {"prompt": as_text(turns)}
        if turns:
            render(turns, tokenizer, number, add_generation_prompt=True)
        return {"prompt": turns}

    found = rows.map(question, with_indices=True, remove_columns=rows.column_names)
    found = found.filter(lambda row: len(row["prompt"]) > 0)
    if not len(found):
        raise ValueError(f"None of the data's {len(rows)} rows holds a question.")
    return found


def not_too_long(rows: Any, tokenizer: PreTrainedTokenizerBase, limit: int) -> Any:
    """The questions of at most `limit` tokens."""
    if limit < 1:
        raise ValueError("max_completion_length takes all of the model's context; lower it.")

    kept = rows.filter(lambda row: len(question_ids(row["prompt"], tokenizer)) <= limit)
    if not len(kept):
        raise ValueError(
            f"Every prompt of the data is longer than {limit} tokens, what the answer leaves of the context."
        )
    return kept


def render(
    turns: Turns, tokenizer: PreTrainedTokenizerBase, number: int, row: dict[str, Any] | None = None, **options: Any
) -> str:
    """Text of messages by the chat template.

    Args:
        number: of the row, for errors.
        row: the row, whose `tools` and `chat_template_kwargs` go to the template; none by default.
        options: for `apply_chat_template`.

    Raises:
        ValueError: the template refuses the messages, or leaves out what a user says.
    """
    tools = (row or {}).get("tools")
    more = (row or {}).get("chat_template_kwargs") or {}
    if isinstance(tools, str):
        tools = json.loads(tools)
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, tools=tools, **options, **more)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise ValueError(
            f"Row {number} of the data does not fit the chat template ({first_line(error)[:200]}); change such rows, "
            "or leave them out."
        ) from error
    if not _says(text, [turn for turn in turns if turn["role"] == "user"]):
        raise ValueError(
            f"The chat template leaves out part of what the user says in row {number} of the data; leave such rows "
            "out."
        )
    return text


def _says(text: str, turns: Turns) -> bool:
    """Return True if a text contains all that the turns say, whitespace aside."""
    said = "".join(text.split())
    parts = [turn[key] for turn in turns for key in SAID if isinstance(turn.get(key), str)]
    return all("".join(part.split()) in said for part in parts)


def _in_two(row: dict[str, Any], name: str, tokenizer: PreTrainedTokenizerBase, number: int) -> tuple[str, str, bool]:
    """Text of a row's prompt up to where the model answers, text of the answer, and whether the template agrees.

    Where it does not, because it leaves out part of the answer or begins it otherwise than it asks for one, the answer
    is what the row says and what the template ends a turn with.

    Args:
        name: column of the answer.
    """
    turns = row[name]
    if not isinstance(row["prompt"], list) or not isinstance(turns, list):
        raise ValueError(f"Row {number} of the data has messages in one of prompt and {name}, and text in the other.")
    prompt = render(row["prompt"], tokenizer, number, row, add_generation_prompt=True)
    whole = render(row["prompt"] + turns, tokenizer, number, row)
    if whole.startswith(prompt) and _says(whole[len(prompt) :], turns):
        return prompt, whole[len(prompt) :], True
    others = [key for turn in turns for key in turn if key not in ("role", "content") and turn[key]]
    if len(turns) != 1 or others:
        raise ValueError(
            f"The chat template does not render the {name} of row {number} of the data as it stands; make it one "
            "message with all of its text as content."
        )
    example = render([*row["prompt"], turns[0] | {"content": PLACEHOLDER}], tokenizer, number, row)
    _, found, end = example.rpartition(PLACEHOLDER)
    if not found:
        end = tokenizer.eos_token
    return prompt, content_of(turns[0]) + end, False


def faithful_answers(rows: Any, tokenizer: PreTrainedTokenizerBase, completion_only: bool = True) -> Any:
    """Rows of chats as they are, or as token ids and labels where the chat template would change an answer.

    Args:
        completion_only: only completions count in the loss.

    Raises:
        ValueError: the template refuses a row, or leaves out part of what is said in `messages`.
    """
    columns = set(rows.column_names)
    if "messages" in columns and "completion" not in columns:
        rows = rows.remove_columns(list(columns & {"prompt"}))  # which UltraChat has as well, and TRL would take
    first = rows[0]
    asked = {"prompt": first["prompt"]} if "prompt" in first else maybe_convert_to_chatml(dict(first))
    if tokenizer.chat_template is None or not is_conversational(asked):
        return rows

    def faithful(row: Any, number: int) -> dict[str, bool]:
        if "prompt" in row:
            return {"faithful": _in_two(dict(row), "completion", tokenizer, number)[2]}
        turns = maybe_convert_to_chatml(dict(row))["messages"]
        if not _says(render(turns, tokenizer, number, row), turns):
            raise ValueError(
                f"The chat template leaves out part of an answer in row {number} of the data, such as its reasoning; "
                "give such rows as prompt and completion, which are trained on as they stand."
            )
        return {"faithful": True}

    def as_ids(row: Any, number: int) -> dict[str, list[int]]:
        prompt, answer, _ = _in_two(dict(row), "completion", tokenizer, number)
        # the template has written the tokenizer's beginning already
        asked, answered = (tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, answer))
        labels = asked + answered
        if completion_only:
            labels = [-100] * len(asked) + answered
        return {"input_ids": asked + answered, "labels": labels}

    checked = rows.map(faithful, with_indices=True, remove_columns=rows.column_names)
    if all(checked["faithful"]):
        return rows
    return rows.map(as_ids, with_indices=True, remove_columns=rows.column_names)


def pairs(rows: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Preferences as they are, or as text for a tokenizer without a chat template or with one that changes answers."""
    if not is_conversational({"chosen": rows[0]["chosen"]}):
        return rows
    if tokenizer.chat_template is not None:
        return _faithful_pairs(rows, tokenizer)

    def plain(row: Any) -> dict[str, str]:
        prompt, chosen, rejected = (as_text(part) for part in _in_parts(row).values())
        return {"prompt": prompt + BETWEEN_TURNS, "chosen": chosen, "rejected": rejected}

    return rows.map(plain, remove_columns=rows.column_names)


def _in_parts(row: Any) -> dict[str, Any]:
    """The prompt of a preference, the turns that both answers begin with where it has none of its own, and the two."""
    parts = maybe_extract_prompt(dict(row))
    return {name: parts[name] for name in ("prompt", "chosen", "rejected")}


def _faithful_pairs(rows: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    def in_three(row: Any, number: int) -> dict[str, Any]:
        row = dict(row) | _in_parts(row)
        prompt, chosen, same = _in_two(row, "chosen", tokenizer, number)
        _, rejected, also_same = _in_two(row, "rejected", tokenizer, number)
        # TRL lets the tokenizer add its beginning to a text, and ends an answer where it does not end already
        ids = tokenizer(prompt, add_special_tokens=False).input_ids
        if tokenizer(prompt).input_ids != ids:
            prompt = prompt.removeprefix(tokenizer.bos_token or "")
        parts = {"prompt": prompt, "chosen": ended(chosen), "rejected": ended(rejected)}
        return parts | {"faithful": same and also_same}

    def ended(answer: str) -> str:
        if answer.rstrip().endswith(tokenizer.eos_token):
            return answer.rstrip()
        return answer

    rendered = rows.map(in_three, with_indices=True, remove_columns=rows.column_names)
    if all(rendered["faithful"]):
        return rows
    return rendered.remove_columns("faithful")
