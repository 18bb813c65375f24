"""A fit divided over the processes that `accelerate launch` or `torchrun` started, with the weights of one process.

The first process decides, keeps what is fitted and writes; the others wait for fits to help with. For the teacher's
blocks the rows of text are divided, for the fits the layers, in turns of as many layers as there are processes:

    1. each process moves its rows through the blocks of the turn, and what a layer's attention took in and gave goes
       to the process that fits this layer
    2. each process fits its layer
    3. the mixers go to the first process

Nothing is summed over processes, and rows pass the blocks in the same groups, so that the weights are those of one
process to the bit. A process holds its rows of the residual stream, and one layer's inputs and outputs. What is sent
lies on the host, by gloo.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LONGEST = timedelta(days=7)
"""Time for which a process waits for another; one that ends closes its connections, which is noticed at once."""
FIT, OVER = "fit", "over"


def rank_of_process() -> int:
    """Number of this process among those started together; 0 where it is alone."""
    return int(os.environ.get("RANK", 0)) if int(os.environ.get("WORLD_SIZE", 1)) > 1 else 0


@dataclass(frozen=True)
class Team:
    """Processes that fit together: this one's number, and how many there are."""

    rank: int = 0
    size: int = 1

    def turns(self, layers: list[int]) -> list[list[int]]:
        """Divide layers into turns; in each a process fits one layer at most, by its number."""
        return [layers[first : first + self.size] for first in range(0, len(layers), self.size)]

    def rows(self, count: int, at_once: int, rank: int | None = None) -> slice:
        """The rows that a process moves, this one by default, in whole groups of `at_once`."""
        rank = self.rank if rank is None else rank
        groups = -(-count // at_once)
        first, last = (groups * number // self.size * at_once for number in (rank, rank + 1))
        return slice(min(first, count), min(last, count))

    def gather(self, here: torch.Tensor, whole: torch.Tensor | None, owner: int, at_once: int) -> None:
        """Send this process's rows to the owner, who puts them and all others' into `whole`."""
        with _together():
            if self.rank != owner:
                dist.send(_as_bytes(here), owner)
                return
            for rank in range(self.size):
                part = whole[self.rows(len(whole), at_once, rank)]
                if rank == owner:
                    part.copy_(here)
                else:
                    received = torch.empty_like(part)
                    dist.recv(_as_bytes(received), rank)
                    part.copy_(received)

    def at_the_first(self, result: Any) -> list[Any]:
        """Gather the results of every process: a list in process 0, empty in the others."""
        if self.size == 1:
            return [result]
        results = [None] * self.size if self.rank == 0 else None
        with _together():
            dist.gather_object(result, results)
        return results or []

    def announce(self, what: str, *parts: Any) -> None:
        """Tell the others, who wait for it, what there is to do."""
        if self.size > 1:
            with _together():
                dist.broadcast_object_list([(what, *parts)], 0)

    def wait(self) -> tuple[Any, ...]:
        """Wait for what the first process announces next."""
        announced: list[Any] = [None]
        with _together():
            dist.broadcast_object_list(announced, 0)
        return announced[0]


ALONE = Team()


@contextlib.contextmanager
def joined() -> Iterator[Team]:
    """Join the other processes, if there are any, for as long as the context lasts."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield ALONE
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    with _together():
        dist.init_process_group("gloo", timeout=LONGEST)
    try:
        yield Team(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()  # those who still wait are told so


def _as_bytes(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


@contextlib.contextmanager
def _together() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        raise ValueError(
            f"Another process of this run ended, and this one cannot go on without it ({said[:200]}). Its own error "
            "says why; the same command, on any number of processes, goes on from what is done."
        ) from error
