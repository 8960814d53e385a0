"""For pytest: the fixture `ssdprof_judge`, which compares a kernel as `ssdprof.compare` does, and
fails the test unless the kernel passed.

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
    """judge(inputs, kernel, **options) -> the results of `ssdprof.compare`, which has the options.

    kernel: a function (inputs) -> (out, final_states), or a name as those of --impl.
    """
    options: dict[str, Any] = {}
    for marker in request.node.iter_markers("ssdprof"):
        options = marker.kwargs | options  # the nearest marker comes first

    def judge(inputs: Inputs, kernel: str | Kernel, **more: Any) -> Results:
        results = ssdprof.compare(inputs, [kernel], **(options | more))
        if not results.passed:
            pytest.fail(str(results), pytrace=False)
        return results

    return judge
