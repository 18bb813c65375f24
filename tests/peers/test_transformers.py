"""transformers' common model tests on each of our shapes."""

import unittest

import torch
from transformers_suite.test_modeling_common import ModelTesterMixin

from tests.helpers.teachers import random_ids

from .known import TRANSFORMERS, known_of
from .shapes import SHAPES, class_of, model_of


class Tester:
    """Sizes, a configuration and inputs of a shape, as the common tests ask for them."""

    batch_size, seq_length, is_training = 3, 13, True

    def __init__(self, shape: str):
        self.config = model_of(shape).config
        self.num_hidden_layers = self.config.num_hidden_layers
        self.hidden_size = self.config.hidden_size
        self.num_attention_heads = self.config.num_attention_heads

    def get_config(self):
        return type(self.config).from_dict(self.config.to_dict())

    def prepare_config_and_inputs_for_common(self):
        ids = random_ids(self.batch_size, self.seq_length)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def suite_of(shape: str) -> type[unittest.TestCase]:
    """The common tests for a shape."""

    def set_up(self):
        self.model_tester = Tester(shape)

    causal = class_of(shape)
    models = (causal.model_class, causal)
    attributes = {"all_model_classes": models, "setUp": set_up, "has_attentions": shape in ("attention", "experts")}
    made = type(f"Test_{shape}", (ModelTesterMixin, unittest.TestCase), attributes)
    for name in filter(lambda name: name.startswith("test_"), dir(made)):
        if (reason := known_of(shape, name, TRANSFORMERS)) is not None:
            setattr(made, name, failing(getattr(made, name), reason))
    return made


def failing(test, reason: str):
    """A test that is known to fail, in itself or in a part of it."""

    def run(self):
        result = unittest.TestResult()
        case = unittest.FunctionTestCase(lambda: test(self))
        self._outcome, outcome = None, self._outcome  # so that parts are not reported one by one
        try:
            case.run(result)
        finally:
            self._outcome = outcome
        assert result.failures or result.errors, f"known to fail, but passes: {reason}"

    return run


globals().update({f"Test_{shape}": suite_of(shape) for shape in SHAPES})
