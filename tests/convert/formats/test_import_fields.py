"""A wrong entry in a published configuration is one line that names the file and the entry, never a traceback."""

import json

import pytest
import torch
from transformers import LlamaConfig

from convert.formats.export import plan_export
from convert.formats.import_ import plan_import
from convert.hybrids.shapes import tensor_shapes
from tests.helpers import published as p
from tests.helpers.command import check_one_line_error, run_as_is
from tests.helpers.exportable import HOLDABLE
from tests.helpers.hybrids import make_hybrid
from tests.helpers.published import FORMATS
from tests.helpers.transfer import exporting, importing

DELETED = object()


def places(values, path=()):
    """The way to every entry of a configuration; of equal blocks the first of each kind."""
    for name, value in values.items() if isinstance(values, dict) else enumerate(values):
        if name in ("Block3", "Block4") or (path[-1:] == ("Blocks",) and name not in (0, 2)):
            continue
        yield (*path, name)
        if isinstance(value, dict) or name in ("Blocks", "attn_layers"):
            yield from places(value, (*path, name))
        elif path[-1:] == ("Blocks",):
            yield from places(value, (*path, name))


def changed(config, path, value):
    config = json.loads(json.dumps(config))
    *way, last = path
    inner = config
    for name in way:
        inner = inner[name]
    if value is DELETED:
        del inner[last]
    else:
        inner[last] = value
    return config


@pytest.mark.parametrize("name", FORMATS)
def test_any_entry_of_any_kind_is_taken_or_refused_in_one_line(tmp_path, name, monkeypatch):
    """Every entry in turn, replaced by what JSON has. Equal configurations have equal shapes, computed once."""
    known = {}

    def shapes(config):
        key = repr(config.to_dict())
        if key not in known:
            known[key] = tensor_shapes(config)
        return known[key]

    monkeypatch.setattr("convert.formats.import_.tensor_shapes", shapes)
    config, tensors, mamba_config = FORMATS[name]()
    folder = p.write(tmp_path / "in", config, tensors, mamba_config=mamba_config)
    refused, options = 0, importing(folder)
    for file, content in (("config.json", config), ("mamba_config.json", mamba_config or {})):
        for path in places(content):
            for value in (None, "x", 0, -1, 1.5, [], {}, DELETED):
                (folder / file).write_text(json.dumps(changed(content, path, value)))
                try:
                    plan_import(options)
                except ValueError as error:
                    assert "\n" not in str(error), (file, path, value)
                    refused += 1
                except Exception as error:
                    raise AssertionError(f"{file}, {path} = {value!r}") from error
        if content:
            (folder / file).write_text(json.dumps(content))
    assert refused > 50


LLAMA = "in/config.json is not a valid llama configuration: "
NAMED = [
    ("v2", "config.json", "hidden_size", "x", LLAMA + "hidden_size must be a whole number"),
    ("v2", "config.json", "num_attention_heads", 0, LLAMA + "num_attention_heads must be a whole number of at"),
    ("v2", "config.json", "rope_scaling", {"rope_type": "nope"}, LLAMA + "rope_type must be one of ('default', "),
    ("v2", "config.json", "dtype", "x", LLAMA),
    ("v2", "mamba_config.json", "n_layer", 10**9, "mamba_config.json leaves other layers than"),
    ("v2", "mamba_config.json", "attn_layers", None, "in/mamba_config.json: attn_layers must be a list, not null."),
    ("v2", "mamba_config.json", "ssm_cfg", None, "in/mamba_config.json has no ssm_cfg.ngroups."),
    ("phi-mamba", "config.json", "MixerModel", None, "in/config.json: MixerModel must be an object, not null."),
    ("phi-mamba", "config.json", "Block1", {"BlockType": "modules.phi_block", "CoreType": "x.discrete_mamba2"},
     "in/config.json has no Block1.n_layers."),
    ("llamba", "config.json", "ssm_cfg", [8], "in/config.json: ssm_cfg must be an object, not [8]."),
    ("llamba", "config.json", "n_layer", "x", 'in/config.json: n_layer must be a whole number above 0, not "x".'),
]  # fmt: skip


@pytest.mark.parametrize("name, file, entry, value, message", NAMED)
def test_the_file_and_the_entry_are_named(tmp_path, name, file, entry, value, message):
    config, tensors, mamba_config = FORMATS[name]()
    (config if file == "config.json" else mamba_config)[entry] = value
    folder = p.write(tmp_path / "in", config, tensors, mamba_config=mamba_config)
    with pytest.raises(ValueError) as error:
        plan_import(importing(folder))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_command_prints_one_line(tmp_path):
    config, tensors, mamba_config = p.mamba_in_llama(2)
    folder = p.write(tmp_path / "in", config | {"hidden_size": "x"}, tensors, mamba_config=mamba_config)
    check_one_line_error(run_as_is("import", folder, tmp_path / "out"), "hidden_size")
    make_hybrid(dtype=torch.float32, **HOLDABLE).save_pretrained(tmp_path / "hybrid")
    written = json.loads((tmp_path / "hybrid/config.json").read_text())
    (tmp_path / "hybrid/config.json").write_text(json.dumps(written | {"hidden_size": "x"}))
    check_one_line_error(run_as_is("export", tmp_path / "hybrid", tmp_path / "out"), "config.json")


EXPORT = {
    "hidden_size": ("x", "config.json is not a valid llamba configuration: hidden_size must be a whole number"),
    "num_key_value_heads": (0, "num_key_value_heads must be a whole number of at least 1, not 0."),
    "mixer_d_conv": (None, "mixer_d_conv must be a whole number"),
    "rope_parameters": ({"rope_type": "nope", "rope_theta": 1e4}, "rope_type must be one of"),
    "hidden_act": ("nope", "hidden_act must be one of transformers' activations, not 'nope'."),
    "rms_norm_eps": ("x", "rms_norm_eps must be a number"),
    "model_type": ([], "is no hybrid of this project"),
}


def test_a_wrong_entry_in_a_hybrid_to_export_is_named(tmp_path):
    make_hybrid(dtype=torch.float32, **HOLDABLE).save_pretrained(tmp_path / "hybrid")
    path = tmp_path / "hybrid/config.json"
    written = json.loads(path.read_text())
    for name, (value, message) in EXPORT.items():
        path.write_text(json.dumps(written | {name: value}))
        with pytest.raises(ValueError) as error:
            plan_export(exporting(tmp_path / "hybrid"))
        assert message in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "kind, message",
    [
        ("prefix", "tensor layers.0.mamba.D; those of a Mamba layer are named model.layers.N.mamba."),
        ("none", "in has no Mamba layers;"),
        ("vector", "tensor backbone.embedding.weight has shape (96,), where 2 dimensions are expected"),
    ],
)
def test_tensors_in_strange_places_or_shapes(tmp_path, kind, message):
    config, tensors, mamba_config = p.mamba_in_llama(1, m1=True)
    if kind == "prefix":
        tensors["layers.0.mamba.D"] = tensors.pop("model.layers.0.mamba.D")
    if kind == "none":
        tensors = {name: tensor for name, tensor in tensors.items() if ".mamba." not in name}
    if kind == "vector":
        (config, tensors), mamba_config = p.llamba(True), None
        tensors["backbone.embedding.weight"] = torch.ones(p.VOCAB)
    folder = p.write(tmp_path / "in", config, tensors, mamba_config=mamba_config)
    with pytest.raises(ValueError) as error:
        plan_import(importing(folder))
    assert message in str(error.value)


def test_null_in_llambas_configuration_means_its_defaults(tmp_path):
    """LlambaConfig puts the 8B's sizes in their place; here they do not fit, and the sizes are said."""
    config, tensors = p.llamba(True)
    folder = p.write(tmp_path / "in", config | {"mlp_cfg": None}, tensors)
    with pytest.raises(ValueError, match=r"gate_proj.weight \(40, 32\) cannot make .* \(14336, 32\)"):
        plan_import(importing(folder))
    folder = p.write(tmp_path / "in", config | {"ssm_cfg": None}, tensors)
    with pytest.raises(ValueError, match="conv1d.weight .* cannot make"):
        plan_import(importing(folder))


def test_null_special_tokens_are_the_bases_and_a_missing_base_is_suggested(tmp_path):
    config, tensors = p.llamba(True)
    config |= {"eos_token_id": None, "bos_token_id": 3, "_name_or_path": "org/base"}
    folder = p.write(tmp_path / "in", config, tensors)
    notes = plan_import(importing(folder)).notes
    assert [note for note in notes if "--base org/base" in note] == notes
    assert len(notes) == 2
    LlamaConfig(
        hidden_size=p.D, num_attention_heads=p.H, vocab_size=p.VOCAB, bos_token_id=5, eos_token_id=6
    ).save_pretrained(tmp_path / "base")
    ours = plan_import(importing(folder, base=str(tmp_path / "base"))).config
    assert (ours.bos_token_id, ours.eos_token_id) == (3, 6)


@pytest.mark.parametrize(
    "name, way, value",
    [
        ("v2", ("rms_norm_eps",), 1e-5),
        ("v1", ("hidden_act",), "gelu"),
        ("m1", ("surprise",), 1),
        ("v2", ("ssm_cfg", "norm_before_gate"), True),
        ("v2", ("ssm_cfg", "dt_limit"), [0.0, 0.1]),
        ("v1", ("ssm_cfg", "d_state"), 5),
        ("llamba", ("ssm_cfg", "surprise"), 1),
        ("llamba", ("mlp_cfg", "surprise"), 1),
        ("llamba", ("surprise",), 1),
        ("mohawk", ("MixerModel", "Blocks", 0, "Layer", "input", "norm_cls"), "rms"),
        ("mohawk", ("MixerModel", "Blocks", 1, "input", "mlp_act_fn"), "gelu"),
        ("phi-mamba", ("Block1", "core_input", "surprise"), 1),
    ],
)
def test_what_is_neither_understood_nor_at_its_default_is_refused(name, way, value, tmp_path):
    config, tensors, mamba_config = FORMATS[name]()
    plan_import(importing(p.write(tmp_path / "in", config, tensors, mamba_config=mamba_config)))
    inner = mamba_config or config
    for step in way[:-1]:
        inner = inner[step]
    inner[way[-1]] = value
    p.write(tmp_path / "in", config, tensors, mamba_config=mamba_config)
    with pytest.raises(ValueError, match=way[-1]):
        plan_import(importing(tmp_path / "in"))


def test_a_base_of_another_model_is_refused_and_biases_of_the_right_one_are_kept(tmp_path):
    config, tensors, mamba_config = p.mamba_in_llama(2)
    folder = p.write(tmp_path / "in", config, tensors, mamba_config=mamba_config)
    LlamaConfig(vocab_size=p.VOCAB).save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="was not made from it"):
        plan_import(importing(folder, base=str(tmp_path / "base")))
    config |= {"attention_bias": True, "mlp_bias": True}
    for layer in range(p.LAYERS):
        for part, rows in (("gate", p.INTER), ("up", p.INTER), ("down", p.D)):
            tensors.add(f"model.layers.{layer}.mlp.{part}_proj.bias", rows)
        for part, rows in (("q", p.D), ("k", 16), ("v", 16), ("o", p.D)) if layer in (1, 3) else ():
            tensors.add(f"model.layers.{layer}.self_attn.{part}_proj.bias", rows)
    plan = plan_import(importing(p.write(folder, config, tensors, mamba_config=mamba_config)))
    assert {rule.kind for rule in plan.rules if rule.target.endswith("proj.bias")} == {"moved"}


def test_every_tensor_keeps_its_type_and_an_absent_activation_is_said(tmp_path):
    config, tensors = p.phi_mamba((1,))
    tensors = {name: t if name.endswith(".D") else t.bfloat16() for name, t in tensors.items()}
    for number in range(1, p.LAYERS + 1):
        config[f"Block{number}"]["core_input"].pop("activation", None)
    folder = p.write(tmp_path / "in", config, tensors)
    plan = plan_import(importing(folder))
    assert {rule.dtype for rule in plan.rules if rule.target.endswith(".D")} == {torch.float32}
    assert plan.dtype == torch.bfloat16
    assert any("kept so" in note for note in plan.notes)
    assert plan.config.mixer_activation == "identity"
    assert any("mixer_activation=silu" in note for note in plan.notes)
    plan = plan_import(importing(folder, fields={"mixer_activation": "silu"}))
    assert plan.config.mixer_activation == "silu"
    assert not any("not said" in note for note in plan.notes)
    for number in range(1, p.LAYERS + 1):
        core = config[f"Block{number}"]["core_input"]
        if "n_v_heads" in core:
            core["nheads"] = core.pop("n_v_heads")
    assert plan_import(importing(p.write(folder, config, tensors))).config.mixer_activation == "silu"
