"""What every test of conversions has."""

import pytest

from tests.helpers.teachers import make_teacher
from tests.helpers.tokenizers import tokenizer


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch):
    """A card's pictures take as long as the rest of a tiny conversion; test_card.py is where they are looked at."""
    if not request.module.__name__.endswith("test_card"):
        monkeypatch.setattr("convert.checkpoint.write.save_pictures", lambda *args: None)


@pytest.fixture(scope="session")
def two_layer_teacher(tmp_path_factory):
    """name -> folder of a teacher of two layers, with a tokenizer."""
    folders = {}

    def get(name: str):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("two-layers") / name
            make_teacher(name, layers=2).save_pretrained(folders[name])
            tokenizer().save_pretrained(folders[name])
        return folders[name]

    return get
