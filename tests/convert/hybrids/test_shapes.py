"""Shapes of a hybrid's tensors, as they are known without its model."""

import pytest

from convert.dry_run import plan_conversion
from convert.hybrids.shapes import meta_shapes, model_class, tensor_shapes
from convert.options import make_options
from tests.helpers.hybrids import MIXERS, PATTERNS, tiny_config
from tests.helpers.teachers import TEACHERS, WITHOUT_MIXERS


def assert_shapes(config):
    of_model = meta_shapes(model_class(config.model_type), config)
    assert list(tensor_shapes(config).items()) == list(of_model.items())


@pytest.mark.parametrize("name", TEACHERS)
def test_shapes_are_those_of_the_model(name, saved_teacher):
    beside = {"window": 32} if name in WITHOUT_MIXERS else {}
    for layers in ("all", "0.5"):
        plan = plan_conversion(make_options(str(saved_teacher(name)), "unused", attention_layers=layers, **beside))
        assert_shapes(plan.config)


@pytest.mark.parametrize("family", ["llamba", "phimamba"])
def test_shapes_of_every_mixer_and_layer(family):
    for pattern in PATTERNS:
        if family == "llamba" or pattern not in ("gemma", "experts"):
            for mixer in MIXERS[:2] if pattern == "shared" else MIXERS:
                assert_shapes(tiny_config(family, mixer, pattern))
