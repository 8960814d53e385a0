"""Builds a run's report, which is written after every case and is partial until the last one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from ssdprof import __version__
from ssdprof.environment import machine
from ssdprof.errors import SsdprofError
from ssdprof.files import uninterrupted
from ssdprof.progress import Watcher
from ssdprof.runs.folder import RunFolder
from ssdprof.runs.notes import notes, of_absent, of_cast, of_placement, of_ranks
from ssdprof.schema import NO_GATES, Answers, Asked, CaseResult, CheckpointRef, Gates, LayerRef, Prompt, RunReport
from ssdprof.schema.placement import Placement

SLOW_S = 0.05  # a write that takes longer is followed by a pause
PAUSE = 10  # times as long as the write


def draft(
    folder: RunFolder,
    command: tuple[str, ...],
    ref: CheckpointRef,
    prompts: Sequence[Prompt],
    segment_length: int,
    *,
    asked: Asked,
    baseline: str = "unfused",
    left_out: Sequence[str] = (),
    gates: Gates = NO_GATES,
    capture_complete: bool = True,
    placement: Placement | None = None,
    ranks: int = 1,
) -> RunReport:
    """The report of a run that is about to start.  command: as typed.  left_out: see `notes.of_absent`."""
    return RunReport(
        ssdprof_version=__version__,
        run_id=folder.path.resolve().name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        state="partial",
        asked=asked,
        gates=gates,
        capture_complete=capture_complete,
        checkpoint=ref,
        environment=machine.collect(),
        prompts=tuple(prompts),
        captured_layers=(),
        segment_length=segment_length,
        placement=placement,
        ranks=ranks,
        cases=(),
        baseline=baseline,
        notes=(
            *of_absent(left_out),
            *notes(ref, prompts),
            *of_ranks(asked.tensor_parallel),
            *of_cast(asked.cast),
            *of_placement(placement),
        ),
    )


class Recorder:
    """Builds the report of one run.  It is written from the first case on, because before that it is empty.

    Every write is of the whole report.  A slow write is followed by a pause, because writing a report of thousands of
    chunks after each of them would take hours.  When the run ends, the report on disk is up to date; only SIGKILL can
    lose the cases of the last few seconds.
    """

    def __init__(self, folder: RunFolder, draft: RunReport) -> None:
        self.folder = folder
        self.report = draft
        self._on_disk: RunReport | None = None
        self._due_s = 0.0  # by time.monotonic; the next write waits for it

    def update(self, **fields: Any) -> None:
        """Replace fields of the report, and write it."""
        self.report = self.report.model_copy(update=fields)
        if self.report.state == "complete" or (self.begun and time.monotonic() >= self._due_s):
            self._write()

    def _write(self) -> None:
        began = time.monotonic()
        self.folder.write(self.report)
        self._on_disk, ended = self.report, time.monotonic()
        if ended - began > SLOW_S:
            self._due_s = ended + PAUSE * (ended - began)

    def captured(self, layer: LayerRef, remark: str = "") -> None:
        """A layer's inputs have been taken.  remark: a sentence on how, for the notes."""
        if layer not in self.report.captured_layers:
            self.update(captured_layers=(*self.report.captured_layers, layer))
        if remark and remark not in self.report.notes:
            self.update(notes=(*self.report.notes, remark))

    def finished(self, case: CaseResult) -> None:
        """A case is done."""
        self.update(cases=(*self.report.cases, case))

    def peaked(self, size: int) -> None:
        """The peak of a process's GPU memory so far is `size` bytes."""
        self.update(model_peak_bytes=max(size, self.report.model_peak_bytes or 0))

    def answered(self, answers: Answers) -> None:
        """Replace the results of the answers to a prompt."""
        others = (known for known in self.report.answers if known.seqlen != answers.seqlen)
        self.update(answers=(*others, answers))

    def complete(self) -> None:
        """Everything was recorded."""
        self.update(state="complete")

    def broken_off(self, error: BaseException) -> None:  # noqa: ARG002  # ranks use it
        """The run ended early; the report stays partial."""
        if self.begun and self._on_disk is not self.report:
            with suppress(SsdprofError):  # the disk may be what ended it
                self._write()

    @property
    def lost(self) -> str:
        """A sentence on other processes of the run that died; empty if none did."""
        return ""

    @property
    def kept(self) -> str:
        """A sentence on where the results are stored."""
        if not self.begun:
            return "Nothing had been compared yet, and no report is kept."
        return f"What was done is kept in {self.folder.path}, marked as partial: {_count(self)}."

    @property
    def begun(self) -> bool:
        """Whether there are results to store."""
        return bool(self.report.cases or self.report.answers)


@contextmanager
def recorded(recorder: Recorder, watcher: Watcher) -> Iterator[Recorder]:
    """The context's value records.  After an exception the report stays partial, and the user is told where it
    is.

    A run that ended before its first case is not kept, and so does not become the latest.
    """
    try:
        yield recorder
        recorder.complete()
    except KeyboardInterrupt as interrupt:
        with uninterrupted():
            recorder.broken_off(interrupt)
        lost = f"{recorder.lost}  " if recorder.lost else ""
        raise KeyboardInterrupt(f"{lost}{recorder.kept}") from None
    except BaseException as error:
        with uninterrupted():
            recorder.broken_off(error)
        if recorder.begun:
            watcher.say(recorder.kept)
        raise


def _count(recorder: Recorder) -> str:
    layers, cases = len(recorder.report.captured_layers), len(recorder.report.cases)
    answers = sum(len(answers.cases) for answers in recorder.report.answers)
    parts = [f"{cases} case{'s' * (cases != 1)} of {layers} layer{'s' * (layers != 1)}"] if cases or not answers else []
    return " and ".join([*parts, *([f"{answers} case{'s' * (answers != 1)} of answers"] if answers else [])])
