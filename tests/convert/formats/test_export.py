"""Exported hybrids are transformers' own architectures: loaded without remote code, they give the hybrid's logits."""

import json
import typing

import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteMoeHybridForCausalLM

from convert import convert
from convert.formats.export import NATIVE_CLASSES, export_checkpoint, plan_export
from convert.formats.import_ import import_checkpoint
from convert.options import ExportTarget, make_options
from convert.tools.families import families
from tests.helpers import published
from tests.helpers.command import check_one_line_error, run, run_as_is
from tests.helpers.exportable import HOLDABLE
from tests.helpers.hybrids import make_hybrid
from tests.helpers.teachers import FIRST, LLAMA3_ROPE, LONGROPE, TEACHERS, YARN_ROPE, random_ids
from tests.helpers.transfer import exporting, importing
from tests.helpers.versions import grouped_norm

VARIANTS = {
    "hybrid": {},
    "no biases": dict(mixer_out_bias=False, mixer_gate_bias=False),
    "gate bias only": dict(mixer_out_bias=False),
    "tied, llama3 rope": dict(tie_word_embeddings=True, rope_parameters=dict(LLAMA3_ROPE)),
    "qwen2 biases": dict(attention_bias=True),
    "all biases": dict(attention_bias=True, attention_out_bias=True),
    "shared state": dict(mixer_shared_state=True),
    "one head each": dict(mixer_num_kv_heads=4, mixer_d_state=5),
    "wide heads": dict(head_dim=16, mixer_head_dim=16, mixer_d_state=8),
    "three heads": dict(mixer_num_heads=3, mixer_num_kv_heads=1),
    "all attention": dict(pattern="attention"),
    "yarn rope": dict(rope_parameters=dict(YARN_ROPE)),
    "dynamic rope": dict(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
                         max_position_embeddings=16),
    "linear rope": dict(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "longrope": dict(rope_parameters=dict(LONGROPE) | {"original_max_position_embeddings": 16}),
}  # fmt: skip


def exported(tmp_path, to, variant=(), expand=None, **overrides):
    options = HOLDABLE | dict(variant or {}) | overrides
    model = make_hybrid(dtype=torch.float32, **options)
    model.save_pretrained(tmp_path / "hybrid")
    out = tmp_path / f"out-{expand}"
    export_checkpoint(exporting(tmp_path / "hybrid", out, to=to, expand=expand))
    assert not list(out.glob("*.py"))
    assert "auto_map" not in json.loads((out / "config.json").read_text())
    native = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert type(native).__name__ == NATIVE_CLASSES[to].architecture
    return model, native, out


@torch.no_grad()
def assert_same(model, native):
    ids = random_ids(2, 21)
    torch.testing.assert_close(native(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    ours, theirs = (m(ids, attention_mask=mask).logits for m in (model, native))
    torch.testing.assert_close(theirs[0, 6:], ours[0, 6:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(theirs[1], ours[1], rtol=1e-4, atol=1e-4)
    drawn = [m.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
             for m in (model, native)]  # fmt: skip
    assert drawn[0].equal(drawn[1])


@grouped_norm
@pytest.mark.parametrize("to", NATIVE_CLASSES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_native_class_gives_the_same_logits_padded_and_generated(tmp_path, variant, to):
    model, native, _ = exported(tmp_path, to, VARIANTS[variant])
    assert_same(model, native)


@grouped_norm
def test_zero_heads_fill_up_a_wider_mixer(tmp_path):
    model, native, out = exported(tmp_path, "bamba", expand=2)
    assert native.config.mamba_n_heads == 8
    assert native.model.layers[0].mamba.out_proj.weight.shape == (32, 64)
    assert_same(model, native)
    assert json.loads((out / "config.json").read_text())["attn_rotary_emb"] == 8


@grouped_norm
def test_bamba_holds_mlp_biases_and_partial_rotary(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    model, native, out = exported(tmp_path, "bamba", mlp_bias=True, rope_parameters=rope)
    assert_same(model, native)
    with pytest.raises(ValueError, match="biases in the MLP, partial rotary embedding"):
        plan_export(exporting(tmp_path / "hybrid"))


def test_config_has_the_spellings_of_other_readers(tmp_path):
    _, _, out = exported(tmp_path, "granitemoehybrid", rope_parameters=dict(LLAMA3_ROPE))
    notes = plan_export(exporting(tmp_path / "hybrid")).notes
    for what in ("--to bamba", "--expand 2", "--mixer.gate_bias false --mixer.out_bias false", "RoPE scaling"):
        assert sum(what in note for note in notes) == 1
    text = (out / "config.json").read_text()
    written = json.loads(text)
    assert written["layer_types"] == ["mamba", "attention"]
    assert written["rope_theta"] == 1e4
    assert "Infinity" not in text
    assert GraniteMoeHybridForCausalLM.from_pretrained(out).config.layer_types[1] == "full_attention"


@pytest.mark.parametrize("norm_eps", [1e-6, 1e-5])
def test_what_cannot_be_held_is_named(tmp_path, norm_eps):
    """One obstacle at a time, each with its name; the epsilon counts when it is another."""
    cases = {
        "the mixer discrete_mamba2": dict(mixer="discrete_mamba2", mixer_norm="none"),
        "a convolution without SiLU": dict(mixer_activation="identity"),
        "rotary embedding on B and C": dict(mixer_rotary=True),
        "the mixer's norm 'whole'": dict(mixer_norm="whole"),
        "layers with a window": dict(pattern="beside"),
        "without an attention layer": dict(pattern="pure"),
        "sliding window": dict(pattern="window", sliding_window=8),
        "norms on queries and keys, norms on B and C": dict(qk_norm="rms", mixer_qk_norm="rms"),
        "a bias on the head": dict(lm_head_bias=True),
        "all of in_proj": dict(mixer_in_bias=True),
        "the MLP's activation gelu": dict(hidden_act="gelu"),
        "parallel block": dict(family="phimamba"),
        "norms both mixer and MLP": dict(norm_placement="both"),
        r"norms that multiply by 1 \+ weight": dict(norm_unit_offset=True),
        "experts": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8),
        "another rotary embedding in some layers, or none": dict(layer_rope=["main", "none"]),
        "final_logit_softcapping 30.0": dict(final_logit_softcapping=30.0),
        "a factor on what each block returns": dict(layer_scalar=True),
        "norms on values": dict(value_norm=True, layer_types=["full_attention"] * 2),
    }
    if norm_eps == 1e-6:
        cases = {"epsilon of its own": dict(mixer_norm_eps=1e-6)}
    for i, (what, overrides) in enumerate(cases.items()):
        make_hybrid(dtype=torch.float32, **HOLDABLE | overrides).save_pretrained(tmp_path / str(i))
        with pytest.raises(ValueError, match=what):
            plan_export(exporting(tmp_path / str(i)))


@grouped_norm
@torch.no_grad()
def test_an_export_is_a_teacher(tmp_path):
    """A dense model of Granite's architecture, whose numbers of experts are 0."""
    _, native, out = exported(tmp_path, "granitemoehybrid", VARIANTS["no biases"])
    convert(str(out), tmp_path / "again", attention_layers="all", align="none")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    ids = random_ids(2, 21)
    torch.testing.assert_close(again(ids).logits, native(ids).logits, rtol=1e-4, atol=1e-4)


def test_every_target_that_the_command_offers_is_there():
    assert tuple(NATIVE_CLASSES) == typing.get_args(ExportTarget)


def test_bad_input(saved_teacher, tmp_path):
    with pytest.raises(ValueError, match="no hybrid of this project"):
        plan_export(exporting(saved_teacher("llama-gqa")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no hybrid of this project"):
        plan_export(exporting(tmp_path / "empty"))
    with pytest.raises(ValueError, match="to must be granitemoehybrid or bamba, not llama"):
        exporting("a", "b", to="llama")
    make_hybrid(dtype=torch.float32, **HOLDABLE).save_pretrained(tmp_path / "hybrid")
    with pytest.raises(ValueError, match="expand must be a whole number of at least 1 and at most 64, not 0"):
        exporting(tmp_path / "hybrid", expand=0)
    make_hybrid(dtype=torch.float32, **HOLDABLE | VARIANTS["wide heads"]).save_pretrained(tmp_path / "wide")
    with pytest.raises(ValueError, match="expand 1 cannot hold 4 heads of 16"):
        plan_export(exporting(tmp_path / "wide", expand=1))
    (tmp_path / "hybrid" / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match="corrupt"):
        plan_export(exporting(tmp_path / "hybrid"))


@grouped_norm
def test_export_ready_conversion_and_the_command(saved_teacher, tmp_path):
    teacher = saved_teacher("llama-gqa")
    plan = convert(str(teacher), tmp_path / "hybrid", export_ready=True, align="none")
    assert (plan.config.mixer, plan.config.mixer_norm, plan.config.mixer_rotary) == ("mamba2", "head", False)
    done = run_as_is("export", tmp_path / "hybrid", tmp_path / "out", "--to", "bamba", "--expand", "2")
    assert done.returncode == 0
    assert "BambaForCausalLM" in done.stderr
    assert "--mixer.gate_bias false" in done.stderr
    assert "--expand 2" not in done.stderr
    ids = random_ids(1, 12)
    with torch.no_grad():
        ours = AutoModelForCausalLM.from_pretrained(tmp_path / "hybrid", trust_remote_code=True)(ids).logits
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    check_one_line_error(run_as_is("export", tmp_path / "hybrid", tmp_path / "out"), "--overwrite")
    check_one_line_error(run_as_is("export", tmp_path / "gone", tmp_path / "new"), "does not exist")


@grouped_norm
@pytest.mark.parametrize("name", [name for name in TEACHERS if name not in FIRST])
def test_the_list_of_families_says_what_can_be_exported(name, saved_teacher, tmp_path):
    (listed,) = [of["export"] for of in families() if of["model_type"] == TEACHERS[name][1].model_type]
    options = dict(export_ready=True, align="none", attention_layers="1")
    if not listed:
        with pytest.raises(ValueError, match="bamba cannot hold|mixers cannot follow"):
            convert(str(saved_teacher(name)), tmp_path / "hybrid", **options)
        return
    convert(str(saved_teacher(name)), tmp_path / "hybrid", **options)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hybrid", dtype=torch.float32)
    for target in listed:
        export_checkpoint(exporting(tmp_path / "hybrid", tmp_path / target, to=target))
        assert_same(model, AutoModelForCausalLM.from_pretrained(tmp_path / target, dtype=torch.float32))
    if name == "granite":
        with pytest.raises(ValueError, match="bamba cannot hold embedding_multiplier 12.0, residual_multiplier 0.22"):
            plan_export(exporting(tmp_path / "hybrid", to="bamba"))


def test_export_ready_refuses_what_it_cannot_keep(saved_teacher, tmp_path):
    for name, what in (("phi", "parallel block"), ("qwen3", "norms on queries"), ("mistral-window", "sliding window")):
        check_one_line_error(run(saved_teacher(name), tmp_path / "out", "--export-ready", "--dry-run"), what)
    with pytest.raises(ValueError, match="export_ready needs norm head, not whole"):
        make_options(model="a", output="b", export_ready=True, norm="whole")
    with pytest.raises(ValueError, match="export_ready needs the mixer mamba2, not mamba1"):
        make_options(model="a", output="b", export_ready=True, mixer="mamba1")
    done = run(saved_teacher("llama-gqa"), tmp_path / "out", "--export-ready", "--window", "4", "--dry-run")
    check_one_line_error(done, "no window beside it", "leave out the window, or mixer.activation")


@grouped_norm
def test_a_published_mamba2_hybrid_goes_all_the_way(tmp_path):
    """Mamba in the Llama v2 imported and exported gives the logits of the published equations."""
    config, tensors, mamba_config = published.mamba_in_llama(2)
    config |= {"rms_norm_eps": 1e-5}
    mamba_config |= {"rms_norm_eps": 1e-5}
    folder = published.write(tmp_path / "in", config, tensors, mamba_config=mamba_config)
    import_checkpoint(importing(folder, tmp_path / "hybrid"))
    export_checkpoint(exporting(tmp_path / "hybrid", tmp_path / "out", to="bamba"))
    freq = published.frequencies(published.HEAD, 1e4, published.LLAMA3)

    def mixer(w, i, u):
        prefix = f"model.layers.{i}."
        if i % 2 == 0:
            return published.mamba2(w, f"{prefix}mamba.", u, False)
        q, k, v = (published.linear(w, f"{prefix}self_attn.{n}_proj", u).unflatten(-1, (-1, 8)) for n in "qkv")
        return published.linear(w, f"{prefix}self_attn.o_proj", published.attention(q, k, v, freq))

    ids = torch.randint(3, published.VOCAB, (2, 19), generator=torch.Generator().manual_seed(1))
    names = ("model.embed_tokens.weight", "model.layers", "model.norm.weight")
    expected = published.llama_logits(tensors, ids, mixer, 1e-5, *names)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)
