"""What is carried to a machine without a network: token ids of a text, files in parts, and how they come together."""

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy
import pytest

from convert.checkpoint.load import prompt_tokenizer
from recipes.benchmarks import carry
from tests.helpers.tiny_chat import save_chat_teacher
from tests.helpers.tokenizers import tokenizer


def test_ids_are_those_of_the_texts_with_their_ends():
    found = carry.token_ids(["w5 w6", "w7"] * 300, tokenizer(), 1000)
    assert found.dtype == numpy.uint16
    assert found[:6].tolist() == [5, 6, 2, 7, 2, 5]
    assert len(found) == 1000
    with pytest.raises(ValueError, match="has 5 tokens, and 9 are asked for"):
        carry.token_ids(["w5 w6", "w7"], tokenizer(), 9)


def test_a_vocabulary_too_large_for_two_bytes_is_refused():
    class Large:
        def __len__(self):
            return 65_537

    with pytest.raises(ValueError, match="65,537 tokens; two bytes hold 65,536"):
        carry.token_ids(["a"], Large(), 1)


def test_installed_texts_are_read_in_one_order(tmp_path, monkeypatch):
    """In whatever order the disk names them; tables of data and what is no text are left out."""
    for name in ("a.py", "b.md", "c/d.py", "e.csv", "f.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "f.py").write_bytes(b"\xff\xfe\xff")
    monkeypatch.setattr(carry.sysconfig, "get_paths", lambda: {"purelib": tmp_path})
    texts = list(carry.installed_text())
    assert sorted(texts) == ["a.py", "b.md", "c/d.py"]
    found = list(tmp_path.rglob("*"))
    monkeypatch.setattr(type(tmp_path), "rglob", lambda self, pattern: reversed(found))
    assert list(carry.installed_text()) == texts


@pytest.fixture
def folder(tmp_path):
    """A folder with the tokenizer's teacher, a larger one in three parts, token ids, and no wheels."""
    teacher = save_chat_teacher(tmp_path / "teacher")
    larger = tmp_path / "larger.gguf"
    larger.write_bytes(bytes(range(250)) * 10)
    small = tmp_path / "small.gguf"
    small.write_bytes(b"GGUF")
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "w9 w10 " * 300}) + "\n")
    carried = tmp_path / "carried"
    with mock.patch("convert.checkpoint.load.prompt_tokenizer", lambda name: prompt_tokenizer(str(teacher))):
        carry.make(carried, small, str(text), 500, [larger], [], "3.12", 1000)
    return carried


def test_parts_come_together_as_they_were(folder, tmp_path):
    parts = sorted(path.name for path in folder.glob("larger*"))
    assert parts == ["larger.gguf.000", "larger.gguf.001", "larger.gguf.002"]
    assert max(path.stat().st_size for path in folder.glob("*.0*")) == 1000
    ids, small, larger = carry.join(folder, tmp_path / "there")
    assert small.read_bytes() == b"GGUF"
    assert larger.read_bytes() == bytes(range(250)) * 10
    assert numpy.load(ids)[:4].tolist() == [9, 10, 9, 10]
    assert len(numpy.load(ids)) == 500
    names = ["ids.npy", "larger.gguf", "small.gguf"]
    assert sorted(path.name for path in (tmp_path / "there").iterdir() if path.suffix != ".sha256") == names


def test_what_has_not_come_yet_is_named_and_what_is_there_stays(folder, tmp_path, capsys):
    last = folder / "larger.gguf.002"
    content = last.read_bytes()
    for there in (None, content[:100]):
        last.unlink() if there is None else last.write_bytes(there)
        assert [path.name for path in carry.join(folder, tmp_path / "there")] == ["ids.npy", "small.gguf"]
        assert "larger.gguf: 0.0 of 0.0 MB are here; carry the rest." in capsys.readouterr().out
    last.write_bytes(content)
    (folder / "ids.npy.xz.000").unlink()
    found = carry.join(folder, tmp_path / "there")
    assert [path.name for path in found] == ["ids.npy", "small.gguf", "larger.gguf"]


def test_another_file_of_the_same_name_takes_its_place(folder, tmp_path):
    carry.join(folder, tmp_path / "there")
    other = tmp_path / "larger.gguf"
    other.write_bytes(b"other")
    contents = json.loads((folder / carry.CONTENTS).read_text()) | {other.name: carry.split(other, folder, 1000)}
    (folder / carry.CONTENTS).write_text(json.dumps(contents))
    carry.join(folder, tmp_path / "there")
    assert (tmp_path / "there/larger.gguf").read_bytes() == b"other"


def test_a_damaged_part_is_refused(folder, tmp_path):
    (folder / "larger.gguf.001").write_bytes(bytes(1000))
    with pytest.raises(ValueError, match="larger.gguf is not the file that was packed"):
        carry.join(folder, tmp_path / "there")
    assert not (tmp_path / "there/larger.gguf").exists()


def test_a_folder_that_holds_something_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="is not empty"):
        carry.make(folder, tmp_path / "small.gguf", "default", 0, [], [], "3.12", 1000)
    with pytest.raises(ValueError, match="same name"):
        carry.make(tmp_path / "n", tmp_path / "a.gguf", "default", 0, [tmp_path / "b/a.gguf"], [], "3.12", 1000)
    with pytest.raises(ValueError, match=r"has no contents.json"):
        carry.join(tmp_path / "nothing", tmp_path / "there")


def test_parts_are_joined_without_this_packages_needs():
    """On a machine that has NumPy, since the packages are among the parts."""
    script = (
        "import sys\nfor name in ('torch', 'transformers', 'docstring_parser'): sys.modules[name] = None\n"
        "import recipes.benchmarks.carry"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(carry.__file__).parents[2])
