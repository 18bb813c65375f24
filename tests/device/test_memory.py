"""Out of memory: a fit goes on in smaller pieces, and where that does not help, one line says what to lower."""

import pytest
import yaml
from safetensors.torch import load_file

from convert import convert
from convert.cli import main as command
from convert.fit import activations, fit
from tests.doubles.device import StandIn
from tests.recipes.tiny_chat import save_chat_teacher

TEXT = dict(text="sampled", tokens=12 * 64, sequence_length=64, held_out_sequences=2, device="cuda")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_chat_teacher(tmp_path_factory.mktemp("memory") / "teacher")


def converted(teacher, out, limit=2**33):
    with StandIn(limit=limit) as device:
        convert(str(teacher), out, window=16, attention_layers=0, alignment=TEXT)
    return load_file(out / "model.safetensors"), device


def test_a_fit_goes_on_in_smaller_pieces(teacher, tmp_path, monkeypatch):
    monkeypatch.setattr("convert.dry_run.alignment_cost", lambda plan: None)
    whole, device = converted(teacher, tmp_path / "whole")
    used, original = [], fit._fit_one
    monkeypatch.setattr(
        fit, "_fit_one", lambda t, n, data, *rest: used.append(data.pieces) or original(t, n, data, *rest)
    )
    limit = device.peak() - 2**12
    there, device = converted(teacher, tmp_path / "smaller", limit)
    assert used[0].kept and not used[-1].kept and device.peak() <= limit  # and what is smaller stays so
    assert there.keys() == whole.keys()
    for name, tensor in whole.items():
        if "down" not in name and "up" not in name:  # whose directions are free
            assert (there[name] - tensor).abs().max() < 1e-2, name


def test_where_nothing_helps_one_line_says_what_to_lower(teacher, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("convert.dry_run.alignment_cost", lambda plan: None)
    out = tmp_path / "out"
    convert(str(teacher), out, align="none", window=16)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    at_once = []
    original = activations.ActivationStream.close
    monkeypatch.setattr(activations.ActivationStream, "close", lambda s: at_once.append(s.at_once) or original(s))
    text, config = tmp_path / "text.txt", tmp_path / "x.yaml"
    text.write_text(" ".join(f"w{7 + i % 100}" for i in range(2000)))
    config.write_text(yaml.safe_dump({"alignment": TEXT | {"text": str(text)}}))
    for limit in (2**13, 2**16, 2**17, 2**18, 2**19):
        with StandIn(limit=limit), pytest.raises(SystemExit):
            command([str(teacher), str(out), "--window", "16", "--config", str(config), "--overwrite"])
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("error: out of memory, while ") and "; lower alignment.tokens or" in error
        assert before == {path.name: path.read_bytes() for path in out.iterdir()}
    assert 1 in at_once
