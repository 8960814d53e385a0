"""The times of several layers, added up."""

import pytest
from report.make import around, failed, make_case

from ssdprof.report.groups import Series
from ssdprof.report.total_speed import total_speed
from ssdprof.schema import EXACT_FP32


def timed(index, device_us, ratio, spread=0.02, verdict="faster"):
    case = make_case(index, 1024, "fused", EXACT_FP32)
    timing = case.timing.model_copy(update={"device_median_us": device_us, "call_median_us": 2 * device_us})
    speedup = case.speedup.model_copy(
        update={
            "device_ratio": ratio,
            "device_interval": around(ratio, spread),
            "call_ratio": ratio / 2,
            "call_interval": around(ratio / 2, spread),
            "verdict": verdict,
        }
    )
    return case.model_copy(update={"timing": timing, "speedup": speedup})


def test_total_ratio_is_that_of_the_sums():
    total = total_speed(Series("fused", EXACT_FP32, (timed(0, 100.0, 2.0), timed(1, 300.0, 4.0))))
    assert total.device.us == 400.0
    assert total.device.ratio == pytest.approx((100 * 2 + 300 * 4) / 400)
    assert total.call.ratio == pytest.approx((100 * 2 + 300 * 4) / 800)
    assert total.device.interval.low == pytest.approx(0.98 * 3.5)
    assert total.device.interval.high == pytest.approx(1.02 * 3.5)
    assert total.device.verdict == "faster"


def test_total_verdict_follows_the_interval_where_layers_disagree():
    mixed = (timed(0, 100.0, 0.9, verdict="slower"), timed(1, 100.0, 1.1, verdict="faster"))
    assert total_speed(Series("fused", EXACT_FP32, mixed)).device.verdict == "no difference"
    slow = (timed(0, 100.0, 0.5, verdict="slower"), timed(1, 100.0, 1.0, verdict="no difference"))
    assert total_speed(Series("fused", EXACT_FP32, slow)).device.verdict == "slower"


def test_a_difference_below_the_smallest_is_none():
    """Layers disagree, and the interval of the sum is above 1, but not by 1 %."""
    mixed = (
        timed(0, 100.0, 1.004, spread=0.001, verdict="no difference"),
        timed(1, 100.0, 1.012, spread=0.001, verdict="faster"),
    )
    total = total_speed(Series("fused", EXACT_FP32, mixed))
    assert total.device.interval.low > 1
    assert total.device.verdict == "no difference"
    assert total.smallest_difference == 0.01


def test_total_leaves_out_what_was_not_timed():
    cases = (timed(0, 100.0, 2.0), failed(timed(1, 300.0, 4.0), "inaccurate"))
    total = total_speed(Series("fused", EXACT_FP32, cases))
    assert total.layers == (0,)
    assert total.device.ratio == 2.0
    assert total_speed(Series("fused", EXACT_FP32, cases[1:])) is None
