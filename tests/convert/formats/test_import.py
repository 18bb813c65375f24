"""Published checkpoints, built here in their own formats, give the logits of their own equations once imported."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PhiConfig

from convert.formats.import_ import import_checkpoint, plan_import
from tests.doubles.hub import COMMIT, HubServer
from tests.helpers import published as p
from tests.helpers.command import run_as_is as run
from tests.helpers.tokenizers import tokenizer
from tests.helpers.transfer import importing

IDS = torch.randint(3, p.VOCAB, (2, 23), generator=torch.Generator().manual_seed(0))
BACKBONE = ("backbone.embedding.weight", "backbone.layers", "backbone.final_layernorm.weight")
PLAIN = ("model.embed_tokens.weight", "model.layers", "model.norm.weight")


def imported(folder, out, **options):
    plan = import_checkpoint(importing(folder, out, **options))
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64)
    assert sum(x.numel() for x in model.parameters()) == sum(math.prod(rule.shape) for rule in plan.rules)
    return plan, model


@torch.no_grad()
def assert_logits(model, expected):
    """At once, and with the last tokens one by one from the cache."""
    torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-5, atol=1e-5)
    parts = [model(IDS[:, :18], use_cache=True)]
    for t in range(18, IDS.shape[1]):
        parts.append(model(IDS[:, t : t + 1], cache=parts[-1].cache))
    torch.testing.assert_close(torch.cat([part.logits for part in parts], 1), expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base model's folder without weights: configuration, tokenizer, generation settings."""
    folder = tmp_path_factory.mktemp("base")
    config = PhiConfig(hidden_size=p.D, num_attention_heads=p.H, vocab_size=p.VOCAB, bos_token_id=5, eos_token_id=6)
    config.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": 6, "temperature": 0.7, "do_sample": true, "use_cache": false}'
    )
    return folder


@pytest.mark.parametrize("attention", [(), (1, 3)])
@pytest.mark.parametrize("binary", [True, False])
def test_phi_mamba(tmp_path, base, attention, binary):
    config, tensors = p.phi_mamba(attention)
    folder = p.write(tmp_path / "in", config, tensors, binary=binary)
    plan, model = imported(folder, tmp_path / "out", base=str(base))
    assert plan.config.model_type == "phimamba"
    assert plan.config.eos_token_id == 6
    settings = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert settings["temperature"] == 0.7
    assert "use_cache" not in settings
    assert "use_cache false" in " ".join(model.config.conversion["notes"])
    assert (tmp_path / "out/tokenizer.json").is_file()
    assert_logits(model, p.phi_logits(tensors, IDS, attention, heads=p.H))


def test_phi_attention_takes_its_sizes_from_phi_config_or_flags(tmp_path):
    config, tensors = p.phi_mamba((2,))
    folder = p.write(tmp_path / "in", config, tensors)
    plan, model = imported(folder, tmp_path / "out", fields={"num_attention_heads": 8, "num_key_value_heads": 8})
    assert_logits(model, p.phi_logits(tensors, IDS, (2,), heads=8))
    assert plan.config.rope_parameters["partial_rotary_factor"] == 0.5
    notes = " ".join(plan.notes)
    assert "PhiConfig" in notes
    assert "no tokenizer" in notes
    assert "PhiConfig" in " ".join(model.config.conversion["notes"])


@pytest.mark.parametrize("qwen, groups, nested", [(False, 2, False), (True, 4, True), (False, 1, False)])
def test_mohawk_students(tmp_path, qwen, groups, nested):
    config, tensors = p.mohawk(qwen=qwen, groups=groups)
    config = {"ComponentsConfig": config, "DistillConfig": {}} if nested else config
    _, model = imported(p.write(tmp_path / "in", config, tensors), tmp_path / "out")
    freq = p.frequencies(p.HEAD, 1e6) if qwen else p.frequencies(p.HEAD, 5e5, p.LLAMA3)
    assert model.config.tie_word_embeddings
    assert_logits(model, mohawk_logits(tensors, freq, groups))


def mohawk_logits(tensors, freq, groups=2, silu=False, eps=1e-5):
    def mixer(w, i, u):
        prefix = f"backbone.layers.{i}.mixer."
        if i != 2:
            return p.discrete_mamba2(w, prefix, u, p.H, groups, 8, silu)
        q, k, v = (p.linear(w, f"{prefix}self_attn.{n}_proj", u).unflatten(-1, (-1, p.HEAD)) for n in "qkv")
        return p.linear(w, f"{prefix}self_attn.o_proj", p.attention(q, k, v, freq))

    return p.llama_logits(tensors, IDS, mixer, eps, *BACKBONE)


def layer_inputs(config, core):
    """What mohawk's configuration says of every layer with this core."""
    return [block["Layer"]["input"] for block in config["MixerModel"]["Blocks"] if core in block["Layer"]["name"]]


def test_mohawks_mixer_has_silu_unless_the_configuration_says_otherwise(tmp_path):
    """Its class has "swish" by default; Phi-Mamba's and Llamba's have "identity". null is the identity.

    It has no `expand`, either: the inner width is d_inner, or the model's.
    """
    freq = p.frequencies(p.HEAD, 5e5, p.LLAMA3)
    for i, (said, silu) in enumerate([({"expand": 2}, True), ({"activation": None, "d_inner": p.D}, False)]):
        config, tensors = p.mohawk()
        for inputs in layer_inputs(config, "Mamba2"):
            del inputs["activation"]
            inputs |= said
        _, model = imported(p.write(tmp_path / f"in{i}", config, tensors), tmp_path / f"out{i}")
        assert_logits(model, mohawk_logits(tensors, freq, silu=silu))
    for i, (config, tensors) in enumerate([p.phi_mamba(), p.llamba(True)]):
        for block in [
            config.get("ssm_cfg", {}),
            *(v["core_input"] for k, v in config.items() if k.startswith("Block")),
        ]:
            block.pop("activation", None)
        folder = p.write(tmp_path / f"other{i}", config, tensors)
        assert plan_import(importing(folder)).config.mixer_activation == "identity"


ROTARY = {
    "the whole alone": ({}, {"rope_theta": 5e5, "rope_scaling": p.LLAMA3}, (5e5, p.LLAMA3)),
    "another layer": ({"rope_theta": 1e3, "rope_scaling": None}, {"rope_theta": 5e5, "rope_scaling": p.LLAMA3},
                      (5e5, p.LLAMA3)),
    "a layer alone": ({"rope_theta": 1e3, "rope_scaling": p.LLAMA3}, {}, (1e4, None)),
}  # fmt: skip


@pytest.mark.parametrize("case", ROTARY)
def test_mohawks_angles_come_from_the_whole_model(tmp_path, case):
    layer, whole, expected = ROTARY[case]
    config, tensors = p.mohawk()
    for inputs, said in ((layer_inputs(config, "Attention")[0], layer), (config["MixerModel"]["input"], whole)):
        for name in ("rope_theta", "rope_scaling"):
            del inputs[name]
        inputs |= said
    plan, model = imported(p.write(tmp_path / "in", config, tensors), tmp_path / "out")
    assert_logits(model, mohawk_logits(tensors, p.frequencies(p.HEAD, *expected)))
    ignored = [note.split()[0] for note in plan.notes if "left out" in note]
    assert ignored == (["rope_theta", "rope_scaling"] if layer else [])


@pytest.mark.parametrize("where", ["the whole", "the blocks", "nowhere"])
def test_mohawks_epsilon_is_read_where_it_is_said(tmp_path, where):
    """configs/Qwen2/1.5B/pure/components.yaml has it at the whole alone."""
    config, tensors = p.mohawk()
    places = {"the whole": [config["MixerModel"]["input"]],
              "the blocks": [block["input"] for block in config["MixerModel"]["Blocks"]]}  # fmt: skip
    for inputs in sum(places.values(), []):
        del inputs["norm_epsilon"]
    for inputs in places.get(where, []):
        inputs["norm_epsilon"] = 1e-3
    plan, model = imported(p.write(tmp_path / "in", config, tensors), tmp_path / "out")
    eps = 1e-5 if where == "nowhere" else 1e-3
    assert_logits(model, mohawk_logits(tensors, p.frequencies(p.HEAD, 5e5, p.LLAMA3), eps=eps))
    assert any("no norm_epsilon" in note for note in plan.notes) == (where == "nowhere")


def test_mohawks_phi_attention_reads_its_layer(tmp_path):
    """Where Phi-Mamba's reads PhiConfig's defaults alone."""
    said = {"num_attention_heads": p.H, "rope_theta": 500.0, "partial_rotary_factor": 0.25}
    for i, (mohawk, sizes) in enumerate([(said, (p.H, 500.0, 0.25)), ({}, (32, 1e4, 0.5))]):
        config, tensors = p.phi_mamba((1, 3), mohawk=mohawk)
        folder = p.write(tmp_path / f"in{i}", config, tensors)
        plan = plan_import(importing(folder))
        rope = plan.config.rope_parameters
        assert (plan.config.num_attention_heads, rope["rope_theta"], rope["partial_rotary_factor"]) == sizes
    config, tensors = p.phi_mamba((1, 3), mohawk=said)
    _, model = imported(tmp_path / "in0", tmp_path / "out")
    assert_logits(model, p.phi_logits(tensors, IDS, (1, 3), heads=p.H, theta=500.0, rotated=0.25))
    config["Block4"]["Layer"]["input"]["rope_theta"] = 1e4
    p.write(tmp_path / "differ", config, tensors)
    with pytest.raises(ValueError, match="rope_theta of the attention layers differs"):
        plan_import(importing(tmp_path / "differ"))


@pytest.mark.parametrize("tied", [True, False])
def test_llamba(tmp_path, tied):
    config, tensors = p.llamba(tied)
    plan, model = imported(p.write(tmp_path / "in", config, tensors, shards=3), tmp_path / "out")

    def mixer(w, i, u):
        return p.discrete_mamba2(w, f"backbone.layers.{i}.mixer.", u, p.H, p.H, 8)

    assert model.config.tie_word_embeddings == tied
    assert plan.config.eos_token_id is None
    assert_logits(model, p.llama_logits(tensors, IDS, mixer, 1e-5, *BACKBONE))


CASES = [(1, False, None), (1, False, False), (1, True, None), (2, False, None), (2, False, True), (2, True, None)]


@pytest.mark.parametrize("version, m1, early", CASES)
def test_mamba_in_the_llama_and_m1(tmp_path, version, m1, early):
    """v1's bias counted twice and its runs of 4 channels where heads have 8; v2's own epsilon; RoPE scaling."""
    config, tensors, mamba_config = p.mamba_in_llama(version, m1=m1, early=early)
    folder = p.write(tmp_path / "in", config, tensors, binary=m1, mamba_config=mamba_config, shards=2)
    plan, model = imported(folder, tmp_path / "out")
    early = version == 1 if early is None else early
    freq = p.frequencies(p.HEAD, 1e4, None if m1 else p.LLAMA3)

    def mixer(w, i, u):
        prefix = f"model.layers.{i}."
        if i % 2 == 0 and version == 2:
            return p.mamba2(w, f"{prefix}mamba.", u, early)
        if i % 2 == 0:
            return p.mamba1(w, f"{prefix}mamba.", u, 4, early)
        if m1:
            q, k, v = p.linear(w, f"{prefix}mha.in_proj", u).split([p.D, p.K * p.HEAD, p.K * p.HEAD], dim=-1)
        else:
            q, k, v = (p.linear(w, f"{prefix}self_attn.{n}_proj", u) for n in "qkv")
        mixed = p.attention(*(x.unflatten(-1, (-1, p.HEAD)) for x in (q, k, v)), freq)
        return p.linear(w, f"{prefix}mha.out_proj" if m1 else f"{prefix}self_attn.o_proj", mixed)

    assert_logits(model, p.llama_logits(tensors, IDS, mixer, 1e-6, *PLAIN))
    assert ("left out" if m1 else "kept, as in training") in " ".join(plan.notes)
    assert plan.config.eos_token_id == 2


def test_mistrals_window_is_kept_and_a_tied_head_is_stored_once(tmp_path):
    config, tensors, mamba_config = p.mamba_in_llama(2)
    config |= {"model_type": "mistral", "sliding_window": 5, "tie_word_embeddings": True, "rope_scaling": None}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    folder = p.write(tmp_path / "in", config, tensors, mamba_config=mamba_config)
    plan, model = imported(folder, tmp_path / "out")

    def mixer(w, i, u):
        if i % 2 == 0:
            return p.mamba2(w, f"model.layers.{i}.mamba.", u, False)
        q, k, v = (p.linear(w, f"model.layers.{i}.self_attn.{n}_proj", u).unflatten(-1, (-1, p.HEAD)) for n in "qkv")
        return p.linear(w, f"model.layers.{i}.self_attn.o_proj", p.attention(q, k, v, p.frequencies(p.HEAD, 1e4), 5))

    assert plan.dropped == {"lm_head.weight": "tied to the embedding"}
    assert sum("window of 5 tokens is kept, as in training" in note for note in plan.notes) == 1
    assert_logits(model, p.llama_logits(tensors, IDS, mixer, 1e-6, *PLAIN))
    # a head that was trained apart is not thrown away, whatever the configuration says
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 1.01
    plan = plan_import(importing(p.write(tmp_path / "b", config, tensors, mamba_config=mamba_config)))  # fmt: skip
    assert not plan.config.tie_word_embeddings
    assert "both are kept" in " ".join(plan.notes)


def broken(tmp_path, what):
    """A folder that cannot be imported."""
    config, tensors, mamba_config = p.mamba_in_llama(2)
    if what == "no mamba_config":
        mamba_config = None
    if what == "mixed":
        tensors |= p.mamba_in_llama(1)[1]
    if what == "backbone too":
        tensors |= p.llamba(True)[1]
        config |= p.llamba(True)[0]
    if what == "plain":
        tensors = {name: t for name, t in tensors.items() if ".mamba." not in name}
    if what == "quantised":
        config["quantization_config"] = {"quant_method": "bitsandbytes"}
    if what == "eight bit":
        tensors["model.layers.0.mamba.out_proj.weight"] = torch.ones(p.D, p.D, dtype=torch.int8)
    if what == "missing tensor":
        del tensors["model.layers.2.mamba.A_log"]
    if what == "strange tensor":
        tensors["model.layers.2.mamba.extra"] = torch.ones(3)
    if what == "other layers":
        mamba_config["attn_layers"] = [0]
    if what == "wrong shape":
        tensors["model.layers.0.mamba.out_proj.weight"] = torch.ones(p.D, p.D + 1)
    if what == "no config":
        config = None
    if what == "norm":
        config, tensors = p.mohawk()
        tensors["backbone.layers.0.mixer.norm.weight"], mamba_config = torch.ones(p.D), None
    if what == "unknown core":
        config, tensors = p.mohawk()
        config["MixerModel"]["Blocks"][0]["Layer"]["name"], mamba_config = "DiscreteMamba2Rotary", None
    if what in ("falcon", "double block"):
        (config, tensors), mamba_config = p.mohawk(), None
        block, attention = config["MixerModel"]["Blocks"][0], config["MixerModel"]["Blocks"][2]["Layer"]
    if what == "falcon":
        block["name"], block["Layer"]["name"] = "FalconBlock", "FalconMambaMixer"
    if what == "double block":
        block |= {"name": "DoubleBlockAdapter", "ssm_layer": block.pop("Layer"), "attn_layer": attention}
    if what.startswith("packed"):
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(p.INTER, p.D // 8, dtype=torch.uint32)
    if what == "packed, and says so":  # as MLX does
        config["quantization"] = {"group_size": 64, "bits": 4}
    if what == "no config, backbone":
        (config, tensors), mamba_config = (None, p.llamba(True)[1]), None
    if what == "no skip":
        config, tensors = p.llamba(True)
        tensors, mamba_config = {name: t for name, t in tensors.items() if not name.endswith(".mixer.D")}, None
    if what == "incomplete config":
        config, tensors = p.llamba(True)
        mamba_config = config.pop("n_layer") and None
    return p.write(tmp_path / "in", config, tensors, mamba_config=mamba_config)


ERRORS = {
    "no mamba_config": "no mamba_config.json",
    "mixed": "mixes the tensors of Mamba in the Llama v1 and Mamba in the Llama v2",
    "backbone too": "mixes the tensors of cartesia Llamba and Mamba in the Llama v2",
    "plain": "A plain Transformer is converted",
    "quantised": "is quantised",
    "eight bit": "so the weights are quantised",
    "missing tensor": "missing tensor model.layers.2.mamba.A_log",
    "strange tensor": "unexpected tensor model.layers.2.mamba.extra",
    "other layers": "mamba_config.json leaves other layers",
    "wrong shape": "has shape (32, 33)",
    "no config": "name the model it was made from (--base)",
    "norm": "norm before out_proj",
    "unknown core": "config.json: MixerModel.Blocks[0] has DiscreteMamba2Rotary mixers",
    "falcon": "config.json: MixerModel.Blocks[0] has FalconMambaMixer mixers in FalconBlock blocks",
    "double block": "Blocks[0] is a DoubleBlockAdapter, with a mixer and attention side by side",
    "packed": "has type U32, so the weights are quantised; supported are full-precision ones",
    "packed, and says so": "is quantised (quantization in config.json); import the full-precision weights",
    "no config, backbone": "no config.json, tensors such as backbone",
    "no skip": "no tensor that ends in .mixer.D",
    "incomplete config": "in/config.json has no n_layer.",
}


@pytest.mark.parametrize("what", ERRORS)
def test_bad_input(tmp_path, what):
    with pytest.raises(ValueError) as error:
        import_checkpoint(importing(broken(tmp_path, what), tmp_path / "out"))
    assert ERRORS[what] in str(error.value)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_our_own_checkpoints_and_unknown_fields_are_refused(tmp_path):
    config, tensors = p.llamba(True)
    folder = p.write(tmp_path / "in", config, tensors)
    with pytest.raises(ValueError, match="no such field"):
        plan_import(importing(folder, fields={"rope": 1}))
    imported(folder, tmp_path / "out")
    with pytest.raises(ValueError, match="just load it"):
        plan_import(importing(tmp_path / "out"))


def test_pickles_with_code_are_not_opened(tmp_path):
    class Code:
        def __reduce__(self):
            return (print, ("ran",))

    config, tensors = p.phi_mamba()
    p.write(tmp_path / "in", config, {**tensors, "x": Code()}, binary=True)
    with pytest.raises(ValueError, match="could run code"):
        plan_import(importing(tmp_path / "in"))


def test_from_the_hub_with_a_base_from_there_too(tmp_path, base, monkeypatch):
    config, tensors = p.llamba(True)
    p.write(tmp_path / "hub/org/Llamba", config, tensors, binary=True)
    shutil.copytree(base, tmp_path / "hub/org/base")
    save_file({"a": torch.ones(2)}, tmp_path / "hub/org/base/model.safetensors")
    with HubServer(tmp_path / "hub") as hub:
        hub.connect(monkeypatch, tmp_path / "cache")
        import_checkpoint(importing("org/Llamba", tmp_path / "out", base="org/base"))
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["conversion"]["imported_from"] == "org/Llamba"
    assert written["conversion"]["revision"] == COMMIT
    assert written["eos_token_id"] == 6
    assert (tmp_path / "out/tokenizer.json").is_file()


def test_an_interrupted_import_leaves_nothing(tmp_path):
    config, tensors = p.llamba(True)
    folder = p.write(tmp_path / "in", config, tensors)

    def interrupt(what, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_checkpoint(importing(folder, tmp_path / "out"), progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_the_command(tmp_path):
    config, tensors = p.llamba(True)
    folder = p.write(tmp_path / "in", config, tensors)
    done = run("import", folder, tmp_path / "out", "--dry-run")
    assert done.returncode == 0
    assert "cartesia Llamba -> llamba with discrete_mamba2" in done.stderr
    assert not (tmp_path / "out").exists()
    done = run("import", folder, tmp_path / "out", "--set", "max_position_embeddings=99", "--dtype", "bfloat16")
    assert done.returncode == 0
    assert "done" in done.stderr
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["max_position_embeddings"] == 99
    assert written["dtype"] == "bfloat16"
    done = run("import", folder, tmp_path / "out")
    assert done.returncode == 1
    assert "--overwrite" in done.stderr
    assert "Traceback" not in done.stderr
    save_file({"a": torch.ones(2)}, tmp_path / "in" / "model.safetensors")
    done = run("import", folder, tmp_path / "new")
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
