"""What a user asked of `ssdprof stalls`, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ssdprof.pipeline.request import COMPARED
from ssdprof.schema import PrecisionRecord
from ssdprof.stalls import collect


@dataclass(frozen=True, kw_only=True)
class StallRequest:
    """where: a run, a model, a folder of captures; None is the latest run.  layer, seqlen: None takes what is there.

    implementations: names, as `operators.named` resolves them.
    out: the folder for what is found; None takes the run's, or makes one under runs/.
    overwrite: stalls that were found before.  tuned: a file of configurations that the kernels shall take.
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
