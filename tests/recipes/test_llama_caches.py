"""Caches of llama.cpp on a tiny GGUF file: its states are the teacher's, and rounding changes them.

llama-cpp-python is built from source; tests that need it run where the extra `rivals` is installed.
"""

import importlib.util

import pytest
import torch

from convert.checkpoint.load import load_model
from recipes.evaluation import llama_caches
from recipes.evaluation.llama_caches import LLAMA_CACHES, LlamaCache, check_llama, is_llama_file
from recipes.evaluation.metrics import reader
from tests.helpers.gguf_file import ARCHITECTURES, write_gguf
from tests.helpers.teachers import random_ids

needs_llama = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"
)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file with as many rows of the embedding as the tokenizer has tokens, which llama.cpp asks for."""
    model_type, settings = ARCHITECTURES["qwen3"]
    monkeypatch.setitem(ARCHITECTURES, "qwen3", (model_type, settings | {"vocab_size": 265}))
    lengths = dict.fromkeys(("attention.key_length", "attention.value_length"), settings["head_dim"])
    write_gguf(tmp_path / "teacher.gguf", "qwen3", "qwen2", **lengths)
    return tmp_path / "teacher.gguf"


@needs_llama
@pytest.mark.slow
def test_states_are_the_teachers_and_rounding_changes_them(file):
    own = reader(load_model(str(file), "float32"))
    ids = random_ids(1, 600) % 200
    with torch.no_grad():
        expected = own.states(ids)
        apart = {
            name: (LlamaCache(str(file), name, 640).states(ids) - expected).pow(2).mean().item()
            for name in LLAMA_CACHES
        }
    exact, *rounded = apart.values()
    assert exact < 1e-6 * expected.pow(2).mean()
    assert sorted(rounded) == rounded, "from 8 bits to 4"
    assert exact < rounded[0]


@needs_llama
@pytest.mark.slow
def test_bytes_are_those_of_its_types(file):
    """Rows of 32 numbers in 8 bits and a scale of 2 bytes; each token has a little beside keys and values."""
    config = load_model(str(file), "float32").config
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4000
    held = {name: LlamaCache(str(file), name, 1024) for name in ("llama.cpp f16", "llama.cpp q8_0")}
    sizes = {name: cache.nbytes(4500) - cache.nbytes(500) for name, cache in held.items()}
    assert sizes["llama.cpp f16"] == pytest.approx(2 * numbers, rel=0.05)
    assert sizes["llama.cpp q8_0"] == pytest.approx(34 / 32 * numbers, rel=0.05)


def test_only_gguf_files_are_asked_for_it(monkeypatch):
    assert is_llama_file("models/teacher.GGUF")
    assert not is_llama_file("HuggingFaceTB/SmolLM2-135M-Instruct")
    monkeypatch.setattr(llama_caches.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"llama-cpp-python .* pip install '.\[rivals\]'"):
        check_llama()
