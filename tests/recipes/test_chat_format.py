"""Questions and preferences in turns, or as text where the tokenizer knows no turns; how long rows are; estimates."""

import pytest
from datasets import Dataset

from recipes.training.chat_format import not_too_long, pairs, question_of, questions
from tests.recipes.tiny_chat import chat_tokenizer

USER, ANSWER = {"role": "user", "content": "w9 w10"}, {"role": "assistant", "content": "w11 w12 w13"}
OTHER = {"role": "assistant", "content": "w14"}


def test_a_chat_models_question_is_its_turns():
    """Where a row has the question as a text as well, as UltraChat does, the turns count."""
    rows = Dataset.from_list([{"prompt": "w9 w10", "messages": [USER, ANSWER, USER]}] * 2)
    assert questions(rows, chat_tokenizer())[0] == {"prompt": [USER]}
    assert questions(rows, chat_tokenizer(template=None))[1] == {"prompt": "w9 w10"}
    plain = Dataset.from_list([{"prompt": "w9"}])
    assert questions(plain, chat_tokenizer())[0] == {"prompt": [{"role": "user", "content": "w9"}]}
    assert question_of({"instruction": "w9", "input": "w10"})[0]["content"] == "w9\n\nw10"
    with pytest.raises(ValueError, match="holds a question"):
        questions(Dataset.from_list([{"messages": [ANSWER]}]), chat_tokenizer())
    with pytest.raises(ValueError, match="NoneType for its content"):
        question_of({"messages": [{"role": "user", "content": None}]})


def test_questions_leave_room_for_an_answer():
    rows = Dataset.from_list([{"prompt": [USER]}, {"prompt": [{"role": "user", "content": "w9 " * 20}]}])
    assert not_too_long(rows, chat_tokenizer(), 10)["prompt"] == [[USER]]
    text = Dataset.from_list([{"prompt": "w9 w10"}, {"prompt": "w9 w10 w11"}])
    assert not_too_long(text, chat_tokenizer(template=None), 2)["prompt"] == ["w9 w10"]
    with pytest.raises(ValueError, match="longer than 1 tokens"):
        not_too_long(text, chat_tokenizer(template=None), 1)
    with pytest.raises(ValueError, match="lower it"):
        not_too_long(text, chat_tokenizer(), 0)


def test_preferences_without_turns():
    named = Dataset.from_list([{"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]}])
    implicit = Dataset.from_list([{"chosen": [USER, ANSWER], "rejected": [USER, OTHER], "score": 1.0}])
    assert pairs(named, chat_tokenizer()) is named
    expected = {"prompt": "w9 w10\n\n", "chosen": "w11 w12 w13", "rejected": "w14"}
    for rows in (named, implicit):
        assert pairs(rows, chat_tokenizer(template=None))[0] == expected
    text = Dataset.from_list([{"prompt": "w9", "chosen": "w10", "rejected": "w11"}])
    assert pairs(text, chat_tokenizer(template=None)) is text
