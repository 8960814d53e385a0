"""The barriers of the Hopper kernel, in a model of its roles that takes turns at random.

A role is a generator: it yields what it waits for, or None where another may come first.  Copies arrive in any order.
The model knows nothing of numbers: a place of a ring holds the name of a chunk, and who reads it says which it expects.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import ssdprof

KERNEL = Path(ssdprof.__file__).parent / "kernels" / "ssd" / "fused_hopper.py"
COUNTS = {"full": 2, "empty": 3, "scored": 1, "unscored": 2, "told": 1}
SCORE_RING = 2
Chunk = tuple[int, int]  # pass, number
Role = Iterator[Callable[[], bool] | None]


class WrongRead(Exception):
    pass


@dataclass
class Barrier:
    """count: arrivals that end a phase; copies: bytes, in effect, that it still waits for."""

    count: int
    pending: int = field(init=False)
    copies: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        self.pending = self.count

    def arrive(self, copies: int = 0) -> None:
        assert self.pending > 0
        self.pending, self.copies = self.pending - 1, self.copies + copies
        self.end_phase()

    def end_phase(self) -> None:
        if self.pending == 0 and self.copies == 0:
            self.phase, self.pending = self.phase + 1, self.count

    def passed(self, parity: int) -> Callable[[], bool]:
        """A wait knows of a phase only whether it is odd."""
        return lambda: self.phase & 1 != parity


def barriers(name: str, places: int) -> list[Barrier]:
    return [Barrier(COUNTS[name]) for _ in range(places)]


class Program:
    """One program of `first` chunks in the first pass, which `stops` may cut short, and `second` in the second."""

    def __init__(self, ring: int, first: int, stops: int, second: int, maker: str) -> None:
        self.ring, self.second, self.maker = ring, second, maker
        self.seen = min(first, stops)
        self.full, self.empty = barriers("full", ring), barriers("empty", ring)
        self.scored, self.unscored = barriers("scored", SCORE_RING), barriers("unscored", SCORE_RING)
        self.told = barriers("told", ring + 2)
        self.tiles: list[Chunk | None] = [None] * ring
        self.gates: list[Chunk | None] = [None] * ring
        self.scores: list[int | None] = [None] * SCORE_RING
        self.goes_on: list[tuple[int, bool] | None] = [None] * (ring + 2)
        self.in_flight: list[tuple[int, Chunk]] = []

    def at(self, it: int) -> tuple[int, int]:
        return it % self.ring, it // self.ring & 1

    @staticmethod
    def read(place: object, expected: object) -> None:
        if place != expected:
            raise WrongRead(f"{place} instead of {expected}")

    def make_first_gates(self) -> Role:
        """Returns how many chunks there were, as the other parts of a role do."""
        for it in range(self.seen):
            slot, parity = self.at(it)
            word = it % (self.ring + 2)
            self.goes_on[word] = (it, it < self.seen - 1)
            yield None
            self.told[word].arrive()
            yield self.empty[slot].passed(parity ^ 1)
            self.gates[slot] = (1, it)
            yield None
            self.full[slot].arrive()
            yield None
        return self.seen

    def follow(self) -> Role:
        it, go = 0, self.seen > 0
        while go:
            slot, parity = self.at(it)
            yield self.full[slot].passed(parity)
            word = self.goes_on[it % (self.ring + 2)]
            self.read(word and word[0], it)
            go = word is not None and word[1]
            self.read(self.tiles[slot], (1, it))
            self.read(self.gates[slot], (1, it))
            yield None
            self.empty[slot].arrive()
            it += 1
            yield None
        return it

    def gates_role(self) -> Role:
        it = yield from self.make_first_gates() if self.maker == "gates" else self.follow()
        for chunk in range(self.second):
            slot, parity = self.at(it + chunk)
            yield self.empty[slot].passed(parity ^ 1)
            self.gates[slot] = (2, chunk)
            yield None
            self.full[slot].arrive()

    def loads_role(self) -> Role:
        it, go = 0, self.seen > 0
        while go:
            yield from self.load(it, (1, it))
            word = it % (self.ring + 2)
            yield self.told[word].passed(it // (self.ring + 2) & 1)
            told = self.goes_on[word]
            self.read(told and told[0], it)
            go = told is not None and told[1]
            it += 1
        for chunk in range(self.second):
            yield from self.load(it + chunk, (2, chunk))

    def load(self, it: int, chunk: Chunk) -> Role:
        slot, parity = self.at(it)
        yield self.empty[slot].passed(parity ^ 1)
        self.full[slot].arrive(copies=1)
        self.in_flight.append((slot, chunk))
        yield None

    def scores_role(self) -> Role:
        it = yield from self.follow() if self.maker == "gates" else self.make_first_gates()
        for chunk in range(self.second):
            slot, parity = self.at(it + chunk)
            stage, turn = chunk % SCORE_RING, chunk // SCORE_RING & 1
            yield self.full[slot].passed(parity)
            self.read(self.tiles[slot], (2, chunk))
            self.read(self.gates[slot], (2, chunk))
            yield self.unscored[stage].passed(turn ^ 1)
            self.scores[stage] = chunk
            self.read(self.tiles[slot], (2, chunk))
            self.empty[slot].arrive()
            yield None
            self.scored[stage].arrive()

    def unit_role(self) -> Role:
        it = yield from self.follow()
        for chunk in range(self.second):
            slot, parity = self.at(it + chunk)
            stage, turn = chunk % SCORE_RING, chunk // SCORE_RING & 1
            yield self.full[slot].passed(parity)
            self.read(self.tiles[slot], (2, chunk))
            self.read(self.gates[slot], (2, chunk))
            yield self.scored[stage].passed(turn)
            self.read(self.scores[stage], chunk)
            yield None
            self.read(self.tiles[slot], (2, chunk))
            self.unscored[stage].arrive()
            self.empty[slot].arrive()

    def run(self, turns: random.Random) -> None:
        roles = [self.gates_role(), self.loads_role(), self.scores_role(), self.unit_role(), self.unit_role()]
        waits: list[Callable[[], bool] | None] = [None] * len(roles)
        speeds = [turns.choice((1, 1, 3, 30)) for _ in roles]
        copy_speed = turns.choice((0.1, 1, 3, 30))
        done: set[int] = set()
        while len(done) < len(roles) or self.in_flight:
            ready = [i for i, wait in enumerate(waits) if i not in done and (wait is None or wait())]
            choices = [(i, speeds[i]) for i in ready] + [(-1, copy_speed)] * bool(self.in_flight)
            assert choices, "deadlock"
            (chosen,) = turns.choices([i for i, _ in choices], [weight for _, weight in choices])
            if chosen == -1:
                slot, chunk = self.in_flight.pop(turns.randrange(len(self.in_flight)))
                self.tiles[slot] = chunk
                self.full[slot].copies -= 1
                self.full[slot].end_phase()
                continue
            try:
                waits[chosen] = next(roles[chosen])
            except StopIteration:
                done.add(chosen)


def run_many(ring: int, maker: str, programs: int) -> None:
    turns = random.Random(ring)
    for _ in range(programs):
        first, second = turns.choice((0, 1, 2, 3, 4, 5, 7, 14)), turns.choice((1, 2, 3, 4, 7, 10))
        Program(ring, first, turns.choice((1, 2, 3, 5, 99)), second, maker).run(turns)


@pytest.mark.parametrize("ring", [2, 3])
def test_every_role_reads_the_chunk_that_it_means_whoever_is_late(ring: int) -> None:
    run_many(ring, "gates", 1500)


def test_the_model_sees_a_role_that_skips_turns_of_a_ring() -> None:
    """If `scores` made the first pass's gates, it would read the second's without having waited for the first's."""
    with pytest.raises(WrongRead):
        run_many(3, "scores", 1500)


def test_the_model_has_the_kernels_counts() -> None:
    inits = re.findall(r"mbarrier\.init\(shared\.(\w+)\.index\(i\), count=(\d)\)", KERNEL.read_text())
    assert {name: int(count) for name, count in inits} == COUNTS
