"""The records of `ssdprof runs`."""

from __future__ import annotations

from typing import Literal

from ssdprof.schema.base import Record

RunVerdict = Literal["passed", "failed", "refused", "incomplete", "unreadable"]


class ListedRun(Record):
    """A run folder.

    name: of the folder; other commands take it.
    verdict: "failed": a case was compared and did not pass, or could not finish, or a gate does not hold; "refused": an
        implementation does not support a case; "incomplete": nothing went wrong, but cases are missing; "unreadable":
        see `reason`, and all other fields but the name are empty.
    state: "partial" if the run did not reach its end.
    gpu: None on a machine without one.
    """

    name: str
    created: str = ""  # ISO 8601, UTC
    model: str = ""
    random_weights: bool = False
    seqlens: tuple[int, ...] = ()
    layers: int = 0  # replayed ones
    cases: int = 0
    gpu: str | None = None
    verdict: RunVerdict
    state: Literal["complete", "partial"] | None = None
    reason: str = ""
