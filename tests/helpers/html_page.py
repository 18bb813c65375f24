"""Checks of a page of HTML as it is in its file."""

from collections import Counter
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "hr"}


class _Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.said = ""

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.said += data


def check_page(content: str) -> str:
    """Check that a page is whole, needs nothing else and can be read aloud; returns its text."""
    reader = _Reader()
    reader.feed(content)
    assert content.startswith("<!doctype html>")
    assert not reader.open
    names = [tag for tag, _ in reader.tags]
    assert not {"script", "img", "iframe", "object"} & set(names)
    for tag, attributes in reader.tags:
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
    assert "@import" not in content
    assert "http" not in content.replace("http://www.w3.org/", "")
    ids = Counter(attributes["id"] for _, attributes in reader.tags if "id" in attributes)
    assert max(ids.values(), default=1) == 1, ids.most_common(3)
    references = [attributes.get(name) for _, attributes in reader.tags for name in ("href", "xlink:href")]
    used = [place[1:] for place in references if place and place.startswith("#")]
    assert set(used) <= set(ids)
    pictures = [attributes for tag, attributes in reader.tags if tag == "svg"]
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in pictures)
    assert names.count("caption") == names.count("table")
    assert all(attributes.get("scope") in ("row", "col") for tag, attributes in reader.tags if tag == "th")
    return reader.said
