"""The command and its YAML: what is printed, what wins, what travels along."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from rich.progress import Progress
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from convert import cli, convert, plan_conversion
from convert.checkpoint.load import load_model
from convert.layout.cache import cache_bytes
from convert.options import (
    ConversionOptions,
    conversion_parser,
    documented,
    make_options,
    options_page,
    parse_size,
)
from modeling_llamba import LlambaForCausalLM
from tests.helpers.command import check_one_line_error, parser_of, run, run_as_is
from tests.helpers.teachers import make_teacher, random_ids
from tests.helpers.tiny_chat import save_chat_teacher
from tests.helpers.tokenizers import tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "options.md"


def test_dry_run_prints_the_plan_and_writes_nothing(saved_teacher, tmp_path, monkeypatch):
    monkeypatch.setattr("convert.io.reader.SafetensorsCheckpoint.read_rows", None)  # reading a weight would fail

    def dry(*flags):
        done = run_as_is(saved_teacher("llama-gqa"), tmp_path / "out", "--dry-run", *flags)
        assert done.returncode == 0, done.stderr
        return done

    done = dry("--align", "none")
    assert "MAMA" in done.stderr
    assert done.stdout == ""
    assert "by scores" not in done.stderr, "nothing is fitted, so they are evenly placed"
    done = dry()
    assert "salient tokens and a state" in done.stderr
    assert "the run chooses the heads that keep full attention" in done.stderr
    assert "query heads, which the run chooses" in dry("--cache", "0.7").stderr
    assert "by scores" not in dry("--cache", "0.9", "--attention-heads", "1:0").stderr, "the user has decided"
    done = dry("--attention-layers", "0.5")
    assert "the layers with attention shown are placeholders" in done.stderr
    assert "the run chooses the heads" not in done.stderr
    window = ("--window", "8", "--attention-heads", "1", "--attention-layers", "none")
    done = dry(*window)
    assert "the run chooses the heads that keep full attention" in done.stderr
    assert "which layers" not in done.stderr
    done = dry(*window[:2], "--mixer", "none", "--align", "none")
    assert "2 hybrid)" in done.stderr
    assert "states" not in done.stderr
    plan = json.loads(dry("--json", "--attention-layers", "3", "--align", "none").stdout)
    assert plan["mixer_layers"] == [0, 1, 2]
    assert plan["attention_layers"] == [3]
    assert set(plan["tensors"]) == {"moved", "scaled", "derived", "initialised", "dropped"}
    assert plan["derived"]["model.layers.0.mixer.in_proj.weight"] == [
        f"model.layers.0.self_attn.{p}_proj.weight" for p in "vkq"
    ]
    assert not (tmp_path / "out").exists()


def test_plan_figures_are_right(saved_teacher):
    """Parameters and bytes against the model itself."""
    plan = plan_conversion(make_options(model=str(saved_teacher("llama-gqa")), output="unused", align="none"))
    model = LlambaForCausalLM(plan.config)
    assert plan.parameters_after == sum(p.numel() for p in model.parameters())
    assert plan.parameters_before == sum(p.numel() for p in make_teacher("llama-gqa").parameters())
    cache = model(random_ids(1, 50), use_cache=True).cache
    held = 0
    for layer in cache.layers:
        tensors = (
            [layer.keys, layer.values] if hasattr(layer, "keys") else [layer.conv_states[0], layer.recurrent_states[0]]
        )
        held += sum(t.numel() * t.element_size() for t in tensors)
    assert cache_bytes(plan.config, 50, torch.float32)[1] == held
    assert plan.summary()["state_bytes"] == cache_bytes(plan.config, 0)[1] > 0


def test_json_and_quiet(saved_teacher, tmp_path):
    done = run(saved_teacher("llama-gqa"), tmp_path / "out", "--json", "--quiet")
    assert done.returncode == 0
    assert done.stderr == ""
    assert json.loads(done.stdout)["output"] == str(tmp_path / "out")
    done = run(saved_teacher("llama-gqa"), tmp_path / "out", "--quiet", "--overwrite")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_yaml_and_flags(saved_teacher, tmp_path):
    config = tmp_path / "hybrid.yaml"
    sections = {
        "model": str(saved_teacher("llama-gqa")),
        "placement": {"attention_layers": [0, 2]},
        "mixer": {"kind": "mamba2"},
        "alignment": {"method": "none"},
        "output": {"folder": str(tmp_path / "out"), "dtype": "bfloat16"},
    }
    config.write_text(yaml.safe_dump(sections))
    assert run_as_is("--config", config).returncode == 0
    written = AutoConfig.from_pretrained(tmp_path / "out")
    assert written.mixer == "mamba2"
    assert written.dtype == torch.bfloat16
    assert [i for i, kind in enumerate(written.layer_types) if kind == "full_attention"] == [0, 2]
    flags = ("--mixer", "mamba1", "--attention-layers", "0.25", "--overwrite")
    for number, arguments in enumerate([("--config", config, *flags), (*flags, "--config", config)]):
        done = run_as_is(sections["model"], *arguments, tmp_path / str(number))
        assert done.returncode == 0, done.stderr
        written = AutoConfig.from_pretrained(tmp_path / str(number))
        assert written.mixer == "mamba1"
        assert written.layer_types.count("full_attention") == 1


SAME = {
    "--attention-layers": ("1,3", "1,3"),
    "--cache": ("50MB", "50MB"),
    "--context": ("99", 99),
    "--window": ("8", 8),
    "--attention-heads": ("16:3", "16:3"),
    "--mixer": ("mamba2", "mamba2"),
    "--align": ("none", "none"),
    "--tokens": ("5120", 5120),
    "--alignment.fit.refine_steps": ("0", 0),
    "--mixer.initial_decay": ("0.5", 0.5),
    "--mixer.gate_bias": ("false", False),
    "--alignment.fit.decays": ("[0.5, 0.7]", [0.5, 0.7]),
}


BESIDE = {
    "--attention-heads": {"placement.window": 4},
    "--alignment.fit.refine_steps": {"placement.attention_layers": 0.5},
    "--alignment.fit.decays": {"placement.attention_layers": 0.5},
}
"""Options without which one has no effect."""


@pytest.mark.parametrize("flag", SAME)
def test_a_flag_a_yaml_entry_and_a_value_in_python_are_the_same(flag, tmp_path):
    text, value = SAME[flag]
    parser = parser_of("convert")
    beside = BESIDE.get(flag, {})
    given, _ = parser.from_command_line(["m", "o", flag, text, *(f"--{k}={v}" for k, v in beside.items())])
    name = cli.CONVERSION_FLAGS.get(flag, flag[2:])
    *sections, leaf = name.split(".")
    nested = {leaf: value}
    for section in reversed(sections):
        nested = {section: nested}
    by_name = {}
    for other, said in beside.items():
        section, _, other = other.partition(".")
        by_name[other] = nested.setdefault(section, {})[other] = said
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(nested))
    by_name[flag[2:].replace("-", "_") if flag in cli.CONVERSION_FLAGS else leaf] = value
    assert given == make_options("m", "o", config=tmp_path / "x.yaml") == make_options("m", "o", **by_name)
    assert given != make_options("m", "o")


@pytest.mark.parametrize(
    "text, message",
    [
        ("mixxer: mamba2", "Unknown option 'mixxer'; did you mean mixer?"),
        ("window: 8", "Unknown option 'window'; did you mean placement.window?"),
        ("alignment: {fitt: {}}", "Unknown option 'alignment.fitt'; did you mean alignment.fit?"),
        ("alignment: {fit: {refine_step: 1}}", "did you mean alignment.fit.refine_steps?"),
        ("mixer: mamba2", "mixer is a section of options, such as mixer.kind"),
        ("- a", "must hold options"),
        ("a: [", "not valid YAML"),
        ("placement: {attention_layers: {a: 1}}", "attention_layers must be"),
        ("seed: true", "seed must be a whole number"),
        ("seed: null", "seed must be a whole number"),
        ("output: {overwrite: 3}", "overwrite must be true or false"),
        ("alignment: {fit: {decays: [0]}}", "decays must be"),
    ],
)
def test_bad_yaml(text, message, tmp_path):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ValueError, match=message.replace("?", r"\?")) as error:
        make_options("m", "o", config=tmp_path / "x.yaml")
    assert "\n" not in " ".join(str(error.value).split())
    assert "jsonargparse" not in str(error.value)
    with pytest.raises(ValueError, match="does not exist"):
        make_options("m", "o", config=tmp_path / "y.yaml")


@pytest.mark.parametrize("word, command", [("imprt", "import"), ("exports", "export"), ("gen", "generate")])
def test_a_misspelt_command_is_told_from_a_model(word, command, tmp_path, monkeypatch, saved_teacher):
    check_one_line_error(run_as_is(word, "a", "b"), f"no command '{word}'", f"did you mean {command}?")
    monkeypatch.chdir(tmp_path)
    (tmp_path / word).symlink_to(saved_teacher("llama-gqa"))
    assert run(word, tmp_path / "out", "--dry-run").returncode == 0, "a folder of that name is a model"


def test_every_command_says_what_it_lacks(tmp_path):
    for name, command in cli.COMMANDS.items():
        if not command.positionals:
            continue
        assert run_as_is(name).stdout.startswith("usage: convert-to-hybrid"), "without arguments, the help"
        check_one_line_error(run_as_is(name, "--verbos"), "Unknown option --verbos; did you mean --verbose?")
    check_one_line_error(run_as_is("inspect", "--json"), "No MODEL given: convert-to-hybrid inspect MODEL")
    for name in ("import", "export"):
        check_one_line_error(run_as_is(name, tmp_path), "No OUT given")
    check_one_line_error(run_as_is("mohawk", "a", "b"), "No teacher given")
    check_one_line_error(run_as_is("export", "a", "b", "c"), "one argument too many: 'c'")


def test_compare_is_named_where_it_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_one_line_error(run_as_is("compare", "a", "b"), "needs the installed command: convert-to-hybrid compare")
    assert "needs the installed command" in run_as_is("--help").stdout


@pytest.mark.parametrize("text, size", [("5GB", 5 * 10**9), ("500 MB", 5 * 10**8), ("2GiB", 2**31), ("100", 100)])
def test_sizes(text, size):
    assert parse_size(text) == size


def test_help_is_short_and_quick():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "convert.cli", "--help"], capture_output=True, text=True
    )
    named = [name for name in cli.COMMANDS if f"convert-to-hybrid {name} " in done.stdout]
    assert done.returncode == 0
    assert named == [name for name in cli.COMMANDS if name != "convert"]
    shown = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  -")]
    assert len(shown) <= 24
    assert set(cli.CONVERSION_FLAGS) <= set(shown)
    assert "torch" not in {line.split("|")[-1].strip() for line in done.stderr.splitlines()}


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_flag_is_an_option_and_every_option_has_its_help(name):
    command = cli.COMMANDS[name]
    options = {option.name: option for option in documented(command.options)}
    assert {*command.flags.values(), *command.positionals.values()} <= set(options)
    assert all(option.help.endswith(".") and "typing" not in option.kind for option in options.values())
    assert "MISSING" not in parser_of(name).help()


def test_the_page_of_options_is_made_from_them():
    rewrite = (
        "python -c 'from convert.options import options_page; print(options_page(), end=\"\")' > docs/guide/options.md"
    )
    assert PAGE.read_text() == options_page(), rewrite
    assert all(f"| `{option.name.split('.')[-1]}`" in options_page() for option in documented(ConversionOptions))


def test_an_unknown_option_in_python_names_the_nearest():
    with pytest.raises(ValueError, match="'windw'; did you mean placement.window"):
        make_options("m", "o", windw=8)
    assert set(conversion_parser().options) == {option.name for option in documented(ConversionOptions)}


@pytest.mark.parametrize("name", ["model", "output", "folder"])
def test_what_is_given_by_place_and_by_name_is_a_contradiction(name):
    with pytest.raises(ValueError, match=f"{name} is given twice"):
        make_options("m", "o", **{name: "other"})


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


SAMPLING, LEFTOVERS = {"temperature": 0.9, "top_p": 0.6}, {"use_cache": False, "output_hidden_states": True}


@pytest.mark.parametrize(
    "place, settings",
    [("generation_config.json", SAMPLING | LEFTOVERS | {"return_dict_in_generate": True}), ("config.json", LEFTOVERS)],
)
def test_settings_that_are_ignored_or_left_from_training_stay_behind(place, settings, tmp_path):
    """Llama-2 ships sampling without do_sample; a fine-tune's use_cache is its training's."""
    make_teacher("llama-gqa").save_pretrained(tmp_path / "teacher")
    (tmp_path / "teacher" / "generation_config.json").unlink()
    path = tmp_path / "teacher" / place
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {"pad_token_id": 0}) | settings))
    plan = convert(str(tmp_path / "teacher"), tmp_path / "out", align="none")
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written["pad_token_id"] == 0
    assert not {*settings, "return_dict_in_generate"} & set(written)
    for name in settings:
        (note,) = (note for note in plan.notes if note.startswith(f"{name} {json.dumps(settings[name])} of {place}"))
        assert note in (tmp_path / "out" / "README.md").read_text()
    hybrid = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert hybrid.config.use_cache
    hybrid.generation_config.pad_token_id = 1  # as training may, and what is unchanged is saved whatever it holds
    hybrid.generation_config.save_pretrained(tmp_path / "trained")
    teacher = load_model(str(tmp_path / "teacher"))
    calls = []
    teacher.model.layers[0].register_forward_pre_hook(lambda _, given: calls.append(given[0].shape[1]))
    assert teacher.generate(random_ids(1, 5), max_new_tokens=3).shape == (1, 8)
    assert calls == [5, 1, 1]


@pytest.mark.parametrize("eos, said", [(2, 0), ([5, 2], 0), (5, 1)])
def test_a_template_whose_turns_end_with_another_token_is_noted(eos, said, tmp_path):
    """Such a model goes on after its answer, as fine-tunes of a base model with a chat template do."""
    teacher = save_chat_teacher(tmp_path / "teacher")
    (teacher / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    plan = convert(str(teacher), tmp_path / "out", align="none")
    assert sum("add 2 to eos_token_id" in note for note in plan.notes) == said
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"eos_token_id": eos}


def test_generation_settings_that_transformers_refuses_are_named_by_their_file(saved_teacher, tmp_path):
    folder = shutil.copytree(saved_teacher("llama-gqa"), tmp_path / "teacher")
    (folder / "generation_config.json").write_text('{"max_new_tokens": -1}')
    with pytest.raises(ValueError, match="generation_config.json holds generation settings that transformers refuses"):
        convert(str(folder), tmp_path / "out", align="none")


def test_provenance_is_recorded(saved_teacher, tmp_path):
    import hashlib

    folder = saved_teacher("llama-gqa")
    assert run(folder, tmp_path / "out", "--mixer", "mamba2", "--seed", "7").returncode == 0
    conversion = json.loads((tmp_path / "out" / "config.json").read_text())["conversion"]
    assert conversion["teacher"] == folder.name
    assert conversion["options"] == {
        "alignment": {"method": "none"},
        "mixer": {"kind": "mamba2"},
        "seed": 7,
    }
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert conversion["teacher_sha256"] == {"model.safetensors": digest}
    assert set(conversion["versions"]) == {"convert-to-hybrid", "transformers", "torch"}
    card = (tmp_path / "out" / "README.md").read_text()
    assert str(folder.parent) not in card
    assert card.endswith("|\n")
    assert digest in card
    assert "Not aligned" in card
    assert "trust_remote_code=True" in card
    assert "MAMA" in card


def test_a_checkout_that_is_not_installed(monkeypatch, tmp_path, capsys):
    installed = importlib.metadata.version

    def version(package):
        if package == "convert-to-hybrid":
            raise importlib.metadata.PackageNotFoundError(package)
        return installed(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    text = dict(text="sampled", tokens=8 * 64, sequence_length=64, held_out_sequences=2)
    convert(str(save_chat_teacher(tmp_path / "teacher")), tmp_path / "out", window=16, alignment=text)
    written = json.loads((tmp_path / "out" / "config.json").read_text())["conversion"]["versions"]
    cli.main(["--version"])
    assert capsys.readouterr().out.endswith(f"convert-to-hybrid {written['convert-to-hybrid']}\n")


def test_a_bar_shows_its_pace():
    clock = iter(range(0, 1000))
    with Progress(cli.Pace(), get_time=lambda: float(next(clock)), auto_refresh=False, disable=True) as bar:
        shown = {}
        for what, step in (("distilling, tokens", 1024), ("aligning, layers", 1)):
            task = bar.add_task(what, total=4096)
            for i in range(1, 4):
                bar.update(task, completed=i * step)
            shown[what] = cli.Pace().render(next(t for t in bar.tasks if t.id == task)).plain
    assert float(shown["distilling, tokens"].removesuffix(" a second").replace(",", "")) > 100
    assert float(shown["aligning, layers"].removesuffix(" s each")) >= 1
    assert cli.pace(30, 200) == "6.7 s each"
    assert cli.pace(3000, 2) == "1,500 a second"


def test_python_takes_what_yaml_takes():
    given = dict(attention_layers=(1, 3), max_shard_size=10**9, activation_memory=10**8, decays=(0.5,), text=Path("x"))
    options = make_options("m", "o", **given)
    assert options.placement.attention_layers == [1, 3]
    assert parse_size(options.output.max_shard_size) == 10**9
    assert options.alignment.fit.decays == (0.5,)
    assert options.alignment.text == "x"
    assert make_options("m", "o", cache=50_000_000).placement.cache == "50000000"
    assert make_options("m", "o", window=torch.tensor(8)).placement.window == 8
    in_section = make_options("m", "o", output={"dtype": "float32"}, mixer={"kind": "mamba2"})
    assert in_section == make_options("m", "o", dtype="float32", mixer="mamba2")
    assert in_section == make_options(model="m", output={"folder": Path("o"), "dtype": "float32"}, kind="mamba2")
    assert make_options(model="m", output="o") == make_options("m", "o")
    with pytest.raises(ValueError, match="No output folder given"):
        make_options("m")


def test_version():
    assert run_as_is("--version").stdout.startswith("convert-to-hybrid ")


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(attention_layers=0.5, context=99), "placement.context has no effect without a cache budget, a window"),
        (dict(attention_layers="all", bits=8, align="none", context=99), "placement.context has no effect"),
        (dict(attention_layers=0.5, salient=8), "placement.salient has no effect without a window"),
        (dict(decays=(0.5,)), "alignment.fit.decays has no effect without a mixer"),
        (dict(align="none", block=8), "placement.block has no effect without a window"),
        (dict(mixer="none", window=8, d_state=4), "mixer.d_state has no effect without a mixer"),
        (dict(mixer="none", window=8, decays=(0.5,)), "alignment.fit.decays has no effect without a mixer"),
    ],
)
def test_what_nothing_reads_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_options("m", "o", **options)


@pytest.mark.parametrize("read", [dict(window=64), dict(attention_layers="all", bits=8)])
def test_a_context_is_read_without_a_budget(read):
    """It says which windows of the teacher stay, and over which positions offsets of keys are averaged."""
    assert make_options("m", "o", context=8192, **read).placement.context == 8192
