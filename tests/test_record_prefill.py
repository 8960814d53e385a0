"""The script that records prefill times: how runs share a budget, interruptions, and the published claims."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import record_prefill

from ssdprof.schema import EXACT_FP32, Interval, LayerRef
from ssdprof.schema.prefill import CallTime, PrefillCase, PrefillLength, PrefillSpeedup


@pytest.mark.parametrize(
    ("left_s", "allowed_s"),
    [
        (400, 160),  # reduced by the limits of the later ones
        (250, 130),  # its own limit has priority
        (90, 90),
    ],
)
def test_a_run_gets_its_limit_and_what_later_ones_do_not_need(left_s: float, allowed_s: float) -> None:
    first, *later = record_prefill.RUNS
    assert [run.limit_s for run in record_prefill.RUNS] == [130, 90, 150]
    assert record_prefill.allowance(first, later, left_s) == allowed_s


def test_a_command_that_does_not_end_is_interrupted_and_may_write_what_it_has(tmp_path: Path) -> None:
    waiting, written = tmp_path / "waiting", tmp_path / "written"
    program = (
        "import pathlib, time\n"
        "try:\n"
        f"    pathlib.Path({str(waiting)!r}).touch(); time.sleep(100)\n"
        "except KeyboardInterrupt:\n"
        f"    pathlib.Path({str(written)!r}).touch(); raise SystemExit(130)\n"
    )
    assert record_prefill.run_within([sys.executable, "-c", program], -7.0, to_stop_s=10) == 130
    assert written.exists()


def case(name: str, call_us: float, version: str = "", speedup: float | None = None) -> PrefillCase:
    interval = Interval(low=call_us, high=call_us)
    return PrefillCase(
        implementation=name,
        version=version,
        surroundings="bundled",
        precision=EXACT_FP32,
        status="passed",
        call=CallTime(median_us=call_us, interval_us=interval, recordings=3, samples=3),
        speedup=speedup and PrefillSpeedup(ratio=speedup, interval=Interval(low=1.11, high=1.13), verdict="faster"),
    )


def test_claims_stand_beside_what_was_measured() -> None:
    cases = (case("unfused", 112), case("fused", 100, speedup=1.12), case("mamba_ssm", 115, "2.3"))
    layer = LayerRef(index=0, name="layers.0.mixer", operator="ssd")
    lengths = [
        PrefillLength(seqlen=seqlen, batch=1, segment_length=seqlen, operator_calls=64, layer=layer, cases=cases)
        for seqlen in (16_384, 131_072)
    ]
    said = record_prefill.beside_claims(lengths, record_prefill.CLAIMS["mamba2-2.7b"])
    rows = [line for line in said.splitlines() if line.startswith("| 1")]
    assert rows == [
        "| 131,072 | roughly a 8-13% end-to-end speedup | bundled | unfused | +12.0% | +11.0% to +13.0% |",
        "| 131,072 | roughly a 8-13% end-to-end speedup | bundled | mamba_ssm 2.3 | +15.0% |  |",
    ]
