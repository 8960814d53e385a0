"""Verdicts on claims and on quoted numbers."""

from __future__ import annotations

import pytest
from reproduced.made import H200, document
from reproducing import judging
from reproducing.published import Claim


@pytest.mark.parametrize(
    ("holds", "verdict"),
    [
        ("a < 2.5", "inside"), ("a < 2", "outside"), ("a <= 2", "inside"), ("a <= 1.99", "outside"),
        ("a > 1.5", "inside"), ("a > 2", "outside"), ("a >= 2", "inside"), ("a >= 2.01", "outside"),
        ("a == 2", "inside"), ("a == 3", "outside"), ("a > b", "inside"), ("b > a", "outside"),
        ("a >= 1 and a <= 3", "inside"), ("a >= 1 and a <= 1.5", "outside"), 
        ("c[this and that, 1 x 4,096] > -1", "inside"),
        ("a > 1 and absent > 1", "not measured"), ("a > absent", "not measured"),
    ],
)  # fmt: skip
def test_every_kind_of_predicate(holds: str, verdict: str) -> None:
    found = {"a": 2.0, "b": 1.0, "c[this and that, 1 x 4,096]": 0.0}
    claim = {"words": "W", "quoted": "Q", "holds": holds}
    stated = document(runner="studies/x.py", measure=[], value=[], numbers=[], figure=None, claim=[claim])
    (one,) = judging.claims(stated, found, H200)
    assert one.verdict == verdict
    assert ("absent" in one.measured) == (verdict == "not measured")


def test_a_measured_number_has_its_unit_or_its_name() -> None:
    """The names of a runner's values contain units."""
    one, *_ = judging.claims(document(), {"least": 2.0}, H200)
    assert one.measured == "2 x"
    claim = {"words": "W", "quoted": "Q", "holds": "least > 0 and speedup[a] > 0"}
    (both,) = judging.claims(document(claim=[claim]), {"least": 2.0, "speedup[a]": 3.0}, H200)
    assert both.measured == "least: 2 x; speedup, a: 3 x"
    claim = {"words": "W", "quoted": "Q", "holds": "time_us > 0"}
    stated = document(runner="studies/x.py", measure=[], value=[], numbers=[], figure=None, claim=[claim])
    (own,) = judging.claims(stated, {"time_us": 2.5}, H200)
    assert own.measured == "time_us: 2.5"


@pytest.mark.parametrize(("holds", "reason"), [("least > 1", ""), ("least > 3", "Because."), ("other > 1", "")])
def test_a_reason_stands_where_the_claim_does_not_hold(holds: str, reason: str) -> None:
    claim = {"words": "W", "quoted": "Q", "holds": holds, "note": "Judged so.", "reason": "Because."}
    stated = document(runner="studies/x.py", measure=[], value=[], numbers=[], figure=None, claim=[claim])
    (one,) = judging.claims(stated, {"least": 2.0}, H200)
    assert (one.note, one.reason) == ("Judged so.", reason)


@pytest.mark.parametrize("holds", ["a", "a > ", "a >= 1 or a <= 2", "a >= 1, a <= 2", "a => 1", "1 < a"])
def test_what_is_no_predicate_is_refused(holds: str) -> None:
    with pytest.raises(ValueError, match="is not comparisons"):
        Claim(words="W", quoted="Q", holds=holds)


@pytest.mark.parametrize(
    ("gpu", "absolute", "verdict"),
    [
        (H200, False, "inside"),
        (H200, True, "inside"),
        ("NVIDIA H100 80GB HBM3", False, "inside (other GPU)"),
        ("NVIDIA H100 80GB HBM3", True, "other GPU"),
    ],
)
def test_a_time_of_another_gpu_says_nothing(gpu: str, absolute: bool, verdict: str) -> None:
    claim = {"words": "W", "quoted": "Q", "holds": "least > 0", "absolute": absolute}
    numbers = [{"words": "N", "value": "speedup", "quoted": {"k": 2.0}, "absolute": absolute}]
    stated, found = document(gpu="A100, H200", claim=[claim], numbers=numbers), {"least": 1.0, "speedup[k]": 2.1}
    assert [one.verdict for one in judging.claims(stated, found, gpu)] == [verdict]
    ((_, (number,)),) = judging.numbers(stated, found, gpu)
    assert number.verdict == verdict


@pytest.mark.parametrize(("value", "verdict"), [(2.2, "inside"), (1.8, "inside"), (2.21, "outside"), (1.79, "outside")])
def test_a_number_is_inside_within_its_percent(value: float, verdict: str) -> None:
    stated = document(numbers=[{"words": "N", "value": "speedup", "within_pct": 10.001, "quoted": {"k": 2.0, "l": 1}}])
    ((_, found),) = judging.numbers(stated, {"speedup[k]": value}, H200)
    assert [one.verdict for one in found] == [verdict, "not measured"]
