"""Experts packed as MXFP4, as gpt-oss is published: two numbers to a byte, an exponent for 32 of them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from convert import convert
from convert.dry_run import plan_conversion
from convert.io.reader import open_weights, unpacked
from convert.options import make_options
from convert.plan import describe
from tests.helpers.teachers import make_teacher, random_ids

NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
NUMBERS += [-number for number in NUMBERS]
"""Numbers of four bits: E2M1, of which the highest bit is the sign."""
PROJECTIONS = ("gate_up_proj", "down_proj")


def unpacked_by_hand(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """(experts, in, out) from blocks (experts, out, groups, 16) and scales (experts, out, groups)."""
    table = torch.tensor(NUMBERS)
    pairs = torch.stack([table[blocks.long() & 15], table[blocks.long() >> 4]], dim=-1).flatten(-2)
    return (pairs * 2.0 ** (scales.float() - 127)[..., None]).flatten(-2).mT


@pytest.fixture
def published(tmp_path):
    """A folder as gpt-oss is published, and the teacher in it in float32."""
    teacher = make_teacher("gpt-oss", layers=2, intermediate_size=64)
    folder = tmp_path / "published"
    teacher.save_pretrained(folder)
    tensors = {name: t.bfloat16() for name, t in load_file(folder / "model.safetensors").items()}
    teacher.load_state_dict(tensors)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for i, layer in enumerate(teacher.model.layers):
            for part in PROJECTIONS:
                weight = getattr(layer.mlp.experts, part)
                experts, rows, columns = weight.shape
                shape = (experts, columns, rows // 32, 16)
                blocks = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
                scales = torch.randint(121, 125, shape[:3], generator=generator, dtype=torch.uint8)
                weight.copy_(unpacked_by_hand(blocks, scales))
                name = f"model.layers.{i}.mlp.experts.{part}"
                del tensors[name]
                tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, teacher


@torch.no_grad()
def test_packed_experts_are_the_teachers(published, tmp_path):
    folder, teacher = published
    plan = convert(str(folder), tmp_path / "out", align="none", attention_layers="all", dtype="bfloat16")
    ours = load_file(tmp_path / "out" / "model.safetensors")
    theirs = {name: t.bfloat16() for name, t in teacher.state_dict().items()}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert {rule.kind for rule in plan.rules} == {"moved"}
    hybrid = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ids = random_ids(2, 24)
    torch.testing.assert_close(hybrid(ids).logits, teacher(ids).logits)


def test_rows_are_read_expert_by_expert(published):
    folder, teacher = published
    checkpoint = unpacked(open_weights(folder))
    name = "model.layers.1.mlp.experts.down_proj"
    expected = teacher.model.layers[1].mlp.experts.down_proj.bfloat16()
    assert torch.equal(checkpoint.read(name, 2, 3), expected[2:3])
    assert [tuple(block.shape) for block in checkpoint.blocks((name, 0, None))] == [(4, 64, 32)]
    assert checkpoint.buffer_bytes() == 4 * 2 * 32 * 128


def test_a_plan_reads_no_expert(published, monkeypatch):
    monkeypatch.setattr("convert.io.reader.SafetensorsCheckpoint.read_rows", None)
    plan = plan_conversion(make_options(str(published[0]), "out", dtype="bfloat16"))
    assert plan.parameters_before == sum(p.numel() for p in published[1].parameters())
    assert "hybrid" in plan.config.layer_types
    assert "bfloat16" in describe(plan)


@pytest.mark.parametrize(
    "change", [lambda t: None, lambda t: t[:, :-1], lambda t: t[..., None]], ids=["none", "few", "deep"]
)
def test_scales_that_do_not_fit_are_named(published, change):
    folder, _ = published
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    scales = change(tensors.pop(name))
    if scales is not None:
        tensors[name] = scales.contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"down_proj_blocks .* holds no MXFP4 weights"):
        plan_conversion(make_options(str(folder), "out"))


def test_what_is_packed_otherwise_is_refused(published, tmp_path):
    """By its name, in this family as in the others."""
    folder, _ = published
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"The teacher is quantised \(bitsandbytes\)"):
        convert(str(folder), tmp_path / "out", align="none")
