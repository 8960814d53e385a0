"""The combined errors of several layers."""

import math

import pytest
from report.make import make_case

from ssdprof.report.pooled import pool
from ssdprof.report.tables.accuracy import vs_oracle
from ssdprof.schema import EXACT_FP32


def with_oracle(case, *, match_pct=None, **changes):
    """The case with another deviation of its output from the oracle.  match_pct: the only match, at tolerance 0."""
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
