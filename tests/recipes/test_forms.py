"""Users' data in every form, through the templates of many families: rendered whole, or refused by number."""

import json
from types import SimpleNamespace

import pytest
from datasets import Dataset, load_dataset

from recipes import dpo, seqkd, sft
from recipes.training.chat_format import faithful_answers, pairs, questions
from recipes.training.forms import read_rows, unused
from recipes.training.run import Run
from tests.helpers.data_forms import (
    ANSWERED,
    ASKED,
    CALLED,
    CHOSEN,
    FORMS,
    PAIR,
    READ_CALLS,
    REJECTED,
    SYSTEM,
    TALK,
    TOOL,
    assistant,
    call,
    rows_of,
    user,
)
from tests.helpers.tiny_chat import (
    TOOLS,
    chat_tokenizer,
    common_arguments,
    save_chat_teacher,
    save_hybrid,
    template_of,
)

FAMILIES = (
    "llama3", "llama3_1", "qwen2_5", "qwen3", "gemma", "gemma4", "phi3", "deepseek_r1_distill", "gptoss", "glm4moe",
    "cohere", "lfm2_2_5", "nemotron_3_nano",
)  # fmt: skip
CALLING = ("llama3_1", "qwen2_5", "qwen3", "gemma4", "gptoss", "glm4moe", "lfm2_2_5", "nemotron_3_nano")
"""Families whose templates render calls of functions."""


FLAT = {"name": "weather", "parameters": {"city": {"type": "str"}}}
"""A function as xLAM's data have it."""


def call_of(**parameters):
    return {"type": "function", "function": FLAT | {"parameters": parameters}}


def tokenizer_of(family):
    return chat_tokenizer(template_of(family))


@pytest.mark.parametrize(
    "kind, row, expected",
    [
        ("answers", {"messages": [ASKED, CHOSEN], "prompt": "Why?"}, {"messages": [ASKED, CHOSEN]}),
        ("answers", {"text": "Why?"}, {"text": "Why?"}),
        ("answers", {"prompt": "Why?", "completion": "So."}, {"prompt": "Why?", "completion": "So."}),
        ("answers", {"prompt": "Why?", "completion": [CHOSEN]}, ANSWERED),
        ("answers", {"prompt": [ASKED], "completion": "Because."}, ANSWERED),
        ("answers", {"prompt": [ASKED], "completion": [ASKED, CHOSEN]}, ANSWERED),
        (
            "answers",
            {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]},
            {"messages": [ASKED, CHOSEN]},
        ),
        (
            "answers",
            {"conversations": [{"from": "User", "value": "Why?"}, {"from": "bot", "value": "A"}], "system": "Brief."},
            {"messages": [SYSTEM | {"content": "Brief."}, ASKED, assistant("A")]},
        ),
        (
            "answers",
            {
                "conversations": [
                    {"from": "human", "value": "Oslo?"},
                    {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
                    {"from": "observation", "value": "sun"},
                    {"from": "chatgpt", "value": "Sunny in Oslo."},
                ],
                "tools": json.dumps([TOOL["function"]]),
            },
            {"messages": READ_CALLS, "tools": [TOOL]},
        ),
        ("answers", {"instruction": "Why?", "input": "", "output": "Because."}, ANSWERED),
        (
            "answers",
            {"instruction": "Why?", "input": "It is.", "output": "Because.", "system": "Be brief."},
            {"prompt": [SYSTEM, user("Why?\n\nIt is.")], "completion": [CHOSEN]},
        ),
        (
            "answers",
            {"messages": [user([{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]), CHOSEN]},
            {"messages": [ASKED, CHOSEN]},
        ),
        (
            "answers",
            {"messages": [ASKED, assistant(None, function_call={"name": "f", "arguments": '{"a": null}'})]},
            {"messages": [ASKED, assistant("", tool_calls=[call("f", a=None)])]},
        ),
        (
            "answers",
            {
                "messages": [
                    user("Oslo?") | {"language": "en", "weight": 0.0},
                    {"from": "tool_call", "value": {"name": "weather", "parameters": {"city": "Oslo"}}, "weight": 1},
                    {"from": "tool_response", "value": "sun"},
                    {"from": "ai", "value": "Sunny in Oslo."},
                ]
            },
            {"messages": READ_CALLS},
        ),
        (
            "answers",
            {"messages": [ASKED, assistant("", tool_calls=[call("f", a=1) | {"id": "b", "index": 0}],
                                           function_call={"name": "f", "arguments": {"a": 1}})]},
            {"messages": [ASKED, assistant("", tool_calls=[call("f", a=1) | {"id": "b"}])]},
        ),
        (
            "answers",
            {"system_prompt": "Be brief.", "question": "Why?", "response": "Because."},
            {"prompt": [SYSTEM, ASKED], "completion": [CHOSEN]},
        ),
        ("answers", {"question": "Why?", "answer": "Because."}, ANSWERED),
        ("answers", {"query": "Why?", "response": "Because."}, ANSWERED),
        (
            "answers",
            {"instruction": "Why?", "context": "It is.", "response": "Because."},
            {"prompt": [user("Why?\n\nIt is.")], "completion": [CHOSEN]},
        ),
        (
            "answers",
            {
                "query": "Oslo?",
                "answers": json.dumps([{"name": "weather", "arguments": {"city": "Oslo"}}]),
                "tools": json.dumps([TOOL["function"]]),
            },
            {"prompt": CALLED[:1], "completion": READ_CALLS[1:2], "tools": [TOOL]},
        ),
        ("answers", {"conversation": [ASKED, CHOSEN]}, {"messages": [ASKED, CHOSEN]}),
        ("answers", {"messages": TALK, "documents": [{"text": "d"}]},
         {"messages": READ_CALLS, "chat_template_kwargs": {"documents": [{"text": "d"}]}}),
        ("pairs", PAIR, PAIR),
        ("pairs", {"chosen": [ASKED, CHOSEN], "rejected": [ASKED, REJECTED]}, PAIR),
        ("pairs", {"prompt": "Why?", "chosen": [ASKED, CHOSEN], "rejected": [ASKED, REJECTED]}, PAIR),
        ("pairs", {"prompt": [ASKED], "chosen": [ASKED, CHOSEN], "rejected": [ASKED, REJECTED]}, PAIR),
        ("pairs", {"prompt": "Why?", "chosen": [CHOSEN], "rejected": [REJECTED]}, PAIR),
        ("pairs", {"chosen": [ASKED, CHOSEN], "rejected": [ASKED, CHOSEN]}, PAIR | {"rejected": [CHOSEN]}),
        (
            "pairs",
            {"system": "Be brief.", "question": "Why?", "chosen": "Because.", "rejected": "No idea."},
            PAIR | {"prompt": [SYSTEM, ASKED]},
        ),
        ("pairs", {"system": "", "question": "Why?", "chosen": "Because.", "rejected": "No idea."}, PAIR),
        (
            "pairs",
            {"conversations": [{"from": "human", "value": "Why?"}], "chosen": CHOSEN, "rejected": REJECTED},
            PAIR,
        ),
        (
            "pairs",
            {"chosen": "\n\nHuman: Why?\n\nAssistant: It is.", "rejected": "\n\nHuman: Why?\n\nAssistant: It was."},
            {"prompt": "\n\nHuman: Why?\n\nAssistant:", "chosen": " It is.", "rejected": " It was."},
        ),
        (
            "pairs",
            {"chosen": "<|im_start|>assistant\nOn", "rejected": "<|im_start|>assistant\nOff"},
            {"prompt": "<|im_start|>assistant\n", "chosen": "On", "rejected": "Off"},
        ),
        (
            "pairs",
            {"system": "Be brief.", "input": "Why?", "chosen": "Because.", "rejected": "No idea."},
            PAIR | {"prompt": [SYSTEM, ASKED]},
        ),
        ("answers", {"messages": json.dumps([ASKED, CHOSEN])}, {"messages": [ASKED, CHOSEN]}),
        ("answers", {"prompt": json.dumps([ASKED]), "completion": "[1] and [2]"},
         ANSWERED | {"completion": [assistant("[1] and [2]")]}),
        ("answers", {"question": "Why?", "context": "It is.", "answer": "Because."},
         ANSWERED | {"prompt": [user("Why?\n\nIt is.")]}),
        ("answers", {"problem": "Why?", "solution": "Because."}, ANSWERED),
        ("answers", {"prompt": "Why?", "response": "Because."}, {"prompt": "Why?", "completion": "Because."}),
        ("answers", {"prompt": [ASKED], "completion": [CHOSEN], "label": True}, ANSWERED),
        ("answers", {"messages": [ASKED, CHOSEN], "tools": json.dumps([FLAT])},
         {"messages": [ASKED, CHOSEN], "tools": [call_of(properties={"city": {"type": "str"}}, type="object")]}),
        ("pairs", {name: json.dumps(turns) for name, turns in PAIR.items()}, PAIR),
        ("questions", {"prompt": [user("")], "completion": [CHOSEN]}, {"prompt": []}),
        ("questions", {"messages": TALK, "tools": [TOOL]}, {"prompt": [CALLED[0]], "tools": [TOOL]}),
        ("questions", {"messages": [ASKED, {"role": "assistant"}, {"role": "narrator"}]}, {"prompt": [ASKED]}),
        ("questions", {"prompt": [ASKED, CHOSEN, user("How?")]}, {"prompt": [ASKED, CHOSEN, user("How?")]}),
        ("questions", {"prompt": "Why?", "completion": "So."}, {"prompt": [ASKED]}),
        ("questions", {"system": "Be brief.", "question": "Why?"}, {"prompt": [SYSTEM, ASKED]}),
        ("questions", {"instruction": "Why?", "output": "So."}, {"prompt": [ASKED]}),
    ],
)  # fmt: skip
def test_a_form_is_read_as_trls(kind, row, expected):
    assert read_rows(rows_of(row), kind)[0] == expected


@pytest.mark.parametrize(
    "kind, row, expected",
    [
        ("answers", {"messages": None}, "has no messages"),
        ("answers", {"messages": []}, "has no messages"),
        ("answers", {"messages": [ASKED, None]}, "NoneType in the place of a message"),
        ("answers", {"messages": [ASKED, {"role": "assistant"}]}, "a message without content"),
        ("answers", {"messages": [ASKED]}, "has an empty answer in messages"),
        ("answers", {"messages": [ASKED, assistant(" ")]}, "has an empty answer in messages"),
        ("answers", {"conversations": [{"from": "narrator", "value": "a"}]}, "role 'narrator', where user, .*gpt"),
        ("answers", {"messages": [user([{"type": "image"}]), CHOSEN]}, "a part of type 'image'"),
        ("answers", {"messages": [user(3), CHOSEN]}, "int for its content"),
        ("answers", {"messages": [ASKED, {"from": "function_call", "value": "f("}]}, "function call that is no JSON"),
        ("answers", {"messages": [ASKED, assistant("", tool_calls=[{"id": "a"}])]}, "a function call without a name"),
        ("answers", {"messages": [ASKED, assistant("", tool_calls=[{"name": "f", "arguments": "3"}])]}, "JSON object"),
        ("answers", {"messages": [ASKED, CHOSEN], "tools": "weather"}, "tools that is no JSON"),
        ("answers", {"messages": [SYSTEM, ASKED, CHOSEN], "system": "Be long."}, "one system message in its column"),
        ("answers", {"text": None}, "has no text"),
        ("answers", {"messages": [ASKED, CHOSEN | {"weight": 0}]}, "an answer of weight 0 in messages"),
        ("answers", {"messages": [ASKED, assistant("", tool_calls=[call("f")], function_call={"name": "g"})]}, "and"),
        ("answers", {"messages": [ASKED, CHOSEN], "chat_template_kwargs": {"tools": []}}, "the key tools in chat"),
        ("answers", {"messages": [ASKED, CHOSEN], "chat_template_kwargs": [1]}, "chat_template_kwargs that are no"),
        ("pairs", {"chosen": [CHOSEN], "rejected": [REJECTED]}, "has no prompt"),
        ("pairs", {"chosen": "The sky is", "rejected": "The sea is"}, "two texts that do not begin .* as prompt"),
        ("pairs", {"chosen": [ASKED, CHOSEN], "rejected": [user("What?"), REJECTED]}, "answers to two questions"),
        ("pairs", {"prompt": [user("Who?")], "chosen": [ASKED, CHOSEN], "rejected": [ASKED, CHOSEN]}, "another q"),
        ("pairs", {"prompt": "Why?", "chosen": [CHOSEN], "rejected": None}, "has no rejected"),
        ("questions", {"messages": None}, "has no messages"),
        ("answers", {"prompt": "", "completion": "A."}, "has an empty prompt"),
        ("answers", {"prompt": [user("")], "completion": [CHOSEN]}, "has an empty prompt"),
        ("pairs", {"prompt": [SYSTEM, user(" ")], "chosen": [CHOSEN], "rejected": [REJECTED]}, "has an empty prompt"),
        ("answers", {"prompt": [ASKED], "completion": [CHOSEN], "label": False}, "a completion of label false"),
        ("answers", {"messages": [ASKED, assistant(""), ASKED, CHOSEN]}, "has an empty answer in messages"),
        ("answers", {"messages": "Why? Because."}, "a messages that is no JSON"),
        ("answers", {"messages": [ASKED, CHOSEN], "prompt": "Who says why?"}, "a prompt that its messages do not say"),
        (
            "pairs",
            {"prompt": "It is so. Why?", "chosen": [ASKED, CHOSEN], "rejected": [ASKED, REJECTED]},
            "a prompt that its messages do not say",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_by_number(kind, row, expected):
    fine = {"answers": {"messages": [ASKED, CHOSEN], "conversations": [ASKED, CHOSEN], "text": "a"}, "pairs": PAIR}
    fine = {name: fine.get(kind, fine["answers"]).get(name) for name in row}
    if "completion" in row:
        prompt = ASKED["content"] if isinstance(row["prompt"], str) else [ASKED]
        fine = row | {"prompt": prompt, "label": True}
    elif isinstance(row.get("prompt"), str) and row.get("rejected", True):
        fine = {name: "Why?" if name == "prompt" else row[name] for name in row}
    elif kind == "pairs" and isinstance(row["chosen"], str):
        fine = {"chosen": "Answer: A", "rejected": "Answer: B"}
    elif kind == "pairs" and "prompt" not in row:
        fine = {name: [ASKED, turns[0]] for name, turns in fine.items()}
    with pytest.raises(ValueError, match=f"^Row 1 of the data .*{expected}.*leave them out.$"):
        read_rows(rows_of(fine, row), kind)


def test_two_texts_with_answers_are_no_question():
    rows = rows_of({"chosen": "Human: Why?\n\nAssistant: A", "rejected": "Human: Why?\n\nAssistant: B"})
    with pytest.raises(ValueError, match=r"^Row 0 of the data has two texts .* give the question as prompt; change"):
        read_rows(rows, "questions")


def test_texts_and_messages_do_not_mix():
    rows = rows_of({"prompt": "Why?", "completion": "So."}, ANSWERED)
    with pytest.raises(ValueError, match="Row 1 of the data differs from the first: one has texts"):
        read_rows(rows, "answers")


def test_all_rows_that_are_refused_are_counted():
    rows = [{"messages": [ASKED, CHOSEN]} if i in (1, 4) else {"messages": [ASKED]} for i in range(9)]
    expected = r"^Row 0 of the data has an empty .* Refused in all: 7 \(rows 0, 2, 3, 5, 6, ...\).$"
    with pytest.raises(ValueError, match=expected):
        read_rows(rows_of(*rows), "answers")
    split = Dataset.from_list([{"messages": [SYSTEM, ASKED, CHOSEN]}] * 2, split="test")
    for kind, prepare in (("answers", faithful_answers), ("questions", questions)):
        with pytest.raises(ValueError, match=r"^Row 0 .*System role.* split test: 2 \(rows 0, 1\).$"):
            prepare(read_rows(split, kind), tokenizer_of("gemma"))


def test_empty_texts_are_left_out_and_counted(capsys):
    run = SimpleNamespace(state=SimpleNamespace(is_main_process=True))
    rows = rows_of({"text": ""}, {"text": "Why?"}, {"text": " \n"})
    assert Run.read(run, rows, "answers")[:] == {"text": ["Why?"]}
    assert "left out: 2 rows of 3 whose text is empty\n" in capsys.readouterr().err
    with pytest.raises(ValueError, match="text is empty in every row"):
        read_rows(rows_of({"text": ""}), "answers")


@pytest.mark.parametrize(
    "kind, row, expected",
    [
        ("answers", {"messages": [ASKED, CHOSEN], "weight": 1, "system": "Be brief."}, ["weight"]),
        ("answers", {"prompt": "Why?", "completion": "So.", "tools": "[]", "source": "a"}, ["tools", "source"]),
        ("answers", PAIR | {"messages": [ASKED, CHOSEN], "prompt": "Why?"}, ["chosen", "rejected"]),
        ("answers", {"input_ids": [3], "labels": [3], "length": 1}, ["length"]),
        (
            "answers",
            {"messages": [ASKED | {"toxic": None}, CHOSEN | {"weight": 1.0}]},
            ["messages.toxic", "messages.weight"],
        ),
        ("answers", [{"messages": [ASKED, CHOSEN]}, {"messages": [ASKED, CHOSEN | {"mood": 1}]}], ["messages.mood"]),
        ("pairs", {"chosen": "Answer: B", "rejected": "Answer: C", "asked": "Why?"}, ["asked"]),
        ("pairs", {"system": "", "question": "Why?", "chosen": "A.", "rejected": "B."}, []),
        ("questions", {"instruction": "Why?", "input": "", "output": "So.", "tools": "[]", "id": 1}, ["id"]),
    ],
)
def test_columns_that_nothing_uses(kind, row, expected):
    assert unused(rows_of(*row) if isinstance(row, list) else rows_of(row), kind) == expected


def test_keys_that_arrow_adds_are_not_said(tmp_path):
    """All structs of a column have one another's keys; a row of JSON keeps its own, nulls included."""
    other = [ASKED, assistant("", tool_calls=[call("time", zone="CET", at=None)])]
    rows = [{"messages": TALK, "tools": [TOOL]}, {"messages": other, "tools": None}]
    (filled, _) = read_rows(Dataset.from_list(rows), "answers")
    assert filled == {"messages": READ_CALLS, "tools": [TOOL]}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, kept = read_rows(load_dataset("json", data_files=str(tmp_path / "rows.jsonl"))["train"], "answers")
    assert kept == {"messages": other, "tools": None}


@pytest.mark.parametrize("family", FAMILIES)
def test_all_forms_become_what_the_template_makes_of_messages(family):
    tokenizer = tokenizer_of(family)
    asked = tokenizer.apply_chat_template([ASKED], add_generation_prompt=True, tokenize=False)
    for name, row in FORMS.items():
        if "chosen" in row:
            found = pairs(read_rows(rows_of(row), "pairs"), tokenizer)[0]
            if isinstance(found["prompt"], str):  # where the template begins no answer as it asks for one
                assert found["prompt"] == asked, name
                begun = "\n</think>\n\n" if asked.endswith("<think>\n") else ""
                assert found["chosen"].startswith(f"{begun}Because."), name
            else:
                assert found == PAIR, name
        else:
            found = faithful_answers(read_rows(rows_of(row), "answers"), tokenizer)[0]
            expected = tokenizer.apply_chat_template([ASKED, CHOSEN])["input_ids"]
            if "input_ids" in found:
                begun = f"{asked}\n</think>\n\n" if asked.endswith("<think>\n") else asked
                expected = tokenizer(f"{begun}Because.", add_special_tokens=False).input_ids
                assert found["input_ids"][: len(expected) - 1] == expected[:-1], name
            else:
                turns = found.get("messages") or found["prompt"] + found["completion"]
                assert tokenizer.apply_chat_template(turns)["input_ids"] == expected, name
        if name != "orca":
            assert questions(read_rows(rows_of(row), "questions"), tokenizer)[0] == {"prompt": [ASKED]}, name


@pytest.mark.parametrize(
    "family, said, expected",
    [
        ("deepseek_r1_distill", "<think>\nSo.\n</think>\n\nBecause.", "<think>\nSo.\n</think>\n\nBecause."),
        ("deepseek_r1_distill", "Because.", "<think>\n\n</think>\n\nBecause."),
        ("nemotron_3_nano", "<think>So.</think>Because.", "<think>\nSo.</think>Because."),
        ("nemotron_3_nano", "Because.", "<think>\n\n</think>\n\nBecause."),
        ("qwen3_5_think", "<think>\nSo.\n</think>\n\nBecause.", "<think>\nSo.\n</think>\n\nBecause."),
        ("qwen3_5_think", "Because.", "<think>\n\n</think>\n\nBecause."),
        ("qwen3_5_nothink", "Because.", "<think>\n\n</think>\n\nBecause."),
    ],
)
def test_an_answer_goes_on_from_reasoning_that_the_question_begins(family, said, expected):
    """It begins once and ends."""
    row = PAIR | {"chosen": [assistant(said)]}
    found = pairs(read_rows(rows_of(row), "pairs"), tokenizer_of(family))[0]
    turns = found["prompt"]
    if isinstance(turns, str):
        text = turns + found["chosen"]
    else:
        text = tokenizer_of(family).apply_chat_template(turns + found["chosen"], tokenize=False)
    assert expected in text
    assert text.count("<think>") == 1


def test_reasoning_where_the_template_asks_for_none_is_refused():
    row = ANSWERED | {"completion": [assistant("<think>\nSo.\n</think>\n\nBecause.")]}
    with pytest.raises(ValueError, match="completion of row 0 .* without reasoning"):
        faithful_answers(read_rows(rows_of(row), "answers"), tokenizer_of("qwen3_5_nothink"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ("answers", "completion", "pairs"))
def test_calls_are_rendered_or_refused(kind, family):
    """Also where the words of a call stand elsewhere, as the city does here."""
    tokenizer = tokenizer_of(family)
    other = assistant(None, tool_calls=[call("weather", city="Rome")])
    row = {
        "answers": {"messages": TALK},
        "completion": {"prompt": CALLED[:1], "completion": TALK[1:2]},
        "pairs": {"prompt": CALLED[:1], "chosen": TALK[1:2], "rejected": [other]},
    }[kind] | {"tools": [TOOL]}
    prepare = {"pairs": pairs}.get(kind, faithful_answers)
    rows = read_rows(rows_of(row), "pairs" if kind == "pairs" else "answers")
    if family not in CALLING or (kind != "answers" and family == "nemotron_3_nano"):  # which begins to reason if asked
        with pytest.raises(ValueError, match="row 0 of the data|^Row 0 of the data does not fit the chat template"):
            prepare(rows, tokenizer)
        return
    found = prepare(rows, tokenizer)[0]
    text = str(found)
    if kind == "answers":
        text = tokenizer.apply_chat_template(found["messages"], tools=found["tools"], tokenize=False)
        assert "sun" in text
    assert "weather" in text
    assert text.count("Oslo") >= 2
    if kind == "pairs":
        assert "Rome" in str(found["rejected"])
        assert found["chosen"] != found["rejected"]


@pytest.mark.parametrize(
    "family, row, expected",
    [
        ("llama3", {"messages": [ASKED, CHOSEN], "tools": [TOOL]}, "function.name of tool 0 in row 0"),
        ("llama3_1", {"messages": [CALLED[0], assistant("Oslo?", tool_calls=[call("weather")])]},
         "content of message 1 in row 0"),
        ("phi3", {"messages": [ASKED, {"role": "tool", "content": "W"}, CHOSEN]}, "content of message 1 in row 0"),
        ("qwen2_5", {"messages": [ASKED | {"name": "Why"}, CHOSEN]}, "name of message 0 in row 0"),
        ("qwen2_5", {"messages": [ASKED, assistant("Because.", reasoning_content="Why?")]}, "reasoning_content of"),
        ("qwen2_5", {"messages": [ASKED, CHOSEN], "documents": [{"text": "Why?"}]}, "text of document 0"),
        ("qwen2_5", {"messages": [ASKED, CHOSEN], "chat_template_kwargs": {"mood": "bad", "enable_thinking": False}},
         "argument mood in row 0"),
        ("phi3", {"messages": [{"role": "developer", "content": "Be brief."}, ASKED, CHOSEN]}, "content of message 0"),
        ("qwen3", {"messages": [ASKED, assistant("", tool_calls=[call("f") | {"id": "a"}, call("f") | {"id": "b"}]),
                                *({"role": "tool", "content": "W", "tool_call_id": i} for i in "ba"), CHOSEN]},
         "tool_call_id of message 2"),
    ],
)  # fmt: skip
def test_whatever_the_template_leaves_out_is_named(family, row, expected):
    rows = read_rows(rows_of(row), "answers")
    with pytest.raises(ValueError, match=f"The chat template leaves out {expected}.*leave such rows out"):
        faithful_answers(rows, tokenizer_of(family))


def test_a_function_has_its_description():
    tokenizer = tokenizer_of("qwen2_5")
    rows = read_rows(rows_of({"messages": [ASKED, CHOSEN], "tools": [TOOL]}), "answers")
    assert faithful_answers(rows, tokenizer).column_names == ["messages", "tools"]
    tokenizer.chat_template = (
        "{% for t in tools %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(ValueError, match="leaves out function.description of tool 0 in row 0"):
        faithful_answers(rows, tokenizer)


def test_what_has_not_to_be_rendered():
    """Ids in order, a result's name that its call has, arguments that are called as fields of messages are."""
    turns = [ASKED, assistant("", tool_calls=[call("f", id=1, ok=True) | {"id": "a"}])]
    turns += [{"role": "tool", "content": '{"a": "b"}', "tool_call_id": "a", "name": "f"}, CHOSEN]
    for family in CALLING:
        rows = read_rows(rows_of({"messages": turns}), "answers")
        assert faithful_answers(rows, tokenizer_of(family)).column_names == ["messages"], family
    reasoned = [ASKED, assistant("Because.", reasoning_content="Hm."), user("How?")]
    rows = read_rows(rows_of({"prompt": reasoned, "completion": [CHOSEN]}), "answers")
    assert faithful_answers(rows, tokenizer_of("qwen3"))[0]["prompt"] == reasoned


def test_a_system_message_may_be_read_as_a_switch():
    """As SmolLM3's template reads one."""
    tokenizer = chat_tokenizer(
        "{% if messages[0].role == 'system' %}[{{ messages[0].content.replace('/no_think', '') }}]{% endif %}"
        "{% for turn in messages if turn.role != 'system' %}{{ turn.content }}</s>{% endfor %}"
        "{{ '' if enable_thinking | default(true) else '' }}"
    )
    turns = [SYSTEM | {"content": "/no_think"}, ASKED, CHOSEN]
    rows = read_rows(rows_of({"messages": turns, "chat_template_kwargs": {"enable_thinking": False}}), "answers")
    assert faithful_answers(rows, tokenizer)[0]["messages"] == turns


def test_texts_alone_without_a_chat_template():
    plain = chat_tokenizer(template=None)
    rows = read_rows(rows_of(FORMS["Alpaca"]), "answers")
    assert faithful_answers(rows, plain)[0] == {"prompt": "Why?\n\n", "completion": "Because."}
    rows = read_rows(rows_of(FORMS["orca"]), "pairs")
    assert pairs(rows, plain)[0] == {"prompt": "Why?\n\n", "chosen": "Because.", "rejected": "No idea."}
    for row in ({"prompt": CALLED[:1], "completion": TALK[1:2]}, ANSWERED | {"tools": [TOOL]}):
        with pytest.raises(ValueError, match="Row 0 of the data says more than texts"):
            faithful_answers(read_rows(rows_of(row), "answers"), plain)
    with pytest.raises(ValueError, match="no chat template for messages"):
        faithful_answers(read_rows(rows_of(FORMS["messages"]), "answers"), plain)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forms")
    teacher = save_chat_teacher(folder / "teacher", template=TOOLS)
    return teacher, save_hybrid(teacher, folder / "hybrid")


SHARED = [
    {"from": "human", "value": "w9 w10"},
    {"from": "function_call", "value": '{"name": "w30", "arguments": {"w31": 3}}'},
    {"from": "observation", "value": "w11"}, {"from": "gpt", "value": "w12 w13"},
]  # fmt: skip
REAL = {
    "ShareGPT": (sft, {"conversations": SHARED, "tools": json.dumps([{"name": "w30"}])}),
    "Alpaca": (sft, {"instruction": "w9", "input": "w10", "output": "w11 w12", "weight": 2}),
    "call": (sft, {"prompt": CALLED[:1], "completion": [CALLED[1]], "tools": [TOOL]}),
    "orca": (dpo, {"system": "w8", "question": "w9 w10", "chosen": "w11", "rejected": "w12 w13"}),
    "UltraFeedback": (dpo, FORMS["UltraFeedback"] | {"messages": [ASKED, CHOSEN], "score_chosen": 1.0}),
    "calls": (
        dpo,
        {"chosen": TALK[:2], "rejected": [TALK[0], assistant("", tool_calls=[call("f")])], "tools": [TOOL]},
    ),
}


@pytest.mark.parametrize("form", REAL)
def test_a_run_with_data_of_each_form(form, world, tmp_path, capsys):
    recipe, row = REAL[form]
    teacher, hybrid = world
    data = tmp_path / "data"
    data.mkdir()
    for split in ("train", "test"):
        (data / f"{split}.jsonl").write_text((json.dumps(row) + "\n") * 4)
    report = recipe.main(common_arguments(hybrid, teacher, data, tmp_path / "out"))
    assert report["after"]["eval_loss"] < report["before"]["eval_loss"]
    named = {"Alpaca": "weight", "UltraFeedback": "messages, score_chosen"}.get(form)
    assert (f"columns that nothing uses: {named}\n" in capsys.readouterr().err) == (named is not None)
    asked = ["--teacher_model_name_or_path", str(teacher), "--dataset_name", str(data), "--output_dir"]
    if form not in ("calls", "call"):
        report = seqkd.main([*asked, str(tmp_path / "kd"), "--max_new_tokens", "3", "--truncated", "keep"])
        assert report["rows"] == {"train": 1, "test": 0}
