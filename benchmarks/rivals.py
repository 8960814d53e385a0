"""The fastest other library of a cell: measured in the run, or estimated from an earlier measurement with fla."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from recorded import Cell

RECORDS = Path(__file__).with_name("rivals.toml")
Place = tuple[str, str, str, str]  # rival, shape, tokens, draw


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

    def best(self, cell: Cell) -> tuple[float, str]:
        """Device time of the fastest rival, the yardstick included, and which it is: "flash_qla, in the run".

        Infinite unless another library than the yardstick was measured, in the run or before.
        """
        others = [self._one(cell, name) for name in self.names]
        if all(us == math.inf for us, _ in others):
            return math.inf, ""
        return min((_least_us(cell, self.yardstick), f"{self.yardstick}, in the run"), *others)

    def _one(self, cell: Cell, name: str) -> tuple[float, str]:
        if (us := _least_us(cell, name)) < math.inf:
            return us, f"{name}, in the run"
        record = self.records.get((name, cell.one.shape, cell.one.tokens, " ".join(cell.one.drawn)))
        if record is None:
            return math.inf, ""
        return _least_us(cell, self.yardstick) * record.ratio, f"{name} {record.version}, recorded"


def _least_us(cell: Cell, words: str) -> float:
    """Infinite if there is no time."""
    case = cell.fastest(words)
    return case.device_us[0] if case and case.device_us else math.inf
