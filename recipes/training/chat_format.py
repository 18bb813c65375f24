"""Rows of chat data as the tokenizer at hand can read them: in turns, or as text where it has no chat template.

A chat template may leave out part of what a row says, as those of reasoning models leave out the reasoning. What it
makes of every row is compared with the row: what would be lost is kept, or the row is named in an error.
"""

import copy
import functools
import operator
import re
from collections.abc import Mapping
from typing import Any

from datasets import Json, List, Value
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from trl import is_conversational

from convert.teachers.teacher import first_line

from .forms import BETWEEN_TURNS, PAIR, SAID, SYSTEM_ROLES, Row, Turns, mapped

PLACEHOLDER = "ANSWER"
REASONING_TAG = re.compile(r"<(/?)(\w*think\w*|reasoning)>\s*$")
"""The tag of reasoning that a question may end with, since the template begins or ends the model's reasoning there."""
STRUCTURE = ("role", "type", "id", "tool_call_id")
"""Fields that say how the others belong together, which templates say by their order."""
TOOL_FIELDS = ("name", "description")
"""Fields of a function that a rendering has to show; templates differ in how they write parameters."""
REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
"""Errors of a chat template that does not take a row."""
Place = tuple[str | int, ...]
"""Keys and indices that lead to a text or a number in a row."""


def as_text(turns: Turns, number: int, row: Row) -> str:
    """The turns' texts one after another, for a model that was never taught turns.

    Args:
        number: of the row, for the error where it says more than texts.
    """
    more = row.get("tools") or (row.get("chat_template_kwargs") or {}).get("documents")
    if more or any(path[-1] != "content" for path in _leaves(turns)):
        raise ValueError(
            f"Row {number} of the data says more than texts, and the tokenizer has no chat template; "
            "give it one, or leave such rows out."
        )
    return BETWEEN_TURNS.join(turn["content"] for turn in turns)


def question_ids(
    question: Turns | str, tokenizer: PreTrainedTokenizerBase, row: Row | None = None, number: int = 0
) -> list[int]:
    """Token ids of a question as the model is asked it: turns with the beginning of an answer, or text as it is."""
    if isinstance(question, str):
        return tokenizer(question).input_ids
    text = checked(question, tokenizer, number, row or {}, [], add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False).input_ids


def questions(rows: Any, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any] | None = None) -> Any:
    """A data set of prompts alone: messages, or text where the tokenizer has no chat template or rows have tools.

    Args:
        options: of the chat template, beside those of the rows.
    """
    # TRL's trainer asks without a row's tools and arguments, so that it gets the text
    as_rendered = not {"tools", "chat_template_kwargs"}.isdisjoint(rows.column_names)

    def question(row: Row, number: int) -> Row:
        turns = row["prompt"]
        if tokenizer.chat_template is None:
            return {"prompt": as_text(turns, number, row)}
        if not turns:
            return {"prompt": "" if as_rendered else []}
        row = row | {"chat_template_kwargs": (options or {}) | (row.get("chat_template_kwargs") or {})}
        text = checked(turns, tokenizer, number, row, [], add_generation_prompt=True)
        return {"prompt": without_beginning(text, tokenizer) if as_rendered else turns}

    is_text = as_rendered or tokenizer.chat_template is None
    found = mapped(rows, question, {"prompt": Value("string") if is_text else List(Json())})
    found = found.filter(lambda row: len(row["prompt"]) > 0)
    if not len(found):
        raise ValueError(f"None of the data's {len(rows)} rows holds a question.")
    return found


def without_beginning(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A rendered text without the first token where the tokenizer adds that itself."""
    if tokenizer(text).input_ids == tokenizer(text, add_special_tokens=False).input_ids:
        return text
    return text.removeprefix(tokenizer.bos_token or "")


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
    turns: Turns, tokenizer: PreTrainedTokenizerBase, number: int, row: Row | None = None, **options: Any
) -> str:
    """Text of messages by the chat template.

    Args:
        number: of the row, for errors.
        row: the row, whose `tools` and `chat_template_kwargs` go to the template; none by default.
        options: for `apply_chat_template`.

    Raises:
        ValueError: the template refuses the messages.
    """
    row = row or {}
    more = row.get("chat_template_kwargs") or {}
    try:
        return tokenizer.apply_chat_template(turns, tokenize=False, tools=row.get("tools"), **options, **more)
    except REFUSALS as error:
        raise ValueError(
            f"Row {number} of the data does not fit the chat template ({first_line(error)[:200]}); change such rows, "
            "or leave them out."
        ) from error


def checked(
    asked: Turns, tokenizer: PreTrainedTokenizerBase, number: int, row: Row, answered: Turns, **options: Any
) -> str:
    """Text of a question and what is answered, in which all that the row says has to show.

    Texts of users have to be there as they are. All other texts and numbers are changed, which must change the text;
    of the template's arguments only texts, since a switch may be as it is by default.

    Raises:
        ValueError: the template refuses the row, or leaves out part of it.
    """
    turns = asked + answered
    text = render(turns, tokenizer, number, row, **options)
    if not _says(text, [turn for turn in turns if turn["role"] == "user"]):
        raise ValueError(
            f"The chat template leaves out part of what a user says in row {number} of the data; leave such rows out."
        )
    options |= row.get("chat_template_kwargs") or {}
    more = {name: value for name, value in options.items() if not isinstance(value, int | float)}
    more.pop("documents", None)
    if asked and answered:  # arguments may change only how an answer begins where it is asked for
        more = {}
    said = {"message": turns, "tool": row.get("tools"), "document": options.get("documents"), "argument": more}
    leaves = {path: leaf for path, leaf in _leaves(said).items() if _has_to_show(path, turns, len(asked))}
    leaves |= _ids_out_of_order(turns)
    roles = {turn["role"] for turn in turns}
    is_plain = all(path[0] == "message" and path[2] == "content" for path in leaves)
    if is_plain and "tool" not in roles and _says(text, [turn for turn in turns if turn["role"] in SYSTEM_ROLES]):
        return text

    def changed(changes: Mapping[Place, Any]) -> str:
        new = copy.deepcopy(said)
        for path, value in changes.items():
            functools.reduce(operator.getitem, path[:-1], new)[path[-1]] = value
        arguments = options | new["argument"] | {"documents": new["document"]}
        others = {"tools": new["tool"], "chat_template_kwargs": arguments}
        try:
            return render(new["message"], tokenizer, number, others)
        except ValueError:
            return ""  # what a template refuses it has read

    marks = {path: f"zq{i}zq" for i, path in enumerate(leaves)}
    marked = changed(marks)
    for path, mark in marks.items():
        other = not leaves[path] if isinstance(leaves[path], bool) else mark
        if mark not in marked and changed({path: other}) == text:
            part = f"{'.'.join(map(str, path[2:]))} of " if path[2:] else ""
            raise ValueError(
                f"The chat template leaves out {part}{path[0]} {path[1]} in row {number} of the data; take a template "
                "that renders it, say it in the content, remove a column that holds it, or leave such rows out."
            )
    return text


def _leaves(said: Any, path: Place = ()) -> dict[Place, Any]:
    """Texts and numbers of a row by their places, apart from those that only give structure."""
    if isinstance(said, dict):
        items = [(key, value) for key, value in said.items() if key not in STRUCTURE or "arguments" in path]
    elif isinstance(said, list):
        items = list(enumerate(said))
    else:
        return {} if said is None or said == "" else {path: said}
    return {place: leaf for key, value in items for place, leaf in _leaves(value, (*path, key)).items()}


def _has_to_show(path: Place, turns: Turns, asked: int) -> bool:
    """Return True for what a rendering has to show.

    It may lack reasoning before the last question and a function's parameters, which are missing when the model is
    asked, too, and the name of a result that is the name of a call.

    Args:
        asked: number of the messages that are a question.
    """
    if path[0] == "tool":
        return path[-1] in TOOL_FIELDS and path[2:-1] in ((), ("function",))
    if path[0] == "message" and path[2] == "name" and turns[path[1]]["role"] == "tool":
        calls = [call["function"]["name"] for turn in turns for call in turn.get("tool_calls") or ()]
        return turns[path[1]]["name"] not in calls
    return path[0] != "message" or path[1] >= asked or path[2] not in SAID[1:]


def _ids_out_of_order(turns: Turns) -> dict[Place, Any]:
    """Ids of results that do not come in the order of their calls, by which templates go."""
    ids = [call.get("id") for turn in turns for call in turn.get("tool_calls") or ()]
    results = {("message", i, "tool_call_id"): turn.get("tool_call_id") for i, turn in enumerate(turns)}
    results = {path: of for path, of in results.items() if of is not None and of in ids}
    return {} if list(results.values()) == [of for of in ids if of in results.values()] else results


def _says(text: str, turns: Turns) -> bool:
    """Return True if a text contains all that the turns say, whitespace and results of functions aside."""
    said = "".join(text.split())
    spoken = [turn for turn in turns if turn["role"] != "tool"]  # results may be written as JSON
    parts = [turn[key] for turn in spoken for key in SAID if isinstance(turn.get(key), str)]
    return all("".join(part.split()) in said for part in parts)


def _in_two(row: Row, name: str, tokenizer: PreTrainedTokenizerBase, number: int) -> tuple[str, str, bool]:
    """Text of a row's prompt up to where the model answers, text of the answer, and whether the template agrees.

    Where it does not, because it leaves out part of the answer or begins it otherwise than it asks for one, the answer
    is what the row says and what the template ends a turn with. It goes on from the question: a tag that begins the
    reasoning is not written twice, and an answer without reasoning ends what the question has begun.

    Args:
        name: column of the answer.
    """
    turns = row[name]
    prompt = checked(row["prompt"], tokenizer, number, row, [], add_generation_prompt=True)
    whole = checked(row["prompt"], tokenizer, number, row, turns)
    first = turns[0] | {"content": _going_on(prompt, turns[0], name, number)}
    if whole.startswith(prompt) and _says(whole[len(prompt) :], [first, *turns[1:]]):
        return prompt, whole[len(prompt) :], True
    if len(turns) != 1 or any(path[-1] != "content" for path in _leaves(turns)):
        raise ValueError(
            f"The chat template does not render the {name} of row {number} of the data as it stands; make it one "
            "message with all of its text as content."
        )
    example = render([*row["prompt"], turns[0] | {"content": PLACEHOLDER}], tokenizer, number, row)
    _, found, end = example.rpartition(PLACEHOLDER)
    if not found:
        end = tokenizer.eos_token
    return prompt, first["content"] + end, False


def _going_on(prompt: str, turn: dict[str, Any], name: str, number: int) -> str:
    """Return what an answer says after a question that may have begun its reasoning already.

    Args:
        name: column of the answer.
        number: of the row.
    """
    content, begun = turn["content"], REASONING_TAG.search(prompt)
    if begun is None or any(turn.get(field) for field in SAID[1:]):
        return content
    is_ended, tag = begun.groups()
    reasons = content.lstrip().startswith(f"<{tag}>")
    if is_ended and reasons:
        raise ValueError(
            f"The {name} of row {number} of the data begins with <{tag}>, and the chat template asks for an answer "
            "without reasoning; let chat_template_kwargs ask for it, or leave such rows out."
        )
    if is_ended:
        return content
    if reasons:
        return content.lstrip().removeprefix(f"<{tag}>").lstrip("\n")
    return content if f"</{tag}>" in content else f"\n</{tag}>\n\n{content}"


def faithful_answers(rows: Any, tokenizer: PreTrainedTokenizerBase, completion_only: bool = True) -> Any:
    """Rows of chats as they are, or as token ids and labels where the chat template would change an answer.

    Args:
        rows: as `read_rows` gives them.
        completion_only: only completions count in the loss.

    Raises:
        ValueError: the template refuses a row, or leaves out part of what it says.
    """
    if not is_conversational(rows[0]):
        return rows
    if tokenizer.chat_template is None:
        return _as_texts(rows, ("completion",))

    def faithful(row: Row, number: int) -> dict[str, bool]:
        if "prompt" in row:
            return {"faithful": _in_two(row, "completion", tokenizer, number)[2]}
        turns = row["messages"]
        text = checked([], tokenizer, number, row, turns)
        if not _says(text, [turn for turn in turns if turn["role"] == "assistant"]):
            raise ValueError(
                f"The chat template leaves out part of an answer in row {number} of the data, such as its reasoning; "
                "give such rows as prompt and completion, which are trained on as they stand."
            )
        return {"faithful": True}

    def as_ids(row: Row, number: int) -> dict[str, list[int]]:
        prompt, answer, _ = _in_two(row, "completion", tokenizer, number)
        # the template has written the tokenizer's beginning already
        asked, answered = (tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, answer))
        labels = asked + answered
        if completion_only:
            labels = [-100] * len(asked) + answered
        return {"input_ids": asked + answered, "labels": labels}

    if all(mapped(rows, faithful, {"faithful": Value("bool")})["faithful"]):
        return rows
    return rows.map(as_ids, with_indices=True, remove_columns=rows.column_names)


def _as_texts(rows: Any, answers: tuple[str, ...]) -> Any:
    """Prompts and answers as texts, for a tokenizer without a chat template."""
    if "messages" in rows.column_names:
        raise ValueError("The tokenizer has no chat template for messages; give one, or prompt and completion.")

    def plain(row: Row, number: int) -> Row:
        parts = {name: as_text(row[name], number, row) for name in ("prompt", *answers)}
        return parts | {"prompt": parts["prompt"] + BETWEEN_TURNS}

    return mapped(rows, plain, dict.fromkeys(("prompt", *answers), Value("string")))


def pairs(rows: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Preferences as they are, or as text for a tokenizer without a chat template or with one that changes answers."""
    if not is_conversational(rows[0]):
        return rows
    if tokenizer.chat_template is None:
        return _as_texts(rows, PAIR)

    def in_three(row: Row, number: int) -> Row:
        prompt, chosen, same = _in_two(row, "chosen", tokenizer, number)
        _, rejected, also_same = _in_two(row, "rejected", tokenizer, number)
        # TRL lets the tokenizer add its beginning to a text, and ends an answer where it does not end already
        parts = {"prompt": without_beginning(prompt, tokenizer), "chosen": ended(chosen), "rejected": ended(rejected)}
        return parts | {"faithful": same and also_same}

    def ended(answer: str) -> str:
        if answer.rstrip().endswith(tokenizer.eos_token):
            return answer.rstrip()
        return answer

    types = dict.fromkeys(("prompt", *PAIR), Value("string")) | {"faithful": Value("bool")}
    rendered = mapped(rows, in_three, types)
    if all(rendered["faithful"]):
        return rows
    return rendered.remove_columns("faithful")
