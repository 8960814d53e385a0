"""Processes that torchrun started on this machine, one per GPU, and the messages that they send to the first one."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ssdprof.errors import BadInputError, MissingCapabilityError

T = TypeVar("T")
POLL_S = 0.2
FIRST = 0  # the rank that writes the report
_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun, with WORLD_SIZE
SLOWEST_S = 10.0  # one rank may be ahead of another by this time before work is divided


@dataclass(frozen=True)
class Ranks:
    """This process and the others.  store: torchrun's, which outlives every process."""

    divided: ClassVar[bool] = False  # of this process; before work is divided, all ranks have the same errors

    rank: int
    count: int
    store: Any
    _seen: dict[int, int] = field(default_factory=dict)  # rank -> messages that were read
    _sent: list[str] = field(default_factory=list)

    @property
    def first(self) -> bool:
        return self.rank == FIRST

    def share(self, items: Sequence[T], rank: int | None = None) -> tuple[T, ...]:
        """The items of a rank, by default of this one: every `count`th of `items`."""
        Ranks.divided = True
        return tuple(items[self.rank if rank is None else rank :: self.count])

    def send(self, text: str) -> None:
        """Send to the first rank.  The message stays available if this process ends."""
        self.store.set(f"{self.rank}/{len(self._sent)}", text)
        self._sent.append(text)

    def received(self) -> Iterator[tuple[int, str]]:
        """The messages of other ranks since the last call, with their ranks."""
        for rank in range(self.count):
            if rank == self.rank:
                continue
            while self.store.check([key := self._next(rank)]):
                self._seen[rank] = self._seen.get(rank, 0) + 1
                yield rank, self.store.get(key).decode()

    def sent(self) -> Iterator[str]:
        """All messages since the beginning, including those of this rank."""
        for rank in range(self.count):
            number = 0
            while self.store.check([key := f"{rank}/{number}"]):
                yield self.store.get(key).decode()
                number += 1

    def end(self) -> None:
        """Tell the others that this rank has finished its share and sent all results."""
        self.store.set(f"{self.rank}/end", "")

    @property
    def ended(self) -> bool:
        """Whether the ranks that this one waits for have ended, and all their messages were received."""
        return all(self._has_ended(rank) and not self.store.check([self._next(rank)]) for rank in self._awaited)

    def lost(self) -> tuple[int, ...]:
        """The ranks that this one waits for and that died before they ended."""
        return tuple(rank for rank in self._awaited if not self._alive(rank) and not self._has_ended(rank))

    def waiting(self) -> Iterator[None]:
        """Yields from time to time until the awaited ranks have ended and all messages were received.

        Raises MissingCapabilityError, with the name of the rank, if one died.
        """
        while not self.ended:
            yield
            if lost := self.lost():
                yield  # messages that it sent before it died
                raise self.gone(lost)
            time.sleep(POLL_S)

    def gone(self, lost: Sequence[int]) -> MissingCapabilityError:
        """The error for ranks that died."""
        names = " and ".join(f"rank {rank}" for rank in lost).capitalize()
        return MissingCapabilityError(
            f"{names} of {self.count} died before its share was done.",
            "Its own messages say why.  A process that was killed leaves none: often it took too much main memory.",
        )

    @property
    def _awaited(self) -> Sequence[int]:
        """The first rank waits for all others, and they wait for the first."""
        return range(FIRST + 1, self.count) if self.first else (FIRST,)

    def _next(self, rank: int) -> str:
        return f"{rank}/{self._seen.get(rank, 0)}"

    def _has_ended(self, rank: int) -> bool:
        ended: bool = self.store.check([f"{rank}/end"])
        return ended

    def _alive(self, rank: int) -> bool:
        """Whether the rank's process runs; one that has not yet joined counts as running."""
        if not self.store.check([f"{rank}/process"]):
            return True
        return _runs(int(self.store.get(f"{rank}/process")))


def started(environment: Mapping[str, str] = os.environ) -> int:
    """Processes that torchrun started, this one included; 1 without torchrun.

    BadInputError for a WORLD_SIZE that torchrun does not set.
    """
    count = environment.get("WORLD_SIZE") or "1"
    if not re.fullmatch(r"[1-9][0-9]{0,8}", count):
        raise BadInputError(f"WORLD_SIZE={count!r} is not a number of processes.", "Run: unset WORLD_SIZE")
    return int(count)


def first_tells(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the first rank reports the error of this rank.

    Before work is divided, all ranks have the same error, and torchrun ends this process after the first one has
    ended.  If torchrun does not, only this rank has the error.
    """
    if not follows(environment):
        return False
    try:
        time.sleep(SLOWEST_S)
    except KeyboardInterrupt:
        return True
    return False


def follows(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this rank is not the first, and has so far done the same as the first."""
    return not Ranks.divided and started(environment) > 1 and int(environment.get("RANK", FIRST)) != FIRST


def join(environment: Mapping[str, str] = os.environ) -> Ranks | None:
    """Join the other processes of torchrun, and select this process's GPU.  None if there are no others.

    BadInputError for processes on several machines, and if torchrun did not start this one; MissingCapabilityError
    for more processes than GPUs.
    """
    count = started(environment)
    if count == 1:
        return None
    if environment.get("LOCAL_WORLD_SIZE", str(count)) != str(count):
        raise BadInputError(
            "Ranks on several machines are not supported.", "Start all of them on one: torchrun --nproc-per-node N."
        )
    if absent := [name for name in _OF_TORCHRUN if not environment.get(name)]:
        raise BadInputError(
            f"WORLD_SIZE={count} asks for {count} ranks, but {absent[0]} is not set: torchrun did not start this "
            "process.",
            f"For one process, run: unset WORLD_SIZE.  For {count}: torchrun --nproc-per-node {count} -m ssdprof ...",
        )
    import torch
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if torch.cuda.is_available():
        if count > (gpus := torch.cuda.device_count()):
            raise MissingCapabilityError(
                f"{count} ranks need {count} GPUs, because each measures on its own; {gpus} can be used here.",
                f"Start torchrun --nproc-per-node {gpus}.",
            )
        torch.cuda.set_device(int(environment["LOCAL_RANK"]))
    store, rank, count = next(iter(rendezvous("env://")))
    joined = Ranks(rank, count, PrefixStore("ssdprof", store))
    joined.store.set(f"{rank}/process", str(os.getpid()))
    return joined


def _runs(process: int) -> bool:
    """Whether the process with this number is running; a zombie is not."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:  # its parent has just read its exit code
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
