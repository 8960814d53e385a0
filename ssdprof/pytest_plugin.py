"""A plugin for pytest: the fixture `ssdprof_judge` compares a kernel as `ssdprof.compare` does, and
fails the test unless the kernel passes.

    def test_my_kernel(ssdprof_judge):
        ssdprof_judge(inputs, my_kernel)

`@pytest.mark.ssdprof(laws="all")` gives options to all comparisons of a test, a class or a module.
pytest imports this module in every session, so it imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

import ssdprof

if TYPE_CHECKING:
    from ssdprof.api import Kernel, Results
    from ssdprof.kernels.inputs import Inputs


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "ssdprof(**options): options of ssdprof.compare for ssdprof_judge"
    )


@pytest.fixture
def ssdprof_judge(request: pytest.FixtureRequest) -> Callable[..., Results]:
    """A function judge(inputs, kernel, **options) that returns the results of `ssdprof.compare` if
    the kernel passes, and otherwise fails the test.

    kernel: a function (inputs) -> (out, final_states), or a name as in `--impl`.
    options: those of `ssdprof.compare`, which replace those of markers.
    """
    marked_options: dict[str, Any] = {}
    for marker in request.node.iter_markers("ssdprof"):  # the nearest marker comes first
        marked_options = marker.kwargs | marked_options

    def judge(inputs: Inputs, kernel: str | Kernel, **options: Any) -> Results:
        results = ssdprof.compare(inputs, [kernel], **(marked_options | options))
        if not results.passed:
            pytest.fail(str(results), pytrace=False)
        return results

    return judge
