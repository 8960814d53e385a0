"""A kernel belongs to the innermost mark at its launch; no kernel is lost."""

from typing import Any

import pytest
import torch

from ssdprof.measure.trace import Trace, busy_us, marked, traced, work


def mark(part: str, begin: float, end: float, tid: int = 1) -> dict[str, Any]:
    name = f"ssdprof:{part}"
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": name,
        "ts": begin,
        "dur": end - begin,
        "tid": tid,
    }


def kernel(
    number: int, launched: float, us: float, *, name: str = "k", tid: int = 1, driver: bool = False
) -> list[dict[str, Any]]:
    both = {"ph": "X", "name": name, "dur": us, "args": {"correlation": number}}
    launch = {"cat": "cuda_driver" if driver else "cuda_runtime", "ts": launched, "tid": tid}
    return [both | launch, both | {"cat": "kernel", "ts": launched + 500, "tid": 7}]


def parts(trace: Trace) -> dict[str | None, float]:
    found = {}
    for one in work(trace):
        found[one[0]] = found.get(one[0], 0.0) + one[2]
    return found


def test_a_kernel_belongs_to_the_innermost_mark_at_its_launch():
    trace = [
        *kernel(1, 5, 1.0),  # before all marks
        mark("mixer", 10, 100),
        *kernel(2, 20, 2.0),
        mark("operator", 30, 50),
        *kernel(3, 31, 4.0, driver=True),  # launched as by Triton; runs long after the mark
        *kernel(4, 51, 8.0),  # the mixer again
        mark("MLP", 100, 120),  # begins where the other ends
        *kernel(5, 100, 16.0),
        *kernel(6, 120, 32.0),  # after all marks
    ]
    assert parts(trace) == {None: 33.0, "mixer": 10.0, "operator": 4.0, "MLP": 16.0}


MIXER = mark("mixer", 0, 100)
OTHERS = mark("x", 0, 100) | {"name": "Optimizer.step"}


@pytest.mark.parametrize(
    ("trace", "expected"),
    [
        (
            [MIXER, mark("operator", 10, 20), *kernel(1, 15, 1.0), *kernel(2, 25, 2.0)],
            {"operator": 1.0, "mixer": 2.0},
        ),
        # of two that begin at once, the inner one ends sooner
        (
            [mark("operator", 0, 20), MIXER, *kernel(1, 12, 1.0), *kernel(2, 30, 2.0)],
            {"operator": 1.0, "mixer": 2.0},
        ),
        (
            [OTHERS, MIXER | {"tid": 2}, *kernel(1, 15, 1.0), *kernel(2, 15, 2.0, tid=2)],
            {None: 1.0, "mixer": 2.0},
        ),
        ([MIXER], {}),
    ],
)
def test_the_order_of_events_means_nothing(trace: Trace, expected: dict[str | None, float]):
    assert parts(trace[::-1]) == parts(trace) == expected


def test_copies_fills_and_kernels_without_a_launch_are_not_lost():
    memory = [
        {
            "ph": "X",
            "cat": cat,
            "name": cat,
            "ts": 5.0,
            "dur": 1.0,
            "tid": 7,
            "args": {"correlation": 99},
        }
        for cat in ("gpu_memcpy", "gpu_memset")
    ]
    bare = {"ph": "X", "cat": "kernel", "name": "bare", "ts": 5.0, "dur": 4.0, "tid": 7}
    found = work([mark("mixer", 0, 100), *memory, bare])
    assert found == [(None, "gpu_memcpy", 1.0), (None, "gpu_memset", 1.0), (None, "bare", 4.0)]


@pytest.mark.gpu
def test_the_profiler_sees_torchs_and_tritons_kernels_in_their_marks():
    from ssdprof.kernels.mixer import causal_conv1d

    device = torch.device("cuda")
    x = torch.randn(1, 4096, 512, device=device)
    weight = torch.randn(512, 4, device=device)

    def run() -> None:
        with marked("mixer"):
            torch.mm(x[0], x[0].T)
            with marked("convolution"):
                causal_conv1d(x, weight)
        x.sum()

    run()
    found = work(traced(run, device))
    by_part = {
        part: [name for where, name, _ in found if where == part]
        for part in ("mixer", "convolution", None)
    }
    assert by_part["convolution"] == ["_causal_conv1d_kernel"]
    assert len(by_part["mixer"]) >= 1
    assert any("reduce" in name for name in by_part[None])
    assert all(us > 0 for *_, us in found)


def test_kernels_that_run_at_the_same_time_count_once():
    trace = [*kernel(1, 0, 10.0), *kernel(2, 5, 20.0), *kernel(3, 6, 1.0), *kernel(4, 100, 2.0)]
    assert busy_us(trace) == 27.0
    assert busy_us([mark("mixer", 0, 5)]) == 0.0
