"""Layers that stay attention: shares, patterns, lists and published choices."""

import pytest

from convert.layout.presets import (
    PUBLISHED_ATTENTION_LAYERS,
    attention_layers,
    pattern_attention_layers,
    uniform_attention_layers,
)


@pytest.mark.parametrize(
    "layers, ratio, expected",
    [
        (32, 0.5, tuple(range(1, 32, 2))),
        (32, 0.25, (3, 7, 11, 15, 19, 23, 27, 31)),
        (32, 0.125, (7, 15, 23, 31)),
        (32, 0.0, ()),
        (32, 1.0, tuple(range(32))),
        (30, 0.5, tuple(range(1, 30, 2))),
        (30, 0.25, (2, 6, 10, 14, 17, 21, 25, 29)),
        (4, 0.3, (3,)),
    ],
)
def test_uniform(layers, ratio, expected):
    assert uniform_attention_layers(layers, ratio) == expected


@pytest.mark.parametrize("layers", range(1, 60))
@pytest.mark.parametrize("ratio", [0.1, 0.125, 0.25, 0.5, 0.75, 0.9])
def test_uniform_keeps_the_share_and_spreads(layers, ratio):
    kept = uniform_attention_layers(layers, ratio)
    assert len(set(kept)) == len(kept) == round(ratio * layers)
    assert all(0 <= i < layers for i in kept)
    gaps = [b - a for a, b in zip(kept, kept[1:], strict=False)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_patterns():
    assert pattern_attention_layers(6, "MA") == (1, 3, 5)
    assert pattern_attention_layers(6, "mmma") == (3,)
    assert pattern_attention_layers(4, "AMMA") == (0, 3)
    assert pattern_attention_layers(3, "M") == ()
    assert attention_layers(6, "mmma") == (3,)
    assert attention_layers(6, "MA") == (1, 3, 5)


def test_lists_and_names():
    assert attention_layers(8, "5, 1,3") == (1, 3, 5)
    assert attention_layers(8, [5, 1]) == (1, 5)
    assert attention_layers(8, 3) == (3,)
    assert attention_layers(3, "all") == (0, 1, 2)
    assert attention_layers(8, "none") == attention_layers(8, "") == ()
    assert attention_layers(24, "hybrid-phi-mamba") == (4, 10, 16, 22)
    assert attention_layers(28, "m1-3b") == (3, 8, 13, 18, 23, 27)
    assert attention_layers(32, "mamba-in-the-llama-75") == tuple(i for i in range(32) if i % 4 != 0)
    assert attention_layers(28, "mamba-in-the-llama-50") == tuple(range(1, 28, 2))


def test_published_sets_are_valid_and_uniform_agrees_where_it_should():
    for name, by_depth in PUBLISHED_ATTENTION_LAYERS.items():
        for depth, layers in by_depth.items():
            assert sorted(set(layers)) == list(layers), name
            assert all(0 <= i < depth for i in layers), name
    for share in ("50", "25", "12.5", "0"):
        published = PUBLISHED_ATTENTION_LAYERS[f"mamba-in-the-llama-{share}"][32]
        assert published == uniform_attention_layers(32, float(share) / 100)
