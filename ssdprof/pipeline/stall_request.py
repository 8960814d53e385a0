"""The request of `ssdprof stalls`, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ssdprof.core.base import PrecisionRecord
from ssdprof.jobs.request import COMPARED
from ssdprof.stalls import collect


@dataclass(frozen=True, kw_only=True)
class StallRequest:
    """where: a run, a model or a folder of captures; None: the latest run.

    layer, seqlen: None: the middle layer, the longest prompt.
    implementations: names, as `operators.named` resolves them.
    out: the folder for the results; None: the run's, or a new one under runs/.
    overwrite: replace existing stalls.  tuned: a file with configurations for the kernels.
    command: as typed.
    """

    where: str | None = None
    layer: int | None = None
    seqlen: int | None = None
    implementations: tuple[str, ...] = COMPARED
    precision: PrecisionRecord
    timeout_s: float = collect.TIMEOUT_S
    out: Path | None = None
    overwrite: bool = False
    tuned: Path | None = None
    command: tuple[str, ...] = ()
