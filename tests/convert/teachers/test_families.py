"""Every family: all attention kept = the teacher; all replaced = the teacher's linearised attention, exactly."""

import contextlib
import itertools
import json
import re
import shutil
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    GenerationConfig,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

import convert.hybrids.mapping as mixer_mapping
from convert import convert
from convert.dry_run import plan_conversion
from convert.options import make_options
from convert.plan import describe
from convert.teachers import get_family
from convert.teachers.teacher import embedded_teacher, find_teacher, read_config, teacher_layer_types
from convert.tools.families import families, readme_table
from modeling_llamba import LlambaConfig
from tests.helpers.padding import left_padded
from tests.helpers.teachers import FIRST, STATEFUL, TEACHERS, WITH_MIXERS, make_teacher, random_ids

LAYERS = 2
every_teacher = pytest.mark.parametrize("name", TEACHERS)
MIXERS = ("discrete_mamba2", "mamba2", "mamba1")
SOME_VARIANTS = [("discrete_mamba2", True, True), ("mamba2", False, False), ("mamba1", True, False)]


def variants(name):
    """Mixer, rotary, expand."""
    return list(itertools.product(MIXERS, (True, False), (True, False))) if name in FIRST else SOME_VARIANTS


def with_settings(folder, copy, **settings):
    """A copy of a teacher with other entries in config.json."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | settings))
    return copy


def converted(folder, output, **options):
    plan = convert(str(folder), output, align="none", **options)
    return AutoModelForCausalLM.from_pretrained(output).eval(), plan


@every_teacher
@torch.no_grad()
def test_all_attention_equals_the_teacher(name, saved_teacher, tmp_path):
    hybrid, plan = converted(saved_teacher(name, LAYERS), tmp_path / "out", attention_layers=1.0)
    teacher = make_teacher(name, layers=LAYERS)
    ids = random_ids(2, 40)
    assert type(hybrid).__name__ == (
        "PhiMambaForCausalLM" if name.startswith("phi-") or name == "phi" else "LlambaForCausalLM"
    )
    torch.testing.assert_close(hybrid(ids).logits, teacher(ids).logits)
    assert {rule.kind for rule in plan.rules} == {"moved"}
    assert "with every layer kept" in describe(plan)
    assert "with every attention layer kept" in (tmp_path / "out" / "README.md").read_text()
    in_teacher = dict(teacher.named_parameters()) | dict(teacher.named_buffers())
    assert plan.parameters_before == sum(t.numel() for n, t in in_teacher.items() if n in teacher.state_dict())
    # in the teacher keys are values, too
    copied = hybrid.model.layers[1].self_attn.v_proj.parameters() if name == "gemma4" else ()
    assert plan.parameters_after == plan.parameters_before + sum(p.numel() for p in copied)


@pytest.mark.parametrize(
    "name", [n for n, (_, config) in TEACHERS.items() if not get_family(config.model_type).windows]
)
@torch.no_grad()
def test_a_window_that_no_layer_has(name, saved_teacher, tmp_path):
    """What a configuration says of one is ignored, as transformers does where the model has none."""
    teacher = tmp_path / "teacher"
    shutil.copytree(saved_teacher(name, LAYERS), teacher)
    config = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps(config | {"sliding_window": 8}))
    hybrid, plan = converted(teacher, tmp_path / "out", attention_layers=1.0)
    theirs, ids = AutoModelForCausalLM.from_pretrained(teacher).eval(), random_ids(1, 24)
    torch.testing.assert_close(hybrid(ids).logits, theirs(ids).logits)
    assert f"sliding_window 8 is no part of a {theirs.config.model_type} model, so it counts as none" in describe(plan)


@every_teacher
@torch.no_grad()
def test_in_float64(name, saved_teacher, tmp_path):
    """All attention is the teacher, up to the norms, which transformers computes in float32. A hybrid, the teacher's
    own windows kept if others are there, is the same padded, packed, in pieces and while generating."""
    layer_types = teacher_layer_types(make_teacher(name, layers=LAYERS).config)
    windows = [i for i, kind in enumerate(layer_types) if kind != "full_attention"]
    beside = {} if len(windows) == LAYERS else {"window": 6, "sinks": 2}
    kept, _ = converted(saved_teacher(name, LAYERS), tmp_path / "all", attention_layers="all")
    hybrid, plan = converted(saved_teacher(name, LAYERS), tmp_path / "out", attention_layers=windows[:1], **beside)
    assert plan.placement.replaced_layers
    assert not beside or plan.placement.hybrid.state
    teacher, ids = make_teacher(name, layers=LAYERS), random_ids(2, 24)
    for model in (teacher, kept, hybrid):
        model.double().set_experts_implementation("eager")  # transformers' default knows no float64
    # a state computed in float32 carries the norms' difference on
    torch.testing.assert_close(kept(ids).logits, teacher(ids).logits, rtol=0, atol=1e-5 if name in STATEFUL else 3e-6)
    if hybrid.config.attn_logit_softcapping is not None:
        hybrid.float()  # transformers' eager attention, which alone knows a cap, has no float64 for padding
    whole, close = hybrid(ids, use_cache=False).logits, dict(rtol=1e-4, atol=1e-5)
    padded, mask = left_padded(ids, 5)
    numbers = (mask.cumsum(1) - 1).clamp(min=0)  # as `generate` does; a factor by position is not relative
    behind = hybrid(padded, attention_mask=mask, position_ids=numbers).logits[:, 5:]
    torch.testing.assert_close(behind, whole, **close)
    positions = torch.arange(24).repeat(2)[None]
    packed = hybrid(ids.view(1, -1), position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed.view_as(whole), whole, **close)
    pieces, cache = [], None
    for piece in ids.split([9, 1, 1, 8, 5], dim=1):
        out = hybrid(piece, cache=cache, use_cache=True)
        pieces, cache = [*pieces, out.logits], out.cache
    torch.testing.assert_close(torch.cat(pieces, 1), whole, **close)
    generated = hybrid.generate(padded, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert torch.equal(hybrid(generated[:, 5:], use_cache=False).logits[:, 23:-1].argmax(-1), generated[:, 29:])


@pytest.mark.parametrize("name", ["gemma4", "gemma4-experts"])
@torch.no_grad()
def test_gemma4_where_transformers_rounds_nothing(name, saved_teacher, tmp_path, monkeypatch):
    """All of it in float64, norms and the embedding's factor, too: rows in another order, and the same numbers."""
    kept, _ = converted(saved_teacher(name), tmp_path / "all", attention_layers="all")
    teacher, ids = make_teacher(name), random_ids(2, 40)
    for model in (teacher, kept):
        model.double().set_experts_implementation("eager")
    monkeypatch.setattr(Gemma4RMSNorm, "forward", lambda self, x: self._norm(x) * getattr(self, "weight", 1.0))
    teacher.model.embed_tokens.embed_scale.fill_(32**0.5)
    torch.testing.assert_close(kept(ids).logits, teacher(ids).logits, rtol=0, atol=1e-12)


@every_teacher
def test_the_plan_of_the_default(name, saved_teacher, monkeypatch):
    """Without reading a weight. No default is a hybrid without a state, and none has more cache than its teacher."""
    monkeypatch.setattr("convert.io.reader.SafetensorsCheckpoint.read_rows", None)
    plan = plan_conversion(make_options(str(saved_teacher(name)), "out"))
    kinds, own = plan.config.layer_types, teacher_layer_types(make_teacher(name).config)
    assert kinds == ["hybrid" if kind == "full_attention" else kind for kind in own]
    if "hybrid" not in kinds:
        assert "every layer has a window of 8 tokens in the teacher and keeps it" in describe(plan)
        return
    assert plan.placement.hybrid.state
    assert plan.config.mixer != "none"
    for size in plan.summary()["cache_bytes"].values():
        assert size["hybrid"] < 0.1 * size["teacher"]
    assert "salient tokens and a state" in describe(plan)


@pytest.mark.parametrize(
    "name, mixer", [(n, m) for n in WITH_MIXERS for m in MIXERS if n in FIRST or m == "discrete_mamba2"]
)
def test_every_other_tensor_is_the_teachers_bit_for_bit(name, mixer, saved_teacher, tmp_path):
    _, plan = converted(saved_teacher(name, LAYERS), tmp_path / "out", mixer=mixer, attention_layers="0")
    teacher = load_file(saved_teacher(name, LAYERS) / "model.safetensors")
    student = load_file(tmp_path / "out" / "model.safetensors")
    moved = [rule for rule in plan.rules if rule.kind == "moved"]
    for rule in moved:
        if len(rule.sources) > 1:  # experts, one below the other
            rows = torch.cat([teacher[source] for source in rule.sources]).view(rule.shape)
        else:
            rows = teacher[rule.sources[0]]
        if name == "glm4" and re.search(r"\.[qk]_proj\.", rule.target):  # heads of 16 rows, of which 12 are turned
            order = [*range(0, 12, 2), *range(1, 12, 2), *range(12, 16)]
            rows = rows.unflatten(0, (-1, 16))[:, order].flatten(0, 1)
        if rows.shape != student[rule.target].shape:  # fused: the rows must be in there, in one piece
            assert any(torch.equal(part, student[rule.target])
                       for part in rows.unfold(0, student[rule.target].shape[0], 1).transpose(1, 2))  # fmt: skip
        else:
            assert torch.equal(rows, student[rule.target]), rule.target
    assert {rule.target for rule in plan.rules} == set(student)
    assert all(".mixer." in rule.target for rule in plan.rules if rule.kind != "moved")
    assert {s for rule in plan.rules for s in rule.sources} | set(plan.weights.dropped) == set(teacher)


@contextlib.contextmanager
def linearised_attention(teacher, rotary=True):
    """The teacher with its softmax taken out: causal Q K^T / sqrt(d) times V, by its own code up to there."""
    matrices = []

    def linear(module, query, key, value, attention_mask, scaling, **kwargs):
        repeats = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
        matrices.append((query @ key.mT * scaling).tril())
        return (matrices[-1] @ value).transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("linearised", linear)
    teacher.config._attn_implementation = "linearised"
    if not rotary:
        original = teacher.model.rotary_emb.forward
        teacher.model.rotary_emb.forward = lambda *args, **kwargs: tuple(
            torch.full_like(t, float(i == 0)) for i, t in enumerate(original(*args, **kwargs))
        )
    yield matrices


@torch.no_grad()
def check_exact_mapping(name, folder, output, **options):
    """Per head and layer the same matrix, and in the end the same logits."""
    mixer = options.get("mixer", "discrete_mamba2")
    head_dim = TEACHERS[name][1].head_dim if getattr(TEACHERS[name][1], "head_dim", None) else 8
    if mixer == "mamba2":
        options["norm"] = "none"
    hybrid, _ = converted(
        folder, output, attention_layers=0.0, initial_decay=1.0, d_state=options.pop("d_state", head_dim), **options
    )
    hybrid = hybrid.double()
    teacher = make_teacher(name, layers=LAYERS).double()
    for model in (hybrid, teacher):
        model.set_experts_implementation("eager")  # transformers' default knows no float64
    ids = random_ids(2, 12)
    inputs = []
    for layer in hybrid.model.layers:
        layer.mixer.register_forward_pre_hook(lambda module, args: inputs.append((module, args[:2])))
    with linearised_attention(teacher, rotary=options.get("rotary", True)) as matrices:
        expected = teacher(ids, use_cache=False).logits
    logits = hybrid(ids, use_cache=False).logits
    for (module, (u, rotary)), matrix in zip(inputs, matrices, strict=True):
        unrolled, _ = module.materialize(u, rotary)
        if mixer == "mamba1":
            matrix = matrix.repeat_interleave(module.head_dim, dim=1)
        torch.testing.assert_close(unrolled, matrix, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name, mixer, rotary, expand", [(n, *of) for n in WITH_MIXERS for of in variants(n)])
def test_mapping_is_exact_head_by_head(name, mixer, rotary, expand, saved_teacher, tmp_path):
    check_exact_mapping(
        name, saved_teacher(name, LAYERS), tmp_path / "out", mixer=mixer, rotary=rotary, expand_kv_heads=expand
    )


@pytest.mark.parametrize(
    "name, mixer", [(n, m) for n in WITH_MIXERS for m in MIXERS[:2] if n in FIRST or m == "discrete_mamba2"]
)
def test_mapping_is_exact_where_heads_share_a_state(name, mixer, saved_teacher, tmp_path):
    check_exact_mapping(name, saved_teacher(name, LAYERS), tmp_path / "out", mixer=mixer, shared_state=True)


def test_every_family_has_a_teacher_and_the_readme_names_it():
    report = families()
    assert {of["model_type"] for of in report} == {config.model_type for _, config in TEACHERS.values()}
    assert readme_table() in (Path(__file__).parents[3] / "README.md").read_text()
    real = {of["model_type"] for of in report if len(of["weights"]) > 1}
    assert real == {find_teacher(str(embedded_teacher())).family.model_type}  # tests/test_real_teacher.py


@pytest.mark.parametrize("published", [True, False])
@torch.no_grad()
def test_the_text_part_of_a_multimodal_gemma(published, saved_teacher, tmp_path):
    """Its vision part is dropped by name; tensors are called as published, or as transformers writes them."""
    text = TEACHERS["gemma3"][1].to_dict()
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28)
    config = Gemma3Config(text_config=text, vision_config=vision | {"patch_size": 14}, mm_tokens_per_image=4)
    teacher = Gemma3ForConditionalGeneration(config).eval()
    teacher.save_pretrained(tmp_path / "in")
    names = load_file(tmp_path / "in" / "model.safetensors")
    if published:
        names = {re.sub(r"^model\.language_model\.", "language_model.model.", name): t for name, t in names.items()}
        names = {name.removeprefix("model."): t for name, t in names.items()}
    else:
        names = {re.sub(r"^language_model\.model\.", "model.language_model.", name): t for name, t in names.items()}
    save_file(names, tmp_path / "in" / "model.safetensors")
    hybrid, plan = converted(tmp_path / "in", tmp_path / "out", attention_layers="all")
    ids = random_ids(2, 24)
    torch.testing.assert_close(hybrid(ids).logits, teacher(ids).logits)
    assert all("vision" in name or "projector" in name for name in plan.weights.dropped)
    assert len(describe(plan).split("dropped  ")) == 2
    assert plan.teacher.family.model_type == "gemma3_text"


@torch.no_grad()
def test_the_text_part_of_a_multimodal_gemma4(tmp_path):
    """Only its images attend to what follows; they are not converted."""
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8)
    vision |= dict(num_key_value_heads=2, patch_size=4, position_embedding_size=16)
    text = TEACHERS["gemma4"][1].to_dict()
    teacher = Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=vision)).eval()
    teacher.save_pretrained(tmp_path / "in")
    hybrid, plan = converted(tmp_path / "in", tmp_path / "out", attention_layers="all")
    ids = random_ids(2, 24)
    torch.testing.assert_close(hybrid(ids).logits, teacher(ids).logits)
    parts = {name.split(".")[1] for name in load_file(tmp_path / "in" / "model.safetensors")}
    assert parts == {"language_model", "vision_tower", "embed_vision"}
    assert plan.weights.dropped
    assert all("vision" in name for name in plan.weights.dropped)


def multimodal_mistral(name):
    """The model that reads images and text; 28 times 28 pixels are four tokens w120."""
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8)
    vision |= dict(model_type="pixtral", image_size=28, patch_size=14)
    own = dict(image_token_index=120, spatial_merge_size=1, tie_word_embeddings=False)
    config = Mistral3Config(text_config=TEACHERS[name][1].to_dict(), vision_config=vision, **own)
    return Mistral3ForConditionalGeneration(config).eval()


@pytest.mark.parametrize("says_untied", [True, False])
@pytest.mark.parametrize("name", ["mistral-no-window", "ministral3"])
@torch.no_grad()
def test_the_text_part_of_a_multimodal_mistral(name, says_untied, tmp_path):
    """Its configuration says which text part it has; where it does not say that the head is untied, the weights do."""
    teacher = multimodal_mistral(name)
    teacher.save_pretrained(tmp_path / "in")
    if not says_untied:
        raw = json.loads((tmp_path / "in" / "config.json").read_text())
        assert not raw.pop("tie_word_embeddings")
        assert Mistral3Config().tie_word_embeddings
        (tmp_path / "in" / "config.json").write_text(json.dumps(raw))
    hybrid, plan = converted(tmp_path / "in", tmp_path / "out", attention_layers="all")
    ids = random_ids(2, 24) % 110
    torch.testing.assert_close(hybrid(ids).logits, teacher(ids).logits)
    assert all("vision" in name or "projector" in name for name in plan.weights.dropped)
    assert ": not part of the text model, which alone is converted" in describe(plan)
    assert plan.teacher.family.model_type == TEACHERS[name][1].model_type


@pytest.mark.parametrize("name", ["mistral-no-window", "ministral3"])
@torch.no_grad()
def test_the_teachers_class_reads_images_for_a_hybrid(name, tmp_path):
    """As docs/guide/conversion.md says: exactly with all layers kept, and a hybrid generates what it reads."""
    teacher = multimodal_mistral(name)
    for parameter in teacher.parameters():
        parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    teacher.save_pretrained(tmp_path / "in")
    ids = random_ids(1, 40) % 110
    ids[:, 12:16] = 120
    image = dict(pixel_values=torch.randn(1, 3, 28, 28), image_sizes=torch.tensor([[28, 28]]))
    expected, without = teacher(ids, **image).logits, teacher(ids % 110).logits
    kept, _ = converted(tmp_path / "in", tmp_path / "all", attention_layers="all")
    hybrid, plan = converted(tmp_path / "in", tmp_path / "out", attention_layers="none", window=8, block=4)
    assert plan.placement.hybrid.state
    for model, is_teacher in ((kept, True), (hybrid, False)):
        teacher.model.language_model, teacher.lm_head = model.model, model.lm_head
        assert torch.allclose(teacher(ids, **image).logits, expected, atol=1e-4) == is_teacher
        said = teacher.generate(ids, **image, max_new_tokens=6, do_sample=False, eos_token_id=None)
        assert torch.equal(teacher(said, **image, use_cache=False).logits[:, 39:-1].argmax(-1), said[:, 40:])
    assert not torch.allclose(expected, without, atol=0.1)


def test_a_multimodal_model_stops_where_its_whole_configuration_says(tmp_path):
    """Gemma 3 has the end of a turn at the top of its config.json, and the end of a text in the text part's."""
    text = TEACHERS["gemma3"][1].to_dict() | {"eos_token_id": 1}
    raw = {"model_type": "gemma3", "text_config": text, "vision_config": {}, "eos_token_id": [1, 6], "bos_token_id": 2}
    config = read_config(raw, "config.json")
    assert (config.eos_token_id, config.bos_token_id) == ([1, 6], 2)
    assert GenerationConfig.from_model_config(config).eos_token_id == [1, 6]


@pytest.mark.parametrize(
    "name, field, value",
    [("gemma3", "use_bidirectional_attention", True), ("mixtral", "router_jitter_noise", 0.1)],
)
def test_what_a_hybrid_cannot_follow_is_refused_by_name(name, field, value, saved_teacher, tmp_path):
    folder = with_settings(saved_teacher(name, LAYERS), tmp_path / "in", **{field: value})
    with pytest.raises(ValueError, match=f"has {field} {value}, which a hybrid cannot follow"):
        convert(str(folder), tmp_path / "out", align="none")


@pytest.mark.parametrize("name", TEACHERS)
def test_a_teacher_that_sees_later_tokens_is_refused(name, saved_teacher, tmp_path):
    """As models of embeddings that were made from a decoder do; transformers reads this entry for every family."""
    entry = {"use_bidirectional_attention": "all"} if name.startswith("gemma4") else {"is_causal": False}
    folder = with_settings(saved_teacher(name, LAYERS), tmp_path / "in", **entry)
    with pytest.raises(ValueError, match="The teacher is not causal"):
        convert(str(folder), tmp_path / "out", align="none")


@pytest.mark.parametrize(
    "name, zeros",
    [
        ("granite4-dense", ["num_experts_per_tok"]),  # as published
        ("qwen3-moe", ["num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"]),
    ],
)
@torch.no_grad()
def test_no_experts_are_counted_as_zero(name, zeros, tmp_path):
    cls, config = TEACHERS[name]
    torch.manual_seed(0)
    teacher = cls(type(config)(**config.to_dict() | dict.fromkeys(zeros, 0))).eval()
    teacher.save_pretrained(tmp_path / "in")
    hybrid, _ = converted(tmp_path / "in", tmp_path / "out", attention_layers=1.0)
    ids = random_ids(2, 40)
    torch.testing.assert_close(hybrid(ids).logits, teacher(ids).logits)


@pytest.mark.parametrize("name", ["ministral3", "glm4"])
def test_a_head_that_no_tensor_has_takes_no_memory(name, saved_teacher, tmp_path):
    """The fuzz found a width of a billion, for which the rows of a head were listed before they were compared."""
    shutil.copytree(saved_teacher(name), tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | {"head_dim": 2 * 10**6}))
    tracemalloc.start()
    with pytest.raises(ValueError, match="where the configuration says"):
        plan_conversion(make_options(str(tmp_path / "in"), "out"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24  # the rows of one head alone are 16 MB


@pytest.mark.parametrize("name", ["gpt-oss", "qwen2-mixed-window", "gemma3"])
def test_a_window_without_a_width_is_refused(name, saved_teacher, tmp_path):
    """transformers loads such a model, and runs it on nothing."""
    shutil.copytree(saved_teacher(name), tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | {"sliding_window": None}))
    with pytest.raises(ValueError, match="has sliding_attention, and sliding_window says no width"):
        plan_conversion(make_options(str(tmp_path / "in"), "out"))


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("num_kv_shared_layers", 1, "its last layers attend to keys and values of earlier ones"),
        ("hidden_size_per_layer_input", 8, "each of its blocks adds an embedding of its own"),
    ],
)
def test_what_is_not_followed_of_gemma4_is_said(field, value, message, saved_teacher, tmp_path):
    """Gemma 4 E2B and E4B have both, with 0 where a hybrid can follow."""
    shutil.copytree(saved_teacher("gemma4", LAYERS), tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(ValueError, match=rf"{message} \({field}"):
        plan_conversion(make_options(str(tmp_path / "in"), "out"))


@torch.no_grad()
def test_offsets_of_keys_where_local_layers_have_other_heads(saved_teacher, tmp_path):
    """Whatever an offset is, taking it off leaves attention as it was, up to rounding."""
    options = {"attention_layers": 1.0, "bits": 8, "text": "sampled", "tokens": 4096}
    convert(str(saved_teacher("gemma4", LAYERS)), tmp_path / "out", **options)
    hybrid = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    heads = {layer.self_attn.key_offset.shape for layer in hybrid.model.layers}
    assert heads == {(layer.self_attn.k_proj.out_features // layer.self_attn.head_dim, layer.self_attn.head_dim)
                     for layer in hybrid.model.layers}  # fmt: skip
    assert len(heads) == 2
    ids, teacher = random_ids(2, 40), make_teacher("gemma4", layers=LAYERS)
    torch.testing.assert_close(hybrid(ids).logits, teacher(ids).logits, rtol=0, atol=0.05)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "qwen3-5-moe", "qwen3-next", "gpt-oss"])
def test_experts_are_balanced_in_training_as_the_teachers_are(name, saved_teacher, tmp_path):
    """The auxiliary loss, its weight in the configuration, and padding left out of it."""
    hybrid, _ = converted(saved_teacher(name, LAYERS), tmp_path / "out", attention_layers="all")
    teacher, ids = make_teacher(name, layers=LAYERS), random_ids(2, 24)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    asked = dict(labels=ids, attention_mask=mask, output_router_logits=True)
    ours, theirs = hybrid(ids, **asked), teacher(ids, **asked)
    torch.testing.assert_close(ours.aux_loss, theirs.aux_loss)
    torch.testing.assert_close(ours.loss, theirs.loss)
    assert hybrid(ids, labels=ids).aux_loss is None
    assert not hasattr(LlambaConfig(), "output_router_logits")  # where there is nothing to balance
    hybrid.config.router_aux_loss_coef = 3.0
    torch.testing.assert_close(hybrid(ids, **asked).loss - ours.loss, (3.0 - 0.001) * ours.aux_loss)


def test_a_cap_on_scores_stays_with_attention_and_is_said_to_be_lost_in_a_state(saved_teacher, tmp_path):
    hybrid, plan = converted(saved_teacher("gemma2", LAYERS), tmp_path / "out", attention_layers="1")
    lost = "attn_logit_softcapping 2.0 holds where attention stays, windows included; a state has no scores to cap"
    assert lost in plan.notes
    assert hybrid.config._attn_implementation == "eager"
    assert hybrid.model.layers[1].self_attn.softcap == 2.0
    with pytest.raises(ValueError, match="scaled_dot_product_attention"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="sdpa")


def test_learned_sinks_are_left_to_attention_that_knows_them(saved_teacher, tmp_path):
    """Attention is the teacher's; a mixer has no softmax to which a sink could be added."""
    hybrid, _ = converted(saved_teacher("gpt-oss", LAYERS), tmp_path / "out", attention_layers="all")
    assert hybrid.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="scaled_dot_product_attention"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="sdpa")
    with pytest.raises(ValueError, match="learned sinks on its attention.*give a window or a cache"):
        convert(str(saved_teacher("gpt-oss", LAYERS)), tmp_path / "mixers", mixer="mamba2", align="none")


def test_a_missing_expert_is_named(saved_teacher, tmp_path):
    shutil.copytree(saved_teacher("mixtral", LAYERS), tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    gone = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    save_file({name: t for name, t in tensors.items() if name != gone}, tmp_path / "in" / "model.safetensors")
    with pytest.raises(ValueError, match=f"missing tensor {re.escape(gone)}"):
        convert(str(tmp_path / "in"), tmp_path / "out", align="none")


def repeat_rows(weight, kv_heads, heads):
    return weight.repeat_interleave(heads // kv_heads, dim=0)


def tile_heads(weight, kv_heads, heads):
    return weight.repeat(heads // kv_heads, *[1] * (weight.ndim - 1))


@pytest.mark.parametrize("mistake", [repeat_rows, tile_heads])
@pytest.mark.parametrize("name", ["llama-gqa", "qwen2", "qwen3"])
def test_the_check_catches_both_ways_to_expand_heads_wrongly(name, mistake, saved_teacher, tmp_path, monkeypatch):
    monkeypatch.setattr(mixer_mapping, "repeat_heads", mistake)
    with pytest.raises(AssertionError, match="not close"):
        check_exact_mapping(name, saved_teacher(name, LAYERS), tmp_path / "out", expand_kv_heads=True)


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2", "phi"])
@pytest.mark.parametrize("rotary", [True, False])
def test_a_larger_state_keeps_the_mapping_exact(name, rotary, saved_teacher, tmp_path):
    check_exact_mapping(name, saved_teacher(name, LAYERS), tmp_path / "out", d_state=12, rotary=rotary)


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2"])
def test_a_smaller_state_is_the_best_low_rank_fit(name, saved_teacher, tmp_path):
    """Of all matrices of that rank, the products C^T B of one key head's queries are the closest to q^T k."""
    folder = saved_teacher(name, LAYERS)
    convert(str(folder), tmp_path / "out", attention_layers=0.0, d_state=5, rotary=False, align="none")
    teacher = load_file(folder / "model.safetensors")
    in_proj = load_file(tmp_path / "out" / "model.safetensors")["model.layers.1.mixer.in_proj.weight"]
    q, k = (teacher[f"model.layers.1.self_attn.{p}_proj.weight"].view(-1, 8, 32) for p in "qk")
    B, C = in_proj[16:26].view(2, 5, 32), in_proj[26:46].view(4, 5, 32)
    for head in range(2):
        products = torch.cat([q[h].T @ k[head] / 8**0.5 for h in (2 * head, 2 * head + 1)])
        ours = torch.cat([C[h].T @ B[head] for h in (2 * head, 2 * head + 1)])
        if "bias" not in "".join(teacher):
            best = torch.linalg.svdvals(products)[5:].norm()
            torch.testing.assert_close((ours - products).norm(), best, rtol=1e-4, atol=1e-5)
        assert (ours - products).norm() < 0.7 * products.norm()


@pytest.mark.parametrize("name", ["phi", "phi-gqa-qk-norm"])
def test_phi_output_bias_folds_into_the_mlp(name, saved_teacher, tmp_path):
    """Without a bias on out_proj, as in the published layout, the parallel MLP carries it: the same function."""
    outputs = []
    for out_bias in (True, False):
        hybrid, _ = converted(
            saved_teacher(name, LAYERS), tmp_path / str(out_bias), attention_layers="1", out_bias=out_bias
        )
        assert (hybrid.model.layers[0].mixer.out_proj.bias is not None) == out_bias
        outputs.append(hybrid(random_ids(2, 9)).logits)
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


def test_an_output_bias_without_a_place_is_an_error(saved_teacher, tmp_path):
    with pytest.raises(ValueError, match=r"bias on o_proj; the mixer needs one on out_proj \(out_bias: true\)"):
        convert(str(saved_teacher("llama-biases", LAYERS)), tmp_path / "out", out_bias=False, align="none")


def test_initial_decay_is_what_was_asked(saved_teacher, tmp_path):
    for mixer in ("discrete_mamba2", "mamba2", "mamba1"):
        hybrid, _ = converted(saved_teacher("llama-gqa", LAYERS), tmp_path / mixer, mixer=mixer, initial_decay=0.97)
        module = hybrid.model.layers[0].mixer
        u = torch.randn(1, 5, 32)
        rotary = hybrid.model.rotary_emb(u, torch.arange(5)[None])
        streams = module.project(u, rotary)
        decay = (streams[1][..., None] * -module.A_log.exp()).exp() if mixer == "mamba1" else streams.log_a.exp()
        torch.testing.assert_close(decay, torch.full_like(decay, 0.97), rtol=1e-4, atol=1e-5)


def test_the_seed_decides_what_the_teacher_does_not(saved_teacher, tmp_path):
    weights = []
    for run, seed in enumerate((0, 0, 1)):
        convert(str(saved_teacher("llama-gqa", LAYERS)), tmp_path / str(run), mixer="mamba1", seed=seed, align="none")
        weights.append((tmp_path / str(run) / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]
