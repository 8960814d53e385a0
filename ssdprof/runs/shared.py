"""Builds one report of a run whose layers several ranks replay: each sends its cases to the first one, which writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ssdprof.environment.ranks import FIRST, Ranks
from ssdprof.errors import MissingCapabilityError, SsdprofError, library_message
from ssdprof.runs.folder import RunFolder, opened, read
from ssdprof.runs.record import Recorder
from ssdprof.schema import CaseResult, LayerRef, RunReport

_FOLDER = "folder"  # of the run, in the store


class Unkept(RunFolder):
    """The folder of a rank that writes no report."""

    def write(self, report: RunReport) -> None:
        """Does nothing, because the first rank writes."""


@contextmanager
def opened_by_first(out: Path | None, model: str, ranks: Ranks | None) -> Iterator[RunFolder]:
    """As `opened` for the first rank, or without other ranks; else an `Unkept`."""
    if ranks is not None and not ranks.first:
        yield Unkept(Path("unkept"))
        return
    with opened(out, model) as folder:
        if ranks is not None:
            ranks.store.set(_FOLDER, str(folder.path.resolve()))
        yield folder


class Sender(Recorder):
    """The recorder of a rank other than the first, to which it sends its results."""

    def __init__(self, folder: RunFolder, draft: RunReport, ranks: Ranks) -> None:
        super().__init__(folder, draft)
        self._ranks = ranks
        self._heir: Recorder | None = None  # of the first rank's report

    def captured(self, layer: LayerRef, remark: str = "") -> None:
        super().captured(layer, remark)
        self._ranks.send(json.dumps({"layer": layer.model_dump(mode="json"), "remark": remark}))

    def finished(self, case: CaseResult) -> None:
        super().finished(case)
        self._ranks.send(json.dumps({"case": case.model_dump(mode="json")}))
        if FIRST in self._ranks.lost():
            raise self._ranks.gone((FIRST,))

    def peaked(self, size: int) -> None:
        super().peaked(size)
        self._ranks.send(json.dumps({"peak_bytes": size}))

    def complete(self) -> None:
        """Wait for the first rank to write the report.  MissingCapabilityError if it dies before."""
        super().complete()
        self._ranks.end()
        for _ in self._ranks.waiting():
            pass

    def broken_off(self, error: BaseException) -> None:
        """Tell the first rank.  If that died, write the report in its place."""
        if self._ranks.ended or FIRST in self._ranks.lost():
            with suppress(SsdprofError):  # its folder was removed
                self._inherit()
        elif self.report.state != "complete":
            why = "interrupted" if isinstance(error, KeyboardInterrupt) else library_message(error)
            self._ranks.send(json.dumps({"failed": why}))

    @property
    def lost(self) -> str:
        return self._ranks.gone((FIRST,)).message if FIRST in self._ranks.lost() else ""

    @property
    def kept(self) -> str:
        if self.lost:
            return self._heir.kept if self._heir else "No report is kept."
        return f"Rank {self._ranks.rank} of {self._ranks.count} has sent its results to the first one."

    def _inherit(self) -> None:
        """Write the results of all ranks into the first one's report, with its name if it died.

        Every other rank does this with the same contents.
        """
        if not self._ranks.store.check([_FOLDER]):
            return
        folder = RunFolder(Path(self._ranks.store.get(_FOLDER).decode()))
        try:
            left = read(folder.path)[1]
        except SsdprofError:  # it had written no report
            empty = {"run_id": folder.path.name, "state": "partial", "captured_layers": (), "cases": ()}
            left = self.report.model_copy(update=empty)
        heir = Recorder(Unkept(folder.path), left)
        known = {case.model_dump_json() for case in left.cases}
        for text in self._ranks.sent():
            message = json.loads(text)
            if "case" not in message or CaseResult.model_validate(message["case"]).model_dump_json() not in known:
                _take(heir, message)
        if lost := self._ranks.lost():
            heir.report = _noted(heir.report, self._ranks.gone(lost).message)
        self._heir = heir
        if heir.begun and heir.report != left:
            folder.write(heir.report)


class Gatherer(Recorder):
    """The recorder of the first rank: its own cases and those that the others send."""

    def __init__(self, folder: RunFolder, draft: RunReport, ranks: Ranks) -> None:
        super().__init__(folder, draft)
        self._ranks = ranks
        self._failures: dict[int, str] = {}

    def finished(self, case: CaseResult) -> None:
        super().finished(case)
        self._gather()
        self._check()

    def complete(self) -> None:
        """Wait for the others, and bring all cases into the order of a single process.

        Raises MissingCapabilityError, with its name, if a rank ended before it had sent all results.
        """
        for _ in self._ranks.waiting():
            self._gather()
            self._check()
        asked = self.report.asked
        assert asked is not None, "a new run says what it was asked for"
        prompts = [prompt.seqlen for prompt in self.report.prompts]

        def place(case: CaseResult) -> tuple[int, int]:
            tokens = case.call.prompt_seqlen if case.call else case.dims.seqlen
            return prompts.index(tokens) if tokens in prompts else len(prompts), asked.layers.index(case.layer)

        self.report = self.report.model_copy(
            update={
                "cases": tuple(sorted(self.report.cases, key=place)),
                "captured_layers": tuple(sorted(self.report.captured_layers, key=asked.layers.index)),
            }
        )
        super().complete()
        self._ranks.end()

    def broken_off(self, error: BaseException) -> None:
        """Store the results of the others, and the name of one that died."""
        self._gather()
        if (why := self._why()) and self.begun:
            self.report = _noted(self.report, why)
        super().broken_off(error)
        if why or isinstance(error, KeyboardInterrupt):  # otherwise the others name this rank
            self._ranks.end()

    @property
    def lost(self) -> str:
        """A sentence on ranks that died; empty if none did."""
        return self._why()

    def _gather(self) -> None:
        for rank, text in self._ranks.received():
            message = json.loads(text)
            if "failed" in message:
                self._failures[rank] = message["failed"]
            _take(self, message)

    def _check(self) -> None:
        if why := self._why():
            raise MissingCapabilityError(why, "Read that rank's own messages; a killed process leaves none.")

    def _why(self) -> str:
        lost = [rank for rank in self._ranks.lost() if rank not in self._failures]
        told = [f"Rank {rank} of {self._ranks.count} ended: {why}." for rank, why in self._failures.items()]
        return " ".join([*([self._ranks.gone(lost).message] if lost else []), *told])


def _take(recorder: Recorder, message: dict[str, Any]) -> None:
    """Record a message of a rank."""
    if "layer" in message:
        recorder.captured(LayerRef.model_validate(message["layer"]), message["remark"])
    elif "case" in message:
        Recorder.finished(
            recorder, CaseResult.model_validate(message["case"])
        )  # the override of Gatherer collects more
    elif "peak_bytes" in message:
        recorder.peaked(message["peak_bytes"])


def recorder_of(folder: RunFolder, draft: RunReport, ranks: Ranks | None) -> Recorder:
    if ranks is None:
        return Recorder(folder, draft)
    return (Gatherer if ranks.first else Sender)(folder, draft, ranks)


def _noted(report: RunReport, note: str) -> RunReport:
    return report if note in report.notes else report.model_copy(update={"notes": (*report.notes, note)})
