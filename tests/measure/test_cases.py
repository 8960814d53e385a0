"""Which cases belong together, and which are compared with each other."""

import pytest
from ssdprof.measure.cases import Case, batches_of, groups_of
from ssdprof.schema import PrecisionRecord, precisions_for

ALL = precisions_for("bf16", "all", ("fp32", "fp16", "bf16"))
RELAXED_FP16 = PrecisionRecord(intermediates="relaxed", state_dtype="fp16")


def labels(cases: list[Case] | tuple[Case, ...]) -> list[str]:
    return [case.label for case in cases]


def test_all_six_precisions_make_three_groups_of_equal_states() -> None:
    groups = groups_of(ALL, ("unfused", "fused"), "unfused")
    assert [len(group) for group in groups] == [4, 4, 4]
    assert labels(groups[1]) == [
        "unfused exact, fp16 states",
        "fused exact, fp16 states",
        "unfused relaxed, fp16 states",
        "fused relaxed, fp16 states",
    ]


def test_the_baseline_is_there_even_if_nobody_asked() -> None:
    (group,) = groups_of([RELAXED_FP16], ("fused",), "unfused")
    assert labels(group) == ["unfused exact, fp16 states", "fused relaxed, fp16 states"]


def test_a_library_is_the_baseline_at_equal_states_where_it_has_them() -> None:
    exact = {states: PrecisionRecord(intermediates="exact", state_dtype=states) for states in ("bf16", "fp16", "fp32")}
    wanted = [exact["fp32"], RELAXED_FP16]
    both = groups_of(wanted, ("fused",), "them", {"them": (exact["fp16"], exact["fp32"])})
    assert [labels(group) for group in both] == [
        ["them exact, fp32 states", "fused exact, fp32 states"],
        ["them exact, fp16 states", "fused relaxed, fp16 states"],
    ]
    (one,) = groups_of(wanted, ("fused",), "them", {"them": (exact["bf16"],)})
    assert labels(one) == ["them exact, bf16 states", "fused exact, fp32 states", "fused relaxed, fp16 states"]


@pytest.mark.parametrize("capacity", [0, 2, 3, 4, 5, 8, 11, 12, 100])
def test_every_batch_holds_its_baselines_and_fits(capacity: int) -> None:
    groups = groups_of(ALL, ("unfused", "fused"), "unfused")
    batches = batches_of(groups, capacity)
    for batch in batches:
        assert len(batch) <= max(capacity, 2)
        assert len(set(batch)) == len(batch)
        for group in groups:
            assert not set(batch) & set(group) or group[0] in batch
    assert {case for batch in batches for case in batch} == {case for group in groups for case in group}


def test_one_batch_when_everything_fits_and_one_per_pair_when_nothing_does() -> None:
    groups = groups_of(ALL, ("unfused", "fused"), "unfused")
    assert len(batches_of(groups, 12)) == 1
    assert len(batches_of(groups, 8)) == 2
    assert len(batches_of(groups, 2)) == 9


def test_a_split_group_loses_nobody_after_an_open_batch() -> None:
    small = groups_of([RELAXED_FP16], ("fused",), "unfused")
    large = groups_of(ALL[::3], ("a", "b", "c"), "unfused")
    batches = batches_of((*small, *large), 3)
    assert labels(batches[0]) == labels(small[0])
    assert {case for batch in batches[1:] for case in batch} == set(large[0])
