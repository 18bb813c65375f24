"""GGUF files of the families that transformers reads, written here, give the model that transformers makes of them."""

import json

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from convert.checkpoint.tokenizer import read_generation_config, read_tokenizer, write_side_files
from convert.dry_run import plan_conversion
from convert.fit.teacher_model import TeacherModel
from convert.options import ConversionOptions, PublishedOutputOptions
from convert.teachers import FAMILIES
from convert.teachers.teacher import find_teacher
from convert.teachers.weights import TeacherWeights
from tests.helpers.gguf_file import ARCHITECTURES, write_gguf
from tests.helpers.index_teachers import QWEN_05B, QWEN_15B, index_teacher
from tests.helpers.teachers import TEACHERS, random_ids


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_a_gguf_file_is_the_model_transformers_makes_of_it(name, tmp_path):
    teacher = write_gguf(tmp_path / "t.GGUF", name)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="t.GGUF", dtype=torch.float32)
    make_names = gguf.get_tensor_name_map
    weights = TeacherWeights.of(find_teacher(str(tmp_path / "t.GGUF")))
    assert gguf.get_tensor_name_map is make_names, "a library's function was replaced for the whole process"
    ids = random_ids(2, 24)
    ours = TeacherModel(weights).whole()
    torch.testing.assert_close(ours(ids).logits, expected(ids).logits)
    torch.testing.assert_close(ours(ids).logits, teacher(ids).logits)


@pytest.mark.parametrize(
    "name, said",
    [
        ("llama-gqa", {"rope.scaling.type": "yarn"}),
        ("phi3", {"attention.sliding_window": 7}),
        ("gemma2", {"attn_logit_softcapping": 20}),
    ],
)
def test_what_transformers_leaves_out_is_refused(name, said, tmp_path):
    write_gguf(tmp_path / "t.gguf", name, **said)
    with pytest.raises(ValueError, match=f"{next(iter(said))} .*use the safetensors"):
        TeacherWeights.of(find_teacher(str(tmp_path / "t.gguf")))


def test_a_file_that_sees_later_tokens_is_refused(tmp_path):
    """As models of embeddings do; transformers' reader leaves it out."""
    write_gguf(tmp_path / "t.gguf", "llama-gqa", **{"attention.causal": False})
    with pytest.raises(ValueError, match="t.gguf is not causal"):
        TeacherWeights.of(find_teacher(str(tmp_path / "t.gguf")))
    write_gguf(tmp_path / "t.gguf", "llama-gqa", **{"attention.causal": True})
    TeacherWeights.of(find_teacher(str(tmp_path / "t.gguf")))


@pytest.mark.parametrize("architecture, title", [("gpt-oss", "gpt-oss"), ("lfm2", "LFM2"), ("gemma4", "Gemma 4")])
def test_a_family_that_transformers_reads_and_no_test_does_is_refused(architecture, title, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", architecture)
    writer.add_block_count(2)
    writer.add_vocab_size(128)
    writer.add_head_count_kv([0, 2])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=f"GGUF files of {title}.* are not supported; convert its safetensors"):
        find_teacher(str(tmp_path / "t.gguf"))


def test_what_is_said_to_be_tested_is():
    tested = {TEACHERS[name][1].model_type for name in ARCHITECTURES}
    assert {name for name, family in FAMILIES.items() if family.gguf} == tested


@pytest.mark.parametrize("tokenizer", ["llama", "default", "qwen2", "llama-bpe", "smollm"])
@pytest.mark.parametrize("name", sorted({of[0]: name for name, of in ARCHITECTURES.items()}.values()))
def test_the_tokenizer_of_every_architecture_is_carried_over(name, tokenizer, tmp_path):
    """With the rules of its class where these alone are missing: a Qwen2Tokenizer composes letters and accents."""
    write_gguf(tmp_path / "teacher.gguf", name, tokenizer)
    teacher = find_teacher(str(tmp_path / "teacher.gguf"))
    files, _, notes = read_tokenizer(teacher, False, "llamba")
    composes = name.startswith("qwen") and tokenizer == "qwen2"
    assert bool(notes) == composes
    write_side_files(files, tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text('{"model_type": "llamba"}')
    found = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (found("e\u0301te\u0301").input_ids == found("\u00e9t\u00e9").input_ids) == composes
    assert found.decode(found("in the heat").input_ids, skip_special_tokens=True).strip() == "in the heat"


def test_every_end_that_a_file_names_ends_an_answer(tmp_path):
    """The end of sequence and of a turn by number, and the end of text, which is Qwen's end of code, by its name."""
    write_gguf(tmp_path / "teacher.gguf", "qwen2", "qwen2")
    teacher = find_teacher(str(tmp_path / "teacher.gguf"))
    files, tokenizer, _ = read_tokenizer(teacher, False, "llamba")
    ends = [ord("t"), *tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])]
    written, notes = read_generation_config(teacher, tokenizer)
    assert json.loads(written["generation_config.json"])["eos_token_id"] == ends
    assert not notes


def test_a_part_of_a_model_is_told_how_to_be_joined(tmp_path):
    part = tmp_path / "big-00002-of-00003.gguf"
    write_gguf(part, "llama-gqa")
    with pytest.raises(ValueError, match="part 2 of 3 .* --merge big-00001-of-00003.gguf big.gguf"):
        find_teacher(str(part))


@pytest.mark.slow
@pytest.mark.parametrize(("original", "parameters"), [(QWEN_05B, 630_167_424), (QWEN_15B, 1_777_088_000)])
def test_a_real_qwen_is_planned(original, parameters):
    path = index_teacher(original)
    teacher = find_teacher(str(path))
    files, _, notes = read_tokenizer(teacher, False, "llamba")
    assert "NFC" in notes[0]
    assert "tokenizer.json" in files
    plan = plan_conversion(ConversionOptions(model=str(path), output=PublishedOutputOptions(folder="unused")))
    assert plan.parameters_before == parameters
