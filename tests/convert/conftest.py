"""What every test of conversions has."""

import pytest


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch):
    """A card's pictures take as long as the rest of a tiny conversion; test_card.py is where they are looked at."""
    if not request.module.__name__.endswith("test_card"):
        monkeypatch.setattr("convert.checkpoint.card.save_pictures", lambda *args: None)
