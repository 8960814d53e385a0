"""Reports of benches with given times: every case is of the shape "tiny", one sequence of 40
tokens.
"""

from typing import Any

import cases

from ssdprof.core.base import EXACT_FP32, PrecisionName
from ssdprof.core.case import Case
from ssdprof.core.report import Report

OURS = ("fused", "unfused", "recurrent")


def measured(
    name: str,
    us: float,
    precision: PrecisionName = EXACT_FP32,
    *,
    ways: tuple[str, ...] = (),
    checked: int | None = None,
    **fields: Any,
) -> Case:
    """A call takes 10 us more than the device."""
    return cases.case(
        name,
        precision,
        task=cases.generated(
            "1 x 40", shape="tiny", ways=ways, checked=checked, dims=cases.dims(40)
        ),
        seqlen=40,
        kind="bundled" if name in OURS else "library",
        version="" if name in OURS else "2.3",
        samples=cases.timed(us, us + 10, width=0.0),
        bytes_moved=10**7,
        flops=10**9,
        **fields,
    )


def report(*made: Case, **fields: Any) -> Report:
    return cases.bench(
        *made, **({"baseline": "mamba_ssm", "created": "2026-01-01T00:00:00+00:00"} | fields)
    )
