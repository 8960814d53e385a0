"""Collects the outcome of each cell of a bench from all processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pydantic import TypeAdapter

from ssdprof.bench.schema import BenchCell, BenchReport, LeftOut
from ssdprof.environment.ranks import Ranks
from ssdprof.errors import MissingCapabilityError
from ssdprof.operators.drawing import Cell

_MESSAGE: TypeAdapter[tuple[int, BenchCell | LeftOut]] = TypeAdapter(tuple[int, BenchCell | LeftOut])


class Outcomes:
    """Outcomes by the number of the cell.  ranks: processes that share the cells; the first one collects.

    writes: whether this process keeps the report.  The first one does; if it dies, the others do.
    """

    def __init__(self, cells: Sequence[Cell], ranks: Ranks | None) -> None:
        self._cells = cells
        self._ranks = ranks
        self._found: dict[int, BenchCell | LeftOut] = {}
        self.writes = ranks is None or ranks.first

    @property
    def mine(self) -> tuple[tuple[int, Cell], ...]:
        """The cells that this process measures, with their numbers."""
        numbered = tuple(enumerate(self._cells))
        return self._ranks.share(numbered) if self._ranks else numbered

    def add(self, number: int, found: BenchCell | LeftOut) -> None:
        """Raises MissingCapabilityError if the first rank, which collects, has died."""
        self._found[number] = found
        if self._ranks is None:
            return
        self._ranks.send(_MESSAGE.dump_json((number, found)).decode())
        if self._ranks.first:
            self._gather()
        elif lost := self._ranks.lost():
            raise self._ranks.gone(lost)

    def wait(self) -> Iterator[None]:
        """The first rank waits for the cells of the others, and they wait until it has written them.

        Yields from time to time.  Raises MissingCapabilityError if a rank died.
        """
        if self._ranks is None:
            return
        if not self._ranks.first:
            self._ranks.end()
        for _ in self._ranks.waiting():
            self._gather()
            yield
        self._leave_out(range(self._ranks.count), "its process was interrupted")

    def end(self) -> None:
        """Tell the other ranks that the report is written."""
        if self._ranks is not None:
            self._ranks.end()

    def broken_off(self, error: BaseException) -> MissingCapabilityError | None:
        """After a rank died: take all measured cells, leave out the rest, and return the error that names the rank.

        error: what ended this rank.
        """
        if self._ranks is None:
            return None
        lost = self._ranks.lost()
        if lost or isinstance(error, KeyboardInterrupt):  # else the others name this rank
            self._ranks.end()
        if not lost:
            return None
        self._take(self._ranks.sent())
        gone = self._ranks.gone(lost)
        self._leave_out(range(self._ranks.count), gone.message.rstrip("."))
        self.writes = True
        return gone

    def put_in(self, report: BenchReport) -> BenchReport:
        """The report with all known outcomes, in the order of the cells."""
        found = [self._found[number] for number in sorted(self._found)]
        return report.model_copy(
            update={
                "cells": tuple(one for one in found if isinstance(one, BenchCell)),
                "left_out": tuple(one for one in found if isinstance(one, LeftOut)),
            }
        )

    def _gather(self) -> None:
        assert self._ranks is not None
        self._take(text for _, text in self._ranks.received())

    def _take(self, messages: Iterable[str]) -> None:
        self._found |= dict(map(_MESSAGE.validate_json, messages))

    def _leave_out(self, ranks: Iterable[int], why: str) -> None:
        """Leave out the cells of these ranks that were not measured."""
        assert self._ranks is not None
        numbered = tuple(enumerate(self._cells))
        for rank in ranks:
            for number, cell in self._ranks.share(numbered, rank):
                self._found.setdefault(number, LeftOut(cell=str(cell), reason=why))
