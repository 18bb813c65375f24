"""Values that a conversion goes by: decided once, each with the reason where the user did not give it."""

import json
import shutil

import pytest
import torch

from convert.cli import main
from convert.dry_run import plan_conversion
from convert.layout.cache import cache_bytes
from convert.layout.config import mixer_fields
from convert.layout.placement import CacheBits, Hybrid, Mixer
from convert.options import MixerOptions, make_options
from convert.plan import describe_decided, make_plan
from convert.resolve import resolve
from convert.scores.budget import Budget
from convert.scores.decide import decide_placement
from convert.teachers.teacher import find_teacher
from convert.teachers.weights import TeacherWeights
from modeling_llamba import LlambaConfig
from tests.helpers.teachers import TINY


def resolved(folder, **options):
    weights = TeacherWeights.of(find_teacher(str(folder)))
    return resolve(make_options(str(folder), "o", **options), weights)


WINDOWED = {"block", "salient", "rank", "sequence_length"}
OF_MIXER = {"mixer_d_state", "mixer_rotary", "mixer_norm", "mixer_activation"}


@pytest.mark.parametrize("kind", ["discrete_mamba2", "mamba2", "mamba1"])
@pytest.mark.parametrize("head_dim", [8, 32])
def test_a_mixer_has_the_fields_that_its_configuration_has_by_default(kind, head_dim):
    """But for the activation: identity alone maps attention exactly, silu is what is published."""
    config = LlambaConfig(**TINY | {"head_dim": head_dim, "mixer": kind})
    fields = mixer_fields(config, MixerOptions(kind=kind))
    for name in ("mixer_head_dim", "mixer_d_state", "mixer_norm"):
        assert fields[name] == getattr(config, name), name
    assert fields["mixer_activation"] == "identity"


@pytest.mark.parametrize(
    "said, values, decided",
    [
        ({}, dict(choice="budget", block=16, salient=16, window=None), {"choice", "cache_bytes", "bits"} | WINDOWED),
        (dict(cache="100KB"), dict(choice="budget", cache_bytes=100_000), {"choice", "bits"} | WINDOWED),
        (
            dict(cache="1MB", window=32, block=8, salient=2, rank=1),
            dict(block=8),
            {"choice", "bits", "sequence_length"},
        ),
        (dict(window=12), dict(choice="share", share=0.5, block=4, salient=16), {"share"} | WINDOWED),
        (dict(window=12, align="none"), dict(salient=0, rank=0), {"share", "block", "salient", "rank"}),
        (dict(window=32, mixer="none"), dict(salient=0, rank=None), {"share", "block", "salient", "sequence_length"}),
        (dict(attention_layers=0.25), dict(share=0.25, layers=None, block=None), OF_MIXER | {"sequence_length"}),
        (dict(attention_layers="MA", align="none"), dict(choice="name", layers=(1, 3)), OF_MIXER),
        (dict(attention_layers="all"), dict(layers=(0, 1, 2, 3)), set()),
        (dict(cache=0.5, align="none"), dict(choice="share", share=None), {"cache_bytes"} | OF_MIXER),
        (dict(attention_heads="1:0", window=8), dict(heads={1: (0,)}, num_heads=0), {"share"} | WINDOWED),
        (dict(attention_heads=0.25, window=8), dict(heads=None, num_heads=2), {"share"} | WINDOWED),
        (dict(align="none", export_ready=True), dict(export_ready=True), {"share", "mixer"} | OF_MIXER),
    ],
)  # fmt: skip
def test_every_value_has_a_reason_unless_it_was_said(said, values, decided, saved_teacher):
    found = resolved(saved_teacher("llama-gqa"), **said)
    assert {name: getattr(found, name) for name in values} == values
    assert set(found.reasons) == decided | {"dtype"}
    assert found.decided().keys() == found.reasons.keys()
    with_type = resolved(saved_teacher("llama-gqa"), dtype="bfloat16", **said)
    assert set(with_type.reasons) == decided
    assert with_type.dtype == torch.bfloat16


def test_the_cache_is_counted_in_bytes(saved_teacher):
    """A share is of the whole; by default of the layers that see everything, whose windows come on top."""
    for name in ("llama-gqa", "gemma3"):
        folder = saved_teacher(name)
        plan = plan_conversion(make_options(str(folder), "o", attention_layers="all"))
        whole, _ = cache_bytes(plan.config, 4096)
        assert resolved(folder, cache=0.25).cache_bytes == whole // 4
        # two windows of 7 tokens, in the teacher and in 8 bits with a scale in the hybrid
        vectors = 2 * 7 * 2 * plan.config.num_key_value_heads if name == "gemma3" else 0
        own, held = (vectors * width for width in (plan.config.head_dim * 2, plan.config.head_dim + 2))
        assert resolved(folder).cache_bytes == int(held + 0.08 * (whole - own))
        assert ("its own windows" in resolved(folder).reasons["cache_bytes"]) == bool(own)


def test_bits_are_open_where_errors_can_choose_them(saved_teacher):
    folder = saved_teacher("llama-mqa-wide-heads")
    for options in ({}, {"cache": 0.05}, {"cache": 0.05, "mixer": "none"}, {"cache": 0.05, "attention_layers": [1]}):
        found = resolved(folder, **options)
        assert found.bits == CacheBits((6, 4), (8, 8))
        is_open = "mixer" not in options
        assert bool(found.other_bits) == is_open
        assert ("compares the errors" in found.reasons["bits"]) == is_open
    found = resolved(folder, cache=0.05, bits=8)
    assert (found.bits, found.other_bits) == (CacheBits((8, 8), (8, 8)), ())


def test_a_teachers_configuration_stays_as_it_was_read(saved_teacher, tmp_path):
    """Also where its weights show that the head is not tied, as it says, and every hybrid goes by the weights."""
    shutil.copytree(saved_teacher("llama-gqa"), tmp_path / "teacher")
    config = json.loads((tmp_path / "teacher" / "config.json").read_text())
    (tmp_path / "teacher" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    teacher = find_teacher(str(tmp_path / "teacher"))
    before = teacher.config.to_dict()
    weights = TeacherWeights.of(teacher)
    assert not weights.config.tie_word_embeddings
    options = make_options(str(tmp_path / "teacher"), "o", context=400, cache=0.4)
    decision = decide_placement(Budget(weights, resolve(options, weights)))
    hybrid = make_plan(weights, decision, resolve(options, weights)).config
    assert not hybrid.tie_word_embeddings
    assert "hybrid" in hybrid.layer_types
    assert teacher.config.to_dict() == before
    assert before["tie_word_embeddings"]


def test_replaced_layers_hold_what_was_asked_for(saved_teacher):
    folder = saved_teacher("llama-gqa")
    assert resolved(folder, attention_layers=0.5).replacement == Mixer()
    assert resolved(folder, window=12, sinks=2).replacement == Hybrid(12, 4, 2, salient=16)
    assert resolved(folder, window=12, mixer="none").replacement == Hybrid(12, 4, 4, state=False)


def test_a_dry_run_says_what_was_decided_and_why(saved_teacher, capsys):
    folder = str(saved_teacher("gemma3"))
    main([folder, "o", "--dry-run", "--json"])
    decided = json.loads(capsys.readouterr().out)["decided"]
    assert decided["bounded"]["value"] == [0, 2]
    assert decided["sequence_length"]["value"] == 1024
    assert "since nothing was said about layers" in decided["cache_bytes"]["reason"]
    text = describe_decided(plan_conversion(make_options(folder, "o")))
    lines = [line for line in text.splitlines() if line.startswith("decided")]
    assert len(lines) == len(decided)
    assert "decided     block 16: 16 by default, and an eighth of the widest window at most" in lines


def test_what_the_user_said_is_recorded_without_paths(saved_teacher, tmp_path):
    (tmp_path / "heads.json").write_text('{"1": [0]}')
    (tmp_path / "text.txt").write_text("text")
    said = dict(window=8, attention_heads=str(tmp_path / "heads.json"), text=str(tmp_path / "text.txt"), work_dir="w")
    assert resolved(saved_teacher("llama-gqa"), dtype="float16", **said).said == {
        "placement": {"window": 8, "attention_heads": {1: (0,)}},
        "alignment": {"text": "text.txt"},
    }
