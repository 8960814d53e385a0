"""What a run compares by default."""

import pytest

from ssdprof.jobs.request import ReplayRequest, parse_states


@pytest.mark.parametrize(
    ("dtype", "request_", "compared"),
    [
        ("bf16", ReplayRequest(), ["exact, fp32 states", "relaxed, bf16 states"]),
        ("fp16", ReplayRequest(), ["exact, fp32 states", "relaxed, fp16 states"]),
        ("fp32", ReplayRequest(), ["exact, fp32 states", "relaxed, fp32 states"]),
        ("bf16", ReplayRequest(intermediates="relaxed"), ["relaxed, bf16 states"]),
        (
            "bf16",
            ReplayRequest(intermediates="exact", states=parse_states("all")),
            ["exact, fp32 states", "exact, fp16 states", "exact, bf16 states"],
        ),
        ("bf16", ReplayRequest(states=("fp16",)), ["exact, fp16 states", "relaxed, fp16 states"]),
    ],
)
def test_two_precisions_unless_more_are_asked_for(dtype, request_, compared):
    assert [str(precision) for precision in request_.precisions(dtype)] == compared
