"""Runs that are killed at random moments, and runs that race: OUT is whole at all times, and nothing is left over."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from safetensors import safe_open

from convert.cli import one_line_errors

# One process imports torch; each command runs in a fork of it, and reports its exit code.
RUNNER = """
import json, os, signal, sys, time
import convert.cli, convert.pipeline, convert.checkpoint.write as write
write.save_pictures = lambda *arguments: None
print("ready", flush=True)
for line in sys.stdin:
    commands, delay, kind, log = json.loads(line)
    children = []
    for number, command in enumerate(commands):
        child = os.fork()
        if not child:
            for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(each, signal.SIG_DFL)
            sys.stderr = open(f"{log}.{number}", "w")
            convert.cli.console.file = sys.stderr
            code = 0
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                convert.cli.main(command)
            except SystemExit as stop:
                code = stop.code
            except BaseException:
                import traceback
                traceback.print_exc()
                code = 99
            sys.stderr.flush()
            os._exit(code)
        children.append(child)
    if kind:
        time.sleep(delay)
        os.kill(children[0], kind)
    print(json.dumps([os.waitpid(child, 0)[1] for child in children]), flush=True)
"""


@pytest.fixture
def runner():
    """Runs commands at once and returns their statuses, the first killed after a delay where a signal is given."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([sys.executable, "-c", RUNNER], env=environment, **pipes) as process:
        assert process.stdout.readline() == "ready\n"

        def run(commands, log, delay=0.0, kind=0):
            process.stdin.write(
                json.dumps([[[str(part) for part in c] for c in commands], delay, kind, str(log)]) + "\n"
            )
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield run
        process.stdin.close()


def is_whole(out, mixers):
    """Whether a folder is one of the complete checkpoints that were written to it."""
    config = json.loads((out / "config.json").read_text())
    listed = json.loads((out / ".convert-to-hybrid").read_text())["files"]
    with safe_open(out / "model.safetensors", "pt") as weights:
        assert len(weights.keys()) > 20
    assert sorted(listed) == sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file())
    return config["mixer"] in mixers


def command_of(teacher, out, mixer, align):
    aligned = ("--text", "sampled", "--tokens", "640", "--alignment.sequence_length", "64",
               "--alignment.fit.refine_steps=2") if align else ("--align", "none")  # fmt: skip
    return [teacher, out, "--mixer", mixer, "--attention-layers", "1", "--overwrite", *aligned]


def kill_often(count, seed, teacher, folder, run):
    print(f"seed {seed}")
    rng, out, log = random.Random(seed), folder / "out", folder / "log"
    assert run([command_of(teacher, out, "mamba2", False)], log) == [0]
    longest, killed, mixers = {False: 0.6, True: 2.0}, 0, ("mamba2", "discrete_mamba2")
    for number in range(count):
        kind = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
        align = number % 4 == 0
        command = command_of(teacher, out, mixers[number % 2], align)
        before = {path.name for path in folder.iterdir()}
        (status,) = run([command], log, rng.uniform(0, longest[align]), int(kind))
        said = (folder / "log.0").read_text()
        assert is_whole(out, mixers), (number, kind, said)
        names = {path.name for path in folder.iterdir()}
        if os.WIFSIGNALED(status):  # by SIGKILL, or before the command could take a signal
            killed += 1
        else:
            killed += os.WEXITSTATUS(status) == 130
            assert os.WEXITSTATUS(status) in (0, 130), (number, kind, said)
            assert "Traceback" not in said, (number, kind, said)
            assert names - before <= {"out.work"}, (number, kind, names - before)
            kept = os.WEXITSTATUS(status) == 130 and "out.work" in names - before
            assert not kept or "the same command goes on from there" in said, (number, kind, said)
    assert run([command_of(teacher, out, "mamba2", True)], log) == [0]
    assert {path.name for path in folder.iterdir()} == {"out", "log.0"}, "the last run swept what was left"
    print(f"{killed} of {count} were killed while they ran")


def race_often(count, teacher, folder, run):
    for number in range(count):
        out = folder / f"out{number}"
        overwrite = number % 2 == 0
        commands = [command_of(teacher, out, mixer, False) for mixer in ("mamba2", "discrete_mamba2")]
        commands = [[part for part in c if overwrite or part != "--overwrite"] for c in commands]
        codes = [os.WEXITSTATUS(status) for status in run(commands, folder / "log")]
        said = [(folder / f"log.{i}").read_text() for i in range(2)]
        assert sorted(codes) in ([0, 0], [0, 1]), said
        assert overwrite or sorted(codes) == [0, 1], said
        for code, text in zip(codes, said, strict=True):
            assert code == 0 or "Another run is writing" in text or "exists and is not empty" in text, text
        assert is_whole(out, ("mamba2", "discrete_mamba2"))
        assert {p.name for p in folder.iterdir() if not p.name.startswith("out")} == {"log.0", "log.1"}


def test_an_interrupt_that_meets_a_destructor_is_not_lost(capsys):
    class Destroyed:
        def __del__(self):
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # which workers of the test runner ignore
    try:
        with pytest.raises(SystemExit) as stopped, one_line_errors(verbose=False):
            Destroyed()
            # the interrupt is delivered between two lines of Python, not within a sleep
            for _ in range(1000):
                time.sleep(0.01)
            pytest.fail("the interrupt was ignored")
    finally:
        signal.signal(signal.SIGINT, previous)
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "error: interrupted.\n"


def test_a_few_kills_and_races(saved_teacher, tmp_path, runner):
    (tmp_path / "kills").mkdir()
    (tmp_path / "races").mkdir()
    kill_often(4, 0, saved_teacher("llama-gqa", 2), tmp_path / "kills", runner)
    race_often(1, saved_teacher("llama-gqa", 2), tmp_path / "races", runner)


@pytest.mark.slow
def test_a_hundred_kills(saved_teacher, tmp_path, runner):
    kill_often(120, random.SystemRandom().randrange(2**31), saved_teacher("llama-gqa", 2), tmp_path, runner)


@pytest.mark.slow
def test_two_writers_race(saved_teacher, tmp_path, runner):
    race_often(24, saved_teacher("llama-gqa", 2), tmp_path, runner)
