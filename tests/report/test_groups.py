"""Which cases may be compared and added up."""

from report.make import ALL_PRECISIONS, EXACT_FP16, RELAXED_FP16, in_calls, make_report

from ssdprof.report.groups import baselines, groups
from ssdprof.schema import EXACT_FP32


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


def test_the_calls_of_a_run_that_was_broken_off_are_counted():
    report = in_calls(make_report(layers=(0, 9), seqlens=(8,)), count=3)

    def extent(wanted):
        (group,) = groups(report.model_copy(update={"cases": tuple(filter(wanted, report.cases))}))
        return group.extent

    assert extent(lambda _: True) == "3 chunks in each of 2 layers"
    assert extent(lambda case: case.layer.index == 0 or case.call.number == 1) == "4 chunks in 2 layers"
    assert extent(lambda case: case.layer.index == 0) == "3 chunks in layer 0"
