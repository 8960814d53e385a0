"""The outcome of each cell of a bench, whichever process measured it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import TypeAdapter

from ssdprof.bench.schema import BenchCell, BenchReport, LeftOut
from ssdprof.environment.ranks import Ranks
from ssdprof.errors import MissingCapabilityError
from ssdprof.operators.drawing import Cell

_MESSAGE: TypeAdapter[tuple[int, BenchCell | LeftOut]] = TypeAdapter(tuple[int, BenchCell | LeftOut])


class Outcomes:
    """By the number of the cell.  ranks: processes that share the cells; the first one gathers."""

    def __init__(self, cells: Sequence[Cell], ranks: Ranks | None) -> None:
        self._cells = cells
        self._ranks = ranks
        self._found: dict[int, BenchCell | LeftOut] = {}

    @property
    def mine(self) -> tuple[tuple[int, Cell], ...]:
        """The cells that this process measures, with their numbers."""
        numbered = tuple(enumerate(self._cells))
        return self._ranks.share(numbered) if self._ranks else numbered

    def add(self, number: int, found: BenchCell | LeftOut) -> None:
        self._found[number] = found
        if self._ranks is None:
            return
        if self._ranks.first:
            self._gather()
        else:
            self._ranks.send(_MESSAGE.dump_json((number, found)).decode())

    def wait(self) -> Iterator[None]:
        """For the other ranks; yields whenever more came.

        MissingCapabilityError if one died: its cells are left out and say so.
        """
        if self._ranks is None:
            return
        if not self._ranks.first:
            self._ranks.end()
            return
        try:
            for _ in self._ranks.waiting():
                self._gather()
                yield
        except MissingCapabilityError as error:
            for number, cell in enumerate(self._cells):
                self._found.setdefault(number, LeftOut(cell=str(cell), reason=error.message.rstrip(".")))
            raise

    def put_in(self, report: BenchReport) -> BenchReport:
        """The report with what is known, in the order of the cells."""
        found = [self._found[number] for number in sorted(self._found)]
        return report.model_copy(
            update={
                "cells": tuple(one for one in found if isinstance(one, BenchCell)),
                "left_out": tuple(one for one in found if isinstance(one, LeftOut)),
            }
        )

    def _gather(self) -> None:
        assert self._ranks is not None
        for _, text in self._ranks.received():
            number, found = _MESSAGE.validate_json(text)
            self._found[number] = found
