"""Launches of a layer in a whole model, counted where Triton's kernels are compiled but do nothing."""

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.timeout(600)
def test_a_layer_launches_no_more_than_its_teacher(record_property):
    """For a prompt, and less than two thirds for a token."""
    command, own = (
        [sys.executable, "-m", "tests.kernels.host_time"],
        {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""},
    )
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for what, models in found.items():
        of_models = (f"{name} {each['launches']} launches, {each['microseconds']} us" for name, each in models.items())
        record_property(f"{what}, host time of a layer:", "; ".join(of_models))
    launches = {what: {name: each["launches"] for name, each in models.items()} for what, models in found.items()}
    assert launches["prompt"]["hybrid"] <= min(40, launches["prompt"]["teacher"])
    assert launches["token"]["hybrid"] < launches["token"]["teacher"] * 2 / 3
