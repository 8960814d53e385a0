"""The document of `ssdprof tune`."""

from __future__ import annotations

from collections.abc import Iterable

from ssdprof.core import words as fmt
from ssdprof.core.statistics import Estimate
from ssdprof.core.tuned import PlannedSearch, SearchOutcome, Trial, TuneReport
from ssdprof.report.table import Column, Document, Table, section, table, text

_MOST_ROWS = 12  # of the candidates that were timed, the fastest
_READING = (
    "Device: the time on the GPU alone, replayed from a CUDA graph; for several lengths, their "
    "geometric mean.  Ratio: the committed configuration's time over the candidate's, sampled in turns, with its 95 % "
    "interval.  A configuration that is kept was compared with the fp64 oracle on the timed inputs, and is more "
    "than 1 % faster with 95 % confidence."
)


def compose(report: TuneReport) -> Document:
    """All searches, then a summary."""
    found = table("Found", _FOUND, report.outcomes, keys=3)
    left = table("Left out", (text("what", str, wraps=True),), report.left_out)
    return Document(
        title=f"ssdprof tune: {report.operator}",
        name="tune",
        version=report.ssdprof_version,
        sections=(section("Searches", *map(_search, report.outcomes), found, left, _READING),),
    )


def candidates(searches: Iterable[PlannedSearch]) -> Table | None:
    """The table of a dry run."""
    return table(
        "Candidates, by what they change in the committed configuration",
        (
            text("shape", lambda one: one.shape),
            text("tokens", lambda one: one.tokens),
            text("intermediates", lambda one: one.intermediates),
            text("candidates", lambda one: "; ".join(one.candidates) or "none", wraps=True),
        ),
        tuple(searches),
        keys=3,
    )


def _search(outcome: SearchOutcome) -> Table | None:
    timed = sorted((one for one in outcome.trials if one.device_us is not None), key=lambda one: one.device_us or 0)
    shown = [trial for place, trial in enumerate(timed) if place < _MOST_ROWS or trial.verdict == "committed"]
    committed = ", ".join(f"{name} {value}" for name, value in outcome.committed.values.items())
    return table(
        f"{outcome.shape}, {outcome.tokens}, {outcome.calls.intermediates}: {outcome.committed.kernel} kernel",
        (
            text("candidate", lambda trial: trial.change or "committed"),
            Column("device", lambda trial: fmt.duration(trial.device_us)),
            Column("ratio", _ratio),
            text("verdict", lambda trial: f"{trial.verdict}: {trial.why}" if trial.why else trial.verdict, wraps=True),
        ),
        (*shown, *(trial for trial in outcome.trials if trial.device_us is None)),
        note=f"Committed: {committed}.  {len(outcome.trials)} tried.",
    )


def _ratio(trial: Trial | None) -> str:
    if trial is None or trial.device_ratio is None or trial.device_interval is None:
        return fmt.MISSING
    return fmt.speedup(Estimate(trial.device_ratio, *trial.device_interval))


def _kept(outcome: SearchOutcome) -> Trial | None:
    kept = outcome.find
    return next((trial for trial in outcome.trials if kept and trial.settings == kept.settings), None)


_FOUND: tuple[Column[SearchOutcome], ...] = (
    text("shape", lambda one: one.shape),
    text("tokens", lambda one: one.tokens),
    text("intermediates", lambda one: one.calls.intermediates),
    text("configuration", lambda one: trial.change if (trial := _kept(one)) else "committed stays"),
    Column("ratio", lambda one: _ratio(_kept(one))),
    text("why", lambda one: one.why, wraps=True),
)
