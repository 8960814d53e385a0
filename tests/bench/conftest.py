from __future__ import annotations

import pytest
from fakes import contender, measured, report
from ssdprof.bench.schema import BenchReport
from ssdprof.operators.ssd.drawing import CHUNK_SIZES


@pytest.fixture(scope="session")
def done() -> BenchReport:
    """A bench of one cell in which fused is three times as fast as mamba_ssm."""
    return report(
        *measured(
            contender(
                "mamba_ssm", lambda chunk: {128: 330.0, 256: 300.0}[chunk or 0], chunk_sizes=CHUNK_SIZES, ours=False
            ),
            contender("unfused", lambda _: 310.0),
            contender("fused", lambda _: 100.0),
        )
    )
