"""Columns of the CSV that are filled only if measured: the warm clock, and the spread of samples."""

from __future__ import annotations

import csv
import io

from report.make import make_report

from ssdprof.report.exports import csv_table
from ssdprof.report.exports.exported import from_run
from ssdprof.schema import CaseResult, Interval, Spread, WarmSpeedup, WarmTiming


def row_of(case: CaseResult) -> dict[str, str]:
    report = make_report().model_copy(update={"cases": (case,)})
    (row,) = csv.DictReader(io.StringIO(csv_table.render(from_run(report))))
    return row


def test_a_report_without_them_leaves_their_columns_empty() -> None:
    row = row_of(make_report().cases[1])
    assert float(row["device time [µs]"]) > 0
    of_warm = [column for column in row if "warm" in column]
    of_spread = [
        f"{time}, {what}" for time in ("device time", "call time") for what in ("min [µs]", "P95 [µs]", "max [µs]")
    ]
    assert len(of_warm) == 8
    assert {row[column] for column in (*of_warm, *of_spread)} == {""}


def test_each_number_has_its_column() -> None:
    case = make_report().cases[1]
    assert case.timing is not None
    assert case.speedup is not None
    spread = Spread(samples=40, min_us=1.0, p95_us=3.0, max_us=4.0)
    warm = WarmTiming(calls=10, median_us=20.0, interval_us=Interval(low=19.0, high=21.0))
    over = WarmSpeedup(ratio=2.0, interval=Interval(low=1.9, high=2.1), verdict="faster")
    timing = case.timing.model_copy(update={"device_spread": spread, "warm": warm})
    speedup = case.speedup.model_copy(update={"warm": over})
    row = row_of(case.model_copy(update={"timing": timing, "speedup": speedup}))
    for column, value in (
        ("device time, min [µs]", 1.0), ("device time, P95 [µs]", 3.0), ("device time, max [µs]", 4.0),
        ("device time, samples", 40), ("warm time [µs]", 20.0), ("warm time, high [µs]", 21.0),
        ("warm calls, back to back", 10), ("speedup, warm [x]", 2.0), ("speedup, warm, low [x]", 1.9),
    ):  # fmt: skip
        assert float(row[column]) == value, column
    assert row["verdict, warm"] == "faster"
    assert row["call time, min [µs]"] == ""
