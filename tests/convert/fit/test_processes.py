"""A fit by several processes has the weights of one, also where one of them was killed and the run went on."""

import contextlib
import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from convert import convert, pipeline
from convert.fit.processes import Team
from tests.helpers.forked import run_forked
from tests.helpers.tiny_chat import save_chat_teacher

OPTIONS = ["--window", "16", "--text", "sampled", "--tokens", "832", "--alignment.sequence_length", "64"]
SUDDEN = """
import os, sys
from convert import cli
from convert.fit import fit

fitted, original, killed = [], fit._fit_one, sys.argv.pop(1)
def fit_one(teacher, layer, *rest):
    if len(fitted) == 1 and os.environ["RANK"] == killed:
        os.kill(os.getpid(), 9)
    fitted.append(layer)
    return original(teacher, layer, *rest)
fit._fit_one = fit_one
cli.main()
"""


def launched(*arguments):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--mixed_precision", "no", "--num_processes"]
    command += ["2", "--config_file", "recipes/configs/accelerate/ddp.yaml", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


def kept(out):
    return sorted(path.stem for path in out.with_name(f"{out.name}.work").rglob("layer-*.safetensors"))


@pytest.mark.slow
def test_processes_fit_what_one_fits(tmp_path):
    """The first run ends as one of two processes is killed at the last layer; with three, rows divide unevenly, and
    one of them has no layer to fit."""
    teacher, out = save_chat_teacher(tmp_path / "teacher"), tmp_path / "two"
    alignment = {"text": "sampled", "tokens": 832, "sequence_length": 64}
    convert(str(teacher), tmp_path / "one", window=16, attention_layers="none", alignment=alignment)
    arguments = [teacher, out, *OPTIONS, "--attention-layers", "none"]
    script = tmp_path / "sudden.py"
    script.write_text(SUDDEN)
    ended = launched(script, "1", *arguments)
    assert ended.returncode != 0, ended.stderr[-3000:]
    assert not out.exists(), ended.stderr[-3000:]
    assert "goes on from" in ended.stderr, ended.stderr  # told by the other's end, or by the launcher's signal
    assert kept(out) == ["layer-000", "layer-001"]
    printed = tmp_path / "printed"
    printed.mkdir()
    run_forked(arguments, 3, printed)
    assert [(printed / str(rank)).read_text().count("done") for rank in range(3)] == [1, 0, 0]
    one, two = (load_file(folder / "model.safetensors") for folder in (tmp_path / "one", out))
    assert one.keys() == two.keys()
    assert all(one[name].equal(two[name]) for name in one)


def test_stages_of_several_processes_are_refused_before_the_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "joined", lambda: contextlib.nullcontext(Team(0, 2)))
    teacher = save_chat_teacher(tmp_path / "teacher")
    with pytest.raises(ValueError, match="stages train in one process"):
        convert(str(teacher), tmp_path / "out", align="mohawk", attention_layers="MAMA")


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 4, 13, 30])
def test_every_row_is_moved_once_in_the_groups_of_one_process(count, size):
    slices = [Team(rank, size).rows(count, 4) for rank in range(size)]
    assert [row for part in slices for row in range(count)[part]] == list(range(count))
    assert all(part.start % 4 == 0 or part.start == count for part in slices)
