"""Where calibration text comes from, and what is wrong with it."""

import json

import numpy
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from convert import convert
from convert.fit.aligner import Aligner
from convert.fit.text import (
    DEFAULT_TEXT,
    beginning_of_text,
    calibration_rows,
    documents,
    read_ids,
    sample_rows,
    token_rows,
)
from convert.options import PlacementOptions, make_options
from convert.resolve import resolve
from convert.teachers.teacher import find_teacher
from convert.teachers.weights import TeacherWeights
from tests.helpers.command import check_one_line_error, nothing_left, run_as_is
from tests.helpers.teachers import TINY, make_teacher, random_ids
from tests.helpers.tiny import teacher_model
from tests.helpers.tokenizers import tokenizer

TEXTS = ["w5 w6 w7", "w8 w9", "w40 w41 w42 w43"]


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


def aligner_of(options):
    weights = TeacherWeights.of(find_teacher(options.model))
    return Aligner(weights, resolve(options, weights))


@pytest.mark.parametrize("kind", ["jsonl", "txt", "parquet"])
def test_files_are_read_in_order(tmp_path, kind):
    path = written(tmp_path, kind)
    texts = ["\n".join(TEXTS)] if kind == "txt" else TEXTS  # a text file is one document, its lines are not
    assert list(documents(str(path))) == texts
    (tmp_path / "folder").mkdir()
    path.rename(tmp_path / "folder" / path.name)
    assert list(documents(str(tmp_path / "folder"))) == texts


def test_rows_without_a_text_are_left_out(tmp_path):
    rows = [{"text": None, "n": 1}, {"text": "w5", "n": 2}, {"text": " ", "n": None}, {"text": "w6", "n": 4}]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert list(documents(str(tmp_path / "text.jsonl"))) == ["w5", "w6"]


@pytest.mark.parametrize(
    "source, asked", [("org/name:en:test", ("org/name", "en", "test")), ("org/name", ("org/name", None, "train"))]
)
def test_a_data_set_of_the_hub_may_name_its_configuration_and_split(source, asked, monkeypatch):
    def load_dataset(name, config, split, streaming):
        assert (name, config, split) == asked
        assert streaming
        return [{"body": "a text"}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert list(documents(source, "body")) == ["a text"]


def test_rows_join_documents_by_the_end_token():
    found = token_rows(iter(TEXTS), tokenizer(), 4, 2, "text")
    assert found.tolist() == [[5, 6, 7, 2], [8, 9, 2, 40]]
    assert token_rows(iter(TEXTS), tokenizer(), 4, 9, "text", at_least=2).shape == (3, 4)
    with pytest.raises(ValueError, match="text gives 12 tokens, and 4 sequences of 4 need 16"):
        token_rows(iter(TEXTS), tokenizer(), 4, 4, "text")


def test_rows_begin_as_the_tokenizer_begins_a_text(tmp_path):
    """With BOS where it adds one, in what layers are fitted to and in what asks for recall."""
    assert beginning_of_text(tokenizer()) == []
    assert beginning_of_text(tokenizer(begins=True)) == [1]
    found = token_rows(iter(TEXTS), tokenizer(begins=True), 4, 3, "text")
    assert found.tolist() == [[1, 5, 6, 7], [1, 2, 8, 9], [1, 2, 40, 41]]
    assert token_rows(iter(TEXTS), tokenizer(begins=True), 4, 9, "text", at_least=2).shape == (4, 4)
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(tmp_path / "teacher")
    tokenizer(begins=True).save_pretrained(tmp_path / "teacher")
    (tmp_path / "text.txt").write_text("w43 w44 w45 " * 2000)
    options = make_options(
        str(tmp_path / "teacher"), "o", text=str(tmp_path / "text.txt"), sequence_length=32, tokens=1024,
        held_out_sequences=2,
    )  # fmt: skip
    rows = aligner_of(options).ids
    asks = ((rows < 43) | (rows > 45))[:, 1:].any(1)
    assert (rows[:, 0] == 1).all()
    assert 4 <= asks.sum() < len(rows)


def test_token_ids_give_the_rows_of_their_text(tmp_path):
    """A file of ids in uint16, cut like the text that it was made from, and read without it."""
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(tmp_path / "teacher")
    tokenizer(begins=True).save_pretrained(tmp_path / "teacher")
    (tmp_path / "text.txt").write_text("w43 w44 w45 w9 " * 2000)
    ids = tokenizer()((tmp_path / "text.txt").read_text(), add_special_tokens=False).input_ids
    numpy.save(tmp_path / "ids.npy", numpy.array(ids, dtype=numpy.uint16))
    rows = [
        aligner_of(make_options(
            str(tmp_path / "teacher"), "o", text=str(tmp_path / name), sequence_length=32, tokens=1024,
            held_out_sequences=2,
        )).ids
        for name in ("text.txt", "ids.npy")
    ]  # fmt: skip
    assert torch.equal(*rows)
    assert rows[1].dtype == torch.int64


@pytest.mark.parametrize(
    "content, said",
    [
        (numpy.zeros((2, 3), dtype=numpy.uint16), "one row of whole numbers"),
        (numpy.zeros(9), "one row of whole numbers"),
        (numpy.array([3, -1]), "one row of whole numbers"),
        (numpy.array([{"a": 1}], dtype=object), "cannot be read as token ids"),
        (b"w5 w6", "cannot be read as token ids"),
        (b"", "cannot be read as token ids"),
        (None, "cannot be read as token ids"),
    ],
)
def test_what_holds_no_token_ids_is_refused(tmp_path, content, said):
    path = tmp_path / "ids.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        numpy.save(path, content)
    with pytest.raises(ValueError, match=said):
        read_ids(str(path))


def test_default_text_ships_and_is_enough_for_the_default(smollm2_gguf):
    texts = list(documents("default"))
    assert len(texts) > 100
    assert all(isinstance(text, str) and text for text in texts)
    # a token of English is four to five characters
    assert sum(map(len, texts)) > 6 * make_options("m", "o").alignment.tokens
    import tomllib

    project = tomllib.loads((DEFAULT_TEXT.parents[2] / "pyproject.toml").read_text())
    assert "fit/*.jsonl" in project["tool"]["setuptools"]["package-data"]["convert"]


def test_sampled_text_is_the_models_own(saved_teacher):
    """Seeded, of the right shape, and likelier under the model than random tokens."""
    model = teacher_model(saved_teacher("llama-gqa")).whole()
    state = torch.random.get_rng_state()
    first, again, other = (sample_rows(model, 40, 6, seed) for seed in (1, 1, 2))
    assert first.shape == (6, 40)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), state)
    own, foreign = (model(ids, labels=ids, use_cache=False).loss for ids in (first, random_ids(6, 40)))
    assert own < foreign - 0.05


@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("empty.jsonl", "", "is empty"),
        ("short.jsonl", '{"text": "w5 w6"}', "gives 3 tokens, and 2 sequences of 512 need 1024"),
        ("column.jsonl", '{"body": "w5 w6"}', "no text in column 'text'; the columns are body"),
        ("broken.jsonl", '{"text": "w5', "cannot be read as text"),
        ("numbers.jsonl", '{"text": 5}', "no text in column 'text'"),
        ("text.docx", "w5 w6", "must be a .jsonl, .json, .txt, .parquet file"),
        (None, "", "cannot be read as text: there is no such file"),
    ],
)
def test_bad_text(two_layer_teacher, tmp_path, name, content, expected):
    path = tmp_path / (name or "nowhere.jsonl")
    if name:
        path.write_text(content)
    options = dict(text=str(path), tokens=1024, attention_layers="1", held_out_sequences=1)
    with pytest.raises(ValueError, match=expected):
        convert(str(two_layer_teacher("llama-gqa")), tmp_path / "out", **options)
    nothing_left(tmp_path, *filter(None, [name]))


def test_too_few_tokens_to_hold_any_out(two_layer_teacher):
    options = make_options(str(two_layer_teacher("llama-gqa")), "o", tokens=512)
    aligner = aligner_of(options)
    with pytest.raises(ValueError, match="512 tokens leave nothing to fit on.* at least 5120"):
        aligner.ids  # noqa: B018


def test_teacher_without_a_tokenizer(saved_teacher, tmp_path):
    done = run_as_is(saved_teacher("llama-gqa"), tmp_path / "out")
    check_one_line_error(done, "no tokenizer", "--text sampled", "--align none")
    nothing_left(tmp_path)


def test_tokenizer_of_another_model(tmp_path):
    LlamaForCausalLM(LlamaConfig(**TINY | {"vocab_size": 8})).save_pretrained(tmp_path / "teacher")
    tokenizer().save_pretrained(tmp_path / "teacher")
    (tmp_path / "text.txt").write_text("w43 " * 80)
    options = make_options(str(tmp_path / "teacher"), "o", text=str(tmp_path / "text.txt"), sequence_length=16)
    model = teacher_model(tmp_path / "teacher")
    with pytest.raises(ValueError, match="token 43, the model's vocabulary only 8"):
        calibration_rows(model.weights.teacher, model, options.alignment, 4, 1)


def test_weights_with_nan_are_named(tmp_path):
    model = make_teacher("llama-gqa", layers=2)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3, 4] = float("nan")
    model.save_pretrained(tmp_path / "teacher")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn\.k_proj\.weight.* NaN"):
        convert(str(tmp_path / "teacher"), tmp_path / "out", text="sampled")
    nothing_left(tmp_path, "teacher")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("alignment: {sequence_lenght: 5}", "Unknown option 'alignment.sequence_lenght'.*alignment.sequence_length"),
        ("alignment: {fit: {steps: 5}}", "Unknown option 'alignment.fit.steps'"),
        ("alignment: {fit: {refine_steps: many}}", "alignment.fit.refine_steps must be a .*number of at least 0"),
        ("alignment: {fit: 5}", "alignment.fit is a section"),
        ("alignment: {fit: {decays: []}}", "decays is empty"),
        ("alignment: {held_out_sequences: 0}", "alignment.held_out_sequences must be a .*number above 0, not 0"),
        ("placement: {context: 0}", "placement.context must be a .*"),
        ("alignment: {distillation: {warmup: 0.9}}", "sum to more than 1"),
        ("alignment: {method: random}", "method must be none or closed-form or mohawk, not random"),
        ("alignment: {distillation: {bf16: 1}}", "bf16 must be true or false, not 1"),
        ("alignment: {sequence_length: 4}", "of at least 16 and at most 16777216, not 4"),
        ("a: [", "not valid YAML"),
    ],
)
def test_options_file_with_a_mistake(tmp_path, text, expected):
    (tmp_path / "options.yaml").write_text(text)
    with pytest.raises(ValueError, match=expected):
        make_options("m", "o", config=tmp_path / "options.yaml")


def test_options_file_is_read(tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text(
        "alignment:\n  method: mohawk\n  fit:\n"
        "    decays: [0.5, 0.9]\n    refine_steps: 3\n  distillation: {tokens: 7}\n"
    )
    options = make_options("m", "o", config=path)
    assert options.alignment.fit.decays == (0.5, 0.9)
    assert options.alignment.fit.refine_steps == 3
    assert options.alignment.distillation.tokens == 7
    assert options.placement == PlacementOptions()
    assert make_options("m", "o").sequence_length == 1024
    assert make_options("m", "o", attention_layers=0.5).sequence_length == 512
    path.write_text("alignment: {sequence_length: 32}\n")
    assert make_options("m", "o", config=path).sequence_length == 32, "what the file says counts"
    with pytest.raises(ValueError, match="nowhere.yaml"):
        make_options("m", "o", config=tmp_path / "nowhere.yaml")
