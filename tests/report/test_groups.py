"""What layers come to when they are pooled or added up."""

import math

import pytest
from report.make import ALL_PRECISIONS, EXACT_FP16, EXACT_FP32, RELAXED_FP16, around, failed, make_case, make_report

from ssdprof.report.groups import Series, baselines, groups, pool, total_speed
from ssdprof.report.tables.accuracy import vs_oracle


def with_oracle(case, *, match_pct=None, **changes):
    """The case with another deviation of its output from the oracle; match_pct: at tolerance 0, the only one then."""
    out = case.accuracy[0]
    if match_pct is not None:
        changes["matches"] = (out.vs_oracle.matches[0].model_copy(update={"match_pct": match_pct}),)
    deviation = out.vs_oracle.model_copy(update=changes)
    return case.model_copy(update={"accuracy": (out.model_copy(update={"vs_oracle": deviation}), *case.accuracy[1:])})


def fused(index, **changes):
    return with_oracle(make_case(index, 1024, "fused", EXACT_FP32), **changes)


def test_matches_are_weighted_by_elements():
    pooled = pool([fused(0, elements=100, match_pct=50.0), fused(1, elements=300, match_pct=90.0)], "out", vs_oracle)
    assert pooled.elements == 400
    assert pooled.match_pct(0.0) == pytest.approx(80.0)
    assert pooled.match_pct(1e-3) is None  # no case has it


def test_one_failing_element_of_many_is_not_all():
    almost = 100.0 * (1 - 1e-15)
    many = [fused(i, elements=10**12, match_pct=100.0) for i in range(63)]
    assert pool(many, "out", vs_oracle).match_pct(0.0) == 100.0
    assert pool([*many, fused(63, elements=1, match_pct=almost)], "out", vs_oracle).match_pct(0.0) < 100.0


def test_maxima_are_those_of_the_worst_layer():
    cases = [fused(3, max_abs=0.5, rms_ratio=0.1, worst_position=(0, 7, 1, 2)), fused(4, max_abs=0.25, rms_ratio=0.2)]
    pooled = pool(cases, "out", vs_oracle)
    assert (pooled.max_abs, pooled.layer.index, pooled.largest.worst_position) == (0.5, 3, (0, 7, 1, 2))
    assert pooled.rms_ratio == 0.2


@pytest.mark.parametrize("order", [1, -1])
def test_nan_is_worse_than_any_number(order):
    cases = [fused(0, max_abs=9.0, rms_ratio=9.0), fused(1, max_abs=math.nan, rms_ratio=math.nan)][::order]
    pooled = pool(cases, "out", vs_oracle)
    assert math.isnan(pooled.max_abs)
    assert math.isnan(pooled.rms_ratio)
    assert pooled.layer.index == 1


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
    assert total.device_us == 400.0
    assert total.device_ratio == pytest.approx((100 * 2 + 300 * 4) / 400)
    assert total.call_ratio == pytest.approx((100 * 2 + 300 * 4) / 800)
    assert total.device_interval.low == pytest.approx(0.98 * 3.5)
    assert total.device_interval.high == pytest.approx(1.02 * 3.5)
    assert total.device_verdict == "faster"


def test_total_verdict_follows_the_interval_where_layers_disagree():
    mixed = (timed(0, 100.0, 0.9, verdict="slower"), timed(1, 100.0, 1.1, verdict="faster"))
    assert total_speed(Series("fused", EXACT_FP32, mixed)).device_verdict == "no difference"
    slow = (timed(0, 100.0, 0.5, verdict="slower"), timed(1, 100.0, 1.0, verdict="no difference"))
    assert total_speed(Series("fused", EXACT_FP32, slow)).device_verdict == "slower"


def test_a_difference_below_the_smallest_is_none():
    """Layers disagree, and the interval of the sum lies above 1, but not by 1 %."""
    mixed = (
        timed(0, 100.0, 1.004, spread=0.001, verdict="no difference"),
        timed(1, 100.0, 1.012, spread=0.001, verdict="faster"),
    )
    total = total_speed(Series("fused", EXACT_FP32, mixed))
    assert total.device_interval.low > 1
    assert total.device_verdict == "no difference"
    assert total.smallest_difference == 0.01


def test_total_leaves_out_what_was_not_timed():
    cases = (timed(0, 100.0, 2.0), failed(timed(1, 300.0, 4.0), "inaccurate"))
    total = total_speed(Series("fused", EXACT_FP32, cases))
    assert total.layers == (0,)
    assert total.device_ratio == 2.0
    assert total_speed(Series("fused", EXACT_FP32, cases[1:])) is None


def test_prompts_are_groups_of_their_own_the_longest_first():
    found = groups(make_report(seqlens=(1024, 131_072), layers=(3, 1)))
    assert [group.seqlen for group in found] == [131_072, 1024]
    assert [layer.index for layer in found[0].layers] == [1, 3]
    assert all(case.dims.seqlen == 1024 for case in found[1].cases)


def test_series_are_in_the_order_of_trust():
    report = make_report(layers=(0,), precisions=ALL_PRECISIONS[::-1])
    group = groups(report)[0]
    assert group.implementations == ("unfused", "fused")
    assert group.compared == ("fused",)
    assert [series.precision for series in group.series("fused")] == list(ALL_PRECISIONS)


def test_relaxed_is_compared_with_the_exact_original_of_the_same_state_dtype():
    group = groups(make_report())[0]
    relaxed = next(series for series in group.series("fused") if series.precision == RELAXED_FP16)
    assert group.baseline_of(relaxed).precision == EXACT_FP16
    assert group.baseline_of(relaxed).implementation == "unfused"


def test_baselines_in_words():
    same = [(RELAXED_FP16, "unfused exact, fp16 states"), (EXACT_FP32, "unfused exact, fp32 states")]
    assert baselines("unfused", same) == "unfused, exact, with the same state dtype"
    assert baselines("unfused", [(RELAXED_FP16, "other")]) == "other"
    assert baselines("unfused", []) == "unfused"
