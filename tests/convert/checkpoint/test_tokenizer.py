"""The tokenizer of a teacher is the hybrid's: the same ids for any text, whatever its files say and are called."""

import base64
import json
import shutil

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from convert import convert
from convert.checkpoint.tokenizer import PROBES, differing_text
from tests.helpers.real_models import CODE_SPLIT
from tests.helpers.teachers import TEACHERS, make_teacher
from tests.helpers.tokenizers import TEMPLATE, tokenizer

ONE_OF_EACH_FAMILY = list({config.model_type: name for name, (_, config) in TEACHERS.items()}.values())
CHAT = [{"role": "user", "content": "2 + 2 = 4?\n\n  Yes"}, {"role": "assistant", "content": " Yes, 100 %"}]


@pytest.fixture(scope="module")
def tokenizer_json() -> str:
    """A byte-level tokenizer.json that splits text as today's models do, of 96 tokens at most as the teachers have."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.decoder = decoders.ByteLevel()
    split = pre_tokenizers.Split(Regex(CODE_SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["\n".join(PROBES)] * 50, trainer)
    return tokenizer.to_str()


@pytest.fixture
def folder_of(saved_teacher, tmp_path):
    """name, files -> a copy of a tiny teacher's folder with these files beside the weights."""

    def get(name: str, files: dict[str, str]):
        folder = tmp_path / name
        shutil.copytree(saved_teacher(name, 2), folder)
        for file, content in files.items():
            (folder / file).write_text(content)
        return folder

    return get


def declared(tokenizer_class: str, **more) -> str:
    """A tokenizer_config.json."""
    return json.dumps(
        {"tokenizer_class": tokenizer_class, "eos_token": "<|endoftext|>", "chat_template": TEMPLATE} | more
    )


@pytest.mark.parametrize("declared_class", ["GPT2Tokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_every_family_keeps_its_tokenizer(name, declared_class, folder_of, tokenizer_json, tmp_path):
    """transformers takes the declared class for some model types, and tokenizer.json as it is for others."""
    folder = folder_of(name, {"tokenizer.json": tokenizer_json, "tokenizer_config.json": declared(declared_class)})
    notes = convert(str(folder), tmp_path / "out", align="none", attention_layers="all").notes
    teacher, hybrid = (AutoTokenizer.from_pretrained(path) for path in (folder, tmp_path / "out"))
    assert differing_text(hybrid, teacher) is None
    assert differing_text(teacher, hybrid) is None
    anew = (folder / "tokenizer_config.json").read_text() != (tmp_path / "out" / "tokenizer_config.json").read_text()
    assert anew == any("tokenizer is saved anew" in note for note in notes)
    assert type(hybrid) is type(teacher)
    assert hybrid.eos_token_id == teacher.eos_token_id
    ids = [tokenizer.apply_chat_template(CHAT)["input_ids"] for tokenizer in (teacher, hybrid)]
    assert ids[0] == ids[1]


def test_tokenizers_that_part_are_told_apart(folder_of, tokenizer_json):
    """By what the declared class makes of the same files."""
    files = {"tokenizer.json": tokenizer_json, "tokenizer_config.json": declared("GPT2Tokenizer")}
    olmo, llama = (AutoTokenizer.from_pretrained(folder_of(name, files)) for name in ("olmo2", "llama-gqa"))
    assert olmo.get_vocab() == llama.get_vocab()
    assert differing_text(olmo, llama) == PROBES[1]


def test_of_two_tokenizers_the_one_that_transformers_loads_comes_along(folder_of, tokenizer_json, tmp_path):
    """As exporting tools leave them: a tokenizer.json, and a tokenizer.model of other pieces."""
    folder = folder_of("llama-gqa", {"tokenizer.json": tokenizer_json, "tokenizer_config.json": declared("Tokenizer")})
    # SentencePiece's ModelProto: field 1 is a piece, with its text as field 1
    pieces = b"".join(bytes([0x0A, len(word) + 2, 0x0A, len(word)]) + word for word in (b"<unk>", b"a", b"b"))
    (folder / "tokenizer.model").write_bytes(pieces)
    convert(str(folder), tmp_path / "out", align="none")
    teacher, hybrid = (AutoTokenizer.from_pretrained(path) for path in (folder, tmp_path / "out"))
    assert differing_text(hybrid, teacher) is None
    assert hybrid.get_vocab() == Tokenizer.from_str(tokenizer_json).get_vocab()
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == pieces


def test_a_tokenizer_under_another_name_comes_along(folder_of, tmp_path):
    """As Mistral's newer models have it: tekken.json alone."""
    tokens = [bytes([byte]) for byte in range(256)] + [b" the", b"th", b"he", b"the"]
    tekken = {
        "config": {
            "pattern": CODE_SPLIT, "num_vocab_tokens": len(tokens), "default_vocab_size": len(tokens) + 4,
            "default_num_special_tokens": 4, "version": "v3",
        },
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for i, token in enumerate(tokens)
        ],
        "special_tokens": [
            {"rank": i, "token_str": token, "is_control": True}
            for i, token in enumerate(("<unk>", "<s>", "</s>"))
        ],
    }  # fmt: skip
    folder = folder_of("mistral-no-window", {"tekken.json": json.dumps(tekken)})
    convert(str(folder), tmp_path / "out", align="none")
    teacher, hybrid = (AutoTokenizer.from_pretrained(path) for path in (folder, tmp_path / "out"))
    assert differing_text(teacher, hybrid) is None
    assert len(hybrid("the theme").input_ids) > 1


@pytest.mark.parametrize("file, field, value", [
    ("tokenizer_config.json", "model_max_length", "float16"),
    ("tokenizer.json", "model", {"type": "WordLevel", "vocab": {"w1": 0}, "unk_token": "<unk>"}),
])  # fmt: skip
def test_a_tokenizer_that_cannot_read_a_text_is_refused(file, field, value, tmp_path):
    folder = tmp_path / "teacher"
    make_teacher("llama-gqa", layers=2).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    values = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(values | {field: value}))
    with pytest.raises(ValueError, match="cannot read a text"):
        convert(folder, tmp_path / "out", align="none")
