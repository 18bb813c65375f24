"""`convert-to-hybrid update`: folders that earlier versions wrote, with the code of today."""

import hashlib
import json
import logging
import subprocess
import sys
import tarfile

import pytest

from convert.checkpoint.code import KERNELS
from convert.io import folder as folder_of_runs
from convert.tools.update import update
from modeling_llamba import LlambaConfig, compatibility
from modeling_llamba.model import hybrid_model
from modeling_llamba.ship_code import code_files
from modeling_phimamba import PhiMambaConfig
from tests.helpers.before import BEFORE, BEFORE_5_24
from tests.helpers.command import check_one_line_error, run_as_is
from tests.helpers.hybrids import make_hybrid

STRANGER = """
import pathlib, sys
import torch
sys.path = [place for place in sys.path if place and not (pathlib.Path(place) / "modeling_llamba").is_dir()]
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder)]
from transformers import AutoModelForCausalLM

for folder in sys.argv[1:]:
    expected = torch.load(f"{folder}/expected.pt")
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules.")
    with torch.no_grad():
        torch.testing.assert_close(model(expected["ids"]).logits[:, -8:], expected["logits"], rtol=1e-4, atol=1e-4)
    options = dict(max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert torch.equal(model.generate(expected["ids"], **options), expected["generated"])
"""
FAMILIES = {"llamba": LlambaConfig, "phimamba": PhiMambaConfig, "fitted": LlambaConfig}


@pytest.fixture
def folders(tmp_path):
    with tarfile.open(BEFORE_5_24) as archive:
        archive.extractall(tmp_path, filter="data")
    return [tmp_path / family for family in FAMILIES]


def contents(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_weights_stay_and_code_is_todays(folders, tmp_path):
    for folder, config_class in zip(folders, FAMILIES.values(), strict=True):
        (folder / "notes of the user.txt").write_text("mine")
        before = contents(folder)
        first = json.loads((folder / "config.json").read_text())
        assert run_as_is("update", folder).returncode == 0
        after = contents(folder)
        changed = {"config.json", "README.md", ".convert-to-hybrid"}
        code = {name for name in before if name.endswith(".py")}
        assert {k: v for k, v in after.items() if not k.endswith(".py") and k not in changed} == {
            k: v for k, v in before.items() if k not in code | changed
        }
        config = config_class.from_pretrained(folder)
        assert {n for n in after if n.endswith(".py")} == set(code_files(config_class, config))
        again = json.loads((folder / "config.json").read_text())
        assert again["conversion"].pop("updated_with")["convert-to-hybrid"]
        assert again.pop("key_offsets") is False  # a field that this version did not have
        again["mixer_backend"] = again.pop("backend")  # and another name of one
        ignored = {"transformers_version"}
        assert {k: v for k, v in again.items() if k not in ignored} == {
            k: v for k, v in first.items() if k not in ignored
        }
        listed = set(json.loads((folder / ".convert-to-hybrid").read_text())["files"])
        assert listed == set(after) - {"notes of the user.txt", "expected.pt"}
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, *map(str, folders)], capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_files_in_folders_of_the_user_stay(folders, monkeypatch):
    inner = folders[0] / "checkpoint-500"
    inner.mkdir()
    for name in ("config.json", "README.md", "model.safetensors"):
        (inner / name).write_text(f"the user's {name}")
    before = contents(inner)
    update(folders[0])
    assert contents(inner) == before
    monkeypatch.chdir(inner)
    with pytest.raises(ValueError, match="working directory"):
        update(folders[0])
    assert contents(inner) == before


def test_a_second_update_changes_nothing(folders):
    update(folders[0])
    first = contents(folders[0])
    update(folders[0])
    assert contents(folders[0]) == first


def test_an_update_that_fails_leaves_the_folder(folders, monkeypatch):
    def fail(*folders):
        raise OSError("the disk is full")

    monkeypatch.setattr(folder_of_runs, "_swap", fail)
    before = contents(folders[0])
    with pytest.raises(OSError, match="full"):
        update(folders[0])
    assert contents(folders[0]) == before
    assert {path.name for path in folders[0].parent.iterdir()} == set(FAMILIES)


def test_a_file_of_the_user_with_a_name_of_todays_code_stays(folders):
    (folders[0] / "prompt.py").write_text("mine")
    before = contents(folders[0])
    with pytest.raises(ValueError, match="prompt.py that is not the hybrid's"):
        update(folders[0])
    assert contents(folders[0]) == before


def test_code_that_came_from_a_repository(folders, monkeypatch):
    """Its references name that; the files, links to which are staged, are not written through."""
    config = json.loads((folders[0] / "config.json").read_text())
    config["auto_map"] = {name: f"me/hybrid--{place}" for name, place in config["auto_map"].items()}
    (folders[0] / "config.json").write_text(json.dumps(config))
    before = contents(folders[0])
    with monkeypatch.context() as failing:
        failing.setattr(folder_of_runs, "_swap", lambda *folders: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            update(folders[0])
    assert contents(folders[0]) == before
    update(folders[0])
    assert {name for name in contents(folders[0]) if name.endswith(".py")} == set(
        code_files(LlambaConfig, LlambaConfig.from_pretrained(folders[0]))
    )


def test_a_card_says_what_is_compiled(folders):
    for folder in folders:
        update(folder)
        assert KERNELS in (folder / "README.md").read_text()


def test_one_run_at_a_time_and_after_a_kill(folders):
    folder = folders[0]
    stale = folder.with_name(f".{folder.name}.partial-01234567")
    stale.mkdir()
    folder_of_runs.mark(stale, None)
    (stale / "model.safetensors").write_text("half a copy")
    with folder_of_runs._lock(folder), pytest.raises(ValueError, match="Another run is writing"):
        update(folder)
    update(folder)
    assert not stale.exists()


def test_a_folder_without_a_marker_gets_none(folders):
    """As one from the Hub has none."""
    (folders[0] / ".convert-to-hybrid").unlink()
    update(folders[0])
    assert not (folders[0] / ".convert-to-hybrid").exists()


def test_what_cannot_be_updated_is_refused(tmp_path):
    with tarfile.open(BEFORE) as archive:
        archive.extractall(tmp_path, filter="data")
    before = contents(tmp_path / "llamba")
    check_one_line_error(run_as_is("update", tmp_path / "llamba"), "format 1")
    assert contents(tmp_path / "llamba") == before
    check_one_line_error(run_as_is("update", tmp_path), "nothing to update")


def test_newer_versions_of_transformers_are_named_once(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    compatibility.warn_if_newer(compatibility.TESTED)
    compatibility.warn_if_newer("5.16.1")
    assert not caplog.records
    for _ in range(2):
        compatibility.warn_if_newer("5.99.0.dev0")
    (record,) = caplog.records
    assert "5.99.0.dev0 is installed" in record.message
    assert "update FOLDER" in record.message


def test_a_model_asks_whether_transformers_is_newer(monkeypatch):
    asked = []
    monkeypatch.setattr(hybrid_model, "warn_if_newer", lambda: asked.append(1))
    make_hybrid()
    assert asked


def test_drafts_are_refused_by_versions_that_may_go_on_with_those_rejected():
    compatibility.check_drafts("5.18.0")
    with pytest.raises(ValueError, match=r"transformers 5.17.0 .* install 5.18.0 or later"):
        compatibility.check_drafts("5.17.0")


def test_the_sources_say_what_they_were_tested_with():
    """The version in constraints.txt is the newest that make test runs on."""
    constraints = (BEFORE.parents[2] / "constraints.txt").read_text()
    assert f"transformers=={compatibility.TESTED}\n" in constraints
