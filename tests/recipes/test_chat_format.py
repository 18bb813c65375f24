"""Questions and preferences in turns, or as text where the tokenizer knows no turns; how long rows are; estimates."""

import pytest
from datasets import Dataset
from tokenizers import processors

from recipes.training import chat_format
from recipes.training.chat_format import not_too_long
from recipes.training.forms import read_rows
from tests.helpers.tiny_chat import REASONING, STRICT, chat_tokenizer

USER, ANSWER = {"role": "user", "content": "w9 w10"}, {"role": "assistant", "content": "w11 w12 w13"}
OTHER = {"role": "assistant", "content": "w14"}


def faithful_answers(rows, tokenizer, **options):
    return chat_format.faithful_answers(read_rows(rows, "answers"), tokenizer, **options)


def pairs(rows, tokenizer):
    return chat_format.pairs(read_rows(rows, "pairs"), tokenizer)


def questions(rows, tokenizer):
    return chat_format.questions(read_rows(rows, "questions"), tokenizer)


def test_a_chat_models_question_is_its_turns():
    """Where a row has the question as a text as well, as UltraChat does, the turns count."""
    rows = Dataset.from_list([{"prompt": "w9 w10", "messages": [USER, ANSWER, USER]}] * 2)
    assert questions(rows, chat_tokenizer())[0] == {"prompt": [USER]}
    assert questions(rows, chat_tokenizer(template=None))[1] == {"prompt": "w9 w10"}
    plain = Dataset.from_list([{"prompt": "w9"}])
    assert questions(plain, chat_tokenizer())[0] == {"prompt": [{"role": "user", "content": "w9"}]}
    task = Dataset.from_list([{"instruction": "w9", "input": "w10"}])
    assert questions(task, chat_tokenizer())[0]["prompt"][0]["content"] == "w9\n\nw10"
    with pytest.raises(ValueError, match="holds a question"):
        questions(Dataset.from_list([{"messages": [ANSWER]}]), chat_tokenizer())


def test_questions_leave_room_for_an_answer():
    rows = Dataset.from_list([{"prompt": [USER]}, {"prompt": [{"role": "user", "content": "w9 " * 20}]}])
    assert not_too_long(rows, chat_tokenizer(), 10)["prompt"] == [[USER]]
    text = Dataset.from_list([{"prompt": "w9 w10"}, {"prompt": "w9 w10 w11"}])
    assert not_too_long(text, chat_tokenizer(template=None), 2)["prompt"] == ["w9 w10"]
    with pytest.raises(ValueError, match="longer than 1 tokens"):
        not_too_long(text, chat_tokenizer(template=None), 1)
    with pytest.raises(ValueError, match="lower it"):
        not_too_long(text, chat_tokenizer(), 0)


def said_twice(rows, prompt):
    """Rows whose answers begin with the question, beside it as a text, as UltraFeedback's do."""
    return rows.add_column("prompt", [prompt])


def test_preferences_without_turns():
    named = Dataset.from_list([{"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]}])
    implicit = Dataset.from_list([{"chosen": [USER, ANSWER], "rejected": [USER, OTHER], "score": 1.0}])
    assert pairs(named, chat_tokenizer())[:] == named[:]
    expected = {"prompt": "w9 w10\n\n", "chosen": "w11 w12 w13", "rejected": "w14"}
    for rows in (named, implicit, said_twice(implicit, "w9 w10")):
        assert pairs(rows, chat_tokenizer(template=None))[0] == expected
    text = Dataset.from_list([{"prompt": "w9", "chosen": "w10", "rejected": "w11"}])
    assert pairs(text, chat_tokenizer(template=None))[:] == text[:]


ASKED, REASONED = [{"role": "user", "content": "w9"}], [{"role": "assistant", "content": "w20 w7 w21"}]


def test_an_answer_that_the_template_would_cut_is_taken_as_it_stands():
    """As DeepSeek-R1-Distill has it: reasoning is begun by the generation prompt, and not rendered."""
    rows = Dataset.from_list([{"prompt": ASKED, "completion": REASONED}, {"prompt": ASKED, "completion": [OTHER]}])
    assert faithful_answers(rows, chat_tokenizer())[:] == rows[:]
    first, second = faithful_answers(rows, chat_tokenizer(REASONING))
    assert first == {"input_ids": [4, 9, 6, 5, 20, 7, 21, 2], "labels": [-100] * 4 + [20, 7, 21, 2]}
    assert second["input_ids"] == [4, 9, 6, 5, 14, 2], "asked as it will be"
    everything = faithful_answers(rows, chat_tokenizer(REASONING), completion_only=False)[0]
    assert everything["labels"] == everything["input_ids"] == first["input_ids"]


def test_preferences_that_the_template_would_cut_are_taken_as_they_stand():
    named = Dataset.from_list([{"prompt": ASKED, "chosen": REASONED, "rejected": [OTHER]}])
    implicit = Dataset.from_list([{"chosen": ASKED + REASONED, "rejected": [*ASKED, OTHER]}])
    for rows in (named, implicit, said_twice(implicit, "w9")):
        assert pairs(rows, chat_tokenizer())[:] == named[:]
        (row,) = pairs(rows, chat_tokenizer(REASONING))
        ids = {name: chat_tokenizer()(text).input_ids for name, text in row.items()}
        assert ids == {"prompt": [4, 9, 6, 5], "chosen": [20, 7, 21, 2], "rejected": [14, 2]}


def test_a_text_begins_once():
    """A template that writes the first token, before a tokenizer that adds it."""
    tokenizer = chat_tokenizer("<s> " + REASONING)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    rows = Dataset.from_list([{"prompt": ASKED, "chosen": REASONED, "rejected": [OTHER]}])
    assert tokenizer(pairs(rows, tokenizer)[0]["prompt"]).input_ids == [1, 4, 9, 6, 5]
    answered = Dataset.from_list([{"prompt": ASKED, "completion": REASONED}])
    assert faithful_answers(answered, tokenizer)[0]["input_ids"] == [1, 4, 9, 6, 5, 20, 7, 21, 2]


SYSTEM = {"role": "system", "content": "w9"}
BOTH = [{"role": "assistant", "content": "w14"}, *REASONED]


@pytest.mark.parametrize(
    "prepare, template, row, expected",
    [
        (
            faithful_answers,
            REASONING,
            {"messages": ASKED + REASONED},
            "an answer in row 1 of the data, such as its rea",
        ),
        (faithful_answers, REASONING, {"conversations": ASKED + REASONED}, "an answer in row 1"),
        (faithful_answers, REASONING, {"prompt": ASKED, "completion": BOTH}, "the completion of row 1 .* one message"),
        (faithful_answers, STRICT, {"messages": [SYSTEM, *ASKED, *REASONED]}, "Row 1 .* chat template .System role"),
        (faithful_answers, STRICT, {"prompt": [SYSTEM, *ASKED], "completion": REASONED}, "Row 1 .* .System role"),
        (
            pairs,
            STRICT,
            {"prompt": [SYSTEM, *ASKED], "chosen": REASONED, "rejected": [OTHER]},
            "Row 1 .* .System role",
        ),
        (questions, STRICT, {"prompt": [SYSTEM, *ASKED]}, "Row 1 of the data does not fit .* .System role not supp"),
        (questions, "w4 {{ messages[-1]['content'] }}", {"prompt": [USER, ASKED[0]]}, "a user says in row 1"),
    ],
)
def test_rows_that_do_not_fit_the_template_are_named(prepare, template, row, expected):
    said = {name: USER if name == "prompt" else {"role": "assistant", "content": "w9"} for name in row}
    fine = {name: [turn] for name, turn in said.items()}
    with pytest.raises(ValueError, match=expected):
        prepare(Dataset.from_list([fine, row]), chat_tokenizer(template))


def test_a_text_beside_the_messages_does_not_count():
    rows = Dataset.from_list([{"prompt": "w9 w10", "messages": [USER, ANSWER]}])
    assert faithful_answers(rows, chat_tokenizer()).column_names == ["messages"]


def test_a_text_beside_messages_is_a_message():
    (row,) = faithful_answers(Dataset.from_list([{"prompt": ASKED, "completion": "w9"}]), chat_tokenizer())
    assert row == {"prompt": ASKED, "completion": [{"role": "assistant", "content": "w9"}]}
