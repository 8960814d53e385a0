"""Values of documents, read from reports."""

from __future__ import annotations

from typing import Any

import pytest
from reproduced.made import DOCUMENT, H200, document
from reproducing import reports
from reproducing.values import values

from ssdprof.bench.schema import BenchCase, BenchReport, ChunkTrial
from ssdprof.schema import EXACT_FP32, Interval, LayerRef, Spread
from ssdprof.schema.prefill import CallTime, PartTime, Prefill, PrefillCase, PrefillLength, PrefillReport
from ssdprof.schema.stalls import KernelStalls, StallReport


def value(kind: str, report: reports.Report, **fields: Any) -> dict[str, float]:
    one = {"name": "v", "measure": "kernels", "kind": kind, **fields}
    claim = {"words": "W", "quoted": "Q", "holds": "v > 0"}
    return values(document(value=[one], claim=[claim], numbers=[], figure=None), {"kernels": report})


def test_times_are_those_of_the_fastest_case(recorded: BenchReport) -> None:
    def least(cell: int, name: str, state: str = "") -> float:
        return min(
            case.timing.device_median_us
            for case in recorded.cells[cell].cases
            if case.implementation == name and case.timing and state in str(case.precision.state_dtype)
        )

    found = value("time", recorded, of="fused", over="published relaxed fp16")
    assert list(found) == [f"v[{cell.tokens}]" for cell in recorded.cells]
    first = recorded.cells[0].tokens
    assert found[f"v[{first}]"] == least(0, "published", "fp16") / least(0, "fused")
    assert value("time", recorded, of="fused", cells=[first]) == {"v": least(0, "fused")}
    assert value("time", recorded, of="fused", over="published relaxed fp16", pick="greatest") == {
        "v": max(found.values())
    }
    assert value("time", recorded, of="nobody", pick="least") == {}


def test_other_statistics_than_the_median_are_those_of_the_samples(recorded: BenchReport) -> None:
    def spread(case: BenchCase) -> BenchCase:
        low = 10.0 if case.implementation == "fused" else 30.0
        own = Spread(samples=20, min_us=low, p95_us=low + 5, max_us=low + 10)
        timing = case.timing and case.timing.model_copy(update={"call_spread": own})
        return case.model_copy(update={"timing": timing})

    cell = recorded.cells[0]
    cell = cell.model_copy(update={"cases": tuple(map(spread, cell.cases))})
    report = recorded.model_copy(update={"cells": (cell,)})
    fields = {"of": "fused", "over": "unfused", "clock": "call", "pick": "least"}
    for statistic, expected in (("min", 3.0), ("p95", 35 / 15), ("max", 2.0)):
        assert value("time", report, **fields, statistic=statistic) == {"v": pytest.approx(expected)}
    assert value("time", report, **fields | {"clock": "device"}, statistic="max") == {}  # as in older reports
    assert value("time", report, **fields) == value("time", recorded, **fields, cells=[cell.tokens])


def test_a_chunk_size_that_was_not_the_fastest_has_its_time(recorded: BenchReport) -> None:
    trials = (
        ChunkTrial(chunk_size=64, status="passed", device_us=0.5),
        ChunkTrial(chunk_size=128, status="passed", device_us=50.0),
        ChunkTrial(chunk_size=256, status="refused"),
    )
    cell = recorded.cells[0]
    case = next(one for one in cell.cases if one.implementation == "unfused").model_copy(
        update={"trials": trials, "chunk_size": 128}
    )
    report = recorded.model_copy(update={"cells": (cell.model_copy(update={"cases": (case,)}),)})
    assert case.timing is not None
    assert value("time", report, of="unfused exact @64", pick="least") == {"v": 0.5}
    for of in ("unfused", "unfused exact @128"):  # not the time of a trial, which has few replays
        assert value("time", report, of=of, pick="least") == {"v": case.timing.device_median_us}
    assert value("time", report, of="unfused @256", pick="least") == {}


def test_each_makes_a_value_of_every_combination() -> None:
    one = {"name": "v_{a}", "measure": "kernels", "kind": "match", "of": "fused {a} {b}", "tolerance": "{t}"}
    each = {"a": ["exact", "relaxed"], "b": ["fp32"], "t": ["0", "0.001"]}
    made = document(value=[*DOCUMENT["value"], one | {"each": each}]).value[2:]
    assert [(each.name, each.key, each.of) for each in made] == [
        ("v_exact", "fp32 0", "fused exact fp32"),
        ("v_exact", "fp32 0.001", "fused exact fp32"),
        ("v_relaxed", "fp32 0", "fused relaxed fp32"),
        ("v_relaxed", "fp32 0.001", "fused relaxed fp32"),
    ]


def stalled() -> StallReport:
    stages = {
        "state_passing": {"barrier": 10, "wait": 5},
        "state_passing.wait": {"long_scoreboard": 5},
        "chunk_scan.current": {"long_scoreboard": 30, "barrier": 50},
        "ahead": {"barrier": 900},
    }
    kernel = KernelStalls(
        kernel="k", implementation="fused", occupancy_pct=25.0, stages=stages, idle=("ahead",),
        duration_us=9.0, compute_pct=45.0, sample_count=1000,
    )  # fmt: skip
    return StallReport(ssdprof_version="0", sources={}, gpu=H200, kernels=(kernel,))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"stages": ["state_passing"]}, 20.0),
        ({"stages": ["state_passing"], "without": ["state_passing.wait"]}, 15.0),
        ({"stages": ["chunk_scan"], "reasons": ["long_scoreboard"]}, 30.0),
        ({"reasons": ["barrier"]}, 60.0),
        ({"resource": "compute_pct"}, 45.0),
        ({"resource": "occupancy_pct"}, 25.0),
        ({"stages": ["ticket"]}, None),
        ({"of": "published"}, None),
    ],
)
def test_shares_of_stalls(fields: dict[str, Any], expected: float | None) -> None:
    found = value("stalls", stalled(), **({"of": "fused"} | fields))
    assert found == ({} if expected is None else {"v": expected})


def test_an_end_to_end_speedup_and_the_parts_of_a_prefill(recorded: BenchReport) -> None:
    def case(name: str, us: float, *parts: PartTime) -> PrefillCase:
        return PrefillCase(
            implementation=name, surroundings="bundled", status="passed", parts=parts,
            precision=EXACT_FP32,
            call=CallTime(median_us=us, interval_us=Interval(low=us, high=us), recordings=1, samples=1),
        )  # fmt: skip

    parts = (PartTime(name="operator", gpu_us=20.0, launches=1), PartTime(name="rest", gpu_us=5.0, launches=1))
    length = PrefillLength(
        seqlen=1024, batch=1, segment_length=1024, operator_calls=64,
        cases=(case("unfused", 120.0), case("fused", 100.0, *parts)), layer=LayerRef(index=0, name="l", operator="ssd"),
    )  # fmt: skip
    prefill = Prefill.model_construct(lengths=(length,), left_out=())
    report = PrefillReport.model_construct(prefill=prefill, environment=recorded.environment)
    assert value("prefill", report, of="fused", over="unfused", seqlen=1024) == {"v": pytest.approx(20.0)}
    assert value("prefill", report, of="fused", over="unfused", seqlen=2048) == {}
    assert value("prefill", report, of="fused", over="mamba_ssm", seqlen=1024) == {}
    for part, expected in (("call", 0.1), ("operator", 0.02), ("idle", 75.0)):
        assert value("prefill", report, of="fused", part=part, seqlen=1024) == {"v": pytest.approx(expected)}
    assert value("prefill", report, of="unfused", part="call", seqlen=1024) == {"v": pytest.approx(0.12)}
    for part in ("operator", "idle"):  # not profiled
        assert value("prefill", report, of="unfused", part=part, seqlen=1024) == {}
