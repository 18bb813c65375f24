"""The command in several processes that work together, as torchrun would start them."""

import multiprocessing
import os
import socket
import sys

from tests.helpers.command import run_as_is


def run_forked(arguments, processes, folder):
    """The command in processes forked off this one, which has imported already what takes each seconds; what they
    printed goes to folder / RANK."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def run(rank):
        group = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {name: str(value) for name, value in (group | {"MASTER_PORT": port}).items()}
        done = run_as_is(*arguments)
        (folder / str(rank)).write_text(done.stderr)
        sys.exit(done.returncode)

    started = [multiprocessing.get_context("fork").Process(target=run, args=(rank,)) for rank in range(processes)]
    for process in started:
        process.start()
    for process in started:
        process.join(timeout=600)
    assert [process.exitcode for process in started] == [0] * processes, sorted(folder.iterdir())
