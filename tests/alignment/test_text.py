"""Where calibration text comes from, and what is wrong with it."""

import dataclasses
import json

import pytest
import torch

from convert.alignment.aligner import calibration_rows
from convert.alignment.text import DEFAULT_TEXT, documents, sample_rows, token_rows
from convert.options import AlignmentOptions, make_options, read_alignment_file
from convert.teachers.teacher import find_teacher
from tests.alignment.tiny import teacher_model
from tests.convert.test_bad_input import check_one_line_error, nothing_left, run
from tests.modeling.test_training import tokenizer
from tests.teachers import make_teacher, random_ids

TEXTS = ["w5 w6 w7", "w8 w9", "w40 w41 w42 w43"]


@pytest.fixture
def teacher(tmp_path):
    """A teacher with a tokenizer."""
    make_teacher("llama-gqa").save_pretrained(tmp_path / "teacher")
    tokenizer().save_pretrained(tmp_path / "teacher")
    return tmp_path / "teacher"


def written(folder, kind):
    path = folder / f"text.{kind}"
    if kind == "txt":
        path.write_text("\n".join(TEXTS))
    elif kind == "parquet":
        from datasets import Dataset

        Dataset.from_dict({"text": TEXTS}).to_parquet(str(path))
    else:
        path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "txt", "parquet"])
def test_files_are_read_in_order(tmp_path, kind):
    path = written(tmp_path, kind)
    texts = ["\n".join(TEXTS)] if kind == "txt" else TEXTS  # a text file is one document, its lines are not
    assert list(documents(str(path))) == texts
    (tmp_path / "folder").mkdir()
    path.rename(tmp_path / "folder" / path.name)
    assert list(documents(str(tmp_path / "folder"))) == texts


def test_rows_join_documents_by_the_end_token():
    found = token_rows(iter(TEXTS), tokenizer(), 4, 2, "text")
    assert found.tolist() == [[5, 6, 7, 2], [8, 9, 2, 40]]
    assert token_rows(iter(TEXTS), tokenizer(), 4, 9, "text", at_least=2).shape == (3, 4)
    with pytest.raises(ValueError, match="text gives 12 tokens, and 4 sequences of 4 need 16"):
        token_rows(iter(TEXTS), tokenizer(), 4, 4, "text")


def test_default_text_ships_and_is_enough_for_the_default(smollm2_gguf):
    texts = list(documents("default"))
    assert len(texts) > 100 and all(isinstance(text, str) and text for text in texts)
    # a token of English is four to five characters
    assert sum(map(len, texts)) > 6 * make_options(model="m", output="o").tokens
    import tomllib

    project = tomllib.loads((DEFAULT_TEXT.parents[2] / "pyproject.toml").read_text())
    assert "alignment/*.jsonl" in project["tool"]["setuptools"]["package-data"]["convert"]


def test_sampled_text_is_the_models_own(saved_teacher):
    """Seeded, of the right shape, and likelier under the model than random tokens."""
    model = teacher_model(saved_teacher("llama-gqa")).whole()
    state = torch.random.get_rng_state()
    first, again, other = (sample_rows(model, 40, 6, seed) for seed in (1, 1, 2))
    assert first.shape == (6, 40) and torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), state)
    own, foreign = (model(ids, labels=ids, use_cache=False).loss for ids in (first, random_ids(6, 40)))
    assert own < foreign - 0.05


@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("empty.jsonl", "", "is empty"),
        ("short.jsonl", '{"text": "w5 w6"}', "gives 3 tokens, and 2 sequences of 512 need 1024"),
        ("column.jsonl", '{"body": "w5 w6"}', "no text in column 'text'; it has body"),
        ("broken.jsonl", '{"text": "w5', "cannot be read as text"),
        ("numbers.jsonl", '{"text": 5}', "no text in column 'text'"),
        ("text.docx", "w5 w6", "must be a .jsonl, .json, .txt, .parquet file"),
        (None, "", "cannot be read as text"),
    ],
)
def test_bad_text(teacher, tmp_path, name, content, expected):
    path = tmp_path / (name or "nowhere.jsonl")
    if name:
        path.write_text(content)
    align = tmp_path / "align.yaml"
    align.write_text("held_out_sequences: 1\n")
    done = run(
        teacher, tmp_path / "out", "--align", "closed-form", "--layer-selection", "uniform", "--align-config", align,
        "--text", path, "--tokens", 1024,
    )  # fmt: skip
    check_one_line_error(done, expected)
    nothing_left(tmp_path, *filter(None, ["teacher", "align.yaml", name]))


def test_too_few_tokens_to_hold_any_out(teacher, tmp_path):
    done = run(teacher, tmp_path / "out", "--align", "closed-form", "--tokens", 512)
    check_one_line_error(done, "leaves nothing to fit on", "at least 5120")


def test_teacher_without_a_tokenizer(saved_teacher, tmp_path):
    done = run(saved_teacher("llama-gqa"), tmp_path / "out", "--align", "closed-form")
    check_one_line_error(done, "no tokenizer", "--text sampled", "--align none")


def test_tokenizer_of_another_model(tmp_path):
    from transformers import LlamaForCausalLM

    from tests.teachers import TEACHERS

    config = TEACHERS["llama-gqa"][1]
    LlamaForCausalLM(type(config)(**config.to_dict() | {"vocab_size": 8})).save_pretrained(tmp_path / "teacher")
    tokenizer().save_pretrained(tmp_path / "teacher")
    text = written(tmp_path, "jsonl")
    options = make_options(model=str(tmp_path / "teacher"), output="o", text=str(text))
    model = teacher_model(tmp_path / "teacher")
    with pytest.raises(ValueError, match="token 43, the model's vocabulary only 8"):
        calibration_rows(find_teacher(str(tmp_path / "teacher")), model, options, 4, 3)


def test_weights_with_nan_are_named(tmp_path):
    model = make_teacher("llama-gqa")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3, 4] = float("nan")
    model.save_pretrained(tmp_path / "teacher")
    done = run(tmp_path / "teacher", tmp_path / "out", "--align", "closed-form", "--text", "sampled")
    check_one_line_error(done, "model.layers.1.self_attn.k_proj.weight", "NaN")
    nothing_left(tmp_path, "teacher")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("sequence_lenght: 5", "Unknown key 'sequence_lenght'"),
        ("fit: {steps: 5}", "Unknown key 'steps' in .*: fit; known keys: decays"),
        ("fit: {refine_steps: many}", "fit: refine_steps must be int, not 'many'"),
        ("fit: 5", "must hold `key: value`"),
        ("fit: {refine_sequences: 0}", "must be positive"),
        ("selection: {rounds: 0}", "rounds must be at least 1"),
        ("distillation: {warmup: 0.9}", "together at most 1"),
        ("start: random", "start must be one of teacher, mohawk, mamba-in-llama"),
        ("distillation: {bf16: 1}", "bf16 must be bool"),
        ("sequence_length: 4", "at least 16"),
        ("a: [", "not valid YAML"),
    ],
)
def test_alignment_file_with_a_mistake(tmp_path, text, expected):
    path = tmp_path / "align.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=expected):
        read_alignment_file(path)


def test_alignment_file_is_read(tmp_path):
    path = tmp_path / "align.yaml"
    path.write_text("fit:\n  decays: [0.5, 0.9]\n  refine_learning_rate: 1e-3\ndistillation: {tokens: 7}\n")
    settings = read_alignment_file(path)
    assert settings.fit.decays == (0.5, 0.9) and settings.fit.refine_learning_rate == 1e-3
    assert settings.distillation.tokens == 7 and settings.selection == AlignmentOptions().selection
    assert read_alignment_file(None) == AlignmentOptions()
    assert read_alignment_file(path, 64) == dataclasses.replace(settings, sequence_length=64)
    path.write_text("sequence_length: 32\n")
    assert read_alignment_file(path, 64).sequence_length == 32, "what the file says counts"
    assert read_alignment_file(None, 64).sequence_length == 64
    with pytest.raises(ValueError, match="does not exist"):
        read_alignment_file(tmp_path / "nowhere.yaml")
