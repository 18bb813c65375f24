"""The forms in which users keep data, and what every recipe reads them as: TRL's messages, prompts and answers.

docs/guide/training.md lists what each form becomes.
"""

import contextlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from datasets import Features, Json, LargeList, List, Value

from convert.checkpoint.load import function_tools

Row = dict[str, Any]
Turns = list[dict[str, Any]]
Kind = Literal["answers", "pairs", "questions"]
"""Kinds of data: answers to learn (SFT), pairs of them (DPO), questions that a model answers (SeqKD, on-policy)."""

BETWEEN_TURNS = "\n\n"
ROLES = {
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "bing": "assistant",
    "bard": "assistant", "model": "assistant", "ai": "assistant",
    "function_call": "assistant", "tool_call": "assistant",
    "tool": "tool", "observation": "tool", "function": "tool", "function_response": "tool", "tool_response": "tool",
    "ipython": "tool",
    "system": "system", "developer": "developer",
}  # fmt: skip
"""Roles of templates by users' names for them."""
CALLERS = ("function_call", "tool_call")
"""Roles whose content is a call."""
SAID = ("content", "reasoning_content", "reasoning", "thinking", "tool_plan")
"""Fields of a message that hold what is said."""
FIELDS = (*SAID, "role", "name", "tool_calls", "tool_call_id")
"""Fields of a message that are read; the others are left out."""
SAME_FIELDS = ("from", "value", "function_call")
"""Users' names for some of them."""
SHOWN = 5
"""Numbers of refused rows in an error."""
ANSWERER = re.compile(
    r"(?:^\W*|<\S+?>)(?:assistant|response|answer|model|bot|gpt|ai)(?::|\|>|<\S+?>|(?=\n))\n*|\[/INST\]", re.I | re.M
)
"""The name of who answers in a text, as a word or as a special token."""


class Form(NamedTuple):
    """Columns that make up a form: where a row has the question, and where the answers."""

    question: str | None
    answers: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    """Other columns that are part of the question, or that come with this form and are not needed."""


PAIR = ("chosen", "rejected")
CONVERSATIONS = ("messages", "conversations", "conversation")
PARTS = ("input", "context")
"""Columns that a question goes on in, in the forms that have them."""
FORMS: dict[Kind, tuple[Form, ...]] = {
    "answers": (
        Form("input_ids", also=("labels", "attention_mask", "completion_mask", "assistant_masks", "seq_lengths")),
        Form("prompt", ("completion",), ("label",)),
        Form("messages", also=("prompt",)),
        Form("conversations"),
        Form("conversation"),
        Form("instruction", ("output",), PARTS),
        Form("instruction", ("response",), PARTS),
        Form("text"),
        Form("question", ("answer",), PARTS),
        Form("question", ("response",), PARTS),
        Form("prompt", ("response",)),
        Form("problem", ("solution",)),
        Form("query", ("response",)),
        Form("query", ("answers",)),
    ),
    "pairs": (
        Form("prompt", PAIR),
        Form("question", PAIR),
        Form("instruction", PAIR, PARTS),
        Form("input", PAIR),
        Form("conversations", PAIR),
        Form(None, PAIR),
    ),
    "questions": (
        Form("messages", also=("prompt",)),
        Form("conversations"),
        Form("conversation"),
        Form("prompt", also=("completion", "response", "label", *PAIR)),
        Form("question", also=(*PARTS, "answer", "response", *PAIR)),
        Form("problem", also=("solution",)),
        Form("instruction", also=(*PARTS, "output", "response", *PAIR)),
        Form("query", also=("response", "answers")),
        Form("input", also=PAIR),
        Form(None, PAIR),
    ),
}
"""The forms of each kind; where data has the columns of several, the first counts."""
SYSTEM = ("system", "system_prompt")
SYSTEM_ROLES = ("system", "developer")
BESIDE_TURNS = (*SYSTEM, "tools", "chat_template_kwargs", "documents")
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
        ValueError: rows cannot be read, or no row has a prompt or a text.
    """
    question = form_of(kind, rows.column_names).question
    if question == "input_ids":
        return rows
    read = reader(rows, kind)
    first = _first_read(rows, kind)
    types = {name: Json() if name in BESIDE_TURNS else List(Json()) for name in first}
    types |= {name: Value("string") for name, value in first.items() if _is_text(value)}

    def alike(row: Row, number: int) -> Row:
        found = read(row, number)
        if list(map(_is_text, found.values())) != list(map(_is_text, first.values())):
            raise ValueError(f"Row {number} of the data differs from the first: one has texts, the other messages.")
        return found

    found = mapped(rows, alike, types)
    if question == "text":
        found = found.filter(lambda text: bool(text.strip()), input_columns="text")
        if not len(found):
            raise ValueError("The text is empty in every row of the data.")
    return found


def mapped(rows: Any, change: Callable[[Row, int], Row], types: dict[str, Any]) -> Any:
    """Rows as `change` makes them of a row and its number.

    Args:
        types: of the columns.

    Raises:
        ValueError: `change` refuses rows, with the reason for the first and the numbers of others.
    """

    def changed(row: Row, number: int) -> Row:
        try:
            return change(row, number) | {"refused": None}
        except ValueError as error:
            return dict.fromkeys(types) | {"refused": str(error)}

    features = Features(types | {"refused": Value("string")})
    found = rows.map(changed, with_indices=True, remove_columns=rows.column_names, features=features)
    refuse({number: reason for number, reason in enumerate(found["refused"]) if reason}, rows)
    return found.remove_columns("refused")


def refuse(reasons: dict[int, str], rows: Any) -> None:
    """Raise ValueError for rows that are refused, if there are any, given the reasons by their numbers."""
    if not reasons:
        return
    numbers = ", ".join(map(str, list(reasons)[:SHOWN])) + (", ..." if len(reasons) > SHOWN else "")
    split = f" of the split {rows.split}" if rows.split else ""
    refused = f" Refused in all{split}: {len(reasons)} (rows {numbers})." if len(reasons) > 1 or split else ""
    raise ValueError(next(iter(reasons.values())) + refused)


def _first_read(rows: Any, kind: Kind) -> Row:
    """The first row that can be read, in TRL's form."""
    read = reader(rows, kind)
    for number, row in enumerate(rows):
        with contextlib.suppress(ValueError):
            return read(row, number)
    return read(rows[0], 0)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def unused(rows: Any, kind: Kind) -> list[str]:
    """The names of the columns that nothing reads."""
    form = form_of(kind, rows.column_names)
    used = {form.question, *form.answers, *form.also}
    fields = []
    if form.question != "input_ids" and not any(map(_is_text, _first_read(rows, kind).values())):
        used.update(BESIDE_TURNS)
        names = [name for name in (form.question, *form.answers) if name]
        values = ((name, row[name]) for row in rows.select_columns(names) for name in names)
        turns = ((name, turn) for name, value in values for turn in _listed(value))
        fields = [(name, field) for name, turn in turns if isinstance(turn, dict) for field in turn]
    others = [f"{name}.{field}" for name, field in dict.fromkeys(fields) if field not in (*FIELDS, *SAME_FIELDS)]
    return [name for name in rows.column_names if name not in used] + others


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def reader(rows: Any, kind: Kind) -> Callable[[Row, int], Row]:
    """The function that reads a row of these, by its number."""
    form = form_of(kind, rows.column_names)
    readers = {"answers": _answered, "pairs": _pair, "questions": _asked}
    features = rows.features  # not the rows themselves, which `datasets` would hash with the function

    def read(row: Row, number: int) -> Row:
        row = {name: without_filled(value, features[name]) for name, value in row.items()}
        try:
            row |= {name: _from_text(row[name], name) for name in (form.question, *form.answers) if name}
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


def _from_text(value: Any, name: str) -> Any:
    """A column's value, whose messages may be given as JSON text."""
    if not isinstance(value, str):
        return value
    if name in CONVERSATIONS:
        return _from_json(value, name)
    with contextlib.suppress(json.JSONDecodeError):
        found = json.loads(value) if value.lstrip().startswith("[") else None
        if found and all(isinstance(turn, dict) and {"role", "from"} & turn.keys() for turn in found):
            return found
    return value


def _answered(row: Row, form: Form) -> Row:
    if "label" in form.also and row.get("label") is False:
        raise ValueError("has a completion of label false, which is not to be trained on")
    if form.question == "text":
        return {"text": row["text"] if isinstance(row["text"], str) else _said(row, "text")}
    if form.answers == ("answers",):  # calls, as JSON
        row = row | {"answers": {"role": "assistant", "tool_calls": row["answers"]}}
    if not form.answers:
        turns = _with_system(_said(row, form.question), row)
        if "prompt" in form.also:
            _check_repeated(row.get("prompt"), turns)
        return {"messages": turns}
    prompt, (completion,) = _matched(_question(row, form), [_said(row, form.answers[0])])
    _check_asked(prompt)
    return {"prompt": prompt, "completion": _after(prompt, completion)}


def _pair(row: Row, form: Form) -> Row:
    answers = [_said(row, name) for name in PAIR]
    prompt = None if form.question is None else _question(row, form)
    if all(isinstance(answer, list) and answer[0]["role"] != "assistant" for answer in answers):
        shared = _shared(answers)
        if not shared:
            raise ValueError("has answers to two questions")
        if not isinstance(row.get(form.question), list) or shared[: len(prompt)] == prompt:
            _check_repeated(row.get(form.question), shared)
            prompt = _with_system(shared, row)
        elif prompt[-len(shared) :] != shared:
            raise ValueError(f"has answers that begin with another question than its {form.question}")
        return {"prompt": prompt, **{name: a[len(shared) :] for name, a in zip(PAIR, answers, strict=True)}}
    if prompt is None:
        if not all(map(_is_text, answers)):
            raise ValueError("has no prompt")
        turns = list(ANSWERER.finditer(os.path.commonprefix(answers)))
        if not turns:
            raise ValueError(
                "has two texts that do not begin with a question and who answers, such as 'Assistant:'; give the "
                "question as prompt"
            )
        end = turns[-1].end()
        return {"prompt": answers[0][:end], **{name: a[end:] for name, a in zip(PAIR, answers, strict=True)}}
    prompt, answers = _matched(prompt, answers)
    _check_asked(prompt)
    return {"prompt": prompt, **dict(zip(PAIR, (_after(prompt, answer) for answer in answers), strict=True))}


def _asked(row: Row, form: Form) -> Row:
    if form.question is None:
        prompt = _pair(row, form)["prompt"]
        if isinstance(prompt, str):
            raise ValueError("has two texts that hold a question and an answer; give the question as prompt")
        return {"prompt": prompt}
    value = row[form.question]
    if form.question in CONVERSATIONS and isinstance(value, list) and value:
        value = list(itertools.takewhile(lambda turn: not _is_answer(turn), value))
        if not value:
            return {"prompt": []}
    turns = _question(row | {form.question: value}, form)
    if not _asks(turns):
        return {"prompt": []}
    return {"prompt": [{"role": "user", "content": turns}] if isinstance(turns, str) else turns}


def _question(row: Row, form: Form) -> Turns | str:
    """A row's question: a text if it is a `prompt` in words without a system message's column, else messages."""
    value = row[form.question]
    if not isinstance(value, str | None) or form.question in CONVERSATIONS:
        return _with_system(turns_of(value, form.question), row)
    if form.question == "prompt" and row.keys().isdisjoint(SYSTEM):
        return value or ""
    parts = [value, *(row.get(name) for name in PARTS if name in form.also)]
    return _with_system([{"role": "user", "content": BETWEEN_TURNS.join(part for part in parts if part)}], row)


def _asks(question: Turns | str) -> bool:
    """Return False for a question that says nothing, what a system message says aside."""
    if isinstance(question, str):
        return bool(question.strip())
    return any(turn["role"] not in SYSTEM_ROLES and _says_something(turn) for turn in question)


def _check_asked(question: Turns | str) -> None:
    """Raise ValueError for a question that says nothing."""
    if not _asks(question):
        raise ValueError("has an empty prompt")


def _check_repeated(prompt: Any, turns: Turns) -> None:
    """Raise ValueError for a prompt beside whole conversations that says more than they do."""
    said = [turn["content"] for turn in turns_of(prompt, "prompt")] if isinstance(prompt, list) else [prompt or ""]
    spoken = ["".join(turn["content"].split()) for turn in turns]
    if not all(any("".join(text.split()) in each for each in spoken) for text in said):
        raise ValueError("has a prompt that its messages do not say")


def _says_something(turn: dict[str, Any]) -> bool:
    return bool(turn["content"].strip() or turn.get("tool_calls"))


def _with_system(turns: Turns, row: Row) -> Turns:
    """Messages with what a column says that the system does before them."""
    system = next(filter(None, map(row.get, SYSTEM)), None)
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
    if not answers or not all(map(_says_something, answers)):
        raise ValueError(f"has an empty answer in {name}")
    if any(_is_answer(turn) and turn.get("weight") == 0 for turn in _listed(value)):
        raise ValueError(f"has an answer of weight 0 in {name}, which is not to be trained on")
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
        given = _from_json(row.get("chat_template_kwargs"), "chat_template_kwargs") or {}
        if not isinstance(given, dict):
            raise ValueError("has chat_template_kwargs that are no JSON object")
        if taken := {"tools", "tokenize", "add_generation_prompt"} & given.keys():
            raise ValueError(f"has the key {min(taken)} in chat_template_kwargs, which is given already")
        found["chat_template_kwargs"] = given
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
    given = {name: value for name, value in given.items() if value is not None}
    called = _called(given)
    role = ROLES.get(called.lower())
    if role is None:
        raise ValueError(f"has a message of the role {called!r}, where {', '.join(ROLES)} are known")
    content = given.get("value", given.get("content"))
    ways = [given.get("tool_calls"), given.get("function_call")]
    if called.lower() in CALLERS:
        ways, content = [*ways, content], ""
    content = _text(content)
    calls = [found for found in map(_calls, ways) if found]
    if any([call["function"] for call in c] != [call["function"] for call in calls[0]] for c in calls):
        raise ValueError("has a message with one call in tool_calls and another in function_call")
    if content is None and not calls:
        raise ValueError("has a message without content")
    turn = {name: value for name, value in given.items() if name in FIELDS and name != "tool_calls"}
    turn |= {"role": role, "content": content or ""}
    return turn | ({"tool_calls": calls[0]} if calls else {})


def _called(turn: dict[str, Any]) -> str:
    """The role of a message by the user's name for it."""
    return str(turn.get("from") or turn.get("role"))


def _is_answer(turn: Any) -> bool:
    return isinstance(turn, dict) and ROLES.get(_called(turn).lower()) == "assistant"


def _calls(given: Any) -> list[dict[str, Any]]:
    """Calls of functions, which may be one, none, or JSON text."""
    calls = _from_json(given, "function call") or []
    return [_call(call) for call in _listed(calls)]


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
    arguments = _from_json(function.get("arguments") or function.get("parameters") or {}, "function call")
    if not isinstance(arguments, dict):
        raise ValueError("has a function call whose arguments are no JSON object")
    number = {"id": call["id"]} if call.get("id") is not None else {}
    return {"type": "function", **number, "function": {"name": function["name"], "arguments": arguments}}


def _from_json(value: Any, name: str) -> Any:
    """A value that may be given as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value or "null")
    except json.JSONDecodeError as error:
        raise ValueError(f"has a {name} that is no JSON ({error})") from error
