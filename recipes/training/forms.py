"""The forms in which users keep data, and what every recipe reads them as: TRL's messages, prompts and answers.

docs/guide/training.md lists what each form becomes.
"""

import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from datasets import Features, Json, LargeList, List, Value
from trl import extract_prompt

from convert.checkpoint.load import function_tools

Row = dict[str, Any]
Turns = list[dict[str, Any]]
Kind = Literal["answers", "pairs", "questions"]
"""Kinds of data: answers to learn (SFT), pairs of them (DPO), questions that a model answers (SeqKD, on-policy)."""

BETWEEN_TURNS = "\n\n"
ROLES = {
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "bing": "assistant",
    "bard": "assistant", "model": "assistant", "function_call": "assistant",
    "tool": "tool", "observation": "tool", "function": "tool", "function_response": "tool", "ipython": "tool",
    "system": "system", "developer": "developer",
}  # fmt: skip
"""Roles of templates by users' names for them."""


class Form(NamedTuple):
    """Columns that make up a form: where a row has the question, and where the answers."""

    question: str | None
    answers: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    """Columns that belong to the question or say it again."""


PAIR = ("chosen", "rejected")
FORMS: dict[Kind, tuple[Form, ...]] = {
    "answers": (
        Form("input_ids", also=("labels", "attention_mask", "completion_mask", "assistant_masks", "seq_lengths")),
        Form("prompt", ("completion",)),
        Form("messages", also=("prompt",)),
        Form("conversations"),
        Form("instruction", ("output",), ("input",)),
        Form("text"),
    ),
    "pairs": (
        Form("prompt", PAIR),
        Form("question", PAIR),
        Form("instruction", PAIR, ("input",)),
        Form("conversations", PAIR),
        Form(None, PAIR),
    ),
    "questions": (
        Form("messages", also=("prompt",)),
        Form("conversations"),
        Form("prompt", also=("completion", *PAIR)),
        Form("question", also=PAIR),
        Form("instruction", also=("input", "output", *PAIR)),
    ),
}
"""The forms of each kind; where data has the columns of several, the first counts."""
BESIDE_TURNS = ("system", "tools", "chat_template_kwargs", "documents")
"""Columns that a chat template renders beside the messages, or as one."""


def form_of(kind: Kind, columns: Iterable[str]) -> Form:
    """The form of rows with these columns.

    Raises:
        ValueError: of this kind there is none.
    """
    found = set(columns)
    needed = [[name for name in (form.question, *form.answers) if name] for form in FORMS[kind]]
    for form, names in zip(FORMS[kind], needed, strict=True):
        if found.issuperset(names):
            return form
    described = "; or ".join(", ".join(names) for names in needed)
    raise ValueError(f"The data has the columns {', '.join(sorted(found))}; needed are {described}.")


def read_rows(rows: Any, kind: Kind) -> Any:
    """Rows in TRL's form.

    Raises:
        ValueError: a row cannot be read, or no row has a prompt.
    """
    if form_of(kind, rows.column_names).question == "input_ids":
        return rows
    read = reader(rows, kind)
    first = read(rows[0], 0)
    types = {name: Json() if name in BESIDE_TURNS else List(Json()) for name in first}
    types |= {name: Value("string") for name, value in first.items() if _is_text(value)}

    def alike(row: Row, number: int) -> Row:
        found = read(row, number)
        if list(map(_is_text, found.values())) != list(map(_is_text, first.values())):
            raise ValueError(f"Rows 0 and {number} of the data differ: one has texts where the other has messages.")
        return found

    found = rows.map(alike, with_indices=True, remove_columns=rows.column_names, features=Features(types))
    if kind != "questions" and "prompt" in types and not any(found["prompt"]):
        raise ValueError(
            "The prompt is empty in every row of the data; give the question as prompt, or as question or instruction."
        )
    return found


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def unused(rows: Any, kind: Kind) -> list[str]:
    """The names of the columns that nothing reads."""
    form = form_of(kind, rows.column_names)
    used = {form.question, *form.answers, *form.also}
    if form.question != "input_ids" and not any(map(_is_text, reader(rows, kind)(rows[0], 0).values())):
        used.update(BESIDE_TURNS)
    return [name for name in rows.column_names if name not in used]


def reader(rows: Any, kind: Kind) -> Callable[[Row, int], Row]:
    """The function that reads a row of these, by its number."""
    form = form_of(kind, rows.column_names)
    readers = {"answers": _answered, "pairs": _pair, "questions": _asked}
    features = rows.features  # not the rows themselves, which `datasets` would hash with the function

    def read(row: Row, number: int) -> Row:
        row = {name: without_filled(value, features[name]) for name, value in row.items()}
        try:
            found = readers[kind](row, form)
            if not any(map(_is_text, found.values())):
                found |= _beside(row)
        except ValueError as error:
            raise ValueError(f"Row {number} of the data {error}; change such rows, or leave them out.") from error
        return found

    return read


def without_filled(value: Any, feature: Any) -> Any:
    """A value without the keys that Arrow adds, since all structs of a column have the same."""
    if isinstance(value, dict) and isinstance(feature, dict):
        return {key: without_filled(inner, feature[key]) for key, inner in value.items() if inner is not None}
    if isinstance(value, list) and isinstance(feature, List | LargeList):
        return [without_filled(inner, feature.feature) for inner in value]
    return value


def _answered(row: Row, form: Form) -> Row:
    if form.question == "text":
        return {"text": _said(row, "text")}
    if not form.answers:
        return {"messages": _with_system(_said(row, form.question), row)}
    prompt, (completion,) = _matched(_question(row, form), [_said(row, form.answers[0])])
    return {"prompt": prompt, "completion": _after(prompt, completion)}


def _pair(row: Row, form: Form) -> Row:
    answers = [_said(row, name) for name in PAIR]
    prompt = None if form.question is None else _question(row, form)
    if all(isinstance(answer, list) and answer[0]["role"] != "assistant" for answer in answers):
        shared = _shared(answers)
        if not shared:
            raise ValueError("has answers to two questions")
        if not isinstance(row.get(form.question), list) or shared[: len(prompt)] == prompt:
            prompt = _with_system(shared, row)
        elif prompt[-len(shared) :] != shared:
            raise ValueError(f"has answers that begin with another question than its {form.question}")
        return {"prompt": prompt, **{name: a[len(shared) :] for name, a in zip(PAIR, answers, strict=True)}}
    if prompt is None:
        if not all(map(_is_text, answers)):
            raise ValueError("has no prompt")
        return extract_prompt(dict(zip(PAIR, answers, strict=True)))
    prompt, answers = _matched(prompt, answers)
    if not prompt and isinstance(prompt, list):
        raise ValueError("has an empty prompt")
    return {"prompt": prompt, **dict(zip(PAIR, (_after(prompt, answer) for answer in answers), strict=True))}


def _asked(row: Row, form: Form) -> Row:
    turns = _question(row, form)
    if isinstance(turns, str):
        turns = [{"role": "user", "content": turns}]
    first_answer = next((i for i, turn in enumerate(turns) if turn["role"] == "assistant"), len(turns))
    return {"prompt": turns[:first_answer]}


def _question(row: Row, form: Form) -> Turns | str:
    """A row's question: a text if it is a `prompt` in words without a column `system` beside it, else messages."""
    value = row[form.question]
    if not isinstance(value, str | None) or form.question in ("messages", "conversations"):
        return _with_system(turns_of(value, form.question), row)
    if form.question == "prompt" and "system" not in row:
        return value or ""
    parts = [value, row.get("input") if form.question == "instruction" else None]
    return _with_system([{"role": "user", "content": BETWEEN_TURNS.join(part for part in parts if part)}], row)


def _with_system(turns: Turns, row: Row) -> Turns:
    """Messages with what the column `system` says before them."""
    system = row.get("system")
    if not system:
        return turns
    if turns and turns[0]["role"] == "system":
        if turns[0]["content"] != system:
            raise ValueError("has one system message in its column and another in its messages")
        return turns
    return [{"role": "system", "content": system}, *turns]


def _said(row: Row, name: str) -> Turns | str:
    """An answer, as a text or as messages with one."""
    value = row[name]
    if isinstance(value, str) and value.strip():
        return value
    turns = [] if isinstance(value, str) else turns_of(value, name)
    answers = [turn for turn in turns if turn["role"] == "assistant"]
    if not answers or not (answers[-1]["content"].strip() or answers[-1].get("tool_calls")):
        raise ValueError(f"has an empty {name}")
    return turns


def _matched(question: Turns | str, answers: list[Turns | str]) -> tuple[Turns | str, list[Turns | str]]:
    """A question and its answers, all in messages if one of them is."""
    if all(map(_is_text, (question, *answers))):
        return question, answers
    if isinstance(question, str):
        question = [{"role": "user", "content": question}] if question else []
    return question, [[{"role": "assistant", "content": a}] if isinstance(a, str) else a for a in answers]


def _shared(answers: list[Turns]) -> Turns:
    """The messages that both of two conversations begin with, their last ones aside."""
    ours, theirs = (answer[:-1] for answer in answers)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))
    return [turn for turn, _ in same]


def _after(question: Turns | str, answer: Turns | str) -> Turns | str:
    """An answer without the question that it repeats."""
    if isinstance(answer, list) and question and answer[: len(question)] == question:
        return answer[len(question) :]
    return answer


def _beside(row: Row) -> Row:
    """Tools and other arguments of a row for the chat template, where it has columns of them."""
    found = {}
    if "tools" in row:
        tools = _from_json(row["tools"], "tools")
        found["tools"] = function_tools(tools) if tools else None
    if {"chat_template_kwargs", "documents"} & row.keys():
        found["chat_template_kwargs"] = _from_json(row.get("chat_template_kwargs"), "chat_template_kwargs") or {}
        if row.get("documents"):
            found["chat_template_kwargs"]["documents"] = _from_json(row["documents"], "documents")
    return found


def turns_of(value: Any, name: str) -> Turns:
    """Messages of a column, as chat templates read them; a single message may stand alone.

    Raises:
        ValueError: how it goes on after "Row N of the data".
    """
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError(f"has no {name}")
    return [_message(each) for each in value]


def _message(given: Any) -> dict[str, Any]:
    """A message with a role of templates, a text for its content, and objects for arguments of calls."""
    if not isinstance(given, dict):
        raise ValueError(f"has {type(given).__name__} in the place of a message")
    turn = {name: value for name, value in given.items() if value is not None}
    called = str(turn.pop("from", turn.get("role")))
    role = ROLES.get(called.lower())
    if role is None:
        raise ValueError(f"has a message of the role {called!r}, where {', '.join(ROLES)} are known")
    content = _text(turn.pop("value", turn.get("content")))
    calls = turn.pop("tool_calls", None) or turn.pop("function_call", None)
    if called.lower() == "function_call":
        calls, content = content, ""
    if content is None and not calls:
        raise ValueError("has a message without content")
    turn |= {"role": role, "content": content or ""}
    if calls:
        calls = _from_json(calls, "function call")
        turn["tool_calls"] = [_call(call) for call in (calls if isinstance(calls, list) else [calls])]
    return turn


def _text(content: Any) -> str | None:
    """Content as a text, which parts of a list make together."""
    if not isinstance(content, list):
        if not isinstance(content, str | None):
            raise ValueError(f"has a message with {type(content).__name__} for its content, where only text is read")
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(f"has a message with a part of type {kind!r}, where only text is read")
    return "".join(part["text"] for part in content)


def _call(call: Any) -> dict[str, Any]:
    """A call of a function, whose arguments are an object, as nearly all templates take them."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not function.get("name"):
        raise ValueError("has a function call without a name")
    arguments = _from_json(function.get("arguments") or {}, "function call")
    if not isinstance(arguments, dict):
        raise ValueError("has a function call whose arguments are no JSON object")
    others = {name: value for name, value in call.items() if function is not call and value is not None}
    return {"type": "function", **others, "function": {**function, "arguments": arguments}}


def _from_json(value: Any, name: str) -> Any:
    """A value that may be given as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value or "null")
    except json.JSONDecodeError as error:
        raise ValueError(f"has a {name} that is no JSON ({error})") from error
