"""Conversion to layers with a window, with a state or without: mapping, bytes, alignment, training, refusals."""

import contextlib
import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from convert import convert
from convert.dry_run import first_plan, open_teacher
from convert.layout.cache import cache_bytes
from convert.layout.placement import Placement
from convert.options import MohawkOptions, OutputOptions, evicted_tokens, make_options
from convert.plan import describe
from convert.resolve import block_of, resolve
from convert.scores.budget import Budget
from convert.scores.decide import MEAN_RANK, RANK_SHARE
from convert.teachers.teacher import teacher_layer_types
from convert.tools.inspect import inspect_model
from convert.train.mohawk.train import train_existing, with_sequence_length
from modeling_llamba import LlambaConfig
from modeling_llamba.hybrid.eviction import BlockShape
from modeling_llamba.hybrid.readout import theory_mass
from modeling_llamba.model.cache import cache_nbytes
from tests.helpers.command import parser_of
from tests.helpers.teachers import TEACHERS, make_teacher, random_ids

LENGTH, WINDOW = 40, 8
HELD = dict(window=WINDOW, block=4, sinks=2)
OWN_WINDOWS = {
    name: [i for i, kind in enumerate(teacher_layer_types(config)) if kind != "full_attention"]
    for name, (_, config) in TEACHERS.items()
}
FIT = dict(text="sampled", tokens=512, sequence_length=32, held_out_sequences=2)
HYBRIDS_OF = [name for name in TEACHERS if len(OWN_WINDOWS[name]) < 4]


def converted(folder, output, **options):
    plan = convert(str(folder), output, **{"attention_layers": 0.0, "align": "none"} | options)
    return AutoModelForCausalLM.from_pretrained(output).eval(), plan


@pytest.mark.parametrize("name", HYBRIDS_OF)
@torch.no_grad()
def test_the_first_tokens_and_a_wide_window_are_the_teacher(name, saved_teacher, tmp_path):
    """And all weights of the layer are, bit for bit, but for what reads the state; its own windows stay."""
    hybrid, plan = converted(saved_teacher(name), tmp_path / "out", rank=3, **HELD)
    replaced = plan.placement.replaced_layers
    assert set(replaced) == {0, 1, 2, 3} - set(OWN_WINDOWS[name])
    teacher, ids = make_teacher(name), random_ids(2, LENGTH)
    expected, before = teacher(ids).logits, hybrid(ids).logits
    torch.testing.assert_close(before[:, :WINDOW], expected[:, :WINDOW], rtol=1e-4, atol=1e-5)
    for layer in replaced:  # as a fit might change them: not for the first tokens
        hybrid.model.layers[layer].mixer.up.weight.normal_()
    assert torch.equal(hybrid(ids).logits[:, :WINDOW], before[:, :WINDOW])
    assert not torch.allclose(hybrid(ids).logits[:, WINDOW:], before[:, WINDOW:])
    parts = {rule.target.partition(".mixer.")[2] for rule in plan.rules if rule.kind != "moved"}
    assert parts == {"mass", "down.weight", "up.weight"}
    assert {rule.kind for rule in plan.rules} == {"moved", "initialised"}
    wide, _ = converted(saved_teacher(name), tmp_path / "wide", window=LENGTH)
    torch.testing.assert_close(wide(ids).logits, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(wide.model.layers[replaced[0]].mixer.mass, theory_mass(plan.config, replaced[0]))


@pytest.mark.parametrize("name", ["llama-biases", "phi-gqa-qk-norm", "phi3", "gemma3"])
def test_what_is_moved_is_the_teachers_bit_for_bit(name, saved_teacher, tmp_path):
    _, plan = converted(saved_teacher(name), tmp_path / "out", rank=3, **HELD)
    teacher = load_file(saved_teacher(name) / "model.safetensors")
    student = load_file(tmp_path / "out" / "model.safetensors")
    for rule in plan.rules:
        if rule.kind == "moved":
            (source,) = rule.sources
            rows = teacher[source].unfold(0, len(student[rule.target]), 1).movedim(-1, 1)  # of fused ones a piece
            assert any(torch.equal(part, student[rule.target]) for part in rows), rule.target
    used = {source for rule in plan.rules for source in rule.sources}
    assert used | set(plan.weights.dropped) == set(teacher)
    assert {rule.target for rule in plan.rules} == set(student)


@pytest.mark.parametrize("block", [1, 2, 4, 8])
@torch.no_grad()
def test_a_window_alone_is_the_teacher_that_sees_only_window_and_sinks(block, saved_teacher, tmp_path):
    options = dict(window=16, block=block, sinks=2, mixer="none")
    hybrid, _ = converted(saved_teacher("llama-gqa"), tmp_path / "out", **options)
    teacher, ids, positions = make_teacher("llama-gqa"), random_ids(2, LENGTH), torch.arange(LENGTH)
    blocks_back = positions[:, None] // block - positions // block
    seen = (positions[:, None] >= positions) & ((blocks_back < 16 // block) | (positions < 2))
    mask = torch.zeros(LENGTH, LENGTH).masked_fill(~seen, -1e30)[None, None]
    torch.testing.assert_close(hybrid(ids).logits, teacher(ids, attention_mask=mask).logits, rtol=1e-4, atol=1e-5)
    assert "no weight was changed" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("window", [WINDOW, 2 * LENGTH])
@pytest.mark.parametrize("heads", [None, "1:0,1:1,2:3"])
@pytest.mark.parametrize("mixer, salient", [("discrete_mamba2", 0), ("discrete_mamba2", 5), ("none", 0), ("none", 3)])
@torch.no_grad()
def test_the_bytes_of_the_plan_are_those_of_the_cache(mixer, salient, heads, window, saved_teacher, tmp_path):
    """Of a text longer than the window, and of a shorter one."""
    options = dict(window=window, sinks=2, attention_heads=heads, mixer=mixer, salient=salient)
    hybrid, plan = converted(saved_teacher("llama-gqa"), tmp_path / "out", **options)
    cache = hybrid(random_ids(1, LENGTH)).cache
    assert cache_nbytes(cache) == cache_bytes(plan.config, LENGTH, torch.float32)[1]
    heads_with_a_state = (8 if heads is None else 6) if mixer != "none" else 0
    assert plan.summary()["state_bytes"] == heads_with_a_state * (8 + 1) * (4 + 1) * 4
    assert Placement.of(plan.config) == plan.placement


def test_what_is_said_of_a_state(saved_teacher, tmp_path):
    _, plan = converted(saved_teacher("llama-gqa"), tmp_path / "out", attention_heads="1:0", salient=3, rank=2, **HELD)
    said = describe(plan)
    assert "a window of 8, 2 sinks and 3 salient tokens and a state" in said
    assert "full heads  1:0,1 " in said
    card = (tmp_path / "out" / "README.md").read_text()
    assert "if keys and values were Gaussian" in card
    assert "not yet a language model" not in card
    assert "mamba" not in card.partition("# ")[0]
    report = inspect_model(str(tmp_path / "out"))
    assert report["mixer"] is None
    held = {"tokens": 8, "sinks": 2, "block": 4, "salient": 3, "state": True, "planes": 2, "rank": 2}
    assert report["window"] == held
    assert report["full_heads"] == 2


WITHOUT_THE_PROJECT = """
import sys, json, torch
from transformers import AutoModelForCausalLM
ids = torch.tensor(json.loads(sys.argv[1]))
models = [AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True) for folder in sys.argv[2:]]
print(json.dumps([model(ids).logits[0, -1].tolist() for model in models]))
"""


@torch.no_grad()
def test_the_checkpoints_run_without_the_project(saved_teacher, tmp_path):
    """In one process, since importing transformers takes longer than all else here."""
    folders = {name: tmp_path / f"modèle-{name}" for name in ("phi", "qwen3-5")}
    hybrids = {name: converted(saved_teacher(name), folder, rank=2, **HELD)[0] for name, folder in folders.items()}
    ids = random_ids(1, 20)
    command = [sys.executable, "-c", WITHOUT_THE_PROJECT, json.dumps(ids.tolist()), *map(str, folders.values())]
    environment = {"HF_HOME": str(tmp_path / "cache"), "PATH": ""}
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    for logits, hybrid in zip(json.loads(found.stdout.splitlines()[-1]), hybrids.values(), strict=True):
        torch.testing.assert_close(torch.tensor(logits), hybrid(ids).logits[0, -1], rtol=1e-4, atol=1e-5)
        hybrid.save_pretrained(tmp_path / "again")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
        assert torch.equal(again(ids).logits, hybrid(ids).logits)


@pytest.mark.parametrize("name", ["llama-gqa", "phi", "gemma3"])
def test_alignment_and_what_it_records(name, saved_teacher, tmp_path):
    """Ranks are chosen within their mean, and o_proj stays the teacher's own."""
    hybrid, plan = converted(
        saved_teacher(name), tmp_path / "out", align="closed-form", attention_layers=[2], salient=2, rank=8,
        **FIT, **HELD,
    )  # fmt: skip
    report = json.loads((tmp_path / "out" / "alignment.json").read_text())
    replaced = plan.placement.replaced_layers
    ranks = {int(layer): rank for layer, rank in report["ranks"].items()}
    assert ranks.keys() == set(replaced)
    assert sum(ranks.values()) <= 8 * len(replaced)
    assert ranks == {layer: hybrid.config.rank_of(layer) for layer in replaced}
    teacher = make_teacher(name).state_dict()
    for layer in replaced:
        mixer, fit = hybrid.model.layers[layer].mixer, report["held_out_error"][str(layer)]
        assert (0 if mixer.down is None else mixer.down.out_features) == ranks[layer]
        assert fit["refined"] == fit["solved"] == fit["by_rank"][str(ranks[layer])]
        assert mixer.salience.abs().sum() > 0
        output = "dense" if name == "phi" else "o_proj"
        assert torch.equal(mixer.o_proj.weight, teacher[f"model.layers.{layer}.self_attn.{output}.weight"])
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Aligned in closed form" in card
    assert "All other tokens are read from a state" in card
    ids = random_ids(1, 12)
    grown = hybrid.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert torch.equal(hybrid(grown[:, :-1]).logits[:, 11:].argmax(-1), grown[:, 12:])


def test_the_default_is_hardly_heavier_than_its_teacher(smollm2_gguf):
    """Maps have a share of the teacher's weights, and there is little else that it does not have."""
    teacher, _ = open_teacher(make_options(str(smollm2_gguf), "o"))

    def planned(**options):
        resolved = resolve(make_options(str(smollm2_gguf), "o", **options), teacher)
        return first_plan(Budget(teacher, resolved))[0]

    plan = planned()
    rank = plan.config.hybrid_rank
    assert 0 < rank <= MEAN_RANK
    assert plan.parameters_after <= 1.035 * plan.parameters_before
    one_more = planned(rank=rank + 1)
    of_a_rank = one_more.parameters_after - plan.parameters_after
    assert of_a_rank == sum(plan.placement.weights_of_a_rank(plan.config).values())
    assert rank * of_a_rank <= RANK_SHARE * plan.parameters_before
    assert rank == MEAN_RANK or (rank + 1) * of_a_rank > RANK_SHARE * plan.parameters_before
    unfitted = planned(align="none", window=32, attention_layers="none")
    assert unfitted.config.hybrid_rank == 0


def test_a_window_alone_stays_the_teachers_and_says_so(saved_teacher, tmp_path):
    options = dict(window=4, sinks=1, mixer="none")
    aligned, plan = converted(
        saved_teacher("phi"), tmp_path / "out", align="closed-form", attention_layers=0.5, **FIT, **options
    )
    report = json.loads((tmp_path / "out" / "alignment.json").read_text())
    assert all(fit["mapped"] == fit["refined"] > 0 for fit in report["held_out_error"].values())
    assert "no weight was changed" in (tmp_path / "out" / "README.md").read_text()
    assert plan.summary()["state_bytes"] == 0
    layers = plan.summary()["attention_layers"]
    mapped, _ = converted(saved_teacher("phi"), tmp_path / "mapped", attention_layers=layers, **options)
    ids = random_ids(2, LENGTH)
    torch.testing.assert_close(aligned(ids).logits, mapped(ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize("name, heads", [("llama-gqa", None), ("gemma2", {1: [0, 1]})])
def test_the_stages_train_all_of_the_layer(name, heads, saved_teacher, tmp_path):
    stage = dict(tokens=5120, sequences=4, learning_rate=3e-4)
    alignment = {"hidden_state_alignment": stage, "distillation": stage}
    converted(
        saved_teacher(name), tmp_path / "out", window=4, sinks=1, salient=1, rank=4, align="mohawk",
        attention_layers=[3], attention_heads=heads, alignment=alignment, **FIT | {"held_out_sequences": 4},
    )  # fmt: skip
    (report,) = json.loads((tmp_path / "out" / "alignment.json").read_text())["stages"]
    hidden = report["hidden_state_alignment"]
    assert hidden["held_out_loss_after"] < hidden["held_out_loss_before"] < 0.1
    assert report["distillation"]["held_out_kl_after"] < report["distillation"]["held_out_kl_before"]


def test_a_window_alone_is_trained_like_a_mixer(saved_teacher, tmp_path):
    folder = saved_teacher("llama-gqa")
    before, _ = converted(folder, tmp_path / "window", mixer="none", window=4, sinks=1)
    stage = dict(tokens=2560, sequences=4, learning_rate=2e-4)
    options = parser_of("mohawk").from_values({
        "hybrid": str(tmp_path / "window"), "teacher": str(folder), "stages": "2,3",
        "alignment": {"text": "sampled", "sequence_length": 32, "held_out_sequences": 2,
                      "hidden_state_alignment": stage, "distillation": stage},
        "output": {"folder": str(tmp_path / "out")},
    })  # fmt: skip
    report = train_existing(options, lambda *args: None)
    hidden = report["hidden_state_alignment"]
    assert hidden["held_out_loss_after"] < hidden["held_out_loss_before"]
    assert report["distillation"]["held_out_kl_after"] < report["distillation"]["held_out_kl_before"]
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert after.config.mixer == "none"
    assert "Aligned with MOHAWK" in (tmp_path / "out" / "README.md").read_text()
    assert not torch.equal(after.model.layers[0].mixer.o_proj.weight, before.model.layers[0].mixer.o_proj.weight)


@pytest.mark.parametrize("asked", [dict(window=4), dict(cache=0.5)], ids=["window", "cache"])
def test_a_layer_with_a_window_has_no_matrix_to_orient(asked, saved_teacher, tmp_path, monkeypatch):
    options = dict(
        align="mohawk", text="sampled", alignment={"matrix_orientation": {"tokens": 64}}, attention_layers=None
    )
    # the refusal must not wait for scores and fit, which take minutes
    monkeypatch.setattr("convert.pipeline.Aligner", lambda *args: pytest.fail("the fit has begun"))
    with pytest.raises(ValueError, match="one matrix with another"):
        converted(saved_teacher("llama-gqa"), tmp_path / "out", **options | asked)


@pytest.mark.parametrize("asked", [dict(window=4), dict(cache=0.5)], ids=["window", "cache"])
def test_what_is_beyond_the_window_can_be_trained(asked, saved_teacher, tmp_path, monkeypatch):
    """A budget gives windows, too, though the user named none."""

    class FitBegan(Exception):
        pass

    def begin(*args):
        raise FitBegan

    stage = {"distillation": {"tokens": 64, "trainable": "beyond-window"}}
    options = dict(align="mohawk", text="sampled", alignment=stage, attention_layers=None) | asked
    monkeypatch.setattr("convert.pipeline.Aligner", begin)
    with pytest.raises(FitBegan):
        convert(str(saved_teacher("llama-gqa")), tmp_path / "out", **options)


@pytest.mark.parametrize(
    "window, block", [(2, 1), (5, 1), (6, 2), (16, 8), (24, 8), (32, 16), (40, 8), (96, 16), (1000, 8)]
)
def test_a_block_is_the_largest_that_the_window_allows(window, block):
    assert block_of(window) == block


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(window=0), "window must be a whole number of at least 2"),
        (dict(window=1), "window must be a whole number of at least 2"),
        (dict(window=8, sinks=-1), "sinks must be a whole number of at least 0"),
        (dict(window=10, block=4), "a multiple of the block of 4 .* give 8 or 12"),
        (dict(window=4, block=4), "two blocks at least; give 8 or 12"),
        (dict(window=8, block=0), "block must be a whole number above 0"),
        (dict(mixer="none"), "say how wide"),
        (dict(mixer="none", window=8, rank=2), "placement.rank has no effect without a state"),
        (dict(mixer="none", window=8, shared_state=True), "no state"),
        (dict(mixer="none", window=8, rotary=False), "mixer.rotary has no effect without a mixer"),
        (dict(window=8, mixer="mamba2"), "no window beside it: leave out the window, or mixer.kind"),
        (dict(window=8, shared_state=True), "no window beside it: leave out the window, or mixer.shared_state"),
        (dict(window=8, export_ready=True), "no window beside it"),
        (dict(window=8, alignment={"fit": {"refine_steps": 3}}), "fit.refine_steps has no effect without a mixer"),
        (dict(attention_layers=0.5, block=4), "placement.block has no effect without a window"),
        (dict(attention_layers=0.5, rank=4), "placement.rank has no effect without a window"),
        (dict(window=1004, sinks=4), "A window of 1004 and 20 sinks and salient tokens cover whole"),
        (dict(window=1008, block=16, alignment={"sequence_length": 1024}), "1008 and 20 sinks .* cover whole"),
        (dict(window=8, mixer={"read": "linear"}), "Unknown option"),
        (dict(window=8, mixer={"scope": "all"}), "Unknown option"),
    ],
)
def test_windows_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_options(model="m", output="o", **options)


def test_a_teacher_of_windows_alone_has_no_other(saved_teacher, tmp_path):
    with pytest.raises(ValueError, match="Every layer of this teacher has a window of 8"):
        converted(saved_teacher("mistral-window"), tmp_path / "out", window=4)


@pytest.mark.parametrize(
    "kinds, window, expected", [("linear", None, 512), ("hybrid", 64, 1024), ("hybrid", 800, 1640)]
)
def test_stages_train_beyond_the_windows_of_a_hybrid(kinds, window, expected):
    """By default; shorter sequences, in which nothing leaves a window, are refused."""
    types = [f"{kinds}_attention" if kinds == "linear" else kinds] * 2
    config = LlambaConfig(num_hidden_layers=2, layer_types=types, hybrid_window=window, hybrid_salient=16)
    settings = MohawkOptions(hybrid="h", teacher="t", output=OutputOptions(folder="o")).alignment
    assert with_sequence_length(settings, config).sequence_length == expected
    if window is not None:
        short = dataclasses.replace(settings, sequence_length=window)
        with pytest.raises(ValueError, match=f"leaves nothing beyond the windows .* hold {window + 20} tokens"):
            with_sequence_length(short, config)


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("length", [64, 65, 79, 80])
def test_a_sequence_is_refused_if_and_only_if_no_token_of_it_is_evicted(length, block):
    """A window of whole blocks is shorter than its width until the last block is full."""
    for window in (32, 48, 64):
        config = LlambaConfig(layer_types=["hybrid"] * 16, hybrid_window=window, hybrid_block=block, hybrid_salient=9)
        shape = BlockShape.of(config, 0)
        last = (length - 1) // block
        left = sum(token // block < last - shape.whole_blocks for token in range(length))
        assert evicted_tokens(length, window, shape.places, block) == left - shape.places
        said = dict(window=window, block=block, sinks=4, salient=9, alignment={"sequence_length": length})
        with contextlib.nullcontext() if left > shape.places else pytest.raises(ValueError, match="cover whole"):
            make_options(model="m", output="o", **said)
