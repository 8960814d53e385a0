"""Which cases may be compared and added up, and what their sums and pooled errors are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cases
import pytest
from cases import PRECISIONS, RELAXED_FP16, case, deviation, failed, in_calls, layer, of_cases, report, timed

from ssdprof.core.accuracy import Match
from ssdprof.core.base import EXACT_FP32
from ssdprof.core.case import Case
from ssdprof.report import calls
from ssdprof.report.groups import Series, groups, places, pool, tokens_of


def test_prompts_are_groups_of_their_own_the_longest_first() -> None:
    found = groups(report(seqlens=(1024, 131_072), layers=(3, 1)))
    assert [group.seqlen for group in found] == [131_072, 1024]
    assert [one.index for one in found[0].layers] == [1, 3]
    assert {one.seqlen for one in found[1].cases} == {1024}
    assert tokens_of(found) == "131,072 and 1,024 tokens"
    assert tokens_of(groups(report(seqlens=(1, 1024)))) == "1,024 and 1 tokens"
    assert tokens_of(groups(report(seqlens=(1,)))) == "1 token"


def test_series_are_in_the_order_of_trust_and_have_their_baselines() -> None:
    (group,) = groups(report(layers=(0,), precisions=PRECISIONS[::-1]))
    assert group.implementations == ("unfused", "fused")
    assert group.compared == ("fused",)
    assert [series.precision for series in group.series("fused")] == list(PRECISIONS)
    relaxed = next(series for series in group.series("fused") if series.precision == RELAXED_FP16)
    original = relaxed.original
    assert original is not None
    assert (original.implementation, original.precision) == ("unfused", cases.EXACT_FP16)


def test_baselines_in_words() -> None:
    (group,) = groups(report(layers=(0,)))
    same = [(RELAXED_FP16, "unfused exact, fp16 states"), (EXACT_FP32, "unfused exact, fp32 states")]
    assert calls.baselines(group, same) == "unfused, exact, with the same state dtype"
    assert calls.baselines(group, [(RELAXED_FP16, "other")]) == "other"
    assert calls.baselines(group, []) == "unfused"


def test_the_calls_of_a_run_that_was_broken_off_are_counted() -> None:
    whole = in_calls(report(layers=(0, 9), seqlens=(24,)))

    def extent(*left_out: tuple[int, int]) -> str:
        kept = [c for c in whole.cases if c.layer and c.call and (c.layer.index, c.call.number) not in left_out]
        (group,) = groups(whole.changed(cases=tuple(kept)))
        return group.extent

    assert extent() == "3 chunks in each of 2 layers"
    assert extent((9, 2), (9, 3)) == "4 chunks in 2 layers"
    assert extent((9, 1), (9, 2), (9, 3)) == "3 chunks in layer 0"
    assert places(groups(whole)) == "in chunks of 8 tokens of 24 tokens"


# --- sums


def summed(*layers: tuple[float, float], width: float = 0.001, **fields: Any) -> Series:
    """The sum of `fused` over layers of (its device time, its speedup).  fields: of the second layer's case."""
    made = []
    for index, (us, ratio) in enumerate(layers):
        more = fields if index else {}
        made += [
            case("unfused", layer=layer(index), samples=timed(us * ratio, us * ratio, 0, turn=1)),
            case("fused", layer=layer(index), **({"samples": timed(us, 2 * us, width)} | more)),
        ]
    (group,) = groups(of_cases("run", made))
    (series,) = group.series("fused")
    return series


def test_a_sum_weighs_each_call_by_its_time() -> None:
    total = summed((100.0, 2.0), (300.0, 4.0), width=0.02)
    assert (total.layers, total.device.us, total.call.us) == ((0, 1), pytest.approx(400), pytest.approx(800))
    assert total.device.speedup is not None
    assert total.call.speedup is not None
    assert total.device.speedup == pytest.approx((3.5, 3.5 * 0.98, 3.5 * 1.02), rel=1e-3)
    assert total.call.speedup.value == pytest.approx(1.75)
    assert total.device.verdict == "faster"


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [((0.9, 1.1), "no difference"), ((0.5, 1.0), "slower"), ((1.004, 1.012), "no difference"), ((2.0, 1.0), "faster")],
)
def test_where_calls_disagree_the_interval_of_the_sum_decides(ratios: Sequence[float], verdict: str) -> None:
    """In the third one, the interval is above 1, but not by 1 %."""
    total = summed(*((100.0, ratio) for ratio in ratios))
    assert total.device.verdict == verdict


def test_a_sum_leaves_out_what_was_not_timed() -> None:
    total = summed((100.0, 2.0), (300.0, 4.0), samples=())
    assert total.layers == (0,)
    assert total.device.speedup is not None
    assert total.device.speedup.value == pytest.approx(2.0)
    (group,) = groups(report(gpu=False))
    assert not any(series.timed for series in group.series())


# --- pooled errors


def with_oracle(index: int, *, pct: float | None = None, **changes: Any) -> Case:
    """A case of a layer with another deviation of its output.  pct: its only match, at tolerance 0."""
    one = case(layer=layer(index))
    changes.setdefault("worst_position", (0, 0))
    if pct is not None:
        changes["matches"] = (Match(tolerance=0.0, match_pct=pct),)
    return one.changed(accuracy=(one.accuracy[0].changed(vs_oracle=deviation().changed(**changes)), *one.accuracy[1:]))


def test_matches_are_weighted_by_elements_and_all_means_all() -> None:
    pooled = pool([with_oracle(0, elements=100, pct=50.0), with_oracle(1, elements=300, pct=90.0)], "out", "vs_oracle")
    assert pooled is not None
    assert pooled.match_pct(0.0) == pytest.approx(80.0)
    assert pooled.match_pct(1e-3) is None, "no case has it"
    many = [with_oracle(i, elements=10**12, pct=100.0) for i in range(63)]
    for found, expected in ((many, True), ([*many, with_oracle(63, elements=1, pct=100.0 * (1 - 1e-15))], False)):
        pooled = pool(found, "out", "vs_oracle")
        assert pooled is not None
        assert (pooled.match_pct(0.0) == 100.0) is expected


def test_maxima_are_those_of_the_worst_call() -> None:
    made = [with_oracle(3, max_abs=0.5, rms_ratio=0.1, worst_position=(0, 7, 1, 2)), with_oracle(4, rms_ratio=0.2)]
    pooled = pool(made, "out", "vs_oracle")
    assert pooled is not None
    assert (pooled.largest.max_abs, pooled.case.layer, pooled.largest.worst_position) == (0.5, layer(3), (0, 7, 1, 2))
    assert pooled.rms_ratio == 0.2
    pooled = pool([failed(made[0], "nonfinite"), made[1]], "out", "vs_oracle")
    assert pooled is not None
    assert pooled.rms_ratio == float("inf"), "worse than any number"
    assert pool([case(accuracy=())], "out", "vs_oracle") is None
