"""The pictures of a model card."""

import re
from pathlib import Path

import pytest

from convert import convert
from convert.checkpoint.card import KEPT_NOTE, SCALED_NOTE
from convert.checkpoint.code import KERNELS
from convert.checkpoint.pictures import CACHE, LAYERS, cache_picture, head_kinds, kl_picture, save_pictures
from convert.layout.cache import cache_bytes
from tests.helpers.hybrids import make_hybrid, tiny_config

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("mixer, beside", [("discrete_mamba2", "window and state"), ("none", "window")])
def test_layers_show_what_each_head_is(mixer, beside):
    config = tiny_config(pattern="beside-only", mixer=mixer, mixer_rotary=False, mixer_decay_bias=False)
    attention = "attention"  # two query heads to a key/value head
    for heads, kinds in (([2], [beside, attention]), ([1, 3], [attention, attention]), ([0], [attention, beside])):
        config.hybrid_full_heads = [heads, *[[]] * (len(config.layer_types) - 1)]
        assert head_kinds(config) == [kinds, *[[beside, beside]] * (len(config.layer_types) - 1)]


def test_layers_that_are_not_hybrid():
    config = tiny_config(pattern="window")
    assert head_kinds(config)[:2] == [["the teacher's sliding window"] * 2, ["mixer"] * 2]
    assert head_kinds(tiny_config(pattern="hybrid"))[1] == ["attention"] * 2


def test_pictures_are_600_pixels_wide(tmp_path):
    config = make_hybrid().config
    config.conversion = {"teacher_layer_types": ["full_attention"] * 4}
    save_pictures(config, tmp_path)
    for name in (LAYERS, CACHE):
        content = (tmp_path / name).read_bytes()
        assert content[:4] == b"\x89PNG"
        assert int.from_bytes(content[16:20], "big") == 600


def test_a_card_shows_the_pictures_that_lie_beside_it(two_layer_teacher, tmp_path):
    convert(
        str(two_layer_teacher("llama-gqa")),
        tmp_path / "out",
        align="none",
        window=8,
        mixer="none",
        attention_layers=0.0,
    )
    card = (tmp_path / "out" / "README.md").read_text()
    shown = set(re.findall(r"!\[.*\]\((.+)\)", card))
    assert shown == {LAYERS, CACHE} == {path.name for path in (tmp_path / "out").glob("*.png")}
    assert "`HH` (H softmax attention to 8 tokens and 4 sinks)" in card
    assert KERNELS in card
    assert all(
        word in (ROOT / "README.md").read_text() for word in ("C compiler", "hybrid_kernels", "HYBRID_COMPILE_C=0")
    )


@pytest.mark.parametrize(
    "teacher, bits, said",
    [("llama-gqa", 8, True), ("llama-gqa", 16, False), ("gemma3", 8, False), ("qwen3", 8, False)],
)
def test_a_card_says_that_adapters_of_the_teacher_do_not_fit(two_layer_teacher, tmp_path, teacher, bits, said):
    convert(str(two_layer_teacher(teacher)), tmp_path / "out", attention_layers="all", bits=bits, align="none")
    card = (tmp_path / "out" / "README.md").read_text()
    assert KEPT_NOTE in card
    assert (SCALED_NOTE in card) == said


def test_the_cache_is_the_plans():
    config = make_hybrid().config
    config.conversion = {"teacher_layer_types": ["full_attention"] * 4}
    axes = cache_picture(config).axes[0]
    teacher, hybrid = (10 ** line.get_ydata()[4] for line in axes.lines[:2])
    assert (teacher, hybrid) == pytest.approx(cache_bytes(config, 4096))
    assert axes.texts[0].get_text() == f"{hybrid / teacher:.0%}"


def test_kl_and_recall_stand_side_by_side():
    positions, recall = [(16, 1.0), (32, 0.5)], {"copy": [(8, 1.0, 0.9), (64, 0.8, 0.4)], "needle": [(16, None, 0.5)]}
    kl, by_distance = kl_picture(positions, recall).axes
    assert list(kl.lines[0].get_ydata()) == [1.0, 0.5]
    assert [list(line.get_ydata()) for line in by_distance.lines] == [[0.9, 0.4], [1.0, 0.8], [0.5]]
    assert len(kl_picture(positions, {}).axes) == len(kl_picture([], recall).axes) == 1
