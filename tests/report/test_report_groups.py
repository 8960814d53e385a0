"""Which cases may be compared and added up, and what their sums and pooled errors are."""

import cases
import pytest
from cases import PRECISIONS, failed, in_calls, report, timed

from ssdprof.core.case import Case
from ssdprof.report.document import heading
from ssdprof.report.groups import Series, group_words, groups, pool, tokens_of


def test_prompts_are_groups_of_their_own_the_longest_first():
    found = groups(report(seqlens=(1024, 131_072), layers=(3, 1), precisions=PRECISIONS[::-1]))
    assert [(group.seqlen, group.layers) for group in found] == [(131_072, (1, 3)), (1024, (1, 3))]
    assert (found[0].implementations, found[0].compared) == (("unfused", "fused"), ("fused",))
    assert [series.precision for series in found[0].series("fused")] == list(PRECISIONS)
    assert [
        tokens_of(groups(report(seqlens=one))) for one in ((1024, 131_072), (1, 1024), (1,))
    ] == ["131,072 and 1,024 tokens", "1,024 and 1 tokens", "1 token"]
    assert ", 1 token, " in heading(cases.answers(cases.of_answers(seqlen=1)))


def test_the_calls_of_a_run_that_was_broken_off_are_counted():
    whole = in_calls(report(layers=(0, 9), seqlens=(24,)))

    def extent(*left_out: tuple[int, int]) -> str:
        kept = [
            c
            for c in whole.cases
            if c.layer and c.call and (c.layer.index, c.call.number) not in left_out
        ]
        (group,) = groups(whole.changed(cases=tuple(kept)))
        return group.extent

    assert extent() == "3 chunks in each of 2 layers"
    assert extent((9, 2), (9, 3)) == "4 chunks in 2 layers"
    assert extent((9, 1), (9, 2), (9, 3)) == "3 chunks in layer 0"
    assert group_words(groups(whole)) == "in chunks of 8 tokens of 24 tokens"


def test_passes_on_equal_tokens_are_grouped_by_their_sequences():
    run = in_calls(report(layers=(0,), seqlens=(24,)), 2)
    packed = [
        cases.with_task(c, call=c.call.changed(kind="packed", sequences=c.call.number))
        for c in run.cases
    ]
    assert group_words(groups(run.changed(cases=packed))) == (
        "at 12 tokens in 2 packed sequences and at 12 tokens in 1 packed sequence"
    )


def summed(*layers: tuple[float, float], width: float = 0.001, **fields) -> Series:
    """The sum of `fused` over layers of (its device time, its speedup).  fields: of the second
    layer's case.
    """
    made = []
    for index, (us, ratio) in enumerate(layers):
        more = {"samples": timed(us, 2 * us, width)} | (fields if index else {})
        base = cases.case(
            "unfused", layer=cases.layer(index), samples=timed(us * ratio, us * ratio, 0, turn=1)
        )
        made += [base, cases.case("fused", layer=cases.layer(index), **more)]
    ((series,),) = (group.series("fused") for group in groups(cases.of_cases("run", made)))
    return series


def test_a_sum_weighs_each_call_by_its_time_and_leaves_out_what_was_not_timed():
    total = summed((100.0, 2.0), (300.0, 4.0), width=0.02)
    assert (total.us("device"), total.us("call")) == (pytest.approx(400), pytest.approx(800))
    assert total.speedup() == pytest.approx((3.5, 3.5 * 0.98, 3.5 * 1.02), rel=1e-3)
    assert total.speedup("call").value == pytest.approx(1.75)  # type: ignore[union-attr]
    assert total.verdict == "faster"
    part = summed((100.0, 2.0), (300.0, 4.0), samples=())
    speedup = part.speedup()
    assert (len(part.timed), speedup.value) == (1, pytest.approx(2.0))


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ((0.9, 1.1), "no difference"),
        ((0.5, 1.0), "slower"),
        ((1.004, 1.012), "no difference"),
        ((2.0, 1.0), "faster"),
    ],
)
def test_where_calls_disagree_the_interval_of_the_sum_decides(ratios: tuple[float, float], verdict):
    """In the third one, the interval is above 1, but not by 1 %."""
    assert summed(*((100.0, ratio) for ratio in ratios)).verdict == verdict


def with_oracle(index: int, *, pct: float | None = None, **changes) -> Case:
    """A case of a layer with another deviation of its output.  pct: its only match, at tolerance
    0.
    """
    one = cases.case(layer=cases.layer(index))
    matches = {} if pct is None else {"matches": (pct, 99.0, 100.0)}
    found = cases.deviation().changed(**({"worst_position": (0, 0)} | matches | changes))
    return one.changed(accuracy=(one.accuracy[0].changed(vs_oracle=found), *one.accuracy[1:]))


def test_matches_are_weighted_by_elements_and_all_means_all():
    pooled = pool(
        [with_oracle(0, elements=100, pct=50.0), with_oracle(1, elements=300, pct=90.0)],
        "out",
        "vs_oracle",
    )
    assert (pooled.match_pct(0.0), pooled.match_pct(1e-3)) == (pytest.approx(80.0), 99.0)
    many = [with_oracle(i, elements=10**12, pct=100.0) for i in range(63)]
    for found, expected in (
        (many, True),
        ([*many, with_oracle(63, elements=1, pct=100.0 * (1 - 1e-15))], False),
    ):
        pooled = pool(found, "out", "vs_oracle")
        assert (pooled.match_pct(0.0) == 100.0) is expected


def test_maxima_are_those_of_the_worst_call():
    made = [
        with_oracle(3, max_abs=0.5, rms_ratio=0.1, worst_position=(0, 7, 1, 2)),
        with_oracle(4, rms_ratio=0.2),
    ]
    pooled = pool(made, "out", "vs_oracle")
    assert (pooled.largest.max_abs, pooled.case.layer, pooled.rms_ratio) == (
        0.5,
        cases.layer(3),
        0.2,
    )
    pooled = pool([failed(made[0], "nonfinite"), made[1]], "out", "vs_oracle")
    assert pooled.rms_ratio == float("inf"), "worse than any number"
    assert pool([cases.case(accuracy=())], "out", "vs_oracle") is None
