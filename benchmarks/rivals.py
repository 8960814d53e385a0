"""The fastest other library of a cell: measured in the run, or estimated from an earlier measurement with fla."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ssdprof.bench.schema import BenchCell

RECORDS = Path(__file__).with_name("rivals.toml")
Place = tuple[str, str, str, str]  # rival, shape, tokens, draw


@dataclass(frozen=True, kw_only=True)
class Rival:
    """us: device time.  how: "flash_qla, in the run", or "flashinfer 0.7.2, recorded"."""

    us: float
    how: str


@dataclass(frozen=True, kw_only=True)
class Record:
    """ratio: the rival's device time over that of the yardstick, both measured in one session."""

    ratio: float
    version: str


@dataclass(frozen=True, kw_only=True)
class Rivals:
    """yardstick: the library that every run times.  names: names of the other libraries."""

    yardstick: str = ""
    names: tuple[str, ...] = ()
    records: Mapping[Place, Record] = field(default_factory=dict)

    @classmethod
    def load(cls, file: Path = RECORDS) -> Rivals:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
        records = {
            (one["name"], shape, tokens, drawn): Record(ratio=own / yardstick, version=one["version"])
            for one in document["record"]
            for shape in one["shapes"]
            for drawn in one["drawn"]
            for tokens, (own, yardstick) in one["us"].items()
        }
        return cls(yardstick=document["yardstick"], names=tuple(document["rivals"]), records=records)

    def best(self, cell: BenchCell, time: Callable[[str], float]) -> Rival | None:
        """The fastest rival, the yardstick included; None unless another one was measured, in the run or before.

        time: least device time of an implementation in the cell, us; infinite if there is none.
        """
        others = [rival for name in self.names if (rival := self._one(cell, name, time))]
        own = Rival(us=time(self.yardstick), how=f"{self.yardstick}, in the run")
        return min((own, *others), key=lambda rival: rival.us) if others else None

    def _one(self, cell: BenchCell, name: str, time: Callable[[str], float]) -> Rival | None:
        if time(name) < math.inf:
            return Rival(us=time(name), how=f"{name}, in the run")
        record = self.records.get((name, cell.shape, cell.tokens, " ".join(cell.drawn)))
        if record is None or time(self.yardstick) == math.inf:
            return None
        return Rival(us=time(self.yardstick) * record.ratio, how=f"{name} {record.version}, recorded")
