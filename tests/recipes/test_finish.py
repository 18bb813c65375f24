"""What training changes in a card."""

import pytest

from convert.checkpoint.card import NOTES
from recipes.training.save import TRAINED_NOTE, new_card, with_training

STAGE = {"stage": "sft", "teacher": None, "data": "chats", "settings": {}, "before": {}, "after": {}}


@pytest.mark.parametrize("note", NOTES, ids=range(len(NOTES)))
def test_a_trained_model_no_longer_says_that_nothing_was_trained(note):
    card = new_card("name")
    card.text += note + "\n"
    text = with_training(card, [STAGE], "name").text
    assert note not in text and text.count(TRAINED_NOTE) == 1
