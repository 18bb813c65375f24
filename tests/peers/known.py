"""Tests of peers that our shapes do not pass, and why; one that passes after all fails."""

import re

BATCHED_EXPERTS = r"test_eager_matches_batched_and_grouped_inference_.*"
WITH_EXPERTS = (
    "Llamba has experts as a class, and this model has none, so that it refuses another implementation of them"
)
NO_PROBABILITIES = "no layer has attention probabilities, so that output_attentions is refused"
TRANSFORMERS: dict[str, dict[str, str]] = {
    ".*": {"test_generation_tester_mixin_inheritance": "the distribution has no tests/generation"},
    "attention|hybrid.*|phimamba|experts": {
        "test_bc_cache_name_forward": "a hybrid takes both names of a cache, so that none is deprecated",
    },
    "attention|hybrid.*|discrete_mamba2|mamba2|mamba1": {BATCHED_EXPERTS: WITH_EXPERTS},
    "attention": {"test_capture_outputs_decorator": "Llamba has router logits as a class, and this model has none"},
    "hybrid.*|.*mamba.*": {"test_capture_outputs_decorator": NO_PROBABILITIES},
    "mamba1": {"test_model_rope_scaling_from_config_.*": "it has no rotary embedding"},
    "experts": {"test_attention_outputs": "one layer of two has attention probabilities"},
}
"""Shapes -> tests -> reason; both as patterns."""


PEFT: dict[str, dict[str, str]] = {
    ".*": {
        r"test_prompt_learning_with_gradient_checkpointing\[(Prompt\w+|CPT)Config-.*": "it loads a hub's data set",
    },
    "attention|hybrid.*|experts|phimamba": {
        r"test_weighted_combination_of_adapters\[LoraConfig-config_kwargs1[6-9]-.*": "a Llama fails alike",
    },
    "attention|hybrid.*|experts|.*mamba[12]": {
        r"test_merge_layers.*\[BeftConfig.*": "a bias has no place in layers without one; Llamas are left out by name",
    },
    "hybrid.*|.*mamba.*|experts": {
        r"test_(disable_adapter|generate\w*|inference_safetensors|passing_input_embeds_works|training_\w+)"
        r"\[PrefixTuningConfig-config_kwargs2[12].*": "windows and states take no keys without tokens",
    },
    "discrete_mamba2|mamba2|mamba1": {r"test_\w+\[.*BeftConfig.*": "the bias is one of v_proj, which no mixer has"},
    "mamba1": {r"test_\w+\[.*GraloraConfig-config_kwargs10-.*": "in_proj has 98 outputs, which 4 does not divide"},
}
"""Shapes -> tests -> reason, of PEFT's decoder tests."""


def known_of(shape: str, test: str, suite: dict[str, dict[str, str]]) -> str | None:
    """The reason for which a test of a suite is known to fail on a shape."""
    for shapes, tests in suite.items():
        for pattern, reason in tests.items():
            if re.fullmatch(shapes, shape) and re.fullmatch(pattern, test):
                return reason
    return None
