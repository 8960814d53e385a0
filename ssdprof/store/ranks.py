"""Ranks: processes that torchrun started on this machine, one per GPU, which share the cases of one
report.

Each rank writes a file of its own into the report's folder, and holds the file's lock while it runs
(`store.reports`).  Through torchrun's store the first rank gives the others the folder, and each
rank says that it has opened its file.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ssdprof.environment.child import rank_count
from ssdprof.errors import BadInputError, MissingCapabilityError

T = TypeVar("T")
POLL_S = 0.2  # seconds between two looks at the store or at a lock
FIRST_RANK = 0  # the rank that makes the folder and prints the report
# torchrun sets these besides WORLD_SIZE
_TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# before work is divided, one rank is ahead of another by at most so much
LONGEST_LAG_S = 10.0


@dataclass(frozen=True)
class Ranks:
    """This process as one of several ranks.

    rank: the number of this one, from 0.
    count: the number of ranks.
    store: torchrun's store, which outlives every rank.
    divided: whether this process has taken its share of the cases.  Until then all ranks do the
        same, and have the same errors.  It belongs to the class, because the error handler of the
        command line has no `Ranks`.
    """

    divided: ClassVar[bool] = False

    rank: int
    count: int
    store: Any

    @property
    def is_first(self) -> bool:
        return self.rank == FIRST_RANK

    def share(self, items: Sequence[T]) -> tuple[T, ...]:
        """The items of this rank: every `count`th one, beginning with item `rank`.  Sets
        `divided`.
        """
        Ranks.divided = True
        return tuple(items[self.rank :: self.count])

    def tell(self, key: str, value: str = "") -> None:
        """Give the other ranks a value under a key."""
        self.store.set(key, value)

    def told(self, key: str, by: int) -> str:
        """The value under a key, which this call waits for.

        by: the rank that gives the value.  Raises MissingCapabilityError if that rank dies before
            it has given it.
        """
        while not self.store.check([key]):
            if not self.alive(by):
                raise self.gone(by)
            time.sleep(POLL_S)
        value: str = self.store.get(key).decode()
        return value

    def alive(self, rank: int) -> bool:
        """Whether the process of a rank runs.  A rank that has not joined yet counts as alive."""
        key = f"{rank}/process"
        return not self.store.check([key]) or _runs(int(self.store.get(key)))

    def gone(self, rank: int) -> MissingCapabilityError:
        """The error for a rank that died."""
        return MissingCapabilityError(
            f"Rank {rank} of {self.count} died before its share was done.",
            "Its own messages say why.  A process that was killed leaves none: often it took too "
            "much main memory.",
        )


def first_tells(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the first rank reports the error that this rank has, so that this one need not.

    Before work is divided, all ranks have the same error, and torchrun interrupts this process when
    the first rank has ended with it.  This function waits for that, for `LONGEST_LAG_S` at most; if
    nothing comes, this rank alone has the error.
    """
    if not follows(environment):
        return False
    try:
        time.sleep(LONGEST_LAG_S)
    except KeyboardInterrupt:
        return True
    return False


def follows(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this rank is not the first one, and has so far done the same as the first one."""
    # `rank_count` refuses impossible values of torchrun's variables; each rank reports them later
    with suppress(BadInputError):
        return (
            not Ranks.divided
            and rank_count(environment) > 1
            and int(environment.get("RANK") or FIRST_RANK) != FIRST_RANK
        )
    return False


def join(environment: Mapping[str, str] = os.environ) -> Ranks | None:
    """Join the other processes of torchrun, and select this process's GPU if there are any.

    Returns None if there is only one process.

    Raises what `rank_count` raises; BadInputError for processes on several machines, and if
    torchrun did not start this one; MissingCapabilityError if there are more processes than GPUs.
    """
    count = rank_count(environment)
    if count == 1:
        return None
    if environment.get("LOCAL_WORLD_SIZE", str(count)) != str(count):
        raise BadInputError(
            "Ranks on several machines are not supported.",
            "Start all of them on one: torchrun --nproc-per-node N.",
        )
    if absent := [name for name in _TORCHRUN_VARIABLES if not environment.get(name)]:
        raise BadInputError(
            f"WORLD_SIZE={count} asks for {count} ranks, but {absent[0]} is not set: torchrun did "
            "not start this process.",
            f"For one process, run: unset WORLD_SIZE.  For {count}: torchrun --nproc-per-node "
            f"{count} -m ssdprof ...",
        )
    import torch
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        if count > gpus:
            raise MissingCapabilityError(
                f"{count} ranks need {count} GPUs, because each measures on its own; {gpus} can be "
                "used here.",
                f"Start torchrun --nproc-per-node {gpus}.",
            )
        torch.cuda.set_device(int(environment["LOCAL_RANK"]))
    store, rank, count = next(iter(rendezvous("env://")))
    joined = Ranks(rank, count, PrefixStore("ssdprof", store))
    joined.tell(f"{rank}/process", str(os.getpid()))
    return joined


def _runs(process: int) -> bool:
    """Whether the process with this number is running; one of another user counts as running, a
    zombie does not.
    """
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:  # it ended after the signal was sent
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
