"""The page of a hybrid: one file that needs nothing else, can be read aloud, and says what the configuration says."""

import pytest

from convert import convert
from convert.cli import main
from convert.io.writer import human_bytes
from convert.layout.cache import CONTEXTS, cache_bytes, parts_of_layers
from convert.tools.inspect import hybrid_config
from convert.tools.page import Answer, Section, Table, page
from tests.helpers.chromium import CHROMIUM, show
from tests.helpers.html_page import check_page
from tests.helpers.hybrids import make_hybrid

OPTIONS = {
    "mixed": {"attention_layers": "1", "window": 16, "attention_heads": {0: [0, 1]}},
    "mamba2": {"mixer": "mamba2", "attention_layers": 0.5},
    "all kept": {"attention_layers": "all"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_inspect_writes_a_page(name, saved_teacher, tmp_path, capsys):
    convert(str(saved_teacher("llama-gqa")), tmp_path / "out", align="none", **OPTIONS[name])
    main(["inspect", str(tmp_path / "out"), "--html", str(tmp_path / "page.html"), "--json"])
    assert capsys.readouterr().out.startswith("{")
    said = check_page((tmp_path / "page.html").read_text())
    config = hybrid_config(str(tmp_path / "out"))
    for tokens in CONTEXTS.values():
        assert human_bytes(cache_bytes(config, tokens)[1]) in said
    assert ("smaller than the teacher's" in said) == (name != "all kept")
    assert not list(tmp_path.glob(".page*"))


@pytest.mark.parametrize("pattern", ["beside", "window", "pure", "attention"])
def test_parts_of_layers_are_the_whole_cache(pattern):
    config = make_hybrid(pattern=pattern, **({"sliding_window": 8} if pattern == "window" else {})).config
    config.conversion = {"teacher_layer_types": ["full_attention"] * config.num_hidden_layers}
    for tokens in (0, 1, 100, 5000):
        parts = parts_of_layers(config, tokens)
        assert len(parts) == config.num_hidden_layers
        assert sum(sum(layer.values()) for layer in parts) == cache_bytes(config, tokens)[1]


def test_a_page_that_cannot_be_written(saved_teacher, tmp_path, capsys):
    convert(str(saved_teacher("llama-gqa")), tmp_path / "out", align="none", attention_layers="all")
    with pytest.raises(SystemExit):
        main(["inspect", str(tmp_path / "out"), "--html", str(tmp_path / "none" / "page.html")])
    assert capsys.readouterr().err.count("\n") == 1


def test_text_of_users_is_text():
    """Names and answers may hold what HTML would take for its own."""
    evil = '<script>alert(1)</script> & "quoted"'
    table = Table(evil, [evil], [[evil]])
    said = check_page(page(evil, evil, [Section(evil, evil, table=table, answers=[Answer(evil, evil, evil, evil)])]))
    assert said.count(evil) == 12


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
@pytest.mark.parametrize("scheme, darkest", [("light", True), ("dark", False)])
def test_a_browser_shows_it(scheme, darkest, saved_teacher, tmp_path):
    from matplotlib.image import imread

    convert(str(saved_teacher("llama-gqa")), tmp_path / "out", align="none", **OPTIONS["mixed"])
    file = tmp_path / "page.html"
    main(["inspect", str(tmp_path / "out"), "--html", str(file), "--json"])
    shown = show(file, scheme, tmp_path / "profile")
    assert shown.requests == [file.as_uri()]
    assert not shown.errors
    (tmp_path / "page.png").write_bytes(shown.picture)
    pixels = imread(tmp_path / "page.png")[..., :3]
    assert (pixels.mean() > 0.5) == darkest
    assert len({tuple(pixel) for pixel in pixels[::3, ::3].reshape(-1, 3)}) > 20
    roles = [node["role"]["value"] for node in shown.nodes]
    assert roles.count("image") == 3
    assert roles.count("table") == 1
    assert roles.count("rowheader") == len(CONTEXTS)
    heads = [node["name"]["value"] for node in shown.nodes if node["role"]["value"] == "columnheader"]
    assert heads == ["tokens", "teacher", "this model", "share"]
