"""What is carried to a machine without a network: token ids of a text, files in parts, and how they come together."""

import json
import lzma

import numpy
import pytest

from recipes.benchmarks import carry
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


def test_installed_texts_are_read_in_one_order():
    first = [next(texts) for texts in (carry.installed_text(), carry.installed_text())]
    assert first[0] == first[1]
    assert first[0].strip()


@pytest.fixture
def folder(tmp_path):
    """A folder as `make` writes it, without its command line: a teacher in three parts, ids, no wheels."""
    teacher = tmp_path / "teacher.gguf"
    teacher.write_bytes(bytes(range(250)) * 10)
    packed = tmp_path / "ids.npy.xz"
    with lzma.open(packed, "wb") as file:
        numpy.save(file, numpy.arange(500, dtype=numpy.uint16))
    carried = tmp_path / "carried"
    carried.mkdir()
    contents = {path.name: carry.split(path, carried, 1000) for path in (teacher, packed)}
    (carried / carry.CONTENTS).write_text(json.dumps(contents))
    return carried


def test_parts_come_together_as_they_were(folder, tmp_path):
    parts = sorted(path.name for path in folder.glob("teacher*"))
    assert parts == ["teacher.gguf.000", "teacher.gguf.001", "teacher.gguf.002"]
    assert max(path.stat().st_size for path in folder.glob("*.0*")) == 1000
    teacher, ids = carry.join(folder, tmp_path / "there")
    assert teacher.read_bytes() == bytes(range(250)) * 10
    assert numpy.load(ids).tolist() == list(range(500))
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["ids.npy", "teacher.gguf"]


def test_what_has_not_come_yet_is_left_and_what_is_there_stays(folder, tmp_path):
    last = folder / "teacher.gguf.002"
    content = last.read_bytes()
    last.unlink()
    assert [path.name for path in carry.join(folder, tmp_path / "there")] == ["ids.npy"]
    last.write_bytes(content)
    (folder / "ids.npy.xz.000").unlink()
    assert [path.name for path in carry.join(folder, tmp_path / "there")] == ["teacher.gguf", "ids.npy"]


def test_a_damaged_part_is_refused(folder, tmp_path):
    (folder / "teacher.gguf.001").write_bytes(bytes(1000))
    with pytest.raises(ValueError, match="teacher.gguf is not the file that was packed"):
        carry.join(folder, tmp_path / "there")
    assert not (tmp_path / "there/teacher.gguf").exists()
