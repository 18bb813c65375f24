"""Conversion to layers that read what lies beyond the window as softmax would: mapping, bytes, options, code."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from convert.options import make_options
from convert.placement.cache import cache_bytes
from convert.placement.placement import Placement
from convert.plan import describe
from convert.teachers.teacher import teacher_layer_types
from convert.tools.inspect import inspect_model
from modeling_llamba.hybrid_cache import cache_nbytes
from modeling_llamba.normalised_read import theory_mass
from tests.convert.test_window import LENGTH, converted
from tests.teachers import TEACHERS, make_teacher, random_ids

READ = dict(read="normalised", window=6, sinks=2)


OWN_WINDOWS = {
    name: [i for i, kind in enumerate(teacher_layer_types(config)) if kind == "sliding_attention"]
    for name, (_, config) in TEACHERS.items()
}


@pytest.mark.parametrize("name", [name for name in TEACHERS if len(OWN_WINDOWS[name]) < 4])
@torch.no_grad()
def test_the_first_tokens_and_a_wide_window_are_the_teacher(name, saved_teacher, tmp_path):
    """Nothing is fitted: out_proj is three times the teacher's o_proj, and the mass that of the theory."""
    kept = {"attention_layers": OWN_WINDOWS[name]} if OWN_WINDOWS[name] else {}
    hybrid, plan = converted(saved_teacher(name), tmp_path / "out", **READ, **kept)
    replaced = plan.placement.replaced_layers[0]
    teacher, ids = make_teacher(name), random_ids(2, LENGTH)
    expected, first = teacher(ids).logits, READ["window"] + READ["sinks"]
    torch.testing.assert_close(hybrid(ids).logits[:, :first], expected[:, :first], rtol=1e-4, atol=1e-5)
    hybrid.model.layers[replaced].mixer.out_proj.weight.mul_(2)  # as a fit might change it: not for the first tokens
    torch.testing.assert_close(hybrid(ids).logits[:, :first], expected[:, :first], rtol=1e-4, atol=1e-5)
    assert {rule.target.rpartition("mixer.")[2] for rule in plan.rules if rule.kind == "initialised"} <= {
        "read.mass", "read.log_decay", "out_proj.bias"
    }  # fmt: skip
    wide, _ = converted(saved_teacher(name), tmp_path / "wide", read="normalised", window=LENGTH, **kept)
    torch.testing.assert_close(wide(ids).logits, expected, rtol=1e-4, atol=1e-5)
    mixer = wide.model.layers[replaced].mixer
    assert {part.split(".")[0] for part in mixer.state_dict()} == {"attention", "read", "out_proj", "near_proj"}
    assert all(torch.equal(part, mixer.near_proj.weight) for part in mixer.out_proj.weight.chunk(3, dim=1))
    assert torch.equal(mixer.read.mass, theory_mass(plan.config, replaced)) and not mixer.read.log_decay.any()


@pytest.mark.parametrize("window", [6, 2 * LENGTH])
@pytest.mark.parametrize("heads", [None, "1:0,1:1,2:3"])
@torch.no_grad()
def test_the_bytes_of_the_plan_are_those_of_the_cache(heads, window, saved_teacher, tmp_path):
    options = READ | {"window": window, "attention_heads": heads}
    hybrid, plan = converted(saved_teacher("llama-gqa"), tmp_path / "out", **options)
    cache = hybrid(random_ids(1, LENGTH)).past_key_values
    assert cache_nbytes(cache) == cache_bytes(plan.config, LENGTH, torch.float32)[1]
    state = 4 * 2 * (8 + 1) * (4 + 1) * 4  # layers, key/value heads, numbers, bytes
    assert plan.summary()["state_bytes"] == state == sum(layer.recurrent_states[0].nbytes for layer in cache.layers)
    assert "a state read as softmax would beside a window" in describe(plan)
    card, report = (tmp_path / "out" / "README.md").read_text(), inspect_model(str(tmp_path / "out"))
    assert "if keys and values were Gaussian" in card and "mamba" not in card.partition("# ")[0]
    assert report["mixer"] is None and report["window"]["mixer"] is None
    assert Placement.of(plan.config) == plan.placement and plan.placement.hybrid.read == "normalised"


@torch.no_grad()
def test_the_checkpoint_runs_without_the_project(saved_teacher, tmp_path):
    hybrid, _ = converted(saved_teacher("phi"), tmp_path / "modèle", **READ)
    ids = random_ids(1, 20)
    code = (
        "import sys, json, torch; from transformers import AutoModelForCausalLM as M;"
        "m = M.from_pretrained(sys.argv[1], trust_remote_code=True);"
        "print(json.dumps(m(torch.tensor(json.loads(sys.argv[2]))).logits[0, -1].tolist()))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "modèle"), json.dumps(ids.tolist())]
    environment = {"HF_HOME": str(tmp_path / "cache"), "PATH": ""}
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    logits = torch.tensor(json.loads(found.stdout.splitlines()[-1]))
    torch.testing.assert_close(logits, hybrid(ids).logits[0, -1], rtol=1e-4, atol=1e-5)
    hybrid.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(again(ids).logits, hybrid(ids).logits)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(read="normalised", align="none"), "beyond a window"),
        (READ | dict(mixer="none"), "mixer none"),
        (READ | dict(scope="all"), "scope all"),
        (READ | dict(export_ready=True), "hold read: normalised"),
        (dict(read="softmax"), "read"),
    ],
)
def test_contradictory_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_options("teacher", "out", **options)
