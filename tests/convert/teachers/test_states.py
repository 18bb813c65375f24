"""Teachers that are hybrids already: their states stay as they are, and the budget goes to the layers that grow."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from convert import convert
from convert.checkpoint.pictures import head_kinds
from convert.dry_run import plan_conversion
from convert.layout.cache import cache_bytes, recurrent_bytes
from convert.options import make_options
from convert.plan import describe
from convert.teachers.teacher import read_config
from convert.tools.inspect import inspect_model
from modeling_llamba.compatibility import cache_of
from modeling_llamba.model.cache import cache_nbytes
from modeling_llamba.model.config_values import RECURRENT
from tests.helpers.padding import left_padded
from tests.helpers.teachers import STATEFUL, TEACHERS, WITH_MIXERS, make_teacher, random_ids

CONTEXT = 200
SEARCH = dict(
    context=CONTEXT, text="sampled", tokens=2048, align="closed-form",
    alignment={"sequence_length": 128, "held_out_sequences": 2},
)  # fmt: skip
every_one = pytest.mark.parametrize("name", STATEFUL)


@every_one
@torch.no_grad()
def test_a_share_is_one_of_the_layers_that_grow(name, saved_teacher, tmp_path):
    """Fitted by default, scores of heads included; the bytes of the plan are those of either cache."""
    plan = convert(str(saved_teacher(name)), tmp_path / "out", cache=0.4, **SEARCH)
    kinds = plan.config.layer_types
    assert [kind == RECURRENT for kind in kinds] == [True, False, True, False]
    assert "hybrid" in kinds
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    teacher, hybrid = cache_bytes(plan.config, CONTEXT)
    states = kinds.count(RECURRENT) * recurrent_bytes(plan.config, torch.bfloat16)
    assert 0 < states < hybrid <= states + 0.4 * (teacher - states)
    of_float32 = cache_nbytes(model(random_ids(1, CONTEXT)).cache)
    assert of_float32 == cache_bytes(plan.config, CONTEXT, torch.float32)[1]
    whole = cache_of(make_teacher(name)(random_ids(1, CONTEXT), use_cache=True))
    assert cache_nbytes(whole) == cache_bytes(plan.config, CONTEXT, torch.float32)[0]


@every_one
def test_what_is_said_of_states(name, saved_teacher, tmp_path):
    plan = convert(str(saved_teacher(name)), tmp_path / "out", align="none", window=8, attention_layers="none")
    said = describe(plan)
    assert "RHRH  (0 attention, 2 hybrid, 2 with the teacher's own state)" in said
    assert "cache 256k" not in said
    assert "of int8's)" in said
    card = (tmp_path / "out" / "README.md").read_text()
    assert "with 2 of its 2 attention layers replaced by" in card
    assert "and 4 sinks, R the teacher's own state)" in card
    own = ["the teacher's state"] * plan.config.num_key_value_heads
    assert head_kinds(plan.config) == [own, ["window and state"] * len(own)] * 2
    report = inspect_model(str(tmp_path / "out"))
    assert (report["layer_map"], report["attention_layers"]) == ("RHRH", [])


@every_one
def test_the_longest_context_is_shown_where_a_teacher_has_it(name, saved_teacher, tmp_path):
    """With its cache in 8 bits, which rounds no state."""
    config = json.loads((saved_teacher(name) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 262_144}))
    (tmp_path / "model.safetensors").symlink_to(saved_teacher(name) / "model.safetensors")
    plan = plan_conversion(make_options(str(tmp_path), "o", context=262_144))
    assert "cache 256k" in describe(plan)
    size = plan.summary()["cache_bytes"]["256k"]
    states = 2 * recurrent_bytes(plan.config, torch.bfloat16)
    width = plan.config.head_dim
    eight = (width + 2) / (2 * width)  # of each vector a scale, too
    assert size["teacher_int8"] == pytest.approx(states + eight * (size["teacher"] - states))
    assert size["hybrid"] < 0.1 * size["teacher"]


@pytest.mark.parametrize("options", [{"attention_layers": 0.5}, {"mixer": "mamba2"}, {"attention_layers": "none"}])
@every_one
def test_a_mixer_without_a_window_is_refused(name, options, saved_teacher, tmp_path):
    with pytest.raises(ValueError, match="which mixers cannot follow; give a window or a cache"):
        convert(str(saved_teacher(name)), tmp_path / "out", align="none", **options)


@every_one
@torch.no_grad()
def test_a_state_that_cannot_be_taken_back_is_not(name, saved_teacher, tmp_path):
    """transformers would crop the convolution alone."""
    convert(str(saved_teacher(name)), tmp_path / "out", align="none", window=8, attention_layers="none")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(random_ids(1, 20), max_new_tokens=4, prompt_lookup_num_tokens=2)
    cache = model.new_cache()
    cache.activate_past_recording()
    model(random_ids(1, 20), cache=cache)
    with pytest.raises(ValueError, match="cannot be cropped; begin with a new cache"):
        cache.crop(-2)
    with pytest.raises(ValueError, match="heads of layer 0, which has a sliding window or a state in the teacher"):
        plan_conversion(make_options(str(saved_teacher(name)), "o", window=8, attention_heads="0:0"))


@every_one
@torch.no_grad()
def test_beams_and_several_answers(name, saved_teacher, tmp_path):
    """Rows of states are chosen and repeated with those of the rest."""
    convert(str(saved_teacher(name)), tmp_path / "out", align="none", window=64, attention_layers="none")
    model, teacher = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval(), make_teacher(name)
    asked = dict(max_new_tokens=8, num_beams=3, num_return_sequences=2, do_sample=False, eos_token_id=None)
    ids = random_ids(2, 12)
    assert torch.equal(model.generate(ids, **asked), teacher.generate(ids, **asked))
    cache = model(ids).cache
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3]))
    new = random_ids(2, 1, seed=1)
    expected = model(torch.cat([ids, new], 1)).logits[:, -1]
    torch.testing.assert_close(model(new, cache=cache).logits[:, -1], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3-5", "granite4", "olmo-hybrid"])
def test_a_hybrid_beside_states_is_trained(name, saved_teacher, tmp_path):
    """Layer by layer, past layers that are not replaced."""
    stages = {
        "matrix_orientation": {"tokens": 0},
        "hidden_state_alignment": {"tokens": 2048, "learning_rate": 1e-5},
        "distillation": {"tokens": 0},
    }
    options = dict(text="sampled", tokens=512, window=6, sinks=1, rank=4, attention_layers="none")
    convert(
        str(saved_teacher(name)), tmp_path / "out", align="mohawk", **options,
        alignment={"sequence_length": 32, "held_out_sequences": 2, **stages},
    )  # fmt: skip
    (trained,) = json.loads((tmp_path / "out" / "alignment.json").read_text())["stages"]
    losses = trained["hidden_state_alignment"]
    assert losses["held_out_loss_after"] < losses["held_out_loss_before"]


@pytest.mark.parametrize("name", WITH_MIXERS[:1])
def test_a_family_without_a_table_of_states_is_refused(name, saved_teacher, tmp_path):
    config = json.loads((saved_teacher(name) / "config.json").read_text())
    config["layer_types"] = ["linear_attention"] * 4
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(saved_teacher(name) / "model.safetensors")
    with pytest.raises(ValueError, match="layers with a state, which are not supported in this family"):
        convert(str(tmp_path), tmp_path / "out", align="none")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t[:-1], "q_conv1d.weight and those beside it have 55 rows where .*conv1d.weight has 56"),
        (lambda t: t[:, :, 1:], "k_conv1d.weight has shape .* where the configuration says"),
        (None, "missing tensor model.layers.0.linear_attn.k_conv1d.weight"),
    ],
)
def test_convolutions_of_a_state_are_joined_if_they_fit(change, message, saved_teacher, tmp_path):
    """OLMo Hybrid's are published one by one."""
    (tmp_path / "config.json").write_bytes((saved_teacher("olmo-hybrid") / "config.json").read_bytes())
    tensors = load_file(saved_teacher("olmo-hybrid") / "model.safetensors")
    name = "model.layers.0.linear_attn.k_conv1d.weight"
    found = tensors.pop(name)
    if change is not None:
        tensors[name] = change(found).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        plan_conversion(make_options(str(tmp_path), "o"))


@pytest.mark.parametrize("field", ["linear_num_value_heads", "linear_conv_kernel_dim"])
def test_sizes_of_a_state_are_checked(field, saved_teacher, tmp_path):
    (tmp_path / "model.safetensors").write_bytes((saved_teacher("qwen3-5") / "model.safetensors").read_bytes())
    config = json.loads((saved_teacher("qwen3-5") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: -4}))
    with pytest.raises(ValueError, match=f"{field} must be a whole number of at least 1, not -4"):
        plan_conversion(make_options(str(tmp_path), "o"))


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@torch.no_grad()
def test_numbers_of_a_state_in_float32_stay_so(dtype, tmp_path):
    """Qwen3.5 has its decays and the norms over its states so, among weights in bfloat16; and if asked, not."""
    make_teacher("qwen3-5").to(torch.bfloat16).save_pretrained(tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    exact = {n: torch.randn(t.shape) for n, t in tensors.items() if n.endswith(("A_log", "linear_attn.norm.weight"))}
    save_file(tensors | exact, tmp_path / "in" / "model.safetensors")
    plan = convert(str(tmp_path / "in"), tmp_path / "out", align="none", attention_layers="all", dtype=dtype)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert sum(t.nbytes for t in written.values()) == plan.bytes_to_write
    for name, values in exact.items():
        own = written[name.replace("linear_attn", "recurrent.module")]
        kept = values if dtype == "auto" else values.bfloat16()
        assert len(exact) == 4
        assert own.dtype == kept.dtype
        assert torch.equal(own, kept)
    assert {t.dtype for n, t in written.items() if not n.endswith(("A_log", "module.norm.weight"))} == {torch.bfloat16}
    loaded = (AutoModelForCausalLM.from_pretrained(tmp_path / of, dtype=torch.float32) for of in ("in", "out"))
    teacher, hybrid = (model(random_ids(2, 24)).logits for model in loaded)
    assert torch.allclose(hybrid, teacher) == (dtype == "auto")


@pytest.mark.parametrize("name, field", [("lfm2", "conv_bias"), ("granite4-dense", "mamba_proj_bias")])
@torch.no_grad()
def test_biases_that_reach_padding(name, field, tmp_path):
    """In the teacher, whose output then depends on padding, too; ours is the same."""
    teacher = make_teacher(name, layers=2, **{field: True})
    teacher.save_pretrained(tmp_path / "in")
    convert(str(tmp_path / "in"), tmp_path / "out", align="none", attention_layers="all")
    hybrid = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids, mask = left_padded(random_ids(2, 24), 5)
    torch.testing.assert_close(
        hybrid(ids, attention_mask=mask).logits[:, 5:], teacher(ids, attention_mask=mask).logits[:, 5:]
    )


@pytest.mark.parametrize(
    "name, model_class, config_class",
    [
        ("qwen3-5", Qwen3_5ForConditionalGeneration, Qwen3_5Config),
        ("qwen3-5-moe", Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeConfig),
    ],
)
@torch.no_grad()
def test_the_text_part_of_a_multimodal_qwen(name, model_class, config_class, tmp_path):
    """Its vision part, and the head that drafts tokens, are dropped by name; tensors are called as published."""
    text = TEACHERS[name][1].to_dict()
    vision = dict(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, patch_size=4,
        num_position_embeddings=16,
    )  # fmt: skip
    tokens = dict(image_token_id=120, video_token_id=121, vision_start_token_id=122, vision_end_token_id=123)
    config = config_class(text_config=text, vision_config=vision, **tokens)
    teacher = model_class(config).eval()
    teacher.save_pretrained(tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    assert {name.split(".")[1] for name in tensors if name.startswith("model.")} == {"language_model", "visual"}
    save_file(tensors | {"mtp.norm.weight": torch.ones(32)}, tmp_path / "in" / "model.safetensors")
    plan = convert(str(tmp_path / "in"), tmp_path / "out", align="none", attention_layers="all")
    hybrid = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = random_ids(2, 24) % 110
    torch.testing.assert_close(hybrid(ids).logits, teacher(ids).logits)
    assert all(name.startswith(("mtp.", "model.visual.")) for name in plan.weights.dropped)
    assert plan.teacher.family.model_type == TEACHERS[name][1].model_type


def test_a_head_may_be_tied_by_what_the_text_part_says():
    """Where the whole model says nothing of it, as transformers' text model reads the same file."""
    raw = {"model_type": "qwen3_5", "text_config": {"tie_word_embeddings": True}}
    assert read_config(raw, "config.json").tie_word_embeddings
    assert not read_config(raw | {"tie_word_embeddings": False}, "config.json").tie_word_embeddings
    assert not read_config({"model_type": "qwen3_5", "text_config": {}}, "config.json").tie_word_embeddings
