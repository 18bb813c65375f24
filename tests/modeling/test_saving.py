"""Saving, loading, and the folder as somebody without this project meets it."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from modeling_llamba import LlambaConfig, LlambaForCausalLM
from tests.students import FAMILIES, MIXERS, make_student, student_config
from tests.teachers import LONGROPE, random_ids

STRANGER = """
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("convert", "modeling_llamba", "modeling_phimamba", "recipes"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NotInstalled())
import torch
from transformers import AutoModelForCausalLM

folder, again = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules"), type(model)
ids = torch.load(f"{folder}/ids.pt")
with torch.no_grad():
    torch.save((model(ids).logits, model.generate(ids, max_new_tokens=6, do_sample=False)), f"{folder}/out.pt")
model(ids, labels=ids).loss.backward()
model.save_pretrained(again)
"""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mixer, pattern", [*((mixer, "hybrid") for mixer in MIXERS), ("discrete_mamba2", "beside")])
def test_a_stranger_loads_generates_trains_and_saves_again(family, mixer, pattern, tmp_path):
    model = make_student(family, mixer, pattern, dtype=torch.float32)
    ids = random_ids(2, 9)
    model.save_pretrained(tmp_path / "first")
    torch.save(ids, tmp_path / "first" / "ids.pt")
    expected = model(ids).logits, model.generate(ids, max_new_tokens=6, do_sample=False)
    for folder, again in (("first", "second"), ("second", "third")):
        torch.save(ids, tmp_path / folder / "ids.pt")
        command = [sys.executable, "-c", STRANGER, str(tmp_path / folder), str(tmp_path / again)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
        logits, generated = torch.load(tmp_path / folder / "out.pt")
        torch.testing.assert_close(logits, expected[0])
        assert torch.equal(generated, expected[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_classes_know_the_installed_package(family, tmp_path):
    model = make_student(family, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is FAMILIES[family][0]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is FAMILIES[family][1]
    ids = random_ids(1, 5)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    hidden = AutoModel.from_pretrained(tmp_path)(ids).last_hidden_state
    torch.testing.assert_close(loaded.lm_head(hidden), loaded(ids).logits)


def test_shards_and_tied_embeddings(tmp_path):
    model = make_student(dtype=torch.float32, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2 and "lm_head.weight" not in index["weight_map"]
    loaded = LlambaForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_resizing_the_vocabulary(family, tied):
    model = make_student(family, dtype=torch.float32, tie_word_embeddings=tied, lm_head_bias=not tied)
    before = model(random_ids(1, 6)).logits
    model.resize_token_embeddings(140, mean_resizing=False)
    after = model(random_ids(1, 6)).logits
    assert after.shape[-1] == 140 and model.config.vocab_size == 140
    torch.testing.assert_close(after[..., :128], before)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_device_map_and_offload_to_disk(tmp_path):
    model = make_student(dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    ids = random_ids(1, 8)
    everything = LlambaForCausalLM.from_pretrained(tmp_path / "model", device_map={"": "cpu"})
    torch.testing.assert_close(everything(ids).logits, model(ids).logits)
    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    device_map |= {"model.embed_dropout": "cpu"} | {f"model.layers.{i}": "disk" if i < 2 else "cpu" for i in range(4)}
    split = LlambaForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    with torch.no_grad():
        torch.testing.assert_close(split(ids).logits, model(ids).logits)
        generated = split.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(generated, model.generate(ids, max_new_tokens=4, do_sample=False))


def test_loading_in_half_precision_keeps_values(tmp_path):
    make_student(dtype=torch.float32).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    model = LlambaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, value in stored.items():
        assert torch.equal(model.state_dict()[name], value.bfloat16()), name
    rotary = make_student(dtype=torch.float32).model.rotary_emb.inv_freq
    torch.testing.assert_close(model.model.rotary_emb.inv_freq.float(), rotary)


def test_a_fresh_model_starts_open():
    """Identity convolution, open gate: what the papers start from."""
    torch.manual_seed(0)
    mixer = LlambaForCausalLM(student_config()).model.layers[0].mixer
    x = torch.randn(1, 6, mixer.conv_size)
    torch.testing.assert_close(mixer.conv1d(x), x)
    torch.testing.assert_close(torch.nn.functional.silu(mixer.z_bias), torch.ones_like(mixer.z_bias))
    assert torch.equal(mixer.D, torch.ones_like(mixer.D))


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(mixer="mamba3"), "mixer must be one of"),
        (dict(layer_types=["linear_attention"]), "needs 4 entries"),
        (dict(layer_types=["linear_attention"] * 3 + ["conv"]), "unknown"),
        (dict(layer_types=["sliding_attention"] * 4, sliding_window=None), "sliding_window must be set"),
        (dict(mixer_num_kv_heads=3), "multiple"),
        (dict(mixer="mamba1", mixer_rotary=False, mixer_decay_bias=False, mixer_d_state=3), "multiple"),
        (dict(mixer="mamba2"), "mixer_decay_bias"),
        (dict(mixer_norm="head"), "mamba2 mixer only"),
        (dict(mixer_backend="triton"), "mixer_backend"),
        (dict(num_attention_heads=0), "num_attention_heads must be a whole number of at least 1"),
        (dict(hidden_size="x"), "hidden_size must be a whole number"),
        (dict(hidden_act="nope"), "hidden_act"),
        (dict(rope_parameters="x"), "rope_parameters must be a dictionary"),
        (dict(rope_parameters={"rope_type": "nope", "rope_theta": 1e4}), "rope_type must be one of"),
        (dict(rope_parameters={"rope_type": "linear", "rope_theta": 1e4}), "factor of RoPE linear"),
        (dict(rope_parameters=LONGROPE | {"long_factor": 2.0}), "long_factor of RoPE longrope must be a list"),
    ],
)
def test_contradictory_configurations_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        student_config(**wrong) if "mixer" not in wrong else LlambaConfig(
            **student_config().to_dict() | {"mixer_activation": None, "mixer_norm": None} | wrong
        )
