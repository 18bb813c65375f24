"""Saving, loading, and the folder as somebody without this project meets it."""

import json
import subprocess
import sys
import tarfile

import accelerate
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from modeling_llamba import LlambaConfig, LlambaForCausalLM
from modeling_llamba.model.hybrid_config import FORMAT_VERSION
from tests.helpers.before import BEFORE
from tests.helpers.hybrids import FAMILIES, make_hybrid, tiny_config
from tests.helpers.teachers import LONGROPE, random_ids
from tests.helpers.versions import states_before

MIXERS_ALONE = """
import pathlib
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

for folder in map(pathlib.Path, sys.argv[1:]):
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    config.layer_types, config.hybrid_window, config.hybrid_full_heads = ["linear_attention"] * 2, None, None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True).eval()
    ids = torch.load(folder / "expected.pt")["ids"]
    alone = folder.with_name(folder.name + "-mixers")
    model.save_pretrained(alone)
    with torch.no_grad():
        torch.save({"ids": ids, "logits": model(ids).logits}, alone / "expected.pt")
"""
"""Writes a model of mixers alone beside each of these, with its code."""

STRANGER = """
import io
import pathlib
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("convert", "modeling_llamba", "modeling_phimamba", "recipes"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NotInstalled())
import torch
from transformers import AutoConfig, AutoModelForCausalLM

for first in map(pathlib.Path, sys.argv[1:]):
    expected = torch.load(first / "expected.pt")
    ids, second = expected["ids"], first.with_name(first.name + "-second")
    for folder, again in ((first, second), (second, None)):
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        assert type(model).__module__.startswith(f"transformers_modules.{folder.name}".replace("-", "_hyphen_"))
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, expected["logits"], msg=str(folder))
        if "generated" in expected:
            assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected["generated"]), folder
            torch.save(model, io.BytesIO())  # pickles it, as Ray and new processes do
        model(ids, labels=ids).loss.backward()
        if again is not None:
            model.save_pretrained(again)
    AutoConfig.from_pretrained(first, trust_remote_code=True).save_pretrained(first.with_name(first.name + "-config"))
"""


def code_in(folder):
    return {path.name: path.read_text() for path in folder.glob("*.py")}


@pytest.mark.parametrize(
    "pattern, mixer, written",
    [
        ("beside-only", "discrete_mamba2", set()),
        ("beside-only", "none", {"mixer"}),
        ("beside", "mamba2", {"mixer", "mixer_d_state"}),
    ],
)
def test_fields_of_mixers_are_written_where_there_are_mixers(pattern, mixer, written):
    config = tiny_config(mixer=mixer, pattern=pattern)
    fields = json.loads(config.to_json_string())
    found = {name for name in fields if name.startswith("mixer")}
    if pattern == "beside":
        assert written <= found
    else:
        assert found == written
    read = LlambaConfig.from_dict(fields)
    assert (read.mixer == "none") == (mixer == "none")
    assert json.loads(read.to_json_string()) == fields


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of both families and all mixers, and those from before, that a stranger has loaded and saved again.

    In a process that cannot import the project: load, train, save, load again, and save the configuration alone.
    """
    root, folders = tmp_path_factory.mktemp("saved"), []
    cases = [(family, "discrete_mamba2", "beside") for family in FAMILIES]
    cases += [("llamba", "mamba2", "hybrid"), ("phimamba", "mamba1", "hybrid")]
    for family, mixer, pattern in cases:
        model, ids = make_hybrid(family, mixer, pattern, dtype=torch.float32), random_ids(2, 9)
        folders.append(root / f"{family}-{mixer}-{pattern}")
        model.save_pretrained(folders[-1])
        with torch.no_grad():
            expected = {"logits": model(ids).logits, "generated": model.generate(ids, max_new_tokens=6)}
        torch.save({"ids": ids} | expected, folders[-1] / "expected.pt")
    with tarfile.open(BEFORE) as archive:
        archive.extractall(root, filter="data")
    before = [root / family for family in FAMILIES]
    mixers_alone = [root / f"{family}-mixers" for family in FAMILIES]
    runs = [(STRANGER, folders)]
    if not states_before.args[0]:
        runs = [(MIXERS_ALONE, before), (STRANGER, [*folders, *before, *mixers_alone])]
    for script, of in runs:
        done = subprocess.run([sys.executable, "-c", script, *map(str, of)], capture_output=True, text=True, cwd=root)
        assert done.returncode == 0, done.stderr[-2000:]
    return root, folders


def test_a_stranger_loads_generates_trains_and_saves_again(saved):
    root, folders = saved
    for folder in folders:
        first = json.loads((folder / "config.json").read_text())
        again = root / f"{folder.name}-second"
        assert code_in(again) == code_in(folder)
        assert json.loads((again / "config.json").read_text()) == first


def test_every_way_to_save_writes_the_same_code_and_classes(saved, tmp_path):
    root, folders = saved
    for folder in folders[:2]:
        family = folder.name.split("-")[0]
        config_class, model_class = FAMILIES[family]
        config = AutoConfig.from_pretrained(folder)
        config.save_pretrained(tmp_path / family)
        AutoModel.from_pretrained(folder).save_pretrained(tmp_path / f"{family}-base")
        written = json.loads((folder / "config.json").read_text())
        assert written["auto_map"] == {
            "AutoConfig": f"configuration_{family}.{config_class.__name__}",
            "AutoModel": f"modeling_{family}.{model_class.__name__.removesuffix('ForCausalLM')}Model",
            "AutoModelForCausalLM": f"modeling_{family}.{model_class.__name__}",
            "AutoModelForSequenceClassification": f"modeling_{family}.{model_class.__name__}".replace(
                "CausalLM", "SequenceClassification"
            ),
        }
        for other in (tmp_path / family, tmp_path / f"{family}-base", root / f"{folder.name}-config"):
            assert code_in(other) == code_in(folder)
            assert json.loads((other / "config.json").read_text())["auto_map"] == written["auto_map"]


def test_pushing_uploads_the_code_with_the_configuration(tmp_path, monkeypatch):
    uploaded = []

    def pushed(self, repo_id, **kwargs):
        self.save_pretrained(tmp_path / "upload")
        uploaded.append((repo_id, sorted(path.name for path in (tmp_path / "upload").iterdir())))

    monkeypatch.setattr(LlambaConfig, "push_to_hub", pushed)
    config = tiny_config()
    config.save_pretrained(tmp_path / "local", push_to_hub=True, repo_id="me/hybrid", private=True)
    assert uploaded == [("me/hybrid", sorted(path.name for path in (tmp_path / "local").iterdir()))]
    assert "ship_code.py" in uploaded[0][1]


def test_a_trained_adapter_goes_on_a_checkpoint_that_a_trainer_wrote(tmp_path):
    """What TRL and PEFT write in the middle of training: whole models with code, adapters without."""
    from peft import LoraConfig, PeftModel, get_peft_model

    model, ids = make_hybrid("phimamba", dtype=torch.float32), random_ids(1, 7)
    model.save_pretrained(tmp_path / "base")
    lora = LoraConfig(r=2, target_modules=["in_proj"], modules_to_save=["conv1d"], init_lora_weights=False)
    adapted = get_peft_model(model, lora).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    assert not code_in(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(loaded(ids).logits, adapted(ids).logits)
    loaded.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-5)
    assert code_in(tmp_path / "merged") == code_in(tmp_path / "base")


def test_an_adapter_of_the_teacher_is_refused(tmp_path):
    """PEFT would load what belongs to kept layers, and say nothing of the rest."""
    from peft import LoraConfig, PeftModel, get_peft_model

    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(make_hybrid(pattern="attention"), lora).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="layers.0.self_attn is not in this hybrid.* merge an adapter"):
        PeftModel.from_pretrained(make_hybrid(pattern="beside-only"), tmp_path / "adapter")


def written(folder):
    return json.loads((folder / "config.json").read_text())


@states_before
@pytest.mark.parametrize("family", FAMILIES)
def test_mixers_alone_from_before_still_load(saved, family, tmp_path):
    """A stranger has loaded them with the code they carry; here they load with today's."""
    folder, again = saved[0] / f"{family}-mixers", saved[0] / f"{family}-mixers-second"
    expected = torch.load(folder / "expected.pt")
    assert "ship_code.py" not in code_in(again)
    assert code_in(again) == code_in(folder)
    assert "format_version" not in written(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is FAMILIES[family][1]
    with torch.no_grad():
        torch.testing.assert_close(model(expected["ids"]).logits, expected["logits"])
    model.save_pretrained(tmp_path / "now")
    assert written(tmp_path / "now")["format_version"] == FORMAT_VERSION
    assert "ship_code.py" in code_in(tmp_path / "now")


@states_before
@pytest.mark.parametrize("family", FAMILIES)
def test_hybrids_from_before_load_with_the_code_that_they_carry_alone(saved, family):
    """As a stranger has done; today's classes, which would misread them, say so in one line."""
    folder, again = saved[0] / family, saved[0] / f"{family}-second"
    assert "ship_code.py" not in code_in(again)
    assert code_in(again) == code_in(folder)
    message = r"has format 1; .* reads format 2\. Load it with the code that it carries \(trust_remote_code=True"
    for load in (
        AutoModelForCausalLM.from_pretrained,
        AutoConfig.from_pretrained,
        FAMILIES[family][0].from_pretrained,
    ):
        with pytest.raises(ValueError, match=message) as caught:
            load(folder)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layer_types", [["hybrid"] * 2, ["linear_attention"] * 2])
def test_a_format_of_later_is_refused(layer_types):
    fields = tiny_config(layer_types=layer_types, hybrid_full_heads=None).to_dict()
    assert fields["format_version"] == FORMAT_VERSION
    assert LlambaConfig.from_dict(fields).layer_types == layer_types
    with pytest.raises(ValueError, match=f"has format {FORMAT_VERSION + 1}; .* reads format {FORMAT_VERSION}"):
        LlambaConfig.from_dict(fields | {"format_version": FORMAT_VERSION + 1})


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_classes_know_the_installed_package(family, tmp_path):
    model = make_hybrid(family, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is FAMILIES[family][0]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is FAMILIES[family][1]
    ids = random_ids(1, 5)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    hidden = AutoModel.from_pretrained(tmp_path)(ids).last_hidden_state
    torch.testing.assert_close(loaded.lm_head(hidden), loaded(ids).logits)


def test_shards_and_tied_embeddings(tmp_path):
    model = make_hybrid(dtype=torch.float32, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert "lm_head.weight" not in index["weight_map"]
    loaded = LlambaForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_resizing_the_vocabulary(family, tied):
    model = make_hybrid(family, dtype=torch.float32, tie_word_embeddings=tied, lm_head_bias=not tied)
    before = model(random_ids(1, 6)).logits
    model.resize_token_embeddings(140, mean_resizing=False)
    after = model(random_ids(1, 6)).logits
    assert after.shape[-1] == 140
    assert model.config.vocab_size == 140
    torch.testing.assert_close(after[..., :128], before)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("pattern", ["hybrid", "beside-only"])
def test_device_map_and_offload_to_disk(pattern, tmp_path):
    """Parameters without a gradient, such as a hybrid layer's salience, come from the disk, too."""
    model = make_hybrid(pattern=pattern, dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    ids = random_ids(1, 30)
    everything = LlambaForCausalLM.from_pretrained(tmp_path / "model", device_map={"": "cpu"})
    torch.testing.assert_close(everything(ids).logits, model(ids).logits)
    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    device_map |= {"model.embed_dropout": "cpu"} | {f"model.layers.{i}": "disk" if i < 1 else "cpu" for i in range(2)}
    split = LlambaForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    with torch.no_grad():
        torch.testing.assert_close(split(ids).logits, model(ids).logits)
        generated = split.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(generated, model.generate(ids, max_new_tokens=4, do_sample=False))


@torch.no_grad()
def test_accelerate_offloads_what_has_no_gradient(tmp_path):
    """To the disk, where it leaves buffers out."""
    bits = dict(window_bits=8, full_attention_bits=8, key_offsets=True)
    model = make_hybrid(pattern="beside-only", dtype=torch.float32, **bits)
    fixed = [(name, p) for name, p in model.named_parameters() if name.endswith(("salience", "key_offset"))]
    assert {name.rpartition(".")[2] for name, _ in fixed} == {"salience", "key_offset"}
    for _, parameter in fixed:
        parameter.normal_()
    model.save_pretrained(tmp_path / "model")
    with accelerate.init_empty_weights():
        empty = LlambaForCausalLM(model.config)
    places = {f"model.{name}": "disk" if name == "layers" else "cpu" for name, _ in model.model.named_children()}
    split = accelerate.load_checkpoint_and_dispatch(
        empty, tmp_path / "model", places | {"lm_head": "cpu"}, offload_folder=tmp_path / "offload"
    )
    ids = random_ids(1, 40)
    torch.testing.assert_close(split(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


def test_loading_in_half_precision_keeps_values(tmp_path):
    make_hybrid(dtype=torch.float32).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    model = LlambaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, value in stored.items():
        assert torch.equal(model.state_dict()[name], value.bfloat16()), name
    rotary = make_hybrid(dtype=torch.float32).model.rotary_emb.inv_freq
    torch.testing.assert_close(model.model.rotary_emb.inv_freq.float(), rotary)


def test_a_fresh_model_starts_open():
    """Identity convolution, open gate: what the papers start from."""
    torch.manual_seed(0)
    mixer = LlambaForCausalLM(tiny_config()).model.layers[0].mixer
    x = torch.randn(1, 6, mixer.conv_size)
    torch.testing.assert_close(mixer.conv1d(x), x)
    torch.testing.assert_close(torch.nn.functional.silu(mixer.z_bias), torch.ones_like(mixer.z_bias))
    assert torch.equal(mixer.D, torch.ones_like(mixer.D))


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(mixer="mamba3"), "mixer must be one of"),
        (dict(layer_types=["linear_attention"]), "needs 2 entries"),
        (dict(layer_types=["linear_attention", "nope"]), "unknown"),
        (dict(layer_types=["sliding_attention"] * 2, sliding_window=None), "sliding_window must be set"),
        (dict(mixer_num_kv_heads=3), "multiple"),
        (dict(mixer="mamba1", mixer_rotary=False, mixer_decay_bias=False, mixer_d_state=3), "multiple"),
        (dict(mixer="mamba2"), "mixer_decay_bias"),
        (dict(mixer_norm="head"), "mamba2 mixer only"),
        (dict(backend="triton"), "backend"),
        (dict(num_attention_heads=0), "num_attention_heads must be a whole number of at least 1"),
        (dict(hidden_size="x"), "hidden_size must be a whole number"),
        (dict(hidden_act="nope"), "hidden_act"),
        (dict(rope_parameters="x"), "rope_parameters must be a dictionary"),
        (dict(rope_parameters={"rope_type": "nope", "rope_theta": 1e4}), "rope_type must be one of"),
        (dict(rope_parameters={"rope_type": "linear", "rope_theta": 1e4}), "factor of RoPE linear"),
        (dict(rope_parameters=LONGROPE | {"long_factor": 2.0}), "long_factor of RoPE must be a list"),
    ],
)
def test_contradictory_configurations_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**wrong) if "mixer" not in wrong else LlambaConfig(
            **tiny_config().to_dict() | {"mixer_activation": None, "mixer_norm": None} | wrong
        )
