"""What training changes in a card."""

import pytest

from convert.checkpoint.card import KL_ROW, NO_FIGURES, NOT_MEASURED, NOTES
from recipes.training.save import TRAINED_NOTE, new_card, with_training

STAGE = {"stage": "sft", "teacher": None, "data": "chats", "settings": {}, "before": {}, "after": {}}


@pytest.mark.parametrize("note", NOTES, ids=range(len(NOTES)))
def test_a_trained_model_no_longer_says_that_nothing_was_trained(note):
    card = new_card("name")
    card.text += note + "\n"
    text = with_training(card, [STAGE], "name").text
    assert note not in text and text.count(TRAINED_NOTE) == 1


def test_a_trained_model_no_longer_has_the_figures_of_before():
    card = new_card("name")
    card.text += f"| {KL_ROW} | 0.123 |\n"
    assert f"| {KL_ROW} | {NOT_MEASURED} |" in with_training(card, [STAGE], "name").text and KL_ROW in NO_FIGURES
