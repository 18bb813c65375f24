"""PEFT's decoder tests on each of our shapes."""

from peft_suite.test_decoder_models import *  # noqa: F403
