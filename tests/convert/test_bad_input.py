"""What a user sees when something is wrong: one line, a non-zero exit, nothing lost or half-written."""

import errno
import io
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig, BertModel

from convert.cli import main, progress_bars
from convert.io import writer
from convert.io.folder import LOCK, MARKER, OutputFolder, mark
from tests.helpers.command import check_one_line_error, nothing_left, run, run_as_is
from tests.helpers.teachers import TEACHERS
from tests.helpers.tokenizers import tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def teacher(saved_teacher, tmp_path):
    """A copy to damage."""
    shutil.copytree(saved_teacher("llama-gqa"), tmp_path / "teacher")
    return tmp_path / "teacher"


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def poison(value):
    def change(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value

    return change


NAME = "model.layers.2.self_attn.k_proj.weight"
DAMAGED_WEIGHTS = {
    "missing tensor": (lambda t: t.pop(NAME), ["missing tensor", NAME]),
    "unexpected tensor": (
        lambda t: t.update({"model.layers.0.extra": torch.ones(2)}),
        ["unexpected", "layers.0.extra"],
    ),
    "bias the configuration denies": (
        lambda t: t.update({NAME.replace("weight", "bias"): torch.ones(16)}),
        ["unexpected", "k_proj.bias"],
    ),
    "wrong shape": (lambda t: t.update({NAME: torch.ones(16, 31)}), [NAME, "(16, 31)", "(16, 32)"]),
    "wrong dtype": (lambda t: t.update({NAME: torch.ones(16, 32, dtype=torch.int8)}), [NAME, "quantised"]),
    "NaN": (poison(float("nan")), ["layers.1.mlp.up_proj.weight", "NaN"]),
    "infinity": (poison(float("inf")), ["layers.1.mlp.up_proj.weight", "contains inf"]),
}


@pytest.mark.parametrize("name", DAMAGED_WEIGHTS)
def test_damaged_weights(name, teacher, tmp_path):
    change, expected = DAMAGED_WEIGHTS[name]
    edit_weights(teacher, change)
    check_one_line_error(run(teacher, tmp_path / "out"), *expected)
    nothing_left(tmp_path, "teacher")


def test_truncated_shard(teacher, tmp_path):
    path = teacher / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    check_one_line_error(run(teacher, tmp_path / "out"), "model.safetensors", "truncated")
    path.write_bytes(b"not safetensors")
    check_one_line_error(run(teacher, tmp_path / "out"), "corrupt")
    nothing_left(tmp_path, "teacher")


def test_index_naming_an_absent_shard(teacher, tmp_path):
    (teacher / "model.safetensors").rename(teacher / "model-00001-of-00002.safetensors")
    index = {
        "metadata": {},
        "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
    }
    (teacher / "model.safetensors.index.json").write_text(json.dumps(index))
    check_one_line_error(run(teacher, tmp_path / "out"), "model-00002-of-00002.safetensors")
    (teacher / "model.safetensors.index.json").write_text("{")
    check_one_line_error(run(teacher, tmp_path / "out"), "not a valid shard index")


def test_no_weights_no_config_no_folder(teacher, tmp_path):
    (teacher / "model.safetensors").unlink()
    check_one_line_error(run(teacher, tmp_path / "out"), "holds no weights")
    (teacher / "MODEL.GGUF").touch()  # as a repository of GGUF files with its original's config.json
    check_one_line_error(run(teacher, tmp_path / "out"), "holds no weights", "say --gguf-file MODEL.GGUF")
    (teacher / "config.json").unlink()
    check_one_line_error(run(teacher, tmp_path / "out"), "no config.json")
    check_one_line_error(run(tmp_path / "nowhere", tmp_path / "out"), "does not exist")
    check_one_line_error(run("no/such/thing/at/all", tmp_path / "out"), "does not exist")
    check_one_line_error(run("not a model id!", tmp_path / "out"), "neither a local folder nor")


def test_unreachable_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    for offline in (False, True):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        check_one_line_error(run("org/model", tmp_path / "out"), "org/model", "cannot be reached")


def test_unsupported_architectures(tmp_path):
    tiny = dict(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    BertModel(BertConfig(**tiny)).save_pretrained(tmp_path / "bert")
    check_one_line_error(run(tmp_path / "bert", tmp_path / "out"), "'bert'", "not supported", "llama")


def test_contradictory_or_quantised_configurations(teacher, tmp_path):
    edit_config(teacher, quantization_config={"quant_method": "bitsandbytes"})
    check_one_line_error(run(teacher, tmp_path / "out"), "quantised (bitsandbytes)")
    edit_config(teacher, quantization_config=None, hidden_size=30)
    check_one_line_error(run(teacher, tmp_path / "out"), "hidden")
    edit_config(teacher, hidden_size=32, intermediate_size=64)
    check_one_line_error(run(teacher, tmp_path / "out"), "mlp", "(64, 32)")
    (teacher / "config.json").write_text("{")
    check_one_line_error(run(teacher, tmp_path / "out"), "not valid JSON")


def test_pickles_that_could_run_code(teacher, tmp_path):
    tensors = load_file(teacher / "model.safetensors")
    (teacher / "model.safetensors").unlink()
    torch.save(tensors, teacher / "pytorch_model.bin")
    assert run(teacher, tmp_path / "good").returncode == 0
    torch.save(tensors | {"hook": Hook()}, teacher / "pytorch_model.bin")
    check_one_line_error(run(teacher, tmp_path / "out"), "pytorch_model.bin", "could run code")
    (teacher / "pytorch_model.bin").write_bytes(b"PK\x03\x04 torn")
    check_one_line_error(run(teacher, tmp_path / "out"), "pytorch_model.bin", "corrupt")
    nothing_left(tmp_path, "teacher", "good")


class Hook:
    def __reduce__(self):
        return print, ("this must not run",)


def test_existing_output(teacher, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    check_one_line_error(run(teacher, out), "exists and is not empty", "--overwrite")
    (out / "config.json").write_text("{}")
    check_one_line_error(run(teacher, out, "--overwrite"), "not made by this project")
    made = tmp_path / "made"
    assert run(teacher, made).returncode == 0
    (made / "precious.txt").write_text("mine")
    check_one_line_error(run(teacher, made, "--overwrite"), "precious.txt", "did not put there")
    (made / "precious.txt").unlink()
    before = (made / "config.json").read_bytes()
    edit_weights(teacher, poison(float("nan")))
    check_one_line_error(run(teacher, made, "--overwrite"), "NaN")
    assert (made / "config.json").read_bytes() == before  # a failed run replaces nothing
    edit_weights(teacher, poison(0.0))
    assert run(teacher, made, "--overwrite", "--mixer", "mamba2").returncode == 0
    assert (made / "config.json").read_bytes() != before
    assert (out / "precious.txt").read_text() == "mine"
    (tmp_path / "file").write_text("")
    check_one_line_error(run(teacher, tmp_path / "file"), "is a file")
    check_one_line_error(run(teacher, tmp_path / "file" / "below"), "cannot be written")
    nothing_left(tmp_path, "file", "made", "out", "teacher")


def test_overwriting_never_takes_the_teacher_along(teacher, tmp_path, monkeypatch):
    for folder in (teacher, tmp_path):  # as if an earlier run had made them
        mark(folder, {str(path.relative_to(folder)) for path in folder.rglob("*")})
    before = sorted(os.listdir(teacher))
    for out in (teacher, tmp_path):
        check_one_line_error(run(teacher, out, "--overwrite"), "is or contains the teacher")
    monkeypatch.chdir(tmp_path / "teacher")
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    check_one_line_error(run(other, teacher, "--overwrite"), "working directory")
    assert sorted(os.listdir(teacher)) == before


def test_output_may_be_a_link(teacher, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for flags in ([], ["--overwrite"]):
        assert run(teacher, tmp_path / "link", *flags).returncode == 0
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "real" / "config.json").exists()
    nothing_left(tmp_path, "link", "real", "teacher")


def test_a_run_killed_while_swapping_loses_nothing(teacher, tmp_path):
    """The old checkpoint was moved away and the new one not yet there: the next run brings it back first."""
    assert run(teacher, tmp_path / "out").returncode == 0
    (tmp_path / "out").rename(tmp_path / ".out.replaced-0123abcd")
    (tmp_path / ".out.partial-mine").mkdir()
    edit_weights(teacher, poison(float("nan")))
    check_one_line_error(run(teacher, tmp_path / "out"), "NaN")
    assert (tmp_path / "out" / "model.safetensors").exists()
    nothing_left(tmp_path, ".out.partial-mine", "out", "teacher")


def test_error_text_is_printed_as_it_is(tmp_path):
    check_one_line_error(run(tmp_path / "a[/b]", tmp_path / "out"), "a[/b]")


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="root may write everywhere")
def test_output_not_writable(teacher, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    code = (
        "import sys; from pathlib import Path; from convert.io.folder import check_output\n"
        "check_output(Path(sys.argv[1]), False)"
    )
    prefix = ["setpriv", "--reuid", "65534", "--clear-groups"] if os.geteuid() == 0 else []
    for folder in (tmp_path, *tmp_path.parents):
        if (
            os.stat(folder).st_uid == os.geteuid()
            and folder != locked
            and str(folder).startswith(str(tmp_path.parents[1]))
        ):
            folder.chmod(0o755)
    done = subprocess.run([*prefix, sys.executable, "-c", code, str(locked / "out")], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "no permission" in done.stderr or "Permission denied" in done.stderr, done.stderr


def test_disk_full(saved_teacher, tmp_path):
    """A limit on file size stands in for a full disk: the same write fails, with another number."""

    teacher, limits = saved_teacher("llama-gqa"), resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        done = run(teacher, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    check_one_line_error(done, "disk is full")
    nothing_left(tmp_path)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 100 kB, and how to give it another size."""
    small = tmp_path / "small"
    small.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(small)]).returncode:
        pytest.skip("this machine does not let us mount a tmpfs")
    yield small, lambda size: subprocess.run(["mount", "-o", f"remount,size={size}", str(small)], check=True)
    subprocess.run(["umount", str(small)], check=True)


def test_disk_really_full(saved_teacher, small_disk):
    small, _ = small_disk
    check_one_line_error(run(saved_teacher("llama-gqa"), small / "out"), "disk is full")
    nothing_left(small)


@pytest.mark.parametrize(
    "memory, file", [("4GB", "safetensors"), ("1kB", "activations")], ids=["a fit", "activations"]
)
def test_a_disk_that_fills_in_the_work_folder(memory, file, saved_teacher, small_disk, tmp_path):
    """Nothing is lost: with more room, the same command goes on from the fits that were kept."""
    small, resize = small_disk
    flags = ("--text", "sampled", "--tokens", "1024", "--attention-layers", "none", "--alignment.fit.refine_steps=0")
    flags += ("--alignment.sequence_length", "128", "--alignment.activation_memory", memory)
    flags += ("--alignment.work_dir", small, "--align", "closed-form")
    resize("44k")
    check_one_line_error(run(saved_teacher("llama-gqa"), tmp_path / "out", *flags), "disk is full, while", file)
    nothing_left(tmp_path, "small")
    kept = {path: path.stat().st_mtime_ns for path in small.glob("*/layer-*.safetensors")}
    assert bool(kept) == (memory == "4GB")
    assert not list(small.glob(".activations*"))
    resize("1M")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("convert.fit.fit.FitCache.drop", lambda cache: None)
        assert run(saved_teacher("llama-gqa"), tmp_path / "out", *flags).returncode == 0
    assert all(path.stat().st_mtime_ns == time_ for path, time_ in kept.items())


def interrupted(kind, folder):
    """The command in this process, which sends itself a signal at the third block that it writes."""
    write_all = writer._write_all
    written = []

    def counted(file, data):
        write_all(file, data)
        written.append(data)
        if len(written) == 3:
            os.kill(os.getpid(), kind)
        time.sleep(0.2)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's children ignore Ctrl-C
    writer._write_all = counted
    sys.stderr = open(folder / f"{kind.name}.txt", "w")
    try:
        main([str(folder / "teacher"), str(folder / kind.name), "-q", "--align", "none"])
    except SystemExit as stop:
        sys.stderr.write(f"{stop.code}\n")
        sys.stderr.flush()
    os._exit(0)


def test_interrupted_half_way(teacher, tmp_path):
    """In processes forked off this one, which has imported torch."""
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        process = multiprocessing.get_context("fork").Process(target=interrupted, args=(kind, tmp_path))
        process.start()
        process.join(timeout=120)
        assert process.exitcode == (-signal.SIGKILL if kind == signal.SIGKILL else 0)
    for kind in ("SIGINT", "SIGTERM"):
        errors = (tmp_path / f"{kind}.txt").read_text()
        assert errors.endswith("\n130\n")
        assert "interrupted; OUT is as it was;" in errors
        assert "Traceback" not in errors
        assert not list(tmp_path.glob(f".{kind}*"))
    (partial,) = tmp_path.glob(".SIGKILL.partial-*")
    assert not (partial / "config.json").exists()  # nothing takes it for a checkpoint
    assert not any((tmp_path / kind).exists() for kind in ("SIGINT", "SIGTERM", "SIGKILL"))
    assert run(teacher, tmp_path / "SIGKILL").returncode == 0
    nothing_left(tmp_path, "SIGINT.txt", "SIGKILL", "SIGKILL.txt", "SIGTERM.txt", "teacher")  # the rerun cleaned up


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["--attention-layers", "1,4"], ["layer 4 is out of range", "0 to 3"]),
        (["--attention-layers", "-1"], ["out of range"]),
        (["--attention-layers", "1,1"], ["listed twice"]),
        (["--attention-layers", "some"], ["'some'", "hybrid-phi-mamba"]),
        (["--attention-layers", "hybrid-phi-mamba"], ["24 layers", "has 4"]),
        (["--attention-layers", "1.5"], ["between 0 and 1"]),
        (["--attention-layers", "MX"], ["'MX' is neither", "a pattern of M (mixer) and A (attention)"]),
        (["--attention-layers", "MMMMA"], ["5 letters", "4 layers"]),
        (["--attention-layers", "1", "--cache", "0.5"], ["cache already sets how many layers", "drop one"]),
        (["--cache", "1.5"], ["cache 1.5 is no share"]),
        (["--cache", "lots"], ["'lots' is not a size"]),
        (["--cache", "8%"], ["'8%' is not a size", "a share of 8 % is 0.08"]),
        (["--mixer", "mamba3"], ["--mixer must be discrete_mamba2 or mamba2 or mamba1 or none, not mamba3"]),
        (["--align", "magic"], ["--align must be none or closed-form or mohawk, not magic"]),
        (["--dtype", "int4"], ["--dtype must be auto or float32 or bfloat16 or float16, not int4"]),
        (["--window", "wide"], ["--window must be a whole number of at least 2 and at most 16777216, not wide"]),
        (["--mixer.initial_decay", "0"], ["initial_decay must be a number above 0 and at most 1, not 0"]),
        (["--mixer.norm", "head"], ["mamba2 mixer only"]),
        (["--mixer.d_state", "4", "--mixer.rotary", "true"], ["say rotary: false"]),
        (["--mixer.d_state", "0"], ["d_state must be a whole number above 0, not 0"]),
        (["--mixer", "mamba1", "--mixer.d_state", "5"], ["multiple"]),
        (["--output.max_shard_size", "lots"], ["'lots' is not a size"]),
        (["--output.private", "true"], ["push_to_hub"]),
        (["--revision", "main"], ["local", "revision"]),
        (["--gguf-file", "x.gguf"], ["no file x.gguf"]),
        (["--push-to-hub", "me/model"], ["token"]),
    ],
)
def test_bad_options(flags, expected, saved_teacher, tmp_path, monkeypatch):
    monkeypatch.setattr("convert.checkpoint.hub.get_token", lambda: None)
    check_one_line_error(run(saved_teacher("llama-gqa"), tmp_path / "out", *flags), *expected)
    nothing_left(tmp_path)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--dry-run"], "No model given"),
        (["model", "--dry-run"], "No output folder given"),
        (["model", "out", "more"], "one argument too many: 'more'"),
        (["model", "out", "--atention-layers", "0.5"], "--atention-layers; did you mean --attention-layers?"),
        (["model", "out", "--sinks", "2"], "--sinks; did you mean --placement.sinks?"),
        (["model", "out", "--initial-decay", "2"], "did you mean --mixer.initial_decay?"),
        (["model", "out", "--window"], "--window needs a value"),
        (["model", "--window", "--overwrite", "out"], "--window needs a value"),
    ],
)
def test_missing_and_misspelt_arguments(arguments, expected):
    check_one_line_error(run(*arguments), expected)


def test_verbose_shows_the_traceback(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        run(tmp_path / "nowhere", tmp_path / "out", "--verbose")


def test_float16_that_overflows(teacher, tmp_path):
    edit_weights(teacher, poison(1e6))
    check_one_line_error(run(teacher, tmp_path / "out", "--dtype", "float16"), "does not fit into float16", "bfloat16")
    nothing_left(tmp_path, "teacher")


def test_bad_gguf(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF but not really")
    check_one_line_error(run(tmp_path / "model.gguf", tmp_path / "out"), "model.gguf")
    (tmp_path / "model.onnx").write_bytes(b"")
    check_one_line_error(run(tmp_path / "model.onnx", tmp_path / "out"), "neither a folder nor a GGUF file")


def test_every_family_refuses_a_stranger_tensor(saved_teacher, tmp_path):
    for name in ("phi", "phi3", "qwen3"):
        shutil.copytree(saved_teacher(name), tmp_path / name)
        edit_weights(tmp_path / name, lambda t: t.update({"model.stray": torch.ones(1)}))
        from convert import convert

        with pytest.raises(ValueError, match="unexpected tensor model.stray"):
            convert(str(tmp_path / name), tmp_path / "out", align="none")
    assert len(TEACHERS) > 10


def test_only_what_this_project_made_is_swept(saved_teacher, tmp_path):
    names = {kind: f".out.partial-{kind:08x}" for kind in range(3)}
    for name in names.values():
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis").write_text("mine")
    mark(tmp_path / names[1], None)
    mark(tmp_path / names[2], {MARKER})
    assert run(saved_teacher("llama-gqa"), tmp_path / "out").returncode == 0
    nothing_left(tmp_path, names[0], names[2], "out")


def test_a_work_folder_of_somebody_else_stays(saved_teacher, tmp_path):
    (tmp_path / "out.work").mkdir()
    (tmp_path / "out.work" / "thesis").write_text("mine")
    check_one_line_error(
        run_as_is(saved_teacher("llama-gqa"), tmp_path / "out"), "out.work", "not a folder that this run may delete"
    )
    owner = OutputFolder(tmp_path / "other")
    with owner:
        (owner.make_work() / ("0" * 20)).mkdir()
        for name in ("thesis", "README.md"):
            (owner.work / name).write_text("mine")
        (owner.work / "2024").mkdir()
    assert sorted(os.listdir(owner.work)) == [MARKER, "2024", "README.md", "thesis"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "third.work").symlink_to(tmp_path / "mine")
    check_one_line_error(
        run_as_is(saved_teacher("llama-gqa"), tmp_path / "third"),
        "third.work",
        "not a folder that this run may delete",
    )
    nothing_left(tmp_path, "mine", "other.work", "out.work", "third.work")


@pytest.mark.parametrize("content", ["", "mine"])
@pytest.mark.parametrize("locks", [True, False])
def test_a_file_that_is_called_like_the_lock_stays(content, locks, tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    if not locks:
        monkeypatch.setattr("fcntl.flock", no_locks)
    (tmp_path / ".out.lock").write_text(content)
    for name in ("out", "other"):
        with OutputFolder(tmp_path / name) as owner, owner.staged():
            assert (tmp_path / f".{name}.lock").is_file()
    assert (tmp_path / ".out.lock").read_text() == content
    nothing_left(tmp_path, ".out.lock", "out", "other")


@pytest.mark.parametrize("unnamed", [True, False])
def test_a_run_that_ends_while_it_makes_its_lock_leaves_none(unnamed, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    class FullFile(io.FileIO):
        write = full

    owner = OutputFolder(tmp_path / "out")
    with monkeypatch.context() as patched:
        if not unnamed:
            patched.delattr(os, "O_TMPFILE", raising=False)
        patched.setattr("convert.io.folder.open", lambda file, mode, **_: FullFile(file, mode), raising=False)
        with pytest.raises(OSError, match="No space"):
            owner.__enter__()
    nothing_left(tmp_path)
    with monkeypatch.context() as patched:
        if not unnamed:
            patched.delattr(os, "O_TMPFILE", raising=False)
        with owner:
            assert (tmp_path / ".out.lock").read_bytes() == LOCK
    nothing_left(tmp_path)


@pytest.mark.parametrize("exchanges", [True, False])
def test_out_is_looked_at_again_before_it_is_replaced(exchanges, tmp_path, monkeypatch):
    if not exchanges:
        monkeypatch.setattr("convert.io.folder._exchange", lambda one, other: False)
    out = tmp_path / "out"

    def write(content, overwrite, meanwhile=lambda: None):
        with OutputFolder(out, overwrite) as owner, owner.staged() as folder:
            (folder / "config.json").write_text(content)
            meanwhile()

    def appears():
        out.mkdir()
        (out / "thesis").write_text("mine")

    with pytest.raises(ValueError, match="exists and is not empty"):
        write("1", False, appears)
    with pytest.raises(ValueError, match="not made by this project"):
        write("1", True)
    (out / "thesis").unlink()
    write("1", False)
    write("2", True)
    assert (out / "config.json").read_text() == "2"
    with pytest.raises(ValueError, match="thesis"):
        write("3", True, lambda: (out / "thesis").write_text("mine"))
    (out / "thesis").unlink()
    with pytest.raises(ValueError, match="Another run is writing"), OutputFolder(out, True):
        write("4", True)
    assert sorted(os.listdir(out)) == [MARKER, "config.json"]
    nothing_left(tmp_path, "out")


@pytest.mark.parametrize(
    "dtype, value, flags",
    [
        (torch.float32, 1e6, ["--dtype", "float16"]),
        (torch.float64, 1e300, ["--dtype", "float32"]),
        (torch.float32, 3e38, ["--mixer", "mamba1", "--attention-layers", "none"]),
    ],
)
def test_weights_too_large_are_refused(dtype, value, flags, teacher, tmp_path):
    edit_weights(teacher, lambda t: t.update({name: tensor.to(dtype) for name, tensor in t.items()}))
    edit_weights(teacher, poison(value))
    check_one_line_error(
        run(teacher, tmp_path / "out", *flags), "does not fit into" if value == 1e6 else f"contains {value:.2g}"
    )
    nothing_left(tmp_path, "teacher")


@pytest.mark.parametrize(
    "name, field, value",
    [
        ("granite", "embedding_multiplier", float("inf")),
        ("granite", "residual_multiplier", float("inf")),
        ("gemma2", "final_logit_softcapping", float("inf")),
        ("gemma2", "query_pre_attn_scalar", 0),
        ("qwen3-moe", "decoder_sparse_step", 0),
    ],
)
def test_a_number_that_no_model_can_have_is_named(name, field, value, saved_teacher, tmp_path):
    shutil.copytree(saved_teacher(name), tmp_path / "teacher")
    edit_config(tmp_path / "teacher", **{field: value})
    check_one_line_error(run(tmp_path / "teacher", tmp_path / "out", "--dry-run"), f"{field} must be a", str(value))


def test_a_damaged_fit_is_made_again(teacher, tmp_path):
    flags = ("--text", "sampled", "--tokens", "640", "--alignment.sequence_length", "64", "--attention-layers", "1")
    flags += ("--alignment.fit.refine_steps=0", "--align", "closed-form")
    work = ("--alignment.work_dir", tmp_path / "work")
    edit_weights(teacher, poison(1e6))
    check_one_line_error(run(teacher, tmp_path / "out", *flags, *work, "--dtype", "float16"), "does not fit")
    fits = sorted((tmp_path / "work").glob("*/layer-*.safetensors"))
    assert len(fits) == 3
    stored = load_file(fits[0])
    save_file({name: tensor * float("nan") for name, tensor in stored.items()}, fits[0])
    fits[1].write_bytes(b"torn")
    fits[2].with_suffix(".json").write_text("[")
    assert run(teacher, tmp_path / "out", *flags, *work).returncode == 0
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in written.values())


def test_a_head_that_differs_is_kept_although_the_configuration_ties_it(saved_teacher, tmp_path):
    shutil.copytree(saved_teacher("llama-mha-tied"), tmp_path / "teacher")
    edit_weights(tmp_path / "teacher", lambda t: t.update({"lm_head.weight": torch.randn(128, 32)}))
    assert run(tmp_path / "teacher", tmp_path / "out", "--attention-layers", "all").returncode == 0
    ids = torch.arange(3, 40)[None]
    ours, theirs = (AutoModelForCausalLM.from_pretrained(tmp_path / name)(ids).logits for name in ("out", "teacher"))
    torch.testing.assert_close(ours, theirs)


def test_a_hybrid_as_the_teacher(teacher, tmp_path):
    run(teacher, tmp_path / "hybrid", "--attention-layers", "0.5")
    done = run(tmp_path / "hybrid", tmp_path / "out")
    check_one_line_error(done, "is a hybrid already", "convert-to-hybrid mohawk")


def test_generate_refuses_a_model_with_missing_weights(teacher, tmp_path):
    assert run(teacher, tmp_path / "out").returncode == 0
    edit_weights(tmp_path / "out", lambda t: [t.pop(name) for name in list(t) if "norm" in name])
    tokenizer().save_pretrained(tmp_path / "out")
    check_one_line_error(run_as_is("generate", tmp_path / "out", "--prompt", "w1"), "are missing", "norm.weight")


@pytest.mark.parametrize("licence", ["mit", "[mit, apache-2.0]"])
def test_a_card_has_the_licence_of_the_teacher(licence, teacher, tmp_path):
    (teacher / "README.md").write_text(f"---\nlicense: {licence}\n---\n# Teacher\n")
    (teacher / "LICENSE").write_text("MIT")
    assert run(teacher, tmp_path / "out").returncode == 0
    assert ModelCard.load(tmp_path / "out" / "README.md").data.license == yaml.safe_load(licence)
    assert (tmp_path / "out" / "LICENSE").is_file()


@pytest.mark.parametrize(
    "file, content, expected",
    [
        ("tokenizer.json", "garbage", "no tokenizer that can be read"),
        ("chat_template.jinja", "{% for m in messages %}", "chat template"),
        ("additional_chat_templates/tool.jinja", "{{ messages[ }}", "chat template"),
        ("tokenizer_config.json", json.dumps({"chat_template": "{% generation %}{{ 1 }}"}), "chat template"),
        ("tokenizer_config.json", json.dumps({"chat_template": 5}), "chat template"),
        ("generation_config.json", json.dumps({"do_sample": 1, "top_p": 0.9}), "do_sample"),
        ("generation_config.json", json.dumps({"output_attentions": "default"}), "output_attentions"),
    ],
)
def test_side_files_are_read_before_the_work(file, content, expected, teacher, tmp_path, monkeypatch):
    tokenizer().save_pretrained(teacher)
    (teacher / file).parent.mkdir(exist_ok=True)
    (teacher / file).write_text(content)
    monkeypatch.setattr("convert.pipeline.Aligner", None)  # would fail otherwise
    check_one_line_error(run_as_is(teacher, tmp_path / "out"), str(teacher), expected)


def test_a_damaged_configuration_is_not_said_to_be_the_tokenizers(teacher):
    tokenizer().save_pretrained(teacher)
    (teacher / "config.json").write_text('{"model_type": "llam')
    check_one_line_error(run_as_is("generate", teacher, "--prompt", "w1"), f"{teacher}/config.json is not valid JSON")


def test_a_model_that_is_nowhere():
    check_one_line_error(
        run_as_is("generate", "nowhere/at-all", "--prompt", "w1"), "check the spelling, or the network"
    )


def test_the_edge_says_what_was_being_done(teacher, tmp_path, monkeypatch):
    def fail(*arguments):
        raise kinds.pop()

    monkeypatch.setattr("convert.dry_run.make_plan", fail)
    kinds = [MemoryError(), RecursionError("too deep"), KeyError("x"), OSError(28, "No space left on device")]
    said = ["the disk is full", "unexpected KeyError", "unexpected RecursionError", "out of memory"]
    for text in said:
        check_one_line_error(run(teacher, tmp_path / "out"), text, "while planning and fitting")
    check_one_line_error(run(tmp_path / "a\x1b[31mb", tmp_path / "out"), "a\N{REPLACEMENT CHARACTER}[31mb")


def test_a_log_has_a_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr("convert.cli.LINE_EVERY", 0.05)
    monkeypatch.setattr("convert.cli.console", Console(stderr=True, soft_wrap=True))
    with progress_bars(False) as report:
        report("aligning, layers", 1, 4)
        time.sleep(0.4)
        report("aligning, layers", 4, 4)
        report("writing, MB", 2000, 2000)
    said = capsys.readouterr().err
    running = r"^aligning, layers: 1 of 4 after 0\.\d s, (0\.\d s each|[\d,]+ a second)$"
    assert len(re.findall(running, said, re.MULTILINE)) > 2
    assert re.search(r"^aligning, layers: 4 of 4 after 0\.\d s, (0\.\d s each|\d+ a second)$", said, re.MULTILINE)
    assert re.search(r"^writing, MB: 2,000 of 2,000 after 0\.\d s, [\d,]+ a second$", said, re.MULTILINE)


@pytest.mark.parametrize(
    "text", ["a: &a [x]\nb: [*a, *a]", "seed: " + "[" * 5000, "placement: {window: 1e400}", "seed: 1" + "0" * 5000]
)
def test_yaml_that_would_explode(text, teacher, tmp_path):
    (tmp_path / "x.yaml").write_text(text)
    done = run_as_is(teacher, tmp_path / "out", "--config", tmp_path / "x.yaml")
    check_one_line_error(done)
    assert "unexpected" not in done.stderr


def test_the_installed_command_starts():
    """It knows this project's packages by a file in each, which may move."""
    code = "import sys, convert_to_hybrid; sys.argv = ['convert-to-hybrid', '--help']; convert_to_hybrid.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage: convert-to-hybrid" in done.stdout


def test_windows_is_refused_in_a_line():
    code = "import sys; sys.platform = 'win32'; import convert_to_hybrid; convert_to_hybrid.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    check_one_line_error(done)
    assert "install it in WSL" in done.stderr


def test_another_package_of_the_same_name_is_said(tmp_path):
    (tmp_path / "convert").mkdir()
    (tmp_path / "convert" / "__init__.py").write_text("")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import convert_to_hybrid; convert_to_hybrid.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert "stands where this project's package convert should" in done.stderr
