"""The command and its YAML: what is printed, what wins, what travels along."""

import json
import subprocess
import sys

import pytest
import torch
import yaml
from rich.progress import Progress
from transformers import AutoConfig, AutoTokenizer

from convert import ConversionConfig, cli, plan_conversion
from convert.options import make_options, parse_size, read_config_file
from tests.convert.test_bad_input import run
from tests.modeling.test_training import tokenizer
from tests.teachers import make_teacher


def test_dry_run_prints_the_plan_and_writes_nothing(saved_teacher, tmp_path, monkeypatch):
    monkeypatch.setattr("convert.weights.reader.SafetensorsCheckpoint.read_rows", None)  # reading a weight would fail
    done = run(saved_teacher("llama-gqa"), tmp_path / "out", "--dry-run")
    assert done.returncode == 0 and "MAMA" in done.stderr and done.stdout == ""
    assert "scores decide" not in done.stderr, "nothing is fitted, so they are evenly placed"
    done = run(saved_teacher("llama-gqa"), tmp_path / "out", "--dry-run", "--align", "closed-form")
    assert "window of 1021" in done.stderr and "scores decide when this is run" in done.stderr, "25 % of the cache"
    half = ("--align", "closed-form", "--attention-layers", "0.5")
    (tmp_path / "align.yaml").write_text("fitt: {}\n")
    done = run(
        saved_teacher("llama-gqa"), tmp_path / "out", "--dry-run", *half, "--align-config", tmp_path / "align.yaml"
    )
    assert done.returncode != 0 and "Unknown key 'fitt'" in done.stderr
    done = run(saved_teacher("llama-gqa"), tmp_path / "out", "--dry-run", *half)
    assert "scores decide which layers" in done.stderr and "which heads" not in done.stderr
    window = ("--window", "8", "--attention-heads", "1", "--attention-layers", "0")
    done = run(saved_teacher("llama-gqa"), tmp_path / "out", "--dry-run", "--align", "closed-form", *window)
    assert "scores decide which heads" in done.stderr and "which layers" not in done.stderr
    done = run(saved_teacher("llama-gqa"), tmp_path / "out", "--dry-run", *window[:2], "--mixer", "none")
    assert "2 window)" in done.stderr and "mixers" not in done.stderr
    done = run(saved_teacher("llama-gqa"), tmp_path / "out", "--dry-run", "--json", "--attention-layers", "3")
    plan = json.loads(done.stdout)
    assert plan["notes"] == [] and plan["mixer_layers"] == [0, 1, 2] and plan["attention_layers"] == [3]
    assert set(plan["tensors"]) == {"moved", "derived", "initialised", "dropped"}
    assert plan["derived"]["model.layers.0.mixer.in_proj.weight"] == [
        f"model.layers.0.self_attn.{p}_proj.weight" for p in "vkq"
    ]
    assert not (tmp_path / "out").exists()


def test_plan_figures_are_right(saved_teacher):
    """Parameters and bytes against the model itself."""
    from modeling_llamba import LlambaForCausalLM
    from tests.teachers import random_ids

    plan = plan_conversion(make_options(model=str(saved_teacher("llama-gqa")), output="unused", align="none"))
    model = LlambaForCausalLM(plan.config)
    assert plan.parameters_after == sum(p.numel() for p in model.parameters())
    assert plan.parameters_before == sum(p.numel() for p in make_teacher("llama-gqa").parameters())
    cache = model(random_ids(1, 50), use_cache=True).past_key_values
    held = 0
    for layer in cache.layers:
        tensors = (
            [layer.keys, layer.values] if hasattr(layer, "keys") else [layer.conv_states[0], layer.recurrent_states[0]]
        )
        held += sum(t.numel() * t.element_size() for t in tensors)
    from convert.placement.cache import cache_bytes

    assert cache_bytes(plan.config, 50, torch.float32)[1] == held
    assert plan.summary()["state_bytes"] == cache_bytes(plan.config, 0, torch.float32)[1] > 0


def test_json_and_quiet(saved_teacher, tmp_path):
    done = run(saved_teacher("llama-gqa"), tmp_path / "out", "--json", "--quiet")
    assert done.returncode == 0 and done.stderr == ""
    assert json.loads(done.stdout)["output"] == str(tmp_path / "out")
    done = run(saved_teacher("llama-gqa"), tmp_path / "out", "--quiet", "--overwrite")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_yaml_and_flags(saved_teacher, tmp_path):
    config = tmp_path / "hybrid.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "model": str(saved_teacher("llama-gqa")),
                "output": str(tmp_path / "out"),
                "attention-layers": [0, 2],
                "mixer": "mamba2",
                "dtype": "bfloat16",
            }
        )
    )
    assert run("--config", config).returncode == 0
    written = AutoConfig.from_pretrained(tmp_path / "out")
    assert written.mixer == "mamba2" and written.dtype == torch.bfloat16
    assert [i for i, kind in enumerate(written.layer_types) if kind == "full_attention"] == [0, 2]
    done = run("--config", config, "--mixer", "mamba1", "--attention-layers", "0.25", "--overwrite")
    assert done.returncode == 0, done.stderr
    written = AutoConfig.from_pretrained(tmp_path / "out")
    assert written.mixer == "mamba1" and written.layer_types.count("full_attention") == 1


@pytest.mark.parametrize(
    "text, message",
    [
        ("mixxer: mamba2", "Unknown key 'mixxer'"),
        ("- a", "option: value"),
        ("a: [", "not valid YAML"),
        ("attention_layers: half", "attention_layers must be"),
        ("seed: true", "seed must be"),
        ("overwrite: 'yes'", "overwrite must be"),
    ],
)
def test_bad_yaml(text, message, tmp_path):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path / "x.yaml", model="m", output="o")
    with pytest.raises(ValueError, match="does not exist"):
        read_config_file(tmp_path / "y.yaml")


def test_an_option_without_effect_warns(saved_teacher, tmp_path):
    done = run(saved_teacher("llama-gqa"), tmp_path / "out", "--device", "cuda")
    assert done.returncode == 0 and "warning: device has no effect" in done.stderr
    assert "warning" not in run(saved_teacher("llama-gqa"), tmp_path / "out2").stderr


@pytest.mark.parametrize("text, size", [("5GB", 5 * 10**9), ("500 MB", 5 * 10**8), ("2GiB", 2**31), ("100", 100)])
def test_sizes(text, size):
    assert parse_size(text) == size


def test_help_groups_options_and_is_quick():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "convert.cli", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    for panel in ("Teacher", "Layers", "Mixer", "Output", "Run"):
        assert f"─ {panel} ─" in done.stdout
    assert "torch" not in {line.split("|")[-1].strip() for line in done.stderr.splitlines()}


def test_every_option_is_a_flag_and_a_key():
    import dataclasses
    import inspect

    from convert.cli import SWITCHES, convert_command

    flags = set(inspect.signature(convert_command).parameters) - set(SWITCHES)
    assert flags == {field.name for field in dataclasses.fields(ConversionConfig)}


def test_tokenizer_template_and_generation_settings_travel_along(tmp_path):
    teacher = make_teacher("llama-gqa")
    teacher.generation_config.temperature = 0.3
    teacher.generation_config.do_sample = True
    teacher.save_pretrained(tmp_path / "teacher")
    saved = tokenizer()
    saved.chat_template = "{% for m in messages %}w9 {{ m.content }} {% endfor %}"
    saved.save_pretrained(tmp_path / "teacher")
    assert run(tmp_path / "teacher", tmp_path / "out").returncode == 0
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    chat = [{"role": "user", "content": "w5 w6"}]
    assert loaded.apply_chat_template(chat)["input_ids"] == saved.apply_chat_template(chat)["input_ids"] == [9, 5, 6]
    assert loaded.pad_token_id == 0
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert settings["temperature"] == 0.3
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "teacher" / name).read_bytes()


def test_provenance_is_recorded(saved_teacher, tmp_path):
    import hashlib

    folder = saved_teacher("llama-gqa")
    assert run(folder, tmp_path / "out", "--mixer", "mamba2", "--seed", "7").returncode == 0
    conversion = json.loads((tmp_path / "out" / "config.json").read_text())["conversion"]
    assert conversion["teacher"] == folder.name and conversion["options"] == {
        "align": "none",
        "mixer": "mamba2",
        "seed": 7,
    }
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert conversion["teacher_sha256"] == {"model.safetensors": digest}
    assert set(conversion["versions"]) == {"convert-to-hybrid", "transformers", "torch"}
    card = (tmp_path / "out" / "README.md").read_text()
    assert str(folder.parent) not in card and card.endswith("|\n")
    assert digest in card and "Not aligned" in card and "trust_remote_code=True" in card and "MAMA" in card


def test_a_bar_that_counts_tokens_shows_their_rate():
    clock = iter(range(0, 1000))
    with Progress(cli.TokenRate(), get_time=lambda: float(next(clock)), auto_refresh=False, disable=True) as bar:
        shown = {}
        for what in ("distilling, tokens", "scoring layers"):
            task = bar.add_task(what, total=4096)
            for done in (1024, 2048, 3072):
                bar.update(task, completed=done)
            shown[what] = cli.TokenRate().render(next(t for t in bar.tasks if t.id == task)).plain
    assert shown["scoring layers"] == "" and shown["distilling, tokens"].endswith("/s")
    assert float(shown["distilling, tokens"][:-2].replace(",", "")) > 0
