"""Pull from and push to a stand-in Hub with the real client over HTTP."""

import json

import pytest
import torch
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from convert import cli, convert
from convert.checkpoint.load import load_config
from convert.io.folder import MARKER
from convert.teachers.teacher import download_model, public_name
from modeling_llamba import LlambaForCausalLM
from recipes import evaluate
from recipes.training.arguments import TeacherArguments
from recipes.training.load import load_teacher
from tests.doubles.hub import COMMIT, HubServer
from tests.helpers.command import run
from tests.helpers.teachers import make_teacher, random_ids
from tests.helpers.tokenizers import tokenizer


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    make_teacher("llama-gqa").save_pretrained(folder / "org" / "teacher", max_shard_size="50KB")
    tokenizer().save_pretrained(folder / "org" / "teacher")
    torch.save(make_teacher("llama-gqa").state_dict(), folder / "pytorch_model.bin")
    with HubServer(folder) as server:
        yield server


@pytest.fixture
def connected(hub, tmp_path, monkeypatch):
    hub.connect(monkeypatch, tmp_path / "cache")
    return hub


def test_pull_convert_push_and_pull_again(connected, tmp_path, monkeypatch):
    hub = connected
    done = run("org/teacher", tmp_path / "out", "--push-to-hub", "me/hybrid", "--output.private", "true",
                  "--output.max_shard_size", "60KB")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert hub.private["me/hybrid"]
    pushed = {p.name for p in (hub.root / "me" / "hybrid").iterdir()}
    assert {p.name for p in (tmp_path / "out").iterdir()} - {MARKER} <= pushed
    assert "model.safetensors.index.json" in pushed
    conversion = json.loads((tmp_path / "out" / "config.json").read_text())["conversion"]
    assert conversion["teacher"] == "org/teacher"
    assert conversion["teacher_revision"] == COMMIT
    assert "base_model: org/teacher" in (hub.root / "me" / "hybrid" / "README.md").read_text()
    hub.connect(monkeypatch, tmp_path / "another-cache")
    shipped = json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"]["AutoModelForCausalLM"]
    pulled, ids = get_class_from_dynamic_module(shipped, "me/hybrid").from_pretrained("me/hybrid"), random_ids(1, 7)
    assert type(pulled).__module__.startswith("transformers_modules")
    local = LlambaForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(pulled(ids).logits, local(ids).logits)


def test_a_folder_of_the_hubs_cache_is_known_by_its_repository(connected, tmp_path):
    """A snapshot's folder is called by its commit alone."""
    folder = download_model("org/teacher", None, None, False, True)[0]
    assert folder.name == COMMIT
    assert public_name(str(folder)) == public_name("org/teacher") == "org/teacher"
    convert(str(folder), tmp_path / "out", align="none")
    config = load_config(str(tmp_path / "out"))
    assert config.conversion["teacher"] == "org/teacher"
    assert config.conversion["teacher_revision"] == COMMIT
    assert "base_model: org/teacher" in (tmp_path / "out" / "README.md").read_text()


def generate_beside(hybrid, output):
    cli.main(["generate", str(hybrid), "--prompt", "w1", "--max-new-tokens", "1", "--teacher", "recorded"])


def evaluate_beside(hybrid, output):
    evaluate.main([str(hybrid), "--parts", "speed", "--contexts", "8", "--speed-tokens", "2", "--output", str(output)])


def train_beside(hybrid, output):
    load_teacher(TeacherArguments(), hybrid)


@pytest.mark.parametrize("use", [generate_beside, evaluate_beside, train_beside])
def test_the_recorded_teacher_is_that_of_its_commit(use, connected, tmp_path, monkeypatch):
    """Whatever its repository holds by now."""
    convert("org/teacher", tmp_path / "out", align="none")
    connected.connect(monkeypatch, tmp_path / "another-cache")
    connected.requests.clear()
    use(tmp_path / "out", tmp_path / "results")
    # transformers 5.16 looks for an adapter in the newest commit, whichever it is asked for
    requests = [request for request in connected.requests if "adapter_config.json" not in request]
    asked = [request.split("/")[4] for request in requests if "/org/teacher/resolve/" in request]
    assert set(asked) == {COMMIT}


@pytest.mark.parametrize("path", ["models--org--teacher/snapshots/main", f"teacher/snapshots/{COMMIT}"])
def test_any_other_folder_stays_private(path, tmp_path):
    (tmp_path / path).mkdir(parents=True)
    assert public_name(str(tmp_path / path)) == (tmp_path / path).name


def test_pushing_again_leaves_no_stale_weights_and_never_publishes(connected, tmp_path):
    for number, size in enumerate(("5GB", "60KB")):
        done = run("org/teacher", tmp_path / str(number), "--push-to-hub", "me/again", "--output.max_shard_size", size)
        assert done.returncode == 0, done.stderr
    weights = {p.name for p in (connected.root / "me" / "again").glob("*.safetensors")}
    assert weights == {p.name for p in (tmp_path / "1").glob("*.safetensors")}
    assert "model.safetensors" not in weights
    done = run("org/teacher", tmp_path / "2", "--push-to-hub", "me/again", "--output.private", "true")
    assert done.returncode == 1, done.stderr
    assert "exists and is public" in done.stderr, done.stderr
    assert not (tmp_path / "2").exists()


def test_an_upload_that_is_interrupted_leaves_the_model(connected, tmp_path, monkeypatch, capsys):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", interrupt)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["org/teacher", str(tmp_path / "out"), "--push-to-hub", "me/late", "--align", "none", "-q"])
    assert stopped.value.code == 130
    assert (tmp_path / "out" / "config.json").is_file()
    said = capsys.readouterr().err
    assert "the model is complete in" in said
    assert "hf upload me/late" in said
    assert "OUT is as it was" not in said


def test_a_plan_leaves_the_weights_on_the_hub(connected, tmp_path):
    connected.requests.clear()
    done = run("org/teacher", tmp_path / "out", "--dry-run", "--json", "-q")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tensors"]["moved"] == 31
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


@pytest.mark.parametrize(
    "arguments, token, expected",
    [
        (["org/nothing"], True, "neither a local folder nor a Hub model"),
        (["org/teacher", "--revision", "v9"], True, "no revision 'v9'"),
        (["org/teacher", "--gguf-file", "a.gguf"], True, "no file a.gguf"),
        (["org/teacher", "--push-to-hub", "me/x"], False, "needs a Hub token"),
        (["org/teacher", "--push-to-hub", "me/x"], "hf_wrong", "did not take me/x"),
    ],
)
def test_errors_come_before_the_work(arguments, token, expected, hub, tmp_path, monkeypatch):
    hub.connect(monkeypatch, tmp_path / "cache", **({} if token is True else {"token": token or None}))
    model, *flags = arguments
    done = run(model, tmp_path / "out", *flags)
    assert done.returncode == 1, done.stderr
    assert expected in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()
